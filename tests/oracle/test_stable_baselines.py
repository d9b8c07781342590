"""covey's GAE and PPO losses against stable-baselines3 2.9.2: its own RolloutBuffer and `PPO.train()`, in float64.

A buffer is filled by hand with random observations, rewards, values and ends of episodes. SB3 computes its advantages,
makes one optimizer step from all of it, and leaves the gradients in its policy. A copy of that policy feeds covey's GAE
and losses, over the same decisions cut into rollouts. Both gradients are then compared, parameter by parameter.

Shapes: B rollouts, T decisions.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import Tensor

from covey import algorithms
from covey.algorithms import Algorithm
from covey.algorithms.advantages import Advantages
from covey.core import baselines
from covey.core.loss_weights import count
from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate

STEPS, SLOTS, GAMMA, LAMBDA = 12, 3, 0.97, 0.9
CASES = range(25)


class Double(FlattenExtractor):
    """Hands SB3's networks float64; its preprocessing makes everything float32."""

    def forward(self, observations: Tensor) -> Tensor:
        return super().forward(observations).double()


class Piece(NamedTuple):
    """An episode's decisions within the buffer, and what may follow the last."""

    slot: int
    begin: int
    stop: int
    end: EndReason
    next_value: float


def make_ppo(seed: int, *, steps: int = STEPS, slots: int = SLOTS, **settings: Any) -> PPO:
    """SB3's PPO on a small random policy, whose one optimizer step takes the whole buffer and clips no gradient."""
    ppo = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=slots), n_steps=steps, batch_size=steps * slots, n_epochs=1,
        gamma=GAMMA, gae_lambda=LAMBDA, max_grad_norm=1e9, seed=seed, device="cpu",
        policy_kwargs={"net_arch": [8], "features_extractor_class": Double}, **settings,
    )  # fmt: skip
    ppo.policy.double()
    ppo.set_logger(Logger(None, []))
    with torch.no_grad():
        for parameter in ppo.policy.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return ppo


def fill(ppo: PPO, seed: int) -> list[Piece]:
    """Random experience in the buffer, advantages computed by SB3; returns how episodes divide it.

    The old log-probabilities and values are some way off the policy's, so that both clips are active.
    """
    rng = np.random.default_rng(seed)
    buffer = ppo.rollout_buffer
    shape = (buffer.buffer_size, buffer.n_envs)
    observations, actions = rng.normal(size=(*shape, 4)).astype(np.float32), rng.integers(0, 2, shape)
    rewards, dones = rng.normal(size=shape), rng.random(shape) < 0.25
    truncated = dones & (rng.random(shape) < 0.5)
    final_values, last_values = rng.normal(size=shape), rng.normal(size=buffer.n_envs)
    with torch.no_grad():
        current = ppo.policy.evaluate_actions(
            torch.as_tensor(observations).reshape(-1, 4), torch.as_tensor(actions).flatten()
        )
    old_values = current[0].numpy().reshape(shape) + 0.3 * rng.normal(size=shape)
    old_logprobs = current[1].numpy().reshape(shape) + 0.3 * rng.normal(size=shape)
    for name in ("rewards", "values", "log_probs", "advantages", "returns", "episode_starts"):
        setattr(buffer, name, getattr(buffer, name).astype(np.float64))
    # SB3 pays what was still to come when a time limit struck as a part of the reward (`collect_rollouts`).
    paid = rewards + GAMMA * np.where(truncated, final_values, 0.0)
    starts = np.concatenate([np.ones((1, buffer.n_envs), dtype=bool), dones[:-1]])
    for t in range(buffer.buffer_size):
        buffer.add(
            observations[t], actions[t], paid[t], starts[t], *map(torch.tensor, (old_values[t], old_logprobs[t]))
        )
    buffer.compute_returns_and_advantage(torch.tensor(last_values), dones[-1])
    buffer.rewards = rewards  # as covey is paid them; SB3 reads them no more
    return _pieces(dones, truncated, final_values, last_values)


