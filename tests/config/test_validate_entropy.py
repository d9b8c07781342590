"""Settings that keep the entropy up and would do nothing are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    ControlConfig,
    ControlLossConfig,
    ControlUpdateConfig,
    EnvironmentConfig,
    LossConfig,
    RunConfig,
    UpdateConfig,
)
from covey.config.rules import validate
from covey.experiment.control import ControlBuilder

GOOD = RunConfig(task=ArithmeticConfig(digits=(1,)), update=UpdateConfig(epochs=2))
CONTROL = ControlConfig(environment=EnvironmentConfig(id="CartPole-v1"))
ONCE = UpdateConfig()
BONUS = {"entropy_target": 0.5, "entropy_coefficient": 0.01}
CLIP = {"entropy_target": 0.5, "entropy_controller": "clip"}


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ({"entropy_target": 0.5}, {}, "set loss.entropy_coefficient above 0"),
        ({"entropy_target": 0.0, "entropy_coefficient": 0.01}, {}, "loss.entropy_target must be above 0"),
        ({"entropy_controller": "clip"}, {}, "has no effect while loss.entropy_target is"),
        ({"entropy_gain": 0.5}, {}, "loss.entropy_gain is set, but has no effect while loss.entropy_target is"),
        (
            {"entropy_bounds": (0.5, 2.0)},
            {},
            "loss.entropy_bounds is set, but has no effect while",
        ),
        (BONUS | {"entropy_gain": 0.0}, {}, "loss.entropy_gain must be above 0"),
        (BONUS | {"entropy_bounds": (0.5,)}, {}, "the lowest and the highest, such as [0.5, 5.0] (is [0.5])"),
        (BONUS | {"entropy_bounds": (2.0, 0.5)}, {}, "loss.entropy_bounds must be two numbers"),
        (BONUS | {"entropy_bounds": (2.0, 5.0)}, {}, "the factor 1, which must be between them"),
        (BONUS | {"entropy_bounds": (0.0, 5.0)}, {}, "loss.entropy_bounds must be above 0"),
        (CLIP, {"update": ONCE}, "every ratio is 1 and nothing is clipped: raise one of them"),
        (CLIP, {"algorithm": "cispo"}, "cispo clips no gradients: set it to 'bonus'"),
        (CLIP, {"algorithm": "rloo", "update": UpdateConfig(minibatches=2)}, "rloo clips no gradients"),
        ({"clip_cov_bounds": (0.5, 2.0)}, {}, "has no effect while loss.clip_cov_fraction is"),
        ({"clip_cov_fraction": 0.1, "clip_cov_bounds": (2.0, 2.0)}, {}, "loss.clip_cov_bounds must be two numbers"),
        ({"clip_cov_fraction": 1.1}, {}, "loss.clip_cov_fraction must be at most 1"),
        ({"kl_cov_coefficient": 0.5}, {}, "has no effect while loss.kl_cov_fraction is"),
        ({"kl_cov_fraction": 0.1, "kl_cov_coefficient": 0.0}, {}, "loss.kl_cov_coefficient must be above 0"),
        ({"kl_cov_fraction": 0.1}, {"update": ONCE}, "so its penalty is 0: raise one of them"),
    ],
)
def test_what_would_do_nothing_is_refused(loss: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(replace(GOOD, loss=LossConfig(**loss), **changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "ppo"])
def test_all_of_it_together_is_allowed(algorithm: str) -> None:
    restrained = {"clip_cov_fraction": 0.01, "kl_cov_fraction": 0.01, "entropy_bounds": (0.5, 2.0)}
    for controller in (BONUS, CLIP):
        validate(replace(GOOD, algorithm=algorithm, loss=LossConfig(**restrained, **controller)))
        validate(replace(CONTROL, algorithm="grpo", loss=ControlLossConfig(**restrained, **controller)))


def test_an_algorithm_without_a_ratio_has_a_bonus_and_clip_cov() -> None:
    loss = LossConfig(clip_cov_fraction=0.01, **BONUS)
    validate(replace(GOOD, algorithm="rloo", loss=loss, update=ONCE))


@pytest.mark.parametrize(("target", "fault"), [(0.7, "between 0 and 0.693 nats"), (-0.1, "between 0"), (0.6, "")])
def test_an_entropy_that_the_actions_cannot_have_is_refused(target: float, fault: str) -> None:
    config = replace(CONTROL, loss=ControlLossConfig(entropy_coefficient=0.01, entropy_target=target))
    validate(config)
    if not fault:
        ControlBuilder(config).close()
        return
    with pytest.raises(ConfigError, match=fault):
        ControlBuilder(config)


def test_continuous_actions_may_have_a_negative_entropy_but_not_the_target_zero() -> None:
    loss = ControlLossConfig(entropy_coefficient=0.01, entropy_target=-0.5)
    config = replace(CONTROL, environment=EnvironmentConfig(id="Pendulum-v1"), loss=loss)
    validate(config)
    ControlBuilder(config).close()
    with pytest.raises(ConfigError, match="set one near 0"):
        validate(replace(config, loss=replace(loss, entropy_target=0.0)))


def test_updates_of_control_run_several_epochs_by_default() -> None:
    once = ControlUpdateConfig(epochs=1)
    with pytest.raises(ConfigError, match="its penalty is 0"):
        validate(replace(CONTROL, loss=ControlLossConfig(kl_cov_fraction=0.1), update=once))
