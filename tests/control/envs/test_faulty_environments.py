"""Environments that raise, lie, hang or die, or break a rule: one line that names environment, episode and step."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from covey.config import ConfigError, ControlConfig, EnvironmentConfig
from covey.config.recipe import config_from_dict
from covey.control.envs import vector_env
from covey.control.envs.checked import EnvironmentFault, Watchdog, checked_flag, checked_observation, checked_reward
from covey.control.envs.vector_env import check_environment, make_environments
from covey.experiment.control import ControlBuilder
from covey.experiment.run import check, run
from helpers import toy_envs
from helpers.faulty_environments import FINE, NAME, Faulty, answers, collect_episodes, raises, registering


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


# What a step does that it must not, and what is said of it.
FAULTS: dict[str, tuple[Any, str]] = {
    "raises": (lambda: raises(ZeroDivisionError("by\n\nzero")), "ZeroDivisionError: by zero"),
    "raises without a text": (lambda: raises(KeyError()), "KeyError"),
    "raises a text that raises": (lambda: raises(BadText()), "BadText"),
    "nothing": (lambda: None, "TypeError"),
    "four values": (lambda: answers()[:4], "it returned 4 values instead of 5"),
    "six values": (lambda: (*answers(), 1), "it returned more values instead of 5"),
    "NaN observed": (
        lambda: answers(observation=np.array([0, np.nan], np.float32)),
        "number 1 of its observation is nan",
    ),
    "infinity observed": (lambda: answers(observation=FINE - np.inf), "number 0 of its observation is -inf"),
    "too large for fp32": (lambda: answers(observation=np.array([1e39, 0.0])), "number 0 of its observation is inf"),
    "None observed": (lambda: answers(observation=None), "its observation is None, not (2,) numbers"),
    "text observed": (lambda: answers(observation="up"), "its observation is 'up', not (2,) numbers"),
    "objects observed": (lambda: answers(observation=np.array([{}, []], object)), "not (2,) numbers"),
    "another shape": (lambda: answers(observation=np.zeros(3, np.float32)), "has the shape (3,), not (2,)"),
    "a shape that would broadcast": (
        lambda: answers(observation=np.zeros(1, np.float32)),
        "has the shape (1,), not (2,)",
    ),
    "a number observed": (lambda: answers(observation=1.0), "has the shape (), not (2,)"),
    "ragged": (lambda: answers(observation=[[1], [1, 2]]), "ValueError"),
    "NaN paid": (lambda: answers(reward=float("nan")), "its reward is nan"),
    "infinity paid": (lambda: answers(reward=np.float32(np.inf)), "its reward is inf"),
    "None paid": (lambda: answers(reward=None), "its reward is None, not a number"),
    "text paid": (lambda: answers(reward="1.0"), "its reward is '1.0', not a number"),
    "10^400 observed": (lambda: answers(observation=[10**400, 0.0]), "not (2,) numbers"),
    "10^400 in fp128 observed": (
        lambda: answers(observation=np.full(2, np.longdouble("1e400"))),
        "number 0 of its observation is inf",
    ),
    "10^400 paid": (lambda: answers(reward=10**400), "its reward is 1000"),
    "10^400 in fp128 paid": (lambda: answers(reward=np.longdouble("1e400")), "its reward is inf"),
    "10^300 paid": (lambda: answers(reward=1e300), "its reward is 1e+300, and the largest is 1e+12: scale it"),
    "10^400 for an end": (lambda: answers(terminated=10**400), "terminated is 1000"),
    "several paid": (lambda: answers(reward=np.ones(2)), "its reward is array([1., 1.]), not a number"),
    "None for an end": (lambda: answers(terminated=None), "terminated is None, neither True nor False"),
    "text for an end": (lambda: answers(truncated="no"), "truncated is 'no', neither True nor False"),
}


@pytest.fixture
def register():
    with registering() as do:
        yield do


@pytest.mark.sampled(18)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("kind", ["auto", "sync", "async"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_environment_episode_and_step(fault, kind, register):
    does, said = FAULTS[fault]
    config = EnvironmentConfig(id=register(lambda: Faulty(does)).id, vectorization=kind)
    environments = make_environments(config, 2)
    try:
        with pytest.raises(EnvironmentFault) as caught:
            collect_episodes(environments)
    finally:
        environments.close()
    line = str(caught.value)
    assert line.startswith(f"environment '{NAME}', step 2 of the episode that began with reset(seed=7): ")
    assert said in line
    assert "\n" not in line


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("fault", [name for name in FAULTS if "observed" in name or name.startswith("raises")])
def test_a_reset_is_checked_too(fault, register):
    does, said = FAULTS[fault]
    environments = make_environments(register(lambda: Faulty(does, fails_at=0)), 2)
    with pytest.raises(EnvironmentFault) as caught:
        collect_episodes(environments)
    assert str(caught.value).startswith(
        f"environment '{NAME}', the reset of the episode that began with reset(seed=7): "
    )
    assert said in str(caught.value)


def test_a_reset_of_the_old_api_is_told(register):
    class Old(Faulty):
        def reset(self, **_: Any) -> Any:
            return FINE

    with pytest.raises(ConfigError, match="its reset returned no pair of observation and info"):
        check_environment(register(Old))


def test_a_reset_without_a_seed_is_told(register):
    class Older(Faulty):
        def reset(self) -> Any:
            return FINE, {}

    with pytest.raises(ConfigError, match=r"argument 'seed': its reset must take seed and options, as in Gymnasium 1$"):
        check_environment(register(Older))


def test_rewards_and_flags_of_every_honest_kind_are_taken():
    for reward in (1, True, 1.0, np.float32(1), np.array(1.0), np.array([1.0]), np.int64(1)):
        assert checked_reward(reward) == 1.0
    for flag in (True, 1, np.bool_(True), np.array([True]), np.int8(1)):
        assert checked_flag(flag, "terminated") is True
    for observation in (FINE, [0, 0], (0.0, 0.0), np.zeros(2, np.int64)):
        assert checked_observation(observation, Faulty.observation_space).shape == (2,)
    nested = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,)))
    assert checked_observation({"a": 2, "b": FINE}, nested)["a"] == 2
    for wrong in ({"a": 3, "b": FINE}, {"a": 2}, {"a": 2, "b": "x"}, None, 4):
        with pytest.raises(ValueError, match="does not belong to"):
            checked_observation(wrong, nested)


def test_a_process_that_hangs_is_given_up(register):
    config = EnvironmentConfig(
        id=register(lambda: Faulty(lambda: time.sleep(600))).id, vectorization="async", timeout_seconds=1.0
    )
    environments = make_environments(config, 2)
    with pytest.raises(
        EnvironmentFault, match=r"the step of copy 1 did not end within 1 s: .* environment.timeout_seconds"
    ):
        collect_episodes(environments)
    assert not any(process.is_alive() for process in environments._vector.processes)


@pytest.mark.parametrize("how", [lambda: os._exit(3), lambda: os.kill(os.getpid(), 9)], ids=["exit", "kill"])
def test_a_process_that_dies_is_told(how, register):
    config = EnvironmentConfig(id=register(lambda: Faulty(how)).id, vectorization="async")
    environments = make_environments(config, 2)
    with pytest.raises(EnvironmentFault, match=r"the process of copy 1 died in step \(exit code (3|-9)\)"):
        collect_episodes(environments)
    assert not any(process.is_alive() for process in environments._vector.processes)


def forever() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def test_python_code_that_hangs_in_this_process_is_interrupted(register):
    config = EnvironmentConfig(id=register(lambda: Faulty(forever)).id, vectorization="sync", timeout_seconds=0.5)
    environments = make_environments(config, 2)
    with pytest.raises(EnvironmentFault, match=r"did not answer within 0.5 s: .* environment.timeout_seconds"):
        collect_episodes(environments)
    time.sleep(0.5)  # nothing is left to be raised here


def test_the_thread_of_a_watchdog_ends_with_it():
    watchdog = Watchdog(0.2, "environment")
    with watchdog:
        thread = watchdog._thread
    assert thread.is_alive()
    del watchdog
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("rollouts", "environment"),
    [
        ({}, {}),
        ({"kind": "branches"}, {}),
        ({}, {"vectorization": "sync"}),
        ({}, {"vectorization": "async"}),
        ({"kind": "fragments"}, {"vectorization": "sync"}),
    ],
    ids=["episodes", "branches", "sync", "async", "fragments"],
)
def test_a_fault_ends_the_run_in_one_line_and_what_was_learned_stays(rollouts, environment, register, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"

    class Late(Faulty):
        def step(self, action: int) -> Any:
            if list(checkpoints.glob("step-*2/manifest.json")):
                raise ValueError("out of luck")
            return super().step(action)

    register(Late)
    tables = {
        "algorithm": "grpo", "steps": 50, "run_dir": str(tmp_path / "run"),
        "environment": {"id": NAME, **environment}, "evaluation": {"episodes": 2}, "checkpoint": {"every": 1},
        "rollouts": {"starts_per_step": 2, "group_size": 2, **rollouts},
    }  # fmt: skip
    if rollouts.get("kind") == "fragments":
        tables |= {"algorithm": "ppo", "rollouts": {"kind": "fragments", "environments": 2, "fragment_steps": 8}}
    line = rf"step \d of the episode .*: ValueError: out of luck \({Path(__file__).name} line \d+\)"
    with pytest.raises(EnvironmentFault, match=f"^environment '{NAME}', {line}$"):
        run(config_from_dict(tables))
    assert list(checkpoints.glob("step-*/manifest.json"))


@pytest.mark.parametrize("fault", ["raises", "four values", "NaN observed", "None paid"])
def test_check_finds_a_fault_at_once(fault, register):
    with pytest.raises(ConfigError, match="step 1 of the episode that began with reset"):
        check_environment(register(lambda: Faulty(FAULTS[fault][0], fails_at=1, seed=0)))


class Endless(Faulty):
    def step(self, action: int) -> Any:
        return answers()


def test_an_environment_without_an_end_is_found_before_the_first_episode(register, monkeypatch):
    monkeypatch.setattr(vector_env, "PROBED_SECONDS", math.inf)  # a busy machine makes fewer steps in them
    config = register(Endless)
    with pytest.raises(ConfigError, match="no time limit, and none of its episodes ended in 1,000 random steps: set"):
        check_environment(config)
    check_environment(EnvironmentConfig(id=NAME, max_episode_steps=5))


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"action_space": spaces.Discrete(10**12)}, "has 1,000,000,000,000 actions"),
        ({"action_space": spaces.MultiDiscrete([10**6, 10**6])}, "has 2,000,000 actions"),
        ({"observation_space": spaces.Discrete(10**9)}, "observes 1,000,000,000 numbers"),
        ({"observation_space": spaces.Box(0, 1, (0,))}, "observes 0 numbers"),
        ({"observation_space": spaces.Text(5)}, "a policy here takes Box, Discrete"),
        (
            {"observation_space": spaces.Tuple([spaces.Text(5), spaces.Box(0, 1, (2,))])},
            "a policy here takes Box, Discrete, MultiDiscrete, MultiBinary, and a Dict or Tuple of them",
        ),
    ],
    ids=str,
)
def test_spaces_that_no_policy_can_have_are_refused(space, said, register):
    with pytest.raises(ConfigError, match=said):
        check_environment(register(type("Spaced", (Faulty,), space)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MiniGrid-Empty-5x5-v0", "pip install minigrid"),
        ("BabyAI-GoToObj-v0", "pip install minigrid"),
        ("ALE/Pong-v5", r"pip install 'covey\[atari\]'"),
        ("Ant-v5", r"pip install 'covey\[mujoco\]'"),
        ("highway-v0", "pip install highway-env"),
        ("MinAtar/Breakout-v1", "pip install minatar"),
        ("phys2d/CartPole-v1", "needs the module 'jax', which is not installed: install its package"),
    ],
)
def test_an_environment_of_a_package_that_is_missing_says_what_to_install(name, said):
    with pytest.raises(ConfigError, match=said):
        make_environments(EnvironmentConfig(id=name), 1)


class Pictures(Faulty):
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def reset(self, **_: Any) -> Any:
        self.made = 0
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action: int) -> Any:
        self.made += 1
        return answers(observation=np.full((8, 8, 3), 255, np.uint8), terminated=self.made == 3)


def test_pictures_that_an_mlp_reads_come_with_a_warning(register):
    register(Pictures)
    config = config_from_dict({"environment": {"id": NAME, "max_episode_steps": 5}, "policy": {"network": "mlp"}})
    assert isinstance(config, ControlConfig)
    (note,) = check(config)
    assert "pictures (8 x 8 x 3): they are flattened to 192 numbers" in note
    environment = config_from_dict({"environment": {"id": "CartPole-v1"}})
    assert isinstance(environment, ControlConfig)
    assert not ControlBuilder(environment).notes


class Seeded(Faulty):
    """Starts and steps with numbers of a generator."""

    def generator(self) -> Any:
        return self.np_random

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.generator().random(2).astype(np.float32), {}

    def step(self, action: int) -> Any:
        _, *rest = super().step(action)
        return self.generator().random(2).astype(np.float32), *rest


class OfTheModule(Seeded):
    def generator(self) -> Any:
        return random


class Unseeded(Seeded):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None)


class LateChance(Seeded):
    def step(self, action: int) -> Any:
        self._np_random = np.random.default_rng()
        return super().step(action)


class Grows(Faulty):
    level = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.level += 1
        super().reset(seed=seed)
        return FINE + self.level, {}


random = np.random.RandomState(5)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Seeded, ""),
        (OfTheModule, "reset(seed=0) began two episodes with different observations"),
        (Unseeded, "reset(seed=0) began two episodes with different observations"),
        (LateChance, "step 1 of two episodes with the same reset(seed=0) and actions had different results"),
        (Grows, "reset(seed=0) began two episodes with different observations"),
    ],
)
def test_an_environment_that_ignores_its_seed_is_named(kind, said, register):
    notes = check_environment(register(kind, max_episode_steps=9))
    assert [said] * len(notes) == [note[len(f"environment '{NAME}': ") :].partition(", so")[0] for note in notes]
    assert bool(notes) == bool(said)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("low", "high", "named"),
    [(0, 1000, True), (-0.01, 0.01, True), (90, 100, True), (-1, 1, False), (0, 1, False), (-np.inf, np.inf, False)],
)
def test_a_range_of_actions_that_the_policy_does_not_explore_is_named_with_the_wrapper(low, high, named, register):
    register(type("Ranged", (Faulty,), {"action_space": spaces.Box(low, high, (2,), np.float32)}), max_episode_steps=9)
    config = config_from_dict({"environment": {"id": NAME}})
    assert isinstance(config, ControlConfig)
    notes = check(config)
    assert len(notes) == named
    assert all(
        f"takes actions from {low:g} to {high:g}" in note and "gymnasium.wrappers.RescaleAction" in note
        for note in notes
    )


def test_episodes_that_nothing_must_end_are_named_with_the_field(register):
    class Ends(Faulty):
        def step(self, action: int) -> Any:
            self.made += 1
            return answers(terminated=self.made == 9)

    (note,) = check_environment(register(Ends))
    assert "has no time limit, and a trained policy may never end an episode: set environment.max_episode_steps" in note
    gym.registry.pop(NAME)
    with pytest.raises(ConfigError, match="has a time limit of 1,000,000,000 decisions, and none of its episodes"):
        check_environment(register(Moving, max_episode_steps=10**9))


class Moving(Faulty):
    def step(self, action: int) -> Any:
        return answers()


def test_parts_of_an_observation_that_are_not_numbers_are_named_and_left_out(register):
    class Told(Faulty):
        observation_space = spaces.Dict(mission=spaces.Text(9), view=spaces.Box(-1, 1, (2,), np.float32))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            _, info = super().reset(seed=seed)
            return {"mission": "go", "view": FINE}, info

        def step(self, action: int) -> Any:
            return answers(observation={"mission": "go", "view": FINE})

    for kind in ("auto", "sync"):
        config = replace(register(Told, max_episode_steps=9), vectorization=kind)
        (note,) = check_environment(config)
        assert "'mission' of its observation is not numbers: the policy does not see it" in note
        environments = make_environments(config, 2)
        assert environments.reset([1, 2]).shape == (2, 2)
        environments.close()
        gym.registry.pop(NAME)


RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "rollouts": {"starts_per_step": 1, "group_size": 2}},
    "ppo": {"algorithm": "ppo", "rollouts": {"kind": "fragments", "environments": 2, "fragment_steps": 4}},
}
OF_GYMNASIUM = sorted(
    name
    for name, spec in gym.registry.items()
    if str(spec.entry_point).startswith(("gymnasium.envs.classic_control", "gymnasium.envs.toy_text"))
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("name", OF_GYMNASIUM)
def test_gymnasiums_own_environments_train_for_two_steps(name, kind, tmp_path):
    tables = RUNS[kind] | {
        "steps": 2,
        "evaluation": {"episodes": 2},
        "environment": {"id": name, "max_episode_steps": 9},
    }
    config = toy_envs.read(tables)
    assert not check(config)
    parts = toy_envs.train_quietly(config, tmp_path / "run")
    assert parts.sampler.version == 2
