"""A causal language model: from files to log-probabilities.

loading                       from a name to a model and its tokenizer: pretrained, hub, folder, conversion, checks
chat, chat_templates          between text and token ids
architecture                  what a model is built of
prefix_tree, microbatches     rows that share a prefix, cut to what fits in memory
prefix_attention              attention over packed rows that share a prefix
hidden_states, logprobs       the states that predict each decision, and their log-probabilities
fused_layers                  layers of a Llama-like model with covey's kernels
exact_kl                      KL over the whole vocabulary
plain_forward                 one plain forward pass: the numbers that all of the above must give
"""
