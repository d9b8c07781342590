"""covey's policies against sb3-contrib 2.9.2: MaskablePPO's distributions on the same logits and masks,
and RecurrentPPO's states, sequences, losses and gradients on the same rollouts.

RecurrentPPO has an LSTM and covey a GRU, so a GRU with covey's weights takes the place of the LSTM in sb3-contrib's
policy. covey's sampler plays CartPole with short episodes for two training steps. sb3-contrib's policy then reads the
observations one by one, and resets its state itself; its buffer cuts the second step into padded sequences, and its
`train` computes the loss and leaves the gradients in its policy.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn

from covey import algorithms
from covey.config import EnvironmentConfig
from covey.control.envs.spaces import Discrete, MultiDiscrete
from covey.control.envs.vector_env import make_environments
from covey.control.policy import ControlPolicy
from covey.control.sampler import FragmentSampler, ResetSeeds, RewardScale
from covey.data import Batch, EndReason, Group, collate
from oracle.test_stable_baselines import annotated

D = 3
SPACES = {
    "one choice": (Discrete(6), spaces.Discrete(6)),
    "several": (MultiDiscrete((2, 3, 4)), spaces.MultiDiscrete([2, 3, 4])),
}


@pytest.fixture(autouse=True)
def _single_precision() -> Iterator[None]:
    """Acting and the masks of sb3-contrib are in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", SPACES)
