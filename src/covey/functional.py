"""The losses of GRPO and PPO, and GAE, on plain tensors, for training loops of one's own.

The mathematics is that of `covey.algorithms` and `covey.core`; here tensors only change their shape. Every sign is that
of a loss: minimise it. Shapes: N prompts with G answers each, T tokens, B = N * G rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from covey.algorithms import Algorithm, KLPenalty, grpo, ppo
from covey.algorithms.advantages import outcome
from covey.config import ConfigError
from covey.core import baselines as comparisons
from covey.core import schedules
from covey.core.loss_weights import count
from covey.core.returns import gae
from covey.data import Batch, PolicyOutput

Numbers = Tensor | Sequence[float] | Sequence[Sequence[float]]


def compute_gae(
    rewards: Numbers, values: Numbers, gamma: float = 0.99, lam: float = 0.95, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one episode or of a batch of them, by GAE (arXiv 1506.02438), eq. 16.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = sum_l (gamma lam)^l delta_{t+l},   return_t = A_t + V_t

    Args:
        rewards: [T] or [batch, T], a tensor or lists: what each step earned.
        values: V of the state before each step, in the same shape; nothing is worth anything after the last step, so
            this is for episodes that ended. With one entry more, [T + 1] or [batch, T + 1], the extra entry is V of the
            state after the last step: for episodes that a time limit cut (bootstrapping).
        gamma: discount per step.
        lam: 0 trusts the values (A = delta), 1 the rewards (A = discounted sum of rewards - V).
        mask: steps that the policy decided, bool, in the shape of `rewards`; None is all. Other columns (padding, a
            tool's output) are skipped: what follows a decision is the next one. Rows that are padded with zeros in both
            rewards and values need none, unless there is an extra entry.

    Returns:
        advantages and returns in the shape of `rewards`, not whitened, without gradient.

    Raises:
        ConfigError: for shapes that do not fit, or a factor outside 0 to 1.
    """
    check_limits("gamma", gamma, 0.0, 1.0)
    check_limits("lam", lam, 0.0, 1.0)
    earned, foreseen = _floats(rewards), _floats(values)
    exact = torch.promote_types(earned.dtype, foreseen.dtype)
    earned, foreseen = earned.to(exact), foreseen.to(earned.device, exact)
    steps = earned.shape[-1] if earned.dim() else 0
    wanted = (*earned.shape[:-1], steps)
    if earned.dim() not in (1, 2) or steps == 0 or foreseen.shape not in (wanted, (*wanted[:-1], steps + 1)):
        raise ConfigError(
            f"rewards {list(earned.shape)} and values {list(foreseen.shape)} do not fit: give [T] or [batch, T], and "
            "as many values or one more, the value after the last step"
        )
    _check_same_shape(rewards=earned, mask=mask)
    earned_BT, foreseen_BT = earned.view(-1, steps), foreseen.view(-1, foreseen.shape[-1])
    ended = foreseen_BT.shape[1] == steps
    advantages_BT, returns_BT = gae(
        earned_BT,
        foreseen_BT[:, :steps],
        earned_BT.new_zeros(len(earned_BT)) if ended else foreseen_BT[:, steps],
        torch.ones_like(earned_BT, dtype=torch.bool) if mask is None else mask.bool().view(-1, steps),
        gamma=gamma,
        lam=lam,
    )
    return advantages_BT.view(earned.shape), returns_BT.view(earned.shape)


