"""A causal language model: from files to log-probabilities.

loading                       from a name to model and tokenizer: pretrained, hub, folder, conversion, checks
chat, chat_templates          between text and token ids; token_texts: the texts of single tokens
gguf_export                   a model as a GGUF file
architecture                  supported architectures and the modules of a layer
prefix_tree, microbatches     the tree of shared prefixes; splitting a batch by memory
prefix_attention, ragged      attention over packed rows that share a prefix; packed tokens as padded rows
hidden_states, logprobs       the states that predict each decision, and their log-probabilities
fused_layers                  layers of a Llama-like model with covey's kernels
exact_kl                      KL over the whole vocabulary
plain_forward                 one plain forward pass, the reference for all of the above
"""