def _pieces(dones: Any, truncated: Any, final_values: Any, last_values: Any) -> list[Piece]:
    pieces = []
    for slot in range(dones.shape[1]):
        begin = 0
        for t in range(len(dones)):
            if truncated[t, slot]:
                piece = Piece(slot, begin, t + 1, EndReason.TRUNCATED, final_values[t, slot])
            elif dones[t, slot]:
                piece = Piece(slot, begin, t + 1, EndReason.TERMINATED, 0.0)
            elif t == len(dones) - 1:
                piece = Piece(slot, begin, t + 1, EndReason.CUT, last_values[slot])
            else:
                continue
            pieces.append(piece)
            begin = t + 1
    return pieces


class Cut(NamedTuple):
    """The buffer's decisions as covey sees them, and numbers of the buffer laid out like them."""

    batch: Batch
    place_BT: Tensor  # of each decision in the buffer, slot after slot

    def lay_out(self, number_N: Tensor) -> Tensor:
        return torch.where(self.batch.mask_BT, number_N[self.place_BT], 0.0)


def cut(ppo: PPO, pieces: list[Piece]) -> Cut:
    """One rollout for each piece."""
    buffer = ppo.rollout_buffer
    rollouts = [
        Rollout(
            context=None,
            actions=[0] * (piece.stop - piece.begin),
            behavior_logprobs=[0.0] * (piece.stop - piece.begin),
            end=piece.end,
            step_rewards=buffer.rewards[piece.begin : piece.stop, piece.slot],
            reward=0.0,
        )
        for piece in pieces
    ]
    batch = collate([Group(Start(0, ""), rollouts)])
    width = torch.arange(batch.mask_BT.shape[1])
    first_B1 = torch.tensor([[piece.slot * buffer.buffer_size + piece.begin] for piece in pieces])
    laid = Cut(batch, torch.where(batch.mask_BT, first_B1 + width, 0))
    rewards, old_values, old_logprobs = (
        torch.as_tensor(array.T.reshape(-1).copy()) for array in (buffer.rewards, buffer.values, buffer.log_probs)
    )
    batch = replace(
        batch,
        rewards_BT=laid.lay_out(rewards),  # collate makes them float32
        values_BT=laid.lay_out(old_values),
        bootstrap_value_B=torch.tensor([piece.next_value for piece in pieces]),
        proximal_logprobs_BT=laid.lay_out(old_logprobs),
    )
    return laid._replace(batch=batch)


def annotated(algorithm: Algorithm, batch: Batch) -> Batch:
    advantages_BT, returns_BT = algorithm.advantage(batch)
    loss_weights_BT = algorithm.aggregation(batch.mask_BT, count(batch.mask_BT))
    return replace(batch, advantages_BT=advantages_BT, returns_BT=returns_BT, loss_weights_BT=loss_weights_BT)


def sb3_std(batch: Batch, *, whiten: bool) -> Advantages:
    """GAE, whitened as SB3 does it: the sample's std and 1e-8; covey's own are the population's and 1e-6."""
    algorithm = algorithms.ppo(gamma=GAMMA, lam=LAMBDA, whiten=False)
    advantages_BT, returns_BT = algorithm.advantage(batch)
    if whiten:
        advantages_N = advantages_BT[batch.mask_BT]
        everyone_N = torch.ones_like(advantages_N, dtype=torch.bool)
        one_group_N = torch.zeros_like(advantages_N, dtype=torch.int64)
        advantages_BT = advantages_BT.clone()
        advantages_BT[batch.mask_BT] = baselines.group_zscore(advantages_N, one_group_N, everyone_N, ddof=1, eps=1e-8)
    return Advantages(advantages_BT, returns_BT)


