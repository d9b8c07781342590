"""Tiny random language models of several architectures, and a tokenizer of single characters, made on the spot."""

from collections.abc import Sequence
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
CALLS = [
    f'\n```tool\n{{"name": "{name}", "arguments": {{"number": {number}}}}}\n```'
    for name, number in [*(("add", number) for number in range(12)), ("subtract", 1)]
]
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

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


def tiny_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character; a chat is the text of its messages followed by '='.

    Args:
        more: texts that are a token too, which the model can write, but no prompt has.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS, *more])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A random model of two layers. Weights are large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = AutoConfig.for_model(
        kind,
        **{"vocab_size": len(CHARACTERS) + 3, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
        | ({} if kind == "gpt2" else common) | SHAPES[kind] | settings,
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


def calling_folder(folder: Path) -> Path:
    """A model folder whose vocabulary has whole calls of the tool `add`, so that a random model calls it."""
    vocabulary = tiny_tokenizer(CALLS).get_vocab()
    tiny_model(vocab_size=len(vocabulary), max_position_embeddings=2048).save_pretrained(folder)
    tiny_tokenizer(CALLS).save_pretrained(folder)
    return folder


def tiny_gguf(file: Path, *, seed: int = 0, without: str = "") -> Path:
    """A GGUF file of a random Llama of two layers whose tokens are single characters; `without` leaves a weight out."""
    import gguf
    import numpy as np

    random = np.random.default_rng(seed)
    # As in byte-level vocabularies: 'Ġ' is a space, 'Ċ' a line end.
    tokens = ["<pad>", "<end>", *(c.replace(" ", "Ġ").replace("\n", "Ċ") for c in CHARACTERS), "12", "34"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(CHARACTERS) + 2)])
    writer.add_token_merges(["1 2", "3 4"])  # transformers before 5.18 takes a single one apart
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        for name, shape in {
            "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
            "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        if name != without:
            values = np.ones(shape) if len(shape) == 1 else random.normal(scale=0.15, size=shape)
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