class GRPOLoss(nn.Module):
    """GRPO's loss of some groups, as `covey.algorithms.grpo`: DeepSeekMath (arXiv 2402.03300), eq. 3, its KL eq. 4.

    >>> loss = GRPOLoss(clip_epsilon=0.2, kl_beta=0.1)(logprobs, logprobs.detach(), rewards, reference_logprobs)
    """

    def __init__(self, clip_epsilon: float = 0.2, kl_beta: float = 0.1, *, scale_rewards: bool = True) -> None:
        """A module without parameters.

        Args:
            clip_epsilon: how far the ratio may leave 1.
            kl_beta: weight of the KL to the reference; 0 is none.
            scale_rewards: divide the advantages by the standard deviation of the group. False leaves r - mean(r), as
                in Dr.GRPO (arXiv 2503.20783); the average over answers and tokens stays GRPO's.

        Raises:
            ConfigError: for a clip_epsilon outside 0 to 1 or a negative kl_beta.
        """
        super().__init__()
        _check_clip(clip_epsilon)
        check_limits("kl_beta", kl_beta, 0.0, math.inf)
        self.clip_epsilon, self.kl_beta, self.scale_rewards = clip_epsilon, kl_beta, scale_rewards

    def extra_repr(self) -> str:
        return f"clip_epsilon={self.clip_epsilon}, kl_beta={self.kl_beta}, scale_rewards={self.scale_rewards}"

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that is computed."""
        penalty = KLPenalty(schedules.constant(self.kl_beta))
        algorithm = grpo(clip_low=self.clip_epsilon, clip_high=self.clip_epsilon, kl=penalty)
        return algorithm if self.scale_rewards else replace(algorithm, advantage=outcome(comparisons.group_centered))

    def forward(
        self,
        policy_logprobs: Tensor,
        old_policy_logprobs: Tensor,
        rewards: Tensor,
        reference_logprobs: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The mean over answers of -min(rho A, clip(rho) A) + kl_beta KL, where A compares the rewards of a group.

        Args:
            policy_logprobs: of the answers, in nats, with gradient: [batch, group_size], one number an answer (then
                the ratio is the whole answer's), or [batch, group_size, T], one a token (then the ratio is a token's,
                and the tokens of an answer are averaged first, as in the paper).
            old_policy_logprobs: of the policy that sampled, in the same shape.
            rewards: [batch, group_size]; NaN marks an answer that could not be graded, which leaves its group.
            reference_logprobs: of the frozen reference, in the same shape; only kl_beta = 0 goes without.
            mask: True at tokens that the policy sampled, False at padding and at others, such as a tool's output, in
                the same shape; None is all.

        Returns:
            a scalar; its gradient reaches `policy_logprobs` only. A group whose rewards are all alike adds nothing but
            its KL.

        Raises:
            ConfigError: for shapes that do not fit, a group of one, or a missing reference.
        """
        if policy_logprobs.dim() not in (2, 3):
            raise ConfigError(
                f"policy_logprobs has shape {list(policy_logprobs.shape)}: give [batch, group_size], or "
                "[batch, group_size, T] with a mask"
            )
        _check_same_shape(
            policy_logprobs=policy_logprobs,
            old_policy_logprobs=old_policy_logprobs,
            reference_logprobs=reference_logprobs,
            mask=mask,
        )
        prompts, answers = policy_logprobs.shape[:2]
        if rewards.shape != (prompts, answers):
            raise ConfigError(
                f"rewards has shape {list(rewards.shape)}: one reward an answer is needed, [{prompts}, {answers}]"
            )
        if answers < 2:
            raise ConfigError("a group of one answer has nothing to compare: group_size must be at least 2")
        if self.kl_beta and reference_logprobs is None:
            raise ConfigError(f"kl_beta is {self.kl_beta}: give reference_logprobs, or set kl_beta to 0")

        algorithm = self.algorithm
        logprobs_BT = _exact(policy_logprobs).reshape(prompts * answers, -1)
        reward_B = rewards.detach().to(logprobs_BT).flatten()
        valid_B = ~reward_B.isnan()
        batch = Batch.blank(
            torch.ones_like(logprobs_BT, dtype=torch.bool) if mask is None else mask.bool().reshape(logprobs_BT.shape),
            reward_B=reward_B.nan_to_num(0.0),
            valid_B=valid_B,
            group_B=torch.arange(prompts, device=logprobs_BT.device).repeat_interleave(answers),
            proximal_logprobs_BT=_constant(old_policy_logprobs, logprobs_BT),
            reference_logprobs_BT=None if reference_logprobs is None else _constant(reference_logprobs, logprobs_BT),
        )
        advantages_BT = algorithm.advantage(batch).advantages_BT
        batch = replace(batch, mask_BT=batch.mask_BT & valid_B[:, None], advantages_BT=advantages_BT)
        batch = weighed(algorithm, batch)
        return algorithm.loss(PolicyOutput(logprobs_BT, torch.zeros_like(logprobs_BT)), batch, self.kl_beta).loss


