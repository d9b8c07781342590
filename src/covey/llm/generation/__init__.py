"""Sampling from a language model: requests -> Generator -> completions.

generator              the `Generator` protocol, its requests, completions and failures: all that a sampler knows
local_generator        `LocalGenerator`, on the policy's own weights: requests -> batch -> decoder
backend                the only place that chooses a decoder and kernels; the table of what runs
trial                  tries a model on random tokens, for the choice
batch                  continuous batching of completions over a prefix tree
decoder                the `Decoder` protocol, and the prefill of prompts
native_decoder         Llama-like models on a CPU, with covey's kernels; its layers are in native_layers
shared_prefix_decoder  models whose attention takes a layout, with torch; llama_layers, else the model's own layers
hf_cache_decoder       every other model, with transformers' cache or without any
token_sampling         one token of each row, from its logits
prepacked_linear       weights in the order in which oneDNN multiplies few rows fastest
"""
