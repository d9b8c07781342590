"""Sampling from a language model: requests -> Generator -> completions.

generator              the `Generator` protocol, its requests, completions and failures: the interface of the sampler
local_generator        `LocalGenerator`, on the policy's own weights: requests -> batch -> decoder
engine                 the requests of several callers in shared batches, in a thread of its own
backend                selects the decoder and the kernels, with a table of the choices
trial                  tests the implementations on random tokens, for this choice
batch                  continuous batching of completions over a prefix tree
decoder                the `Decoder` protocol, and the prefill of prompts
native_decoder         Llama-like models on a CPU, with covey's kernels; its layers are in native_layers
shared_prefix_decoder  models whose attention takes a layout, with torch; its layers are llama_layers or the model's own
hf_cache_decoder       all other models, with transformers' KV cache or without a cache
token_sampling         draws one token per row from logits
prepacked_linear       weights prepacked for oneDNN's products with few rows
"""