class PPOLoss(nn.Module):
    """PPO's loss of policy, critic and entropy, as `covey.algorithms.ppo`: PPO (arXiv 1707.06347), eq. 7 and 9.

    >>> loss = PPOLoss()(logprobs, old_logprobs, values, returns, advantages, entropy)
    """

    compute_gae = staticmethod(compute_gae)

    def __init__(self, clip_epsilon: float = 0.2, value_loss_coef: float = 0.5, entropy_coef: float = 0.01) -> None:
        """A module without parameters.

        Args:
            clip_epsilon: how far the ratio may leave 1.
            value_loss_coef: weight of the critic's squared error.
            entropy_coef: weight of the entropy bonus.

        Raises:
            ConfigError: for a clip_epsilon outside 0 to 1 or a negative coefficient.
        """
        super().__init__()
        _check_clip(clip_epsilon)
        check_limits("value_loss_coef", value_loss_coef, 0.0, math.inf)
        check_limits("entropy_coef", entropy_coef, 0.0, math.inf)
        self.clip_epsilon, self.value_loss_coef, self.entropy_coef = clip_epsilon, value_loss_coef, entropy_coef

    def extra_repr(self) -> str:
        return (
            f"clip_epsilon={self.clip_epsilon}, value_loss_coef={self.value_loss_coef}, "
            f"entropy_coef={self.entropy_coef}"
        )

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that is computed."""
        return ppo(
            clip_low=self.clip_epsilon,
            clip_high=self.clip_epsilon,
            value_coefficient=self.value_loss_coef,
            entropy_coefficient=self.entropy_coef,
        )

    def forward(
        self,
        policy_logprobs: Tensor,
        old_policy_logprobs: Tensor,
        values: Tensor,
        returns: Tensor,
        advantages: Tensor,
        entropy: Tensor | float,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mean over decisions of -min(rho A, clip(rho) A) + value_loss_coef (V - R)^2 - entropy_coef H.

        Args:
            policy_logprobs: of the decisions, in nats, with gradient; any shape.
            old_policy_logprobs: of the policy that sampled, in the same shape.
            values: of the critic, with gradient, in the same shape.
            returns: what the critic should have said, in the same shape (`compute_gae`).
            advantages: in the same shape (`compute_gae`), taken as they are: whiten them before, if you want that.
            entropy: of the policy at each decision, in the same shape, or the mean of all as one number; in nats.
            mask: True at decisions, False at padding and at tokens that the policy did not decide, in the same shape;
                None is all.

        Returns:
            a scalar; its gradient reaches `policy_logprobs`, `values` and `entropy` only.

        Raises:
            ConfigError: for shapes that do not fit.
        """
        undecided = torch.as_tensor(entropy, device=policy_logprobs.device)
        _check_same_shape(
            policy_logprobs=policy_logprobs,
            old_policy_logprobs=old_policy_logprobs,
            values=values,
            returns=returns,
            advantages=advantages,
            entropy=undecided if undecided.dim() else None,
            mask=mask,
        )
        if not policy_logprobs.numel() or (mask is not None and not mask.any()):
            raise ConfigError("there is no decision to learn from: the tensors are empty, or all is masked")
        algorithm = self.algorithm
        logprobs_BT = _decided(_exact(policy_logprobs), mask)
        values_BT = _decided(values, mask).to(logprobs_BT)
        batch = Batch.blank(
            torch.ones_like(logprobs_BT, dtype=torch.bool),
            advantages_BT=_constant(_decided(advantages, mask), logprobs_BT),
            returns_BT=_constant(_decided(returns, mask), logprobs_BT),
            values_BT=values_BT.detach(),
            proximal_logprobs_BT=_constant(_decided(old_policy_logprobs, mask), logprobs_BT),
        )
        batch = weighed(algorithm, batch)
        entropy_BT = (_decided(undecided, mask) if undecided.dim() else undecided).to(logprobs_BT)
        entropy_BT = entropy_BT.expand_as(logprobs_BT)
        policy_loss = algorithm.loss(PolicyOutput(logprobs_BT, entropy_BT), batch, 0.0).loss
        return policy_loss + algorithm.critic_loss(values_BT, batch)


def weighed(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with its loss weights, in the precision of its advantages."""
    assert batch.advantages_BT is not None
    loss_weights_BT = algorithm.aggregation(batch.mask_BT.double(), count(batch.mask_BT))
    return replace(batch, loss_weights_BT=loss_weights_BT.to(batch.advantages_BT.dtype))


def _exact(logprobs: Tensor) -> Tensor:
    """At least float32: a ratio of bf16 log-probabilities would be off by percents."""
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))


def _decided(value: Tensor, mask: Tensor | None) -> Tensor:
    """The entries that the mask keeps, each in a row of its own: what PPO averages knows no answers, only decisions."""
    return (value.flatten() if mask is None else value[mask.bool()])[:, None]


def _constant(value: Tensor, like_BT: Tensor) -> Tensor:
    """Without gradient, in the shape, precision and place of `like_BT`."""
    return value.detach().to(like_BT).reshape(like_BT.shape)


def _floats(numbers: Numbers) -> Tensor:
    tensor = torch.as_tensor(numbers).detach()
    return tensor if tensor.is_floating_point() else tensor.float()


def _check_same_shape(**tensors: Tensor | None) -> None:
    """Every tensor that is there has the shape of the first."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, wanted = present[0][0], present[0][1].shape
    for name, tensor in present:
        if tensor.shape != wanted:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}, {first} has {list(wanted)}: they must be alike")


def _check_clip(clip_epsilon: float) -> None:
    if not 0 < clip_epsilon < 1:
        raise ConfigError(f"clip_epsilon must be above 0 and below 1 (is {clip_epsilon}); 0.2 is usual")


def check_limits(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g} (is {value})")
