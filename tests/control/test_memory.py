"""A policy with a GRU: its sequences in float64, its states in episodes, fragments and branches, and its recall."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.render import render_episode
from covey.control.envs.spaces import Discrete
from covey.control.envs.vector_env import make_environments
from covey.control.mlp import RunningMeanStd
from covey.control.policy import ControlCritic, ControlPolicy, load_policy
from covey.control.sampler import BranchSampler, EpisodeSampler, FragmentSampler, ResetSeeds, RewardScale
from covey.data import collate
from covey.experiment.control import ControlBuilder, episode_returns
from helpers import toy_envs

H = 6


def make_policy(size: int, actions: int = 2, *, masked: bool = False, normalised: bool = False) -> ControlPolicy:
    normaliser = RunningMeanStd(size) if normalised else None
    if normaliser is not None:
        normaliser.update(np.random.default_rng(5).standard_normal((50, size)) * 2 + 1)
    policy = ControlPolicy(size, Discrete(actions), masked=masked, memory=H, hidden=(5,), normaliser=normaliser, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def by_hand(policy: ControlPolicy, context: Any) -> Any:
    """Logits of a rollout's decisions in float64, by the equations of torch's GRU; and the states before them."""
    network, size = policy.module.network, policy.observation_size
    gru = network.gru
    weights = [w.double() for w in (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)]
    x_LD = torch.from_numpy(np.asarray(context)[:-1]).double()
    state = x_LD[0, -H:]
    logits, states = [], []
    for row in x_LD:
        x = row[:size]
        if policy.normaliser is not None:
            mean, var = map(torch.from_numpy, (policy.normaliser.mean_D, policy.normaliser.var_D))
            x = ((x - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
        states.append(state)
        r_in, z_in, n_in = (weights[0] @ x + weights[2]).chunk(3)
        r_h, z_h, n_h = (weights[1] @ state + weights[3]).chunk(3)
        reset, update = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
        state = (1 - update) * torch.tanh(n_in + reset * n_h) + update * state
        first, head = network.linears
        output = head.weight.double() @ torch.tanh(first.weight.double() @ state + first.bias.double())
        output = output + head.bias.double()
        if policy.masked:
            output = torch.where(row[size : size + policy.actions.count] > 0, output, -1e8)
        logits.append(output)
    return torch.stack(logits), torch.stack(states)


def sampled(policy: ControlPolicy, name: str, kind: str, rounds: int = 1) -> Any:
    """Groups of the last of some training steps."""
    environments = make_environments(EnvironmentConfig(name), 6, copies_states=True)
    scale = RewardScale()
    if kind == "episodes":
        sampler: Any = EpisodeSampler(policy, environments, 1, scale, 1.0)
        shape = (2, 4)  # more episodes than copies
    elif kind == "fragments":
        sampler = FragmentSampler(policy, environments, 1, scale, 1.0, steps=7)
        shape = (6, 1)
    else:
        trunks = make_environments(EnvironmentConfig(name), 2, copies_states=True)
        sampler = BranchSampler(policy, environments, 1, scale, 1.0, trunks=trunks, horizon=5, decisions=5)
        shape = (2, 3)
    for step in range(1, rounds + 1):
        groups = sampler.sample(ResetSeeds().draw(1, step, shape[0]), shape[1], step)
    return groups, sampler


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("kind", ["episodes", "fragments", "branches"])
@pytest.mark.parametrize("name", [toy_envs.NOISY, toy_envs.DOORS.format("info")])
def test_the_update_computes_the_sequence_that_was_sampled(name: str, kind: str, normalised: bool) -> None:
    size, actions, masked = (2, 3, False) if name == toy_envs.NOISY else (1, 6, True)
    policy = make_policy(size, actions, masked=masked, normalised=normalised)
    groups, _ = sampled(policy, name, kind, rounds=1 if kind == "episodes" else 2)
    batch = collate(groups)
    output = policy.evaluate(batch)
    torch.testing.assert_close(output.logprobs_BT, batch.behavior_logprobs_BT, rtol=1e-4, atol=1e-5)
    wanted = []
    begins = set()
    for row, context in enumerate(batch.context):
        logits, states = by_hand(policy, context)
        length = len(context) - 1
        torch.testing.assert_close(torch.from_numpy(context[:-1, -H:]).double(), states.detach(), rtol=1e-4, atol=1e-5)
        wanted.append(logits.log_softmax(1).gather(1, batch.actions_BT[row, :length, None])[:, 0])
        begins.add(bool((context[0, -H:] == 0).all()))
        assert (np.abs(context[1:, -H:]).sum(axis=1) > 0).all()
    assert begins == {"episodes": {True}, "fragments": {True, False}, "branches": begins}[kind]
    assert kind != "branches" or False in begins
    found = output.logprobs_BT[batch.mask_BT]
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=1e-4, atol=1e-5)
    parameters = list(policy.module.parameters())
    ours, theirs = (torch.autograd.grad(total.sum(), parameters) for total in (found, torch.cat(wanted)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_decision_is_the_same_with_other_rows_and_without_later_columns() -> None:
    policy = make_policy(2, 3)
    batch = collate(sampled(policy, toy_envs.NOISY, "episodes")[0])
    whole = policy.evaluate(batch).logprobs_BT
    rows = torch.tensor([3, 1])
    part = batch.select(rows)
    found = policy.evaluate(part).logprobs_BT
    torch.testing.assert_close(found, whole[rows][:, : found.shape[1]])


def test_the_critic_reads_the_state_and_the_one_after_the_last_decision() -> None:
    policy = make_policy(2, 3, normalised=True)
    batch = collate(sampled(policy, toy_envs.NOISY, "fragments", 2)[0])
    critic = ControlCritic(2, memory=H, hidden=(8,), normaliser=policy.normaliser, seed=1)
    values, after = critic.values(batch), critic.bootstrap_values(batch)
    for row, context in enumerate(batch.context):
        every = critic.values_of(context)
        np.testing.assert_allclose(values[row, : len(context) - 1].detach(), every[:-1], rtol=1e-4, atol=1e-6)
        assert after[row].item() == pytest.approx(every[-1], rel=1e-4, abs=1e-6)
    other = copy.deepcopy(batch.context[0])
    other[:, -H:] += 1
    assert np.abs(critic.values_of(other) - critic.values_of(batch.context[0])).max() > 1e-3


def test_fragments_go_on_after_a_checkpoint_with_their_states() -> None:
    policy = make_policy(2, 3)
    _, sampler = sampled(policy, toy_envs.NOISY, "fragments", 2)
    state = copy.deepcopy(sampler.state_dict())
    again = FragmentSampler(
        policy, make_environments(EnvironmentConfig(toy_envs.NOISY), 6), 1, RewardScale(), 1.0, steps=7
    )
    again.load_state_dict(state)
    starts = ResetSeeds().draw(1, 3, 6)
    for left, right in zip(sampler.sample(starts, 1, 3), again.sample(starts, 1, 3), strict=True):
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            np.testing.assert_array_equal(one.context, other.context)
            np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)


def test_a_saved_policy_remembers(tmp_path: Any) -> None:
    policy = make_policy(2, 3, normalised=True)
    policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    environments = make_environments(EnvironmentConfig(toy_envs.NOISY), 3)
    seeds = list(range(8))
    assert episode_returns(loaded, environments, seeds) == episode_returns(policy, environments, seeds)
    cartpole = make_policy(4)
    path = tmp_path / "agent.gif"
    total = render_episode(EnvironmentConfig("CartPole-v1"), cartpole.greedy_action, 3, path, cartpole.remembering)
    assert [total] == episode_returns(cartpole, make_environments(EnvironmentConfig("CartPole-v1"), 1), [3])


def test_memory_with_convolutions_is_one_line() -> None:
    tables = {"environment": {"id": toy_envs.CATCH}, "policy": {"memory": 8, "network": "small_cnn"}}
    with pytest.raises(
        ConfigError, match=r"policy\.memory excludes convolutions: set it to 0, or policy\.network = 'mlp'"
    ):
        ControlBuilder(toy_envs.read(tables)).close()


LEARNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "steps": 40, "rollouts": {"starts_per_step": 8, "group_size": 8}},
    "ppo": {
        "algorithm": "ppo",
        "steps": 60,
        "rollouts": {"kind": "fragments", "environments": 32, "fragment_steps": 20},
        "update": {"minibatches": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 16])
@pytest.mark.parametrize("kind", LEARNS)
def test_a_cue_is_recalled_only_with_memory(kind: str, memory: int, tmp_path: Any) -> None:
    """The cue of the first step must be named four steps later; without memory half of the guesses are right."""
    tables = LEARNS[kind] | {"environment": {"id": toy_envs.RECALL}, "policy": {"memory": memory}, "seed": 1}
    tables["update"] = {"learning_rate": 0.01} | tables.get("update", {})
    policy = toy_envs.train_quietly(toy_envs.read(tables), tmp_path / "run").policy
    recalled = toy_envs.mean_return(policy, toy_envs.RECALL, 100)
    assert recalled > 0.95 if memory else 0.3 < recalled < 0.7
