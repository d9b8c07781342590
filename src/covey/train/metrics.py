"""Metrics of a training step: what was sampled, what the critic predicted, what the update did."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from covey.algorithms import LossTerms
from covey.core.kl import k3
from covey.core.returns import explained_variance
from covey.data import Batch, Group, PolicyOutput
from covey.runtime.optimizer import StepResult


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of freshly graded rollouts: rewards, lengths, ends."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.decisions for rollout in rollouts]
    steps = [len(rollout.step_ends) for rollout in rollouts if rollout.step_ends is not None]
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.logged.items():
            logged.setdefault(f"reward/{name}", []).extend(values)
    return describe_rewards(groups) | {
        **{name: fmean(values) for name, values in logged.items()},
        **({"length/steps": fmean(steps)} if steps else {}),
        "groups/failed_rollouts": float(sum(rollout.reward is None for rollout in rollouts)),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_fraction": fmean(rollout.end.is_limit for rollout in rollouts),
        "decisions/sampled": float(sum(lengths)),
    }


def describe_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Mean rewards of rollouts. Those whose grading failed count in no mean."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}
    if scores:
        metrics["score/mean"] = fmean(scores)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            if value is not None:
                parts.setdefault(f"reward/{name}", []).append(value)
    return metrics | {name: fmean(values) for name, values in parts.items()}


def value_metrics(values_BT: Tensor | None, returns_BT: Tensor | None, counted_BT: Tensor) -> dict[str, float]:
    """Explained variance and means of the critic's values; empty without a critic."""
    if values_BT is None or returns_BT is None:
        return {}
    metrics = {"value/explained_variance": float(explained_variance(values_BT, returns_BT, counted_BT))}
    if counted_BT.any():
        metrics["value/mean"] = float(values_BT[counted_BT].mean())
        metrics["value/returns_mean"] = float(returns_BT[counted_BT].mean())
    return metrics


class UpdateMetrics:
    """Sums over the decisions of an update, read as metrics at its end."""

    def __init__(self) -> None:
        # Added up where the policy lives and read once, because reading waits.
        # Loss, clipped low, clipped high, entropy, KL, decisions:
        self.sums: Tensor | None = None
        self.sums_before_epoch: list[float] = [0.0] * 6
        self.mismatch = self.mismatch_kl = self.mismatch_decisions = 0.0
        self.reference_kl: float | None = None  # where the policy measures it, before the first optimizer step
        self.capped: Tensor | None = None
        self.log_ratio_max = torch.tensor(0.0)
        self.critic_loss: Tensor | None = None
        self.grad_norms: list[float] = []
        self.applied = self.critic_applied = self.skipped = self.epochs = self.critic_epochs = 0

    @torch.no_grad()
    def add(self, part: Batch, evaluation: PolicyOutput, terms: LossTerms) -> None:
        mask_BT = part.mask_BT
        old_to_new_BT = k3(torch.zeros_like(terms.log_ratio_BT), terms.log_ratio_BT)
        added = torch.stack(
            (
                terms.loss.detach(),
                terms.clipped_low_BT.sum(),
                terms.clipped_high_BT.sum(),
                torch.where(mask_BT, evaluation.entropy_BT, 0.0).sum(),
                old_to_new_BT.sum(),
                mask_BT.sum(),
            )
        )
        self.sums = added if self.sums is None else self.sums + added
        self.log_ratio_max = torch.maximum(self.log_ratio_max.to(added.device), terms.log_ratio_BT.max())
        if not self.grad_norms and not self.skipped:  # before the first optimizer step: sampler against trainer
            gap_N = (evaluation.logprobs_BT - part.behavior_logprobs_BT)[mask_BT]
            self.mismatch += float(gap_N.abs().sum())
            self.mismatch_kl += float(k3(torch.zeros_like(gap_N), gap_N).sum())
            self.mismatch_decisions += float(mask_BT.sum())
            if evaluation.kl_BT is not None:
                self.reference_kl = (self.reference_kl or 0.0) + float(evaluation.kl_BT[mask_BT].sum())
        if terms.capped_BT is not None:
            capped = terms.capped_BT.sum()
            self.capped = capped if self.capped is None else self.capped + capped

    def add_critic(self, loss: Tensor) -> None:
        self.critic_loss = loss.detach() if self.critic_loss is None else self.critic_loss + loss.detach()

    def finish(self, result: StepResult) -> None:
        self.applied += result.applied
        self.skipped += not result.applied
        if result.applied:
            self.grad_norms.append(result.grad_norm)

    def kl_of_epoch(self) -> float:
        """Mean k3 estimate of KL(old || current) over the decisions since the last call, in nats."""
        sums = [0.0] * 6 if self.sums is None else self.sums.tolist()
        kl, decisions = (sums[i] - self.sums_before_epoch[i] for i in (4, 5))
        self.sums_before_epoch = sums
        return float(kl / max(decisions, 1))

    def read(self, minibatches: int) -> dict[str, float]:
        loss, low, high, entropy, kl, count = [0.0] * 6 if self.sums is None else self.sums.tolist()
        decisions = max(count, 1)
        metrics = {
            "loss": loss / (max(self.epochs, 1) * minibatches),
            "clip/low": low / decisions,
            "clip/high": high / decisions,
            "ratio/max": float(self.log_ratio_max.exp()),
            "update/optimizer_steps": float(self.applied),
            "update/skipped_steps": float(self.skipped),
            "update/epochs": float(self.epochs),
        }
        if count:
            metrics["entropy"] = entropy / decisions
            metrics["mismatch/mean"] = self.mismatch / max(self.mismatch_decisions, 1)
            metrics["mismatch/kl"] = self.mismatch_kl / max(self.mismatch_decisions, 1)
            metrics["kl/behavior"] = kl / decisions
        if self.reference_kl is not None:
            metrics["kl"] = self.reference_kl / max(self.mismatch_decisions, 1)
        if self.capped is not None:
            metrics["mismatch/capped_fraction"] = float(self.capped) / decisions
        if self.critic_loss is not None:
            metrics["loss/value"] = float(self.critic_loss) / (self.critic_epochs * minibatches)
            metrics["update/critic_steps"] = float(self.critic_applied)
        if self.grad_norms:
            metrics["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        return metrics
