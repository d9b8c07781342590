"""Sampling from a language model: requests -> Generator -> completions.

generator              the protocols `Generator` and `TurnGenerator`, their requests, completions and failures
local_generator        on the policy's own weights: `LocalGenerator` for one caller, `Engine` in a thread for several
backend                selects the decoder and the kernels, with a table of the choices
trial                  tests the implementations on random tokens, for this choice
batch                  continuous batching over a prefix tree, of completions and of turns of conversations
decoder                the `Decoder` protocol, the prefill of prompts, layers with prepacked weights; what the
                       decoders with kernels share: rows that can be parked, kept and copied
native_decoder         Llama-like models on a CPU, with covey's kernels
graph_decoder          the same on a GPU
shared_prefix_decoder  models whose attention takes a layout, with torch
hf_cache_decoder       all other models, with transformers' KV cache or without a cache
token_sampling         draws one token per row from logits
"""
