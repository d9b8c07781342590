"""What a [replay] table may not be combined with, in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    ControlConfig,
    ControlLossConfig,
    EnvironmentConfig,
    IterationConfig,
    LossConfig,
    ReplayConfig,
    RunConfig,
    UpdateConfig,
)
from covey.config.common import importance_cap
from covey.config.recipe import read_recipe
from covey.config.rules import validate
from covey.experiment.algorithm import build_algorithm
from covey.experiment.llm import build_llm_algorithm
from covey.train.replay import RecentGroups, Replay, build_replay

ON = ReplayConfig(groups=4)
LANGUAGE = RunConfig(task=ArithmeticConfig(), replay=ON)
CONTROL = ControlConfig(environment=EnvironmentConfig(id="CartPole-v1"), replay=ON)


@pytest.mark.parametrize("config", [LANGUAGE, CONTROL])
def test_replay_is_accepted_by_both_kinds_of_run(config):
    validate(config)


@pytest.mark.parametrize("config", [LANGUAGE, CONTROL])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "ppo"}, "replay.groups is set, but ppo does not compare within groups"),
        ({"algorithm": "reinforce_pp"}, "but reinforce_pp does not compare within groups"),
        ({"replay": ReplayConfig(max_age=3)}, "replay.max_age is set, but has no effect while replay.groups is 0"),
        ({"replay": ReplayConfig(max_uses=2)}, "replay.max_uses is set, but has no effect while replay.groups is 0"),
    ],
)
def test_refused_by_both_kinds_of_run(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        validate(replace(config, **changes))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"algorithm": "rloo"}, True),
        ({"algorithm": "rloo", "loss": LossConfig(kl_coefficient=0.0)}, False),
        ({"algorithm": "rloo", "loss": LossConfig(kl_estimator="k3")}, False),
        ({"loss": LossConfig(kl_estimator="k1")}, True),
        ({"loss": LossConfig(kl_estimator="k1", kl_to="behavior"), "update": UpdateConfig(minibatches=2)}, False),
        ({"loss": LossConfig()}, False),
    ],
)
def test_a_kl_in_the_reward_is_refused(changes, refused):
    config = replace(LANGUAGE, **changes)
    if not refused:
        validate(config)
        return
    with pytest.raises(ConfigError, match="the KL is in the reward"):
        validate(config)


def test_a_kl_in_the_reward_is_refused_in_control():
    loss = ControlLossConfig(kl_coefficient=0.1, kl_estimator="k1")
    with pytest.raises(ConfigError, match="the KL is in the reward"):
        validate(replace(CONTROL, loss=loss))


@pytest.mark.parametrize("field", ["clip_cov_fraction", "kl_cov_fraction"])
def test_covariances_over_several_policies_are_refused(field):
    with pytest.raises(ConfigError, match="compare decisions of one policy"):
        validate(replace(CONTROL, loss=ControlLossConfig(**{field: 0.01})))


def test_a_reward_model_that_is_trained_is_refused():
    with pytest.raises(ConfigError, match=r"iteration\.steps trains the reward model"):
        validate(replace(LANGUAGE, iteration=IterationConfig(steps=5)))


@pytest.mark.parametrize(
    ("loss", "replay", "cap"),
    [
        (LossConfig(), ON, 2.0),
        (LossConfig(), ReplayConfig(), None),
        (LossConfig(importance_cap=5.0), ON, 5.0),
        (LossConfig(importance_mask=(0.5, 1.5)), ON, None),
    ],
)
def test_the_cap_of_the_importance_weights(loss, replay, cap):
    assert importance_cap(loss, replay) == cap
    config = replace(LANGUAGE, loss=loss, replay=replay)
    validate(config)
    importance = build_llm_algorithm(config, {}).importance
    if cap is not None:
        assert importance is not None
        assert importance.cap == cap
    else:
        assert (importance is None) == (not loss.importance_mask)


def test_weights_of_whole_rollouts_need_no_cap_of_their_own():
    loss = ControlLossConfig(importance_level="sequence")
    validate(replace(CONTROL, loss=loss))
    with pytest.raises(ConfigError, match="there are no importance weights"):
        validate(replace(CONTROL, loss=loss, replay=ReplayConfig()))


def test_control_has_importance_weights_as_language_models_have_them():
    built = build_algorithm("grpo", ControlLossConfig(importance_cap=3.0)).importance
    assert built is not None
    assert built.cap == 3.0


def test_what_is_built():
    assert type(build_replay(ReplayConfig())) is Replay
    built = build_replay(ReplayConfig(groups=3, max_age=7, max_uses=2))
    assert isinstance(built, RecentGroups)
    assert (built.groups, built.max_age, built.max_uses) == (3, 7, 2)


def test_a_change_of_the_algorithm_takes_replay_out(tmp_path):
    recipe = tmp_path / "replayed.toml"
    recipe.write_text('[environment]\nid = "CartPole-v1"\n\n[replay]\ngroups = 4\nmax_age = 2\n')
    assert read_recipe(recipe).replay == ReplayConfig(groups=4, max_age=2)
    assert read_recipe(recipe, ["--algorithm", "rloo", "--epochs", "1"]).replay == ReplayConfig(groups=4, max_age=2)
    assert read_recipe(recipe, ["--algorithm", "reinforce_pp"]).replay == ReplayConfig()
