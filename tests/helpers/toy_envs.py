"""Small environments in which one knows what an agent should learn, and runs on them without files to look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from rich.console import Console

from covey.config import ControlConfig
from covey.config.recipe import config_from_dict
from covey.config.rules import validate
from covey.control.envs.vector_env import Environments, make_environments
from covey.control.mlp import RunningMeanStd
from covey.control.policy import ControlPolicy
from covey.control.sampler import ResetSeeds
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.experiment.control import ControlBuilder, episode_returns
from covey.tracking.console import Display
from covey.tracking.run_store import RunStore
from covey.train.loop import train
from covey.train.state import Components, Progress

ENDLESS = "covey-practice/Endless-v0"
NOISY = "covey-practice/Noisy-v0"
TARGET = "covey-practice/Target-v0"
NEGATED_TARGET = "covey-practice/NegatedTarget-v0"
NEGATED_CARTPOLE = "covey-practice/NegatedCartPole-v0"
ENDLESS_LIMIT = 10
DOORS = "covey-practice/Doors-{}-v0"
RECALL = "covey-practice/Recall-v0"
CATCH = "covey-practice/Catch-v0"
MASK_PLACES = ("info", "method", "observation")


class Endless(gym.Env):
    """Always looks the same, pays 1 a step, never ends by itself: only a time limit stops it."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, dtype=np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.ones(1, dtype=np.float32), 1.0, False, False, {}


class Noisy(gym.Env):
    """A walk that its own generator pushes about: what comes next is known only to who has the generator's state."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.made = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += action - 1 + self.np_random.normal()
        self.made += 1
        return self._observation(), self.place, bool(abs(self.place) > 4), self.made == 12, {}

    def _observation(self) -> Any:
        return np.array([self.place, self.made], dtype=np.float32)


class Target(gym.Env):
    """Continuous: name the number that is shown. Pays minus the squared distance, ten times an episode."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-3, 3, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.made = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = -float((action[0] - self.shown[0]) ** 2)
        self.made += 1
        return self._show(), reward, self.made == 10, False, {}

    def _show(self) -> Any:
        self.shown = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.shown


