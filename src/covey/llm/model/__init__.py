"""A causal language model: from files to log-probabilities.

loading            from a name to model and tokenizer, with the checks of both
files              config.json, tokenizer and headers of weights, checked before anything is loaded; the loaders of
                   transformers, and the model hub
gguf               GGUF files: conversion to a folder of transformers, and export
chat               between text and token ids; chat_templates: a template in a process of its own
architecture       supported architectures and the modules of a layer
prefix_attention   attention over packed rows that share a prefix; splitting a batch by memory
fused_layers       layers of a Llama-like model with covey's kernels; recompute: what autograd keeps of them
logprobs           the states that predict each decision, their log-probabilities, and the exact KL
lora               adapters, and the identity of the weights to which they belong
stop_strings       the end of a completion by its text
plain_forward      one plain forward pass, the reference for all of the above
"""
