"""The memory estimate against parameter counts of real models and against its own rules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from covey.config import ArithmeticConfig, ConfigError, RunConfig, SamplingConfig, UpdateConfig
from covey.llm.memory import SMOLLM2_135M, estimate_memory, find_model_config, peak_memory, read_dimensions

CONFIG = RunConfig(task=ArithmeticConfig(), precision="bf16")
GROUPED = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 512,
}
FIELDS = {
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "qwen2": {**GROUPED, "tie_word_embeddings": False},
    "qwen3": {**GROUPED, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 128},
}


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_parameters_are_counted_as_transformers_counts_them(kind: str) -> None:
    config = AutoConfig.for_model(kind, **FIELDS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert read_dimensions(json.loads(config.to_json_string(use_diff=False))).parameters == pytest.approx(
        real, rel=0.02
    )


def test_smollm2_has_its_known_size() -> None:
    assert read_dimensions(SMOLLM2_135M).parameters == 134_515_008
    parts = estimate_memory(SMOLLM2_135M, CONFIG)
    assert parts["weights"] == parts["reference model"] == 2 * 134_515_008
    assert parts["fp32 master weights"] == parts["gradients"] == 4 * 134_515_008
    assert parts["Adam's two moments"] == 8 * 134_515_008
    assert estimate_memory(SMOLLM2_135M, replace(CONFIG, precision="fp32"))["fp32 master weights"] == 0


def test_activations_are_near_what_autograd_kept() -> None:
    # Measured: two groups of eight rollouts of 12 tokens after 50 of a prompt, 276 tokens fed, kept 283 MB in bf16.
    config = replace(CONFIG, sampling=SamplingConfig(max_new_tokens=12), update=UpdateConfig(microbatch_tokens=276))
    assert estimate_memory(SMOLLM2_135M, config)["activations of a microbatch"] == pytest.approx(283.3e6, rel=0.15)


def test_keys_and_values_grow_with_the_rows_up_to_the_sampler_s_bound() -> None:
    def cache(**fields: int) -> int:
        parts = estimate_memory(SMOLLM2_135M, replace(CONFIG, sampling=SamplingConfig(**fields)))
        return parts["keys and values while sampling"]

    per_token = 2 * 30 * 3 * 64 * 2
    assert cache(prompts_per_step=1, group_size=4, max_new_tokens=10) == per_token * (4 * 10 + 64)
    assert cache(max_new_tokens=4000) < 2.2 * 2**30
    assert cache(rows_at_once=16, max_new_tokens=10) == per_token * (16 * 10 + 64)


def test_a_smaller_microbatch_needs_less() -> None:
    small = replace(CONFIG, update=UpdateConfig(microbatch_tokens=512))
    saved = peak_memory(estimate_memory(SMOLLM2_135M, CONFIG)) - peak_memory(estimate_memory(SMOLLM2_135M, small))
    assert saved > 2 * 2**30


def test_the_peak_is_the_larger_of_sampling_and_update() -> None:
    parts = dict.fromkeys(estimate_memory(SMOLLM2_135M, CONFIG), 0)
    parts |= {"weights": 1, "keys and values while sampling": 100, "gradients": 10, "logits of a chunk": 20}
    assert peak_memory(parts) == 101
    assert peak_memory(parts | {"activations of a microbatch": 200}) == 231


def test_where_a_config_is_found(tmp_path: Path) -> None:
    assert find_model_config("smollm2-135m") == SMOLLM2_135M
    assert find_model_config("nobody/no-such-model") is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8}')
    assert find_model_config(str(tmp_path)) == find_model_config(str(tmp_path / "model")) == {"hidden_size": 8}
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no valid JSON"):
        find_model_config(str(tmp_path))
    with pytest.raises(ConfigError, match="has no hidden_size"):
        read_dimensions({})
