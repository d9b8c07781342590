"""Tiny random language models of several architectures, and a tokenizer of single characters, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

CHARACTERS = "0123456789+-*/=? .,abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'\n()<>[]:;"
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 64},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 64},
    "qwen3": {"num_key_value_heads": 1, "intermediate_size": 64, "head_dim": 12},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    # Positions come from ALiBi inside the attention, which no layout knows: the plain way must serve.
    "bloom": {"n_layer": 2, "n_head": 4},
    # Attends to the last tokens only, which shared prompts are not written for.
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 64, "sliding_window": 6},
    # Scales its logits after the output layer.
    "cohere": {"num_key_value_heads": 2, "intermediate_size": 64, "logit_scale": 0.25},
}
SHARED = ("llama", "qwen2", "qwen3", "gpt2")
PLAIN = ("bloom", "mistral", "cohere")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a chat is the text of its messages followed by '='."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return fast


def tiny_model(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of two layers. Weights are large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = AutoConfig.for_model(
        kind, vocab_size=len(CHARACTERS) + 3, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        **({} if kind == "gpt2" else common), **SHAPES[kind],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def tiny_folder(folder: Path, kind: str = "llama", *, seed: int = 0) -> Path:
    """A model folder in Hugging Face's layout."""
    tiny_model(kind, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
