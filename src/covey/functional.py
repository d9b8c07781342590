"""The losses of GRPO and PPO, and GAE, on plain tensors, for custom training loops.

The functions reshape their arguments and call `covey.algorithms` and `covey.core`. Every loss is to be minimised.
Shapes: N prompts with G answers each, T tokens, B = N * G rows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from covey.algorithms import Algorithm, KLPenalty, grpo, ppo
from covey.algorithms.advantages import outcome
from covey.config import ConfigError
from covey.core import baselines, schedules
from covey.core.loss_weights import count
from covey.core.precision import widened
from covey.core.returns import gae
from covey.data import Batch, PolicyOutput

Numbers = Tensor | Sequence[float] | Sequence[Sequence[float]]


def compute_gae(
    rewards: Numbers, values: Numbers, gamma: float = 0.99, lam: float = 0.95, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation for one episode or a batch of episodes: GAE (arXiv 1506.02438), eq. 16.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = sum_l (gamma lam)^l delta_{t+l},   return_t = A_t + V_t

    Args:
        rewards: reward of each step, [T] or [batch, T], a tensor or lists.
        values: V of the state before each step, in the same shape. V after the last step is then 0, which is right for
            episodes that terminated. With one more entry, [T + 1] or [batch, T + 1], the last entry is V of the state
            after the last step, for episodes that a time limit truncated (bootstrapping).
        gamma: discount per step.
        lam: 0 gives A = delta, 1 gives A = discounted sum of rewards - V.
        mask: True at steps that the policy decided, bool, in the shape of `rewards`; None: all steps. Other columns
            (padding, a tool's output) are skipped: t + 1 is the next decision. Rows that are padded with zeros in
            rewards and values need no mask, unless `values` has the additional entry.

    Returns:
        advantages and returns in the shape of `rewards`, not whitened, without gradient.

    Raises:
        ConfigError: if the shapes do not match, or gamma or lam is outside 0 to 1.
    """
    check_limits("gamma", gamma, 0.0, 1.0)
    check_limits("lam", lam, 0.0, 1.0)
    reward, value = _floats(rewards), _floats(values)
    dtype = torch.promote_types(reward.dtype, value.dtype)
    reward, value = reward.to(dtype), value.to(reward.device, dtype)
    steps = reward.shape[-1] if reward.dim() else 0
    expected = (*reward.shape[:-1], steps)
    if reward.dim() not in (1, 2) or steps == 0 or value.shape not in (expected, (*expected[:-1], steps + 1)):
        raise ConfigError(
            f"rewards {list(reward.shape)} and values {list(value.shape)} do not fit: give [T] or [batch, T], and "
            "as many values or one more, the value after the last step"
        )
    _check_same_shape(rewards=reward, mask=mask)
    reward_BT, value_BT = reward.view(-1, steps), value.view(-1, value.shape[-1])
    terminated = value_BT.shape[1] == steps
    advantages_BT, returns_BT = gae(
        reward_BT,
        value_BT[:, :steps],
        reward_BT.new_zeros(len(reward_BT)) if terminated else value_BT[:, steps],
        torch.ones_like(reward_BT, dtype=torch.bool) if mask is None else mask.bool().view(-1, steps),
        gamma=gamma,
        lam=lam,
    )
    return advantages_BT.view(reward.shape), returns_BT.view(reward.shape)