class Doors(gym.Env):
    """Six doors, of which some are locked: a locked one raises, and the open one with the largest number pays 1.

    Args:
        place: where it gives the mask of the open doors.
    """

    action_space = spaces.Discrete(6)

    def __init__(self, place: str) -> None:
        self.place = place
        self.observation_space: Any = spaces.Box(0, 1, (1,), np.float32)
        if place == "method":
            self.action_masks = self._mask
        if place == "observation":
            mask_space = spaces.Box(0, 1, (6,), np.int8)
            self.observation_space = spaces.Dict(action_mask=mask_space, observation=self.observation_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.made = 0
        return self._show()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.open[action]:
            raise ValueError(f"door {action} is locked")
        reward = float(action == np.flatnonzero(self.open)[-1])
        self.made += 1
        observation, info = self._show()
        return observation, reward, self.made == 10, False, info

    def _mask(self) -> Any:
        return self.open

    def _show(self) -> tuple[Any, dict[str, Any]]:
        self.open = np.zeros(6, dtype=np.int8)
        self.open[self.np_random.choice(6, size=2, replace=False)] = 1
        seen = np.array([self.made / 10], dtype=np.float32)
        info = {"action_mask": self.open} if self.place == "info" else {}
        return {"observation": seen, "action_mask": self.open} if self.place == "observation" else seen, info


class Catch(gym.Env):
    """Pixels, 6 x 5: a ball falls, and the paddle in the last row is moved to the left, not at all or to the right."""

    observation_space = spaces.Box(0, 255, (6, 5), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball, self.paddle, self.row = int(self.np_random.integers(5)), 2, 0
        return self._show(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.paddle = int(np.clip(self.paddle + action - 1, 0, 4))
        self.row += 1
        landed = self.row == 5
        return self._show(), float(landed and self.ball == self.paddle), landed, False, {}

    def _show(self) -> Any:
        pixels = np.zeros((6, 5), dtype=np.uint8)
        pixels[self.row, self.ball] = pixels[5, self.paddle] = 255
        return pixels


class Recall(gym.Env):
    """Shows a cue in the first step, and pays 1 in the fifth if the action names it."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.made = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], dtype=np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.made += 1
        over = self.made == 5
        return np.array([0, self.made == 4], dtype=np.float32), float(over and action == self.cue), over, False, {}


class Negated(gym.RewardWrapper):
    """The opposite of what an environment pays."""

    def reward(self, reward: Any) -> float:
        return -float(reward)


def register() -> None:
    """Make the environments known under their ids; harmless when repeated."""
    if ENDLESS in gym.registry:
        return
    gym.register(ENDLESS, entry_point=Endless, max_episode_steps=ENDLESS_LIMIT)
    gym.register(NOISY, entry_point=Noisy)
    gym.register(TARGET, entry_point=Target)
    gym.register(CATCH, entry_point=Catch)
    gym.register(RECALL, entry_point=Recall)
    for place in MASK_PLACES:
        gym.register(DOORS.format(place), entry_point=Doors, kwargs={"place": place})
    gym.register(NEGATED_TARGET, entry_point=lambda **options: Negated(Target(**options)))
    gym.register(NEGATED_CARTPOLE, entry_point=lambda **options: Negated(gym.make("CartPole-v1", **options)))


def read(tables: dict[str, Any], **sections: Any) -> ControlConfig:
    """A checked config; tables given twice are merged, the later value counts."""
    merged = dict(tables)
    for name, value in sections.items():
        merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    config = config_from_dict(merged)
    assert isinstance(config, ControlConfig)
    validate(config)
    return config


def policy_for(environments: Environments, *, normalised: bool = False, spread: float = 30.0) -> ControlPolicy:
    """An untrained policy whose choices depend visibly on what it sees."""
    size = environments.observation_size
    normaliser = RunningMeanStd(size) if normalised else None
    policy = ControlPolicy(
        size, environments.actions, masked=environments.masked, hidden=(8,), normaliser=normaliser, seed=1
    )
    policy.module.network.linears[-1].weight.data.mul_(spread)
    return policy


def made(name: str, count: int, *, copies_states: bool = False, **environment: Any) -> Environments:
    """Copies of an environment, with the settings of [environment]."""
    config = read({"environment": {"id": name, **environment}, **FRAGMENTS}).environment
    return make_environments(config, count, copies_states=copies_states)


FRAGMENTS = {"algorithm": "ppo", "rollouts": {"kind": "fragments"}}  # goes with every setting of an environment


def train_quietly(
    config: ControlConfig, run_dir: Path, change: Callable[[Components], Components] = lambda parts: parts
) -> Components:
    """The whole training loop of a run, without evaluation and curve; `change` may exchange parts of it."""
    builder = ControlBuilder(config)
    try:
        display = Display(config.steps, domain=builder.name, score_kind=builder.score_kind, console=Console(quiet=True))
        experiment = builder.build(RunStore(run_dir), display)
        parts = change(experiment.parts)
        train(parts, experiment.settings, Progress(), should_stop=lambda: False)
    finally:
        builder.close()
    return parts


def mean_return(policy: ControlPolicy, name: str, episodes: int = 20) -> float:
    """Of greedy episodes that training never saw."""
    environments = made(name, episodes)
    returns = episode_returns(policy, environments, [start.prompt for start in ResetSeeds().held_out(episodes)])
    environments.close()
    return float(np.mean(returns))


def mean_kl_from_even(policy: ControlPolicy) -> float:
    """How far a policy of two actions for CartPole is from choosing evenly, in nats, over a few states."""
    states_ND = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    rows = [Rollout(state[None].repeat(2, 0), np.zeros(1, np.int64), np.zeros(1), EndReason.CUT) for state in states_ND]
    logp_NV = policy.evaluate(collate([Group(Start(0, 0), rows)])).all_logprobs_BTV[:, 0]
    return float((logp_NV.exp() * (logp_NV + np.log(2))).sum(dim=1).mean().detach())
