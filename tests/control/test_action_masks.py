"""Action masks: forbidden actions are never taken, and neither in a probability, an entropy, a KL nor a gradient."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.checked import EnvironmentFault
from covey.control.envs.spaces import Discrete, MultiDiscrete
from covey.control.envs.vector_env import check_environment, make_environments
from covey.control.mlp import RunningMeanStd
from covey.control.policy import ControlPolicy, load_policy
from covey.core import kl
from covey.data import EndReason, Group, Rollout, Start, collate
from helpers import toy_envs

D = 3
SPACES = {"two": Discrete(2), "five": Discrete(5), "several": MultiDiscrete((2, 3, 4))}


def make_policy(space: str, seed: int = 1, normaliser: Any = None) -> ControlPolicy:
    policy = ControlPolicy(D, SPACES[space], masked=True, hidden=(8,), normaliser=normaliser, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def random_rows(space: str, count: int = 60) -> Any:
    """Observations with masks, of which every choice allows an action at least."""
    random, actions = np.random.default_rng(2), SPACES[space]
    masks = []
    for size in actions.counts:
        mask = random.random((count, size)) < 0.5
        mask[np.arange(count), random.integers(size, size=count)] = True
        masks.append(mask)
    return np.hstack([random.standard_normal((count, D)), *masks]).astype(np.float32)


def batch_of(policy: ControlPolicy, rows: Any) -> Any:
    """The rows as decisions of three rollouts, which the policy made."""
    uniform = np.random.default_rng(3).random((len(rows), policy.actions.size))
    rollouts = []
    for part in np.array_split(np.arange(len(rows)), 3):
        actions, logprobs = policy.act(rows[part], uniform[part])
        context = np.concatenate([rows[part], rows[part[-1:]]])
        rollouts.append(Rollout(context, actions, logprobs, EndReason.TERMINATED, reward=0.0))
    return collate([Group(Start(0, 0), rollouts)])


def by_hand(policy: ControlPolicy, rows: Any) -> tuple[Any, Any, Any]:
    """Softmax over the allowed actions alone, in float64: allowed, probabilities, entropies."""
    x = torch.from_numpy(rows[:, :D]).double()
    if policy.normaliser is not None:
        mean, var = map(torch.from_numpy, (policy.normaliser.mean_D, policy.normaliser.var_D))
        x = ((x - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
    first, head = policy.module.network.linears
    logits = torch.tanh(x @ first.weight.double().t() + first.bias.double()) @ head.weight.double().t()
    logits = logits + head.bias.double()
    allowed = torch.from_numpy(rows[:, D:]).bool()
    counts = list(policy.actions.counts)
    probability, entropy = [], torch.zeros(len(rows), dtype=torch.float64)
    for part, open_ in zip(logits.split(counts, 1), allowed.split(counts, 1), strict=True):
        weight = torch.where(open_, (part - part.amax(1, keepdim=True)).exp(), 0.0)
        p = weight / weight.sum(1, keepdim=True)
        entropy = entropy - torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(1)
        probability.append(p)
    return allowed, torch.cat(probability, 1), entropy


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("normalised", [False, True])
def test_probabilities_are_a_softmax_over_the_allowed_actions(space: str, normalised: bool) -> None:
    rows = random_rows(space)
    normaliser = RunningMeanStd(D) if normalised else None
    if normaliser is not None:
        normaliser.update(3 * rows[:, :D] + 1)
    policy = make_policy(space, normaliser=normaliser)
    batch = batch_of(policy, rows)
    found, mask = policy.evaluate(batch), batch.mask_BT
    allowed, probability, entropy = by_hand(policy, rows)
    assert 0.2 < allowed.double().mean() < 0.9
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.all_logprobs_BTV[mask].exp().double(), probability, **close)
    assert (found.all_logprobs_BTV[mask].exp()[~allowed] == 0).all()
    torch.testing.assert_close(found.entropy_BT[mask].double(), entropy, **close)
    torch.testing.assert_close(found.logprobs_BT, batch.behavior_logprobs_BT, rtol=1e-5, atol=5e-6)
    offset = torch.tensor([0, *policy.actions.counts[:-1]]).cumsum(0)
    chosen = batch.actions_BT[mask].reshape(len(rows), -1) + offset
    assert allowed.gather(1, chosen).all()
    torch.testing.assert_close(found.logprobs_BT[mask].double(), probability.gather(1, chosen).log().sum(1), **close)
    greedy = policy.greedy_action(rows).reshape(len(rows), -1)
    for choice, part in enumerate(probability.split(list(policy.actions.counts), 1)):
        np.testing.assert_array_equal(greedy[:, choice], part.argmax(1).numpy())


@pytest.mark.parametrize("space", SPACES)
def test_a_forbidden_action_has_no_gradient_and_no_kl(space: str) -> None:
    rows = random_rows(space, 3)
    rows[1:] = rows[0]  # one mask for all
    policy, reference = make_policy(space), make_policy(space, seed=7)
    batch = batch_of(policy, rows)
    mask = batch.mask_BT
    found, other = policy.evaluate(batch), reference.evaluate(batch)
    distance = kl.exact(found.all_logprobs_BTV, other.all_logprobs_BTV)[mask]
    allowed, p, _ = by_hand(policy, rows)
    _, q, _ = by_hand(reference, rows)
    wanted = torch.where(allowed, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(1)
    torch.testing.assert_close(distance.double(), wanted, rtol=1e-4, atol=1e-5)
    (found.logprobs_BT[mask] + found.entropy_BT[mask] + distance).sum().backward()
    gradient = policy.module.network.linears[-1].bias.grad
    assert (gradient[~allowed[0]] == 0).all()
    assert gradient.isfinite().all()
    assert (gradient[allowed[0]] != 0).any() or allowed[0].sum() == len(policy.actions.counts)


@pytest.mark.parametrize("space", SPACES)
def test_no_uniform_number_draws_a_forbidden_action(space: str) -> None:
    policy, rows = make_policy(space), random_rows(space)
    allowed = rows[:, D:] > 0
    offset = np.cumsum([0, *policy.actions.counts[:-1]])
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        with np.errstate(all="raise", under="ignore"):
            actions, logprobs = policy.act(rows, np.full((len(rows), policy.actions.size), uniform))
        chosen = actions.reshape(len(rows), -1) + offset
        assert np.take_along_axis(allowed, chosen, 1).all()
        assert np.isfinite(logprobs).all()


def test_a_saved_policy_keeps_its_masks(tmp_path: Any) -> None:
    policy, rows = make_policy("five"), random_rows("five")
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.masked
    np.testing.assert_array_equal(loaded.greedy_action(rows), policy.greedy_action(rows))


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
@pytest.mark.parametrize("place", toy_envs.MASK_PLACES)
def test_masks_are_found_where_an_environment_gives_them(place: str, vectorization: str) -> None:
    if vectorization == "async" and place != "info":
        pytest.skip("one is enough for processes")
    name = toy_envs.DOORS.format(place)
    environments = make_environments(EnvironmentConfig(name, vectorization=vectorization), 3)
    try:
        assert environments.masked
        rows = environments.reset([5, 6, 7])
        assert rows.shape == (3, environments.observation_size + environments.actions.outputs)
        for t in range(30):  # a forbidden action raises
            rows = environments.step(environments.random_actions(t)).observation_ND
            assert set(np.unique(rows[:, environments.observation_size :])) <= {0.0, 1.0}
    finally:
        environments.close()
    off = make_environments(EnvironmentConfig(name, action_masks=False, vectorization="sync"), 1)
    assert not off.masked
    assert off.reset([0]).shape[1] == off.observation_size


def test_taxi_and_several_choices() -> None:
    taxi = make_environments(EnvironmentConfig("Taxi-v4"), 2)
    assert (taxi.masked, taxi.observation_size, taxi.actions.outputs) == (True, 500, 6)
    taxi.reset([0, 1])
    assert make_environments(EnvironmentConfig("FrozenLake-v1"), 1).masked is False


class Gives(gym.Env):
    """Gives the mask that it was made with from step 2 on."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, mask: Any, action_space: Any = None, ends: bool = False) -> None:
        self.mask, self.action_space, self.ends = mask, action_space or spaces.Discrete(3), ends

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.made = 0
        return np.zeros(2, np.float32), self._info()

    def step(self, action: Any) -> Any:
        self.made += 1
        return np.zeros(2, np.float32), 1.0, self.ends and self.made == 2, self.made == 4, self._info()

    def _info(self) -> Any:
        actions = self.action_space.n if isinstance(self.action_space, spaces.Discrete) else 5
        if self.made < 2:
            return {"action_mask": np.ones(actions, np.int8)}
        return {} if self.mask is None else {"action_mask": self.mask}


