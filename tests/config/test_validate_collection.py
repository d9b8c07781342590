"""Group fields that contradict each other are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.config import ArithmeticConfig, ConfigError, RunConfig, SamplingConfig
from covey.config.rules import validate

GOOD = RunConfig(task=ArithmeticConfig(digits=(1,)))


@pytest.mark.parametrize(
    ("algorithm", "steps", "fields", "message"),
    [
        ("grpo", 9, {"adaptive": True, "initial_group_size": 17}, "initial_group_size (17) spends more than the"),
        (
            "grpo", 9, {"adaptive": True, "initial_group_size": 8, "final_group_size": 6},
            "budget of group_size (6) rollouts a prompt: set it to at most 6",
        ),
        ("grpo", 9, {"adaptive": True, "max_group_size": 12}, "max_group_size (12) is below group_size (16)"),
        (
            "grpo", 9, {"adaptive": True, "max_group_size": 20, "final_group_size": 32},
            "max_group_size (20) is below group_size (32), so part of the budget could never be spent: set it to 32",
        ),
        ("grpo", 9, {"initial_group_size": 8}, "has no effect while sampling.adaptive is false"),
        ("grpo", 9, {"max_group_size": 32}, "has no effect while sampling.adaptive is false"),
        ("grpo", 9, {"adaptive": True, "max_resamples": 2}, "set max_resamples = 0, or remove adaptive"),
        ("dapo", 9, {"adaptive": True}, "sampling.adaptive with max_resamples = 3"),
        ("reinforce_pp", 9, {"adaptive": True}, "sampling.adaptive is set, but not used with reinforce_pp"),
        ("reinforce_pp", 9, {"max_resamples": 1}, "sampling.max_resamples is set, but reinforce_pp does not compare"),
        ("ppo", 9, {"max_resamples": 1}, "ppo does not compare within groups"),
        ("grpo", 1, {"final_group_size": 32}, "the run has one step"),
        ("grpo", 9, {"overlong_tokens": 65}, "set it to at most 64"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(algorithm, steps, fields, message):
    with pytest.raises(ConfigError) as refused:
        validate(replace(GOOD, algorithm=algorithm, steps=steps, sampling=SamplingConfig(**fields)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        ("grpo", {"adaptive": True}),
        ("grpo", {"adaptive": True, "initial_group_size": 16, "max_group_size": 16}),
        ("grpo", {"adaptive": True, "final_group_size": 128}),
        ("dapo", {}),
        ("dapo", {"adaptive": True, "max_resamples": 0}),
        ("rloo", {"max_resamples": 5, "final_group_size": 4}),
        ("ppo", {"final_group_size": 8, "overlong_tokens": 64}),
    ],
)
def test_what_can_work_is_allowed(algorithm, fields):
    validate(replace(GOOD, algorithm=algorithm, sampling=SamplingConfig(**fields)))
