"""Sampling from a language model: requests -> Generator -> completions.

generator              the `Generator` protocol, its requests, completions and failures: the interface of the sampler
local_generator        `LocalGenerator`, on the policy's own weights: requests -> batch -> decoder
engine                 the requests of several callers in shared batches, in a thread of its own
backend                selects the decoder and the kernels, with a table of the choices
trial                  tests the implementations on random tokens, for this choice
batch                  continuous batching of completions over a prefix tree
turns                  conversations: rollouts of several turns, each a completion of all tokens so far
conversation_batch     batches whose rows keep their keys and values from turn to turn
decoder                the `Decoder` protocol, and the prefill of prompts
native_decoder         Llama-like models on a CPU, with covey's kernels
shared_prefix_decoder  models whose attention takes a layout, with torch
hf_cache_decoder       all other models, with transformers' KV cache or without a cache
packed_layers          layers with weights prepacked for oneDNN's products with few rows
token_sampling         draws one token per row from logits
"""