class GRPOLoss(nn.Module):
    """GRPO's loss: DeepSeekMath (arXiv 2402.03300), eq. 3, with the KL of eq. 4. It equals `covey.algorithms.grpo`.

    >>> loss = GRPOLoss(clip_epsilon=0.2, kl_beta=0.1)(logprobs, logprobs.detach(), rewards, reference_logprobs)
    """

    def __init__(self, clip_epsilon: float = 0.2, kl_beta: float = 0.1, *, scale_rewards: bool = True) -> None:
        """A module without parameters.

        Args:
            clip_epsilon: the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon.
            kl_beta: weight of the KL to the reference; 0 for no KL.
            scale_rewards: divide the advantages by the standard deviation of the group. If False, the advantage is
                r - mean(r), as in Dr.GRPO (arXiv 2503.20783); the average over answers and tokens stays GRPO's.

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
        return algorithm if self.scale_rewards else replace(algorithm, advantage=outcome(baselines.group_centered))

    def forward(
        self,
        policy_logprobs: Tensor,
        old_policy_logprobs: Tensor,
        rewards: Tensor,
        reference_logprobs: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mean over answers of -min(rho A, clip(rho) A) + kl_beta KL.

        A is the group-relative advantage of an answer.

        Args:
            policy_logprobs: log-probabilities of the answers, in nats, with gradient. [batch, group_size], one per
                answer, for ratios of whole answers; or [batch, group_size, T], one per token, for ratios of tokens. The
                tokens of an answer are then averaged first, as in the paper.
            old_policy_logprobs: of the policy that sampled, in the same shape.
            rewards: [batch, group_size]; NaN marks an answer that could not be graded and is excluded from its group.
            reference_logprobs: of the frozen reference, in the same shape; may be None only if kl_beta is 0.
            mask: True at tokens that the policy sampled, False at padding and at others, such as a tool's output, in
                the same shape; None: all tokens.

        Returns:
            a scalar with a gradient to `policy_logprobs` only. A group whose rewards are all equal adds only its KL.

        Raises:
            ConfigError: if the shapes do not match, group_size is 1, or the reference is missing.
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
                f"rewards has shape {list(rewards.shape)}: one reward per answer is needed, [{prompts}, {answers}]"
            )
        if answers < 2:
            raise ConfigError("a group of one answer has nothing to compare: group_size must be at least 2")
        if self.kl_beta and reference_logprobs is None:
            raise ConfigError(f"kl_beta is {self.kl_beta}: give reference_logprobs, or set kl_beta to 0")

        algorithm = self.algorithm
        logprobs_BT = _at_least_fp32(policy_logprobs).reshape(prompts * answers, -1)
        reward_B = rewards.detach().to(logprobs_BT).flatten()
        valid_B = ~reward_B.isnan()
        batch = Batch.blank(
            torch.ones_like(logprobs_BT, dtype=torch.bool) if mask is None else mask.bool().reshape(logprobs_BT.shape),
            reward_B=reward_B.nan_to_num(0.0),
            valid_B=valid_B,
            group_B=torch.arange(prompts, device=logprobs_BT.device).repeat_interleave(answers),
            proximal_logprobs_BT=_detached_as(old_policy_logprobs, logprobs_BT),
            reference_logprobs_BT=None if reference_logprobs is None else _detached_as(reference_logprobs, logprobs_BT),
        )
        advantages_BT = algorithm.estimate_advantages(batch).advantages_BT
        batch = replace(batch, mask_BT=batch.mask_BT & valid_B[:, None], advantages_BT=advantages_BT)
        batch = with_loss_weights(algorithm, batch)
        return algorithm.loss(PolicyOutput(logprobs_BT, torch.zeros_like(logprobs_BT)), batch, self.kl_beta).loss


class PPOLoss(nn.Module):
    """PPO's loss of policy, critic and entropy: PPO (arXiv 1707.06347), eq. 7 and 9. It equals `covey.algorithms.ppo`.

    >>> loss = PPOLoss()(logprobs, old_logprobs, values, returns, advantages, entropy)
    """

    compute_gae = staticmethod(compute_gae)

    def __init__(self, clip_epsilon: float = 0.2, value_loss_coef: float = 0.5, entropy_coef: float = 0.01) -> None:
        """A module without parameters.

        Args:
            clip_epsilon: the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon.
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
            returns: targets of the critic, in the same shape (`compute_gae`).
            advantages: in the same shape (`compute_gae`); they are not whitened here.
            entropy: of the policy at each decision, in nats, in the same shape; or one number, the mean over decisions.
            mask: True at decisions, False at padding and at tokens that the policy did not decide, in the same shape;
                None: all decisions.

        Returns:
            a scalar with a gradient to `policy_logprobs`, `values` and `entropy` only.

        Raises:
            ConfigError: if the shapes do not match, or there is no decision.
        """
        entropies = torch.as_tensor(entropy, device=policy_logprobs.device)
        _check_same_shape(
            policy_logprobs=policy_logprobs,
            old_policy_logprobs=old_policy_logprobs,
            values=values,
            returns=returns,
            advantages=advantages,
            entropy=entropies if entropies.dim() else None,
            mask=mask,
        )
        if not policy_logprobs.numel() or (mask is not None and not mask.any()):
            raise ConfigError("there is no decision to train on: the tensors are empty, or all is masked")
        algorithm = self.algorithm
        logprobs_BT = _decisions(_at_least_fp32(policy_logprobs), mask)
        values_BT = _decisions(values, mask).to(logprobs_BT)
        batch = Batch.blank(
            torch.ones_like(logprobs_BT, dtype=torch.bool),
            advantages_BT=_detached_as(_decisions(advantages, mask), logprobs_BT),
            returns_BT=_detached_as(_decisions(returns, mask), logprobs_BT),
            values_BT=values_BT.detach(),
            proximal_logprobs_BT=_detached_as(_decisions(old_policy_logprobs, mask), logprobs_BT),
        )
        batch = with_loss_weights(algorithm, batch)
        entropy_BT = (_decisions(entropies, mask) if entropies.dim() else entropies).to(logprobs_BT)
        entropy_BT = entropy_BT.expand_as(logprobs_BT)
        policy_loss = algorithm.loss(PolicyOutput(logprobs_BT, entropy_BT), batch, 0.0).loss
        return policy_loss + algorithm.critic_loss(values_BT, batch)


def with_loss_weights(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with its loss weights, in the dtype of its advantages."""
    assert batch.advantages_BT is not None
    loss_weights_BT = algorithm.aggregation(widened(batch.mask_BT), count(batch.mask_BT))
    return replace(batch, loss_weights_BT=loss_weights_BT.to(batch.advantages_BT.dtype))


