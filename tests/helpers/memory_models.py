"""Tiny models with their dimensions, and what autograd keeps of a batch: the measure of predicted memory."""

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.memory import SMOLLM2_135M, Dimensions, read_dimensions
from covey.llm.policy import LanguagePolicy

GROUPED = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 200, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "llama untied": GROUPED,
    "llama without groups": {**GROUPED, "num_key_value_heads": 6},
    "qwen2": {**GROUPED, "tie_word_embeddings": False},
    "qwen3": {**GROUPED, "head_dim": 32},
    "gpt2": {
        "n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 512, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
SMOLLM2 = read_dimensions(SMOLLM2_135M)


def model_config(kind: str) -> dict[str, Any]:
    """The content of its config.json."""
    config = AutoConfig.for_model(kind.split()[0], **FIELDS[kind])
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def sized_model(kind: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Dimensions]:
    """A random model with its dimensions."""
    config = AutoConfig.for_model(kind.split()[0], **FIELDS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=dtype), read_dimensions(model_config(kind))


def batch_of(prompts: int, group_size: int, prompt_tokens: int, new_tokens: int) -> Batch:
    """Groups of completions of equal length."""

    def rollout(prompt: int, number: int) -> Rollout:
        context = [(7 * prompt + 3 * j) % 500 for j in range(prompt_tokens)]
        actions = [(5 * number + j) % 500 for j in range(new_tokens)]
        return Rollout(context, actions, [0.0] * new_tokens, EndReason.LENGTH, reward=0.0)

    return collate([Group(Start(i, ""), [rollout(i, j) for j in range(group_size)]) for i in range(prompts)])


def bytes_kept(policy: LanguagePolicy, batch: Batch) -> int:
    """What autograd holds on to between forward and backward, the weights aside; a storage counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.evaluate(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