def our_loss(policy: Any, ppo: PPO, algorithm: Algorithm, laid: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """covey's loss of the policy and of the critic and the mean entropy, with the networks' opinions in them."""
    buffer = ppo.rollout_buffer  # which `train` has laid out slot after slot
    values_N, logprobs_N, entropy_N = policy.evaluate_actions(
        torch.as_tensor(buffer.observations), torch.as_tensor(buffer.actions).long().flatten()
    )
    batch = annotated(algorithm, laid.batch)
    evaluation = PolicyOutput(laid.lay_out(logprobs_N), laid.lay_out(entropy_N))
    loss = algorithm.loss(evaluation, batch, 0.0).loss
    return loss, algorithm.critic_loss(laid.lay_out(values_N.flatten()), batch), entropy_N.mean()


def gradients(policy: Any) -> Tensor:
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in policy.parameters()])


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_gae(lam, agree):
    """RolloutBuffer.compute_returns_and_advantage, with ends of episodes, time limits and a last value."""
    for seed in CASES:
        ppo = make_ppo(seed)
        ppo.rollout_buffer.gae_lambda = lam
        laid = cut(ppo, fill(ppo, seed))
        buffer, mask_BT = ppo.rollout_buffer, laid.batch.mask_BT
        ours_BT, returns_BT = algorithms.ppo(gamma=GAMMA, lam=lam, whiten=False).advantage(laid.batch)
        theirs, their_returns = (torch.as_tensor(a.T.reshape(-1).copy()) for a in (buffer.advantages, buffer.returns))
        assert returns_BT is not None
        agree(f"GAE, lambda {lam:g}: advantages", ours_BT[mask_BT], theirs[laid.place_BT][mask_BT])
        agree(f"GAE, lambda {lam:g}: returns", returns_BT[mask_BT], their_returns[laid.place_BT][mask_BT])


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.02])
@pytest.mark.parametrize("whiten", [False, True])
def test_ppo_losses(whiten, entropy_coefficient, agree):
    """Clipped policy loss, value loss and entropy bonus: their sizes, and the gradient of all parameters."""
    for seed in CASES:
        ppo = make_ppo(seed, normalize_advantage=whiten, ent_coef=entropy_coefficient, vf_coef=0.4, clip_range=0.2)
        algorithm = replace(
            algorithms.ppo(clip_low=0.2, clip_high=0.2, value_coefficient=0.4, entropy_coefficient=entropy_coefficient),
            advantage=partial(sb3_std, whiten=whiten),
        )
        laid = cut(ppo, fill(ppo, seed))
        policy = deepcopy(ppo.policy)
        ppo.train()
        policy_loss, critic_loss, entropy = our_loss(policy, ppo, algorithm, laid)
        (policy_loss + critic_loss).backward()
        logged = ppo.logger.name_to_value
        what = f"PPO, whiten {whiten}, entropy {entropy_coefficient:g}"
        agree(f"{what}: gradient", gradients(policy), gradients(ppo.policy))
        agree(f"{what}: loss", policy_loss + critic_loss, logged["train/loss"])
        surrogate = policy_loss + entropy_coefficient * entropy
        agree(f"{what}: policy loss", surrogate, logged["train/policy_gradient_loss"])
        agree(f"{what}: value loss", critic_loss / 0.4, logged["train/value_loss"])


def test_clipped_value_loss_is_the_larger_of_sb3s_two(agree):
    """A difference by decision: SB3 takes the clipped error alone; covey the larger of both errors, decision by
    decision (arXiv 2005.12729). So SB3 is asked for both, on buffers of a single decision.
    """
    clip, taken = 0.2, set()
    for seed in range(60):
        asked = []
        for clip_range_vf in (None, clip):
            ppo = make_ppo(seed, steps=1, slots=1, normalize_advantage=False, clip_range_vf=clip_range_vf)
            laid = cut(ppo, fill(ppo, seed))
            policy = deepcopy(ppo.policy)
            ppo.train()
            asked.append((float(ppo.logger.name_to_value["train/value_loss"]), ppo, laid, policy))
        larger = max((0, 1), key=lambda i: asked[i][0])
        taken.add((larger, asked[0][0] == asked[1][0]))
        theirs, ppo, laid, policy = asked[larger]
        algorithm = replace(
            algorithms.ppo(value_coefficient=0.5, value_clip=clip), advantage=partial(sb3_std, whiten=False)
        )
        policy_loss, critic_loss, _ = our_loss(policy, ppo, algorithm, laid)
        (policy_loss + critic_loss).backward()
        agree("PPO, clipped value loss: size", critic_loss / 0.5, theirs)
        agree("PPO, clipped value loss: gradient", gradients(policy), gradients(ppo.policy))
    assert {larger for larger, _ in taken} == {0, 1}
    assert (0, True) in taken  # the value had moved less than the clip