def _at_least_fp32(logprobs: Tensor) -> Tensor:
    """Log-probabilities in fp32 or fp64, because ratios of bf16 log-probabilities have errors of several percent."""
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))


def _decisions(value: Tensor, mask: Tensor | None) -> Tensor:
    """The entries at which the mask is True, [N, 1]: PPO's loss is a mean over decisions, not over answers."""
    return (value.flatten() if mask is None else value[mask.bool()])[:, None]


def _detached_as(value: Tensor, like_BT: Tensor) -> Tensor:
    """The value without gradient, with the shape, dtype and device of `like_BT`."""
    return value.detach().to(like_BT).reshape(like_BT.shape)


def _floats(numbers: Numbers) -> Tensor:
    tensor = torch.as_tensor(numbers).detach()
    return tensor if tensor.is_floating_point() else tensor.float()


def _check_same_shape(**tensors: Tensor | None) -> None:
    """Check that all tensors that are not None have the shape of the first.

    Raises:
        ConfigError: naming the first that has another shape.
    """
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, shape = present[0][0], present[0][1].shape
    for name, tensor in present:
        if tensor.shape != shape:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}, {first} has {list(shape)}: they must be equal")


def _check_clip(clip_epsilon: float) -> None:
    if not 0 < clip_epsilon < 1:
        raise ConfigError(f"clip_epsilon must be above 0 and below 1 (is {clip_epsilon}); 0.2 is usual")


def check_limits(name: str, value: float, low: float, high: float) -> None:
    """Check that a setting is finite and in [low, high].

    Raises:
        ConfigError: naming the setting and its limits.
    """
    if not low <= value <= high or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g} (is {value})")
