"""KL settings that would change nothing, or that cannot be computed, are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    LossConfig,
    ReferenceConfig,
    RunConfig,
    UpdateConfig,
)
from covey.config.recipe import config_from_dict
from covey.config.rules import validate

GOOD = RunConfig(task=ArithmeticConfig(digits=(1,)))
TWICE = UpdateConfig(epochs=2)


@pytest.mark.parametrize(
    ("loss", "update", "message"),
    [
        ({"adaptive_kl_target": 0.1}, TWICE, "set loss.kl_coefficient above 0"),
        ({"adaptive_kl_target": 0.1, "kl_coefficient": 0.0}, TWICE, "set loss.kl_coefficient above 0"),
        ({"adaptive_kl_target": 0.0, "kl_coefficient": 0.1}, TWICE, "loss.adaptive_kl_target must be above 0"),
        ({"adaptive_kl_horizon": 500}, TWICE, "has no effect while loss.adaptive_kl_target is"),
        ({"kl_warmup_steps": 5, "kl_coefficient": 0.0}, TWICE, "kl_coefficient is 0"),
        ({"kl_to": "behavior", "kl_coefficient": 0.1}, UpdateConfig(), "their KL is 0: raise one of them"),
        ({"kl_to": "behavior", "kl_estimator": "exact"}, TWICE, "use 'k3', or set kl_to to 'reference'"),
        ({"importance_cap": 0.0}, TWICE, "loss.importance_cap must be above 0"),
        ({"importance_mask": (0.5,)}, TWICE, "such as [0.5, 5.0], got [0.5]"),
        ({"importance_mask": (1.5, 5.0)}, TWICE, "a lowest weight below 1 and a highest above 1"),
        ({"importance_mask": (0.5, 1.0)}, TWICE, "a lowest weight below 1 and a highest above 1"),
        ({"importance_mask": (-1.0, 2.0)}, TWICE, "a lowest weight below 1 and a highest above 1"),
        ({"importance_mask": (0.5, 2.0), "importance_cap": 3.0}, TWICE, "importance_cap = 3 has no effect"),
        ({"importance_level": "sequence"}, TWICE, "set importance_cap or importance_mask"),
    ],
)
def test_what_would_not_pull_is_refused(loss, update, message):
    with pytest.raises(ConfigError) as refused:
        validate(replace(GOOD, loss=LossConfig(**loss), update=update))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "loss",
    [
        {"adaptive_kl_target": 0.1, "kl_coefficient": 0.05, "adaptive_kl_horizon": 500, "kl_warmup_steps": 3},
        {"kl_to": "behavior", "kl_coefficient": 0.05, "adaptive_kl_target": 0.01},
        {"kl_to": "behavior", "kl_estimator": "k1"},
        {"kl_estimator": "exact", "importance_cap": 2.0},
        {"importance_mask": (0.0, 2.0), "importance_cap": 1.0, "importance_level": "sequence"},
    ],
)
def test_what_pulls_is_allowed(loss):
    validate(replace(GOOD, loss=LossConfig(**loss), update=TWICE))


def test_a_share_without_a_refresh_is_refused():
    with pytest.raises(ConfigError, match=r"set reference\.refresh_every"):
        validate(replace(GOOD, reference=ReferenceConfig(refresh_fraction=0.1)))
    validate(replace(GOOD, reference=ReferenceConfig(refresh_every=5, refresh_fraction=0.1)))


def test_the_rules_hold_in_control():
    tables = {"environment": {"id": "CartPole-v1"}, "loss": {"adaptive_kl_target": 0.1}}
    with pytest.raises(ConfigError, match=r"set loss\.kl_coefficient above 0"):
        validate(config_from_dict(tables))
    validate(config_from_dict(tables | {"loss": {"adaptive_kl_target": 0.1, "kl_coefficient": 0.05}}))
    once = {"update": {"epochs": 1}, "loss": {"kl_to": "behavior", "kl_coefficient": 0.1}}
    with pytest.raises(ConfigError, match="raise one of them"):
        validate(config_from_dict(tables | once))
