"""The gradient of a training step, by covey's own path and straight from the papers' formulas."""

import math
from dataclasses import replace
from statistics import fmean, pstdev

import torch
from torch import Tensor

from covey.algorithms import Algorithm, KLInLoss, KLInReward, KLPenalty, dr_grpo, grpo, reinforce, rloo
from covey.core import loss_weights, schedules
from covey.core.kl import k1, k2, k3
from covey.data import Batch, EndReason, Group, Start, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.tabular_policy import Recorder, ToyPolicy
from helpers.updates import one_update

MAX_LENGTH = 10
KL_COEFFICIENT = 0.3
NO_KL = KLPenalty()
ALGORITHMS = ("grpo", "dr_grpo", "rloo", "reinforce")
KLS = {
    "no_kl": NO_KL,
    "k1_in_loss": KLPenalty(schedules.constant(KL_COEFFICIENT), KLInLoss(k1)),
    "k2_in_loss": KLPenalty(schedules.constant(KL_COEFFICIENT), KLInLoss(k2)),
    "k3_in_loss": KLPenalty(schedules.constant(KL_COEFFICIENT), KLInLoss(k3)),
    "k1_in_reward": KLPenalty(schedules.constant(KL_COEFFICIENT), KLInReward(k1)),
}
AGGREGATIONS = {
    "sequence": loss_weights.sequence_mean,
    "token": loss_weights.token_mean,
    "constant": loss_weights.constant_length(MAX_LENGTH),
}


def make(name: str, kl: str = "no_kl", averaging: str | None = None) -> Algorithm:
    if name == "dr_grpo":
        made = dr_grpo(max_length=MAX_LENGTH, kl=KLS[kl])
    else:
        made = {"grpo": grpo, "rloo": rloo, "reinforce": reinforce}[name](kl=KLS[kl])
    return replace(made, aggregation=AGGREGATIONS[averaging]) if averaging else made


def annotated(
    batch: Batch,
    algorithm: Algorithm,
    *,
    optimizer_steps: int = 1,
    rows: int = 1000,
    padding: float = 0.0,
    mask_truncated: bool = False,
) -> tuple[Batch, dict[str, float]]:
    return prepare_batch(
        batch,
        ToyPolicy(seed=1, rows=rows, padding=padding),
        algorithm,
        reference=ToyPolicy(seed=2, rows=rows, padding=padding),
        kl_coefficient=algorithm.kl.coefficient(1),
        optimizer_steps=optimizer_steps,
        mask_truncated=mask_truncated,
    )


def step_gradients(
    batch: Batch,
    algorithm: Algorithm,
    *,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008
    rows: int = 1000,
    padding: float = 0.0,
    mask_truncated: bool = False,
    step: int = 1,
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient that every optimizer step of one training step saw (the weights stay as they are), and metrics."""
    ready, found = annotated(
        batch,
        algorithm,
        optimizer_steps=plan.optimizer_steps(step),
        rows=rows,
        padding=padding,
        mask_truncated=mask_truncated,
    )
    policy = ToyPolicy(seed=1, rows=rows, padding=padding)
    recorder = Recorder(policy)
    learned = one_update(
        policy, recorder, algorithm, ready, plan, kl_coefficient=algorithm.kl.coefficient(1), step=step
    )
    return recorder.gradients, found | learned


def gradient_of(groups: list[Group] | Batch, algorithm: Algorithm, **options) -> Tensor:
    """The one gradient of a step without minibatches."""
    batch = groups if isinstance(groups, Batch) else collate(groups)
    (gradient,), _ = step_gradients(batch, algorithm, **options)
    return gradient


def formula_gradient(
    groups: list[Group], name: str, kl: str, averaging: str | None = None, *, mask_truncated: bool = False
) -> Tensor:
    """The gradient straight from the formulas, decision by decision in Python floats, sharing no code with covey.core.

    Every rollout counts in the denominators; those of groups with equal rewards have no loss, hence no KL either.
    """
    averaging = averaging or ("constant" if name == "dr_grpo" else "sequence")
    policy, reference = ToyPolicy(seed=1), ToyPolicy(seed=2)
    estimator, _, place = kl.partition("_in_")
    decisions, kept = 0, []
    loss_of = []  # (length, sum of the decisions' losses) of every rollout that counts
    for group in groups:
        rewards = []
        for item in group.rollouts:
            penalty = 0.0
            if place == "reward":
                for old, ref in zip(item.behavior_logprobs, _logprobs(reference, item), strict=True):
                    penalty += old - ref.item()
            assert item.reward is not None
            rewards.append(item.reward - KL_COEFFICIENT * penalty)
        for index, item in enumerate(group.rollouts):
            if mask_truncated and item.end is EndReason.LENGTH:
                continue
            others = rewards[:index] + rewards[index + 1 :]
            advantage = {
                "grpo": lambda i=index, r=rewards: (r[i] - fmean(r)) / (pstdev(r) + 1e-6),
                "dr_grpo": lambda i=index, r=rewards: r[i] - fmean(r),
                "reinforce": lambda i=index, r=rewards: r[i] - fmean(r),
                "rloo": lambda i=index, r=rewards, o=others: r[i] - fmean(o),
            }[name]()
            total = torch.zeros((), dtype=torch.float64)
            for new, ref in zip(_logprobs(policy, item), _logprobs(reference, item), strict=True):
                ratio = (new - new.detach()).exp()
                if place == "loss":
                    log_x = ref.detach() - new
                    penalty_t = {"k1": -log_x, "k2": log_x**2 / 2, "k3": log_x.exp() - log_x - 1}[estimator]
                    total = total + KL_COEFFICIENT * penalty_t
                if name in ("grpo", "dr_grpo"):
                    bounded = ratio.clamp(0.8, 1.2)
                    total = total - torch.minimum(ratio * advantage, bounded * advantage)
                else:
                    total = total - advantage * new
            live = max(rewards) - min(rewards) > 1e-6
            decisions += len(item.actions)
            kept.append(item)
            loss_of.append((len(item.actions), total if live else 0.0 * total))
    divisor = {
        "sequence": lambda length: len(kept) * length,
        "token": lambda length: decisions,
        "constant": lambda length: len(kept) * MAX_LENGTH,
    }[averaging]
    loss = sum((total / divisor(length) for length, total in loss_of), torch.zeros((), dtype=torch.float64))
    loss.backward()
    assert policy.table.grad is not None
    return policy.table.grad


def _logprobs(policy: ToyPolicy, item) -> list[Tensor]:
    evaluation = policy.evaluate(collate([Group(Start(0, ""), [item])]))
    return list(evaluation.logprobs_BT[0])


def same(left: Tensor, right: Tensor) -> None:
    """Equal but for float32: rewards, weights and log-probabilities of other policies travel in it."""
    assert math.isfinite(float(left.norm()))
    assert float(right.norm()) > 0, "a gradient of zero would prove nothing"
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6 * float(right.norm()))
