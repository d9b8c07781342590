"""Sampling from a language model.

backend             the only place that chooses a decoder; the table of what runs
decoding            the decoders' protocol and those on transformers' forward pass
native_decoder      Llama-like models on a CPU, with covey's kernels: native_layers, else llama_layers
token_sampling      one token of each row, from its logits
prepacked_linear    weights in the order in which oneDNN multiplies few rows fastest
"""