def test_a_masked_policy_has_the_numbers_of_maskable_ppo(name: str, seed: int) -> None:
    actions, space = SPACES[name]
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    policy = ControlPolicy(D, actions, masked=True, hidden=(8,), normaliser=None, seed=seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows, mask = _rows(actions, random)
    drawn, logprobs = policy.act(rows, random.random((len(rows), actions.size)))
    batch = Batch.blank(torch.ones(1, len(rows), dtype=torch.bool))
    batch.context = (np.concatenate([rows, rows[:1]]),)
    batch.actions_BT = torch.from_numpy(drawn)[None]

    theirs = make_masked_proba_distribution(space)
    logits = policy.module.network(torch.from_numpy(rows[:, :D]))
    theirs.proba_distribution(action_logits=logits)
    theirs.apply_masking(mask)
    wanted = theirs.log_prob(torch.from_numpy(drawn)), theirs.entropy()
    found = policy.evaluate(batch)
    for ours, other in zip((found.logprobs_BT[0], found.entropy_BT[0]), wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(logprobs), wanted[0].detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(policy.greedy_action(rows), theirs.mode().numpy())
    parameters = list(policy.module.parameters())
    gradients = [
        torch.autograd.grad((logprob + 0.3 * entropy).sum(), parameters)
        for logprob, entropy in ((found.logprobs_BT, found.entropy_BT), wanted)
    ]
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def _rows(actions: Any, random: np.random.Generator) -> tuple[Any, Any]:
    """Observations with their masks, and the masks alone."""
    masks = []
    for count in actions.counts:
        mask = random.random((40, count)) < 0.5
        mask[np.arange(40), random.integers(count, size=40)] = True
        masks.append(mask)
    mask = np.hstack(masks)
    return np.hstack([random.standard_normal((40, D)), mask]).astype(np.float32), mask


SLOTS, STEPS, H, GAMMA, LAMBDA = 6, 20, 5, 0.97, 0.9
SINGLE = 1e-5  # of the largest number: both sides compute in float32


class GRUAsLSTM(nn.GRU):
    """A GRU behind the interface of an LSTM: the cell state is passed through."""

    def forward(self, sequence: Tensor, states: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
        output, state = super().forward(sequence, states[0])
        return output, (state, states[1])


@pytest.mark.parametrize("slots", [SLOTS, 2])  # of a minibatch
def test_a_policy_with_memory_has_the_numbers_of_recurrent_ppo(slots, agree, monkeypatch):
    monkeypatch.setattr(
        np.random, "randint", lambda *_, **__: 0
    )  # the index at which the buffer cuts a sequence in two
    ends = set()
    for seed in range(10):
        ends |= compare_recurrent(seed, slots, agree)
    assert ends == {EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.CUT}


def compare_recurrent(seed: int, slots: int, agree: Any) -> set[EndReason]:
    """Compare the numbers of one random policy; returns the ends of the rollouts."""
    policy = ControlPolicy(4, Discrete(2), memory=H, hidden=(8,), normaliser=None, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    environments = make_environments(EnvironmentConfig("CartPole-v1", max_episode_steps=12), SLOTS)
    sampler = FragmentSampler(policy, environments, seed, RewardScale(), GAMMA, steps=STEPS)
    rounds = [sampler.sample(ResetSeeds().draw(seed, step, SLOTS), 1, step) for step in (1, 2)]
    ppo = make_recurrent_ppo(policy, slots)
    batch = collate(rounds[1])
    batch = replace(batch, rewards_BT=batch.rewards_BT.double())
    rng = np.random.default_rng(seed)
    ends = [rollout.end for group in rounds[1] for rollout in group.rollouts]
    terminated_B = np.array([end is EndReason.TERMINATED for end in ends])
    bootstrap_B = np.where(terminated_B, 0.0, rng.normal(size=len(batch)))
    fill_recurrent(ppo, rounds, bootstrap_B, rng, agree)
    buffer = ppo.rollout_buffer

    recorded: list[list[Tensor]] = []
    theirs = network_parameters(ppo)
    ppo.policy.optimizer.step = lambda: recorded.append([p.grad.clone() for p in theirs])
    ppo.train()
    logged = ppo.logger.name_to_value

    batch = replace(
        batch,
        values_BT=lay_out(batch.mask_BT, buffer.values.flatten()),
        proximal_logprobs_BT=lay_out(batch.mask_BT, buffer.log_probs.flatten()).float(),
        bootstrap_value_B=torch.tensor(bootstrap_B),
    )
    algorithm = algorithms.ppo(
        clip_low=0.2, clip_high=0.2, entropy_coefficient=0.02, value_coefficient=0.4, gamma=GAMMA, lam=LAMBDA,
        whiten=False,
    )  # fmt: skip
    slot_B = torch.tensor([slot for slot, group in enumerate(rounds[1]) for _ in group.rollouts])
    for number, gradients in enumerate(recorded):
        rows = ((slot_B >= number * slots) & (slot_B < (number + 1) * slots)).nonzero()[:, 0]
        part = annotated(algorithm, batch.select(rows))
        output = policy.evaluate(part)
        loss = algorithm.loss(output, part, 0.0).loss
        ours = torch.autograd.grad(loss, list(policy.module.parameters()))
        both = (torch.cat([gradient.flatten() for gradient in of_one]) for of_one in (ours, gradients))
        agree("RecurrentPPO: gradient", *both, tolerance=SINGLE)
        if slots == SLOTS:
            values_N = ppo.policy.predict_values(torch.as_tensor(buffer.observations).float(), None, None).flatten()
            critic_loss = algorithm.critic_loss(lay_out(part.mask_BT, values_N), part)
            agree("RecurrentPPO: value loss", critic_loss / 0.4, logged["train/value_loss"], tolerance=SINGLE)
            agree("RecurrentPPO: loss", loss + critic_loss, logged["train/loss"], tolerance=SINGLE)
            entropy = output.entropy_BT.sum() / part.mask_BT.sum()
            agree("RecurrentPPO: entropy", entropy, -logged["train/entropy_loss"], tolerance=SINGLE)
    assert len(recorded) == SLOTS // slots
    return set(ends)


def network_parameters(ppo: RecurrentPPO) -> list[Tensor]:
    """The parameters of the policy's network in the order of covey's."""
    layers = ppo.policy.mlp_extractor.policy_net[0], ppo.policy.action_net
    return [p for layer in layers for p in (layer.weight, layer.bias)] + list(ppo.policy.lstm_actor.parameters())


def make_recurrent_ppo(policy: ControlPolicy, slots: int) -> RecurrentPPO:
    """RecurrentPPO with covey's network, whose weights stay as they are."""
    ppo = RecurrentPPO(
        "MlpLstmPolicy", make_vec_env("CartPole-v1", n_envs=SLOTS), n_steps=STEPS, batch_size=STEPS * slots, n_epochs=1,
        gamma=GAMMA, gae_lambda=LAMBDA, max_grad_norm=1e9, learning_rate=0.0, normalize_advantage=False, seed=0,
        ent_coef=0.02, vf_coef=0.4, clip_range=0.2, device="cpu", policy_kwargs={
            "net_arch": {"pi": [8], "vf": [8]}, "lstm_hidden_size": H, "enable_critic_lstm": False
        },
    )  # fmt: skip
    ppo.set_logger(Logger(None, []))
    ppo.policy.lstm_actor = GRUAsLSTM(4, H)
    with torch.no_grad():
        for theirs, ours in zip(network_parameters(ppo), policy.module.parameters(), strict=True):
            theirs.copy_(ours)
    ppo.policy.optimizer = torch.optim.SGD(ppo.policy.parameters(), lr=0.0)
    return ppo


def lay_out(mask_BT: Tensor, number_N: Any) -> Tensor:
    """Numbers of the buffer's decisions, slot after slot, as a batch has them."""
    number_N = torch.as_tensor(number_N)
    return number_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, number_N)


def fill_recurrent(ppo: RecurrentPPO, rounds: list[list[Group]], bootstrap_B: Any, rng: Any, agree: Any) -> None:
    """The second round in the buffer, whose states and log-probabilities sb3-contrib's policy computes from the first
    observation of the run on. They are compared with those of covey's sampler.
    """
    buffer, went_on_N = ppo.rollout_buffer, np.zeros(SLOTS, dtype=bool)
    for name in ("rewards", "values", "log_probs", "advantages", "returns"):
        setattr(buffer, name, getattr(buffer, name).astype(np.float64))
    states = torch.zeros(1, SLOTS, H), torch.zeros(1, SLOTS, H)
    for number, groups in enumerate(rounds):
        row_NTW, action_NT, logprob_NT, reward_NT, start_NT = (
            np.stack([np.concatenate([part(rollout) for rollout in group.rollouts]) for group in groups])
            for part in (
                lambda rollout: rollout.context[:-1],
                lambda rollout: rollout.actions,
                lambda rollout: rollout.behavior_logprobs,
                lambda rollout: rollout.step_rewards,
                lambda rollout: np.arange(len(rollout.actions)) == 0,
            )
        )
        start_NT[:, 0] &= ~went_on_N
        last_NT = np.stack(
            [np.concatenate([np.arange(len(r.actions))[::-1] == 0 for r in group.rollouts]) for group in groups]
        )
        after_NT = np.zeros(last_NT.shape)
        if number:
            after_NT[last_NT] = bootstrap_B
        what, theirs = "RecurrentPPO, while sampling: ", []
        for t in range(STEPS):
            observation_ND, start_N = torch.tensor(row_NTW[:, t, :4]), torch.tensor(start_NT[:, t]).float()
            with torch.no_grad():
                distribution, after = ppo.policy.get_distribution(observation_ND, states, start_N)
                logprob_N = distribution.log_prob(torch.tensor(action_NT[:, t]))
                value_N = ppo.policy.predict_values(observation_ND, states, start_N).flatten()
            state_NH = (1 - start_N[:, None]) * states[0][0]
            agree(f"{what}states", torch.tensor(row_NTW[:, t, 4:]), state_NH, tolerance=SINGLE)
            theirs.append(logprob_N)
            if number:
                over_N = last_NT[:, t] & (t < STEPS - 1)
                paid_N = reward_NT[:, t] + GAMMA * np.where(over_N, after_NT[:, t], 0.0)
                noise = 0.3 * rng.normal(size=(2, SLOTS))
                buffer.add(
                    observation_ND.numpy(), action_NT[:, t, None], paid_N, start_NT[:, t],
                    value_N.double() + torch.tensor(noise[0]), logprob_N.double() + torch.tensor(noise[1]),
                    lstm_states=RNNStates(states, states),
                )  # fmt: skip
            states = after
        agree(f"{what}log-probabilities", torch.tensor(logprob_NT), torch.stack(theirs, dim=1), tolerance=SINGLE)
        went_on_N = np.array([group.rollouts[-1].end is EndReason.CUT for group in groups])
    # At the last step sb3-contrib gets what follows as a value, whether the episode went on or was stopped.
    buffer.compute_returns_and_advantage(torch.tensor(after_NT[:, -1]), np.zeros(SLOTS))