WRONG = {
    "none": (np.zeros(3), "its action mask allows no action, and the episode is not over"),
    "short": (np.ones(2), "its action mask has 2 values, and its action space 3 actions"),
    "long": ([1, 1, 1, 1], "its action mask has 4 values, and its action space 3 actions"),
    "values": (np.array([1.0, -np.inf, 1.0]), "its action mask has a value other than 0 and 1"),
    "text": ("all", "its action mask is 'str', not an array of 0 and 1"),
    "missing": (None, "its info has no 'action_mask', and that of its first reset had one"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_mask_is_one_line_with_the_environment(fault: str) -> None:
    mask, said = WRONG[fault]
    gym.register("covey-masks/Gives-v0", lambda: Gives(mask), max_episode_steps=9)
    try:
        with pytest.raises(ConfigError) as caught:
            check_environment(EnvironmentConfig("covey-masks/Gives-v0"))
    finally:
        gym.registry.pop("covey-masks/Gives-v0")
    assert str(caught.value).startswith("environment 'covey-masks/Gives-v0', step 2 of the episode")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


class InSteps(Gives):
    """Gives masks in the info of steps, and none in that of a reset."""

    def _info(self) -> Any:
        return {"action_mask": self.mask} if self.made else {}


def test_masks_that_are_in_the_infos_of_steps_alone_are_refused() -> None:
    config = EnvironmentConfig("covey-masks/InSteps-v0", vectorization="sync")
    gym.register(config.id, lambda: InSteps(np.ones(3)), max_episode_steps=9)
    try:
        with pytest.raises(ConfigError, match=r"step 1 of .* 'action_mask', and its first reset gave none: give"):
            check_environment(config)
        assert check_environment(replace(config, action_masks=False)) == ()
    finally:
        gym.registry.pop(config.id)


def test_one_choice_of_several_without_an_action_is_named_and_masks_may_be_a_tuple() -> None:
    several = spaces.MultiDiscrete([2, 3])
    for mask, said in (((np.ones(2), np.zeros(3)), "of choice 1"), ((np.ones(2), np.ones(3)), None)):
        gym.register("covey-masks/Gives-v0", lambda mask=mask: Gives(mask, several), max_episode_steps=9)
        environments = make_environments(EnvironmentConfig("covey-masks/Gives-v0", vectorization="sync"), 1)
        gym.registry.pop("covey-masks/Gives-v0")
        environments.reset([0])
        environments.step(environments.random_actions(0))
        if said is None:
            assert environments.step(environments.random_actions(1)).observation_ND[0, 2:].tolist() == [1.0] * 5
        else:
            with pytest.raises(EnvironmentFault, match=said):
                environments.step(environments.random_actions(1))


def test_the_mask_of_an_episode_that_is_over_does_not_count_and_continuous_actions_take_none() -> None:
    config = EnvironmentConfig("covey-masks/Gives-v0", vectorization="sync")
    for space, ends in ((spaces.Discrete(3), True), (spaces.Box(-1, 1, (5,), np.float32), False)):
        gym.register(config.id, lambda space=space, ends=ends: Gives(np.zeros(3), space, ends), max_episode_steps=9)
        try:
            if ends:
                assert check_environment(config) == ()
            else:
                with pytest.raises(ConfigError, match=r"are continuous: set environment\.action_masks = false"):
                    make_environments(config, 1)
        finally:
            gym.registry.pop(config.id)


LEARNS: dict[str, dict[str, Any]] = {
    "episodes": {"algorithm": "grpo", "steps": 10, "rollouts": {"starts_per_step": 4, "group_size": 8}},
    "branches": {
        "algorithm": "grpo",
        "steps": 10,
        "rollouts": {"kind": "branches", "starts_per_step": 8, "group_size": 4, "horizon": 6},
    },
    "fragments": {
        "algorithm": "ppo",
        "steps": 12,
        "rollouts": {"kind": "fragments", "environments": 8, "fragment_steps": 20},
        "loss": {"entropy_coefficient": 0.001, "kl_coefficient": 0.001, "kl_estimator": "exact"},
    },
}


@pytest.mark.parametrize("kind", LEARNS)
def test_a_game_is_learnt_in_which_a_forbidden_action_raises(kind: str, tmp_path: Any) -> None:
    """Random play earns 5 of 10; the best door is always the allowed one with the largest number."""
    name = toy_envs.DOORS.format("info")
    tables = LEARNS[kind] | {"environment": {"id": name}, "update": {"learning_rate": 0.02}, "seed": 2}
    policy = toy_envs.train_quietly(toy_envs.read(tables), tmp_path / "run").policy
    assert toy_envs.mean_return(policy, name) > 8.5
