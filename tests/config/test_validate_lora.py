"""Settings of adapters that have no effect or contradict others, and folders that are not adapters, are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.config import ArithmeticConfig, ConfigError, CriticConfig, LoRAConfig, RewardConfig, RunConfig
from covey.config.model_sources import resolved
from covey.config.rules import validate

BASE = RunConfig(task=ArithmeticConfig(), rewards=(RewardConfig(name="exact"),))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(BASE, lora=LoRAConfig(alpha=8)), r"lora\.alpha is set, but has no effect while lora\.rank is 0"),
        (
            replace(BASE, lora=LoRAConfig(targets=("q_proj",))),
            r"lora\.targets is set, but has no effect while",
        ),
        (
            replace(BASE, algorithm="ppo", critic=CriticConfig("adapter")),
            'critic.trunk = "adapter" is for runs with LoRA',
        ),
        (replace(BASE, lora=LoRAConfig(rank=4, dropout=0.1)), r"lora\.dropout is 0\.1: it must be 0, because a ratio"),
        (replace(BASE, lora=LoRAConfig(rank=-1)), r"lora\.rank must be"),
        (replace(BASE, lora=LoRAConfig(rank=4, alpha=0)), r"lora\.alpha must be above 0"),
        (replace(BASE, algorithm="ppo", lora=LoRAConfig(rank=4)), 'set critic.trunk = "adapter"'),
        (replace(BASE, lora=LoRAConfig(adapter="nothing")), r"lora\.adapter: nothing has no adapter_config\.json"),
    ],
)
def test_settings_without_effect_are_refused(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config)


def adapter(folder: Path, **fields: Any) -> LoRAConfig:
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(whole | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return LoRAConfig(adapter=str(folder))


def test_rank_alpha_and_targets_are_those_of_the_adapter(tmp_path: Path) -> None:
    lora = resolved(adapter(tmp_path / "one"))
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert resolved(adapter(tmp_path / "two", use_rslora=True)).alpha == 16.0, "alpha / sqrt(rank)"
    assert resolved(adapter(tmp_path / "three", target_modules="all-linear")).targets == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type = 'IA3', which covey does not compute"),
        ({"use_dora": True}, "has use_dora = 'True', which covey does not compute"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"r": "4"}, "must have a rank r, a number lora_alpha and a list target_modules"),
        ({"lora_alpha": True}, "must have a rank r, a number lora_alpha and a list target_modules"),
        ({"target_modules": ".*proj"}, "must have a rank r, a number lora_alpha and a list target_modules"),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(replace(BASE, lora=adapter(tmp_path, **fields)))


def test_fields_of_the_adapter_are_not_set_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank is read from the file of lora\.adapter: remove lora\.rank"):
        validate(replace(BASE, lora=replace(adapter(tmp_path), rank=8)))
