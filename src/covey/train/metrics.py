"""Metrics of a training step: rollouts, values of the critic, update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

import torch
from torch import Tensor

from covey.algorithms import LossTerms
from covey.core.kl import k3
from covey.core.ratios import effective_sample_fraction, token_log_ratio
from covey.core.returns import explained_variance
from covey.data import Batch, Group, PolicyOutput
from covey.runtime.optimizer import StepResult

T = TypeVar("T")


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of graded rollouts: rewards, lengths, end reasons."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.decisions for rollout in rollouts]
    steps = [len(ends) for ends in _present(rollout.step_ends for rollout in rollouts)]
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.logged.items():
            logged.setdefault(f"reward/{name}", []).extend(values)
    return describe_rewards(groups) | {
        **{name: fmean(values) for name, values in logged.items()},
        **({"length/steps": fmean(steps)} if steps else {}),
        "groups/failed_rollouts": float(len(rollouts) - len(_present(rollout.reward for rollout in rollouts))),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_fraction": fmean(rollout.end.is_limit for rollout in rollouts),
        "decisions/sampled": float(sum(lengths)),
    }


def describe_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Means of rewards and scores, without the rollouts whose grading failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = _present(rollout.reward for rollout in rollouts)
    scores = _present(rollout.score for rollout in rollouts)
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}
    if scores:
        metrics["score/mean"] = fmean(scores)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(f"reward/{name}", []).extend(_present([value]))
    return metrics | {name: fmean(values) for name, values in parts.items() if values}


def _present(values: Iterable[T | None]) -> list[T]:
    """The values that are not None; a reward is None if its grading failed."""
    return [value for value in values if value is not None]


def value_metrics(batch: Batch, returns_BT: Tensor | None, counted_BT: Tensor) -> dict[str, float]:
    """Explained variance and means of the critic's values."""
    values_BT = batch.values_BT
    assert values_BT is not None
    assert returns_BT is not None
    metrics = {"value/explained_variance": float(explained_variance(values_BT, returns_BT, counted_BT))}
    if counted_BT.any():
        metrics["value/mean"] = float(values_BT[counted_BT].mean())
        metrics["value/returns_mean"] = float(returns_BT[counted_BT].mean())
    return metrics


class UpdateMetrics:
    """Accumulates the metrics of an update over its microbatches."""

    def __init__(self) -> None:
        # Sums of loss, clipped low, clipped high, entropy, KL to the old policy, and number of decisions.
        self.sums = torch.zeros(6)
        self.sums_before_epoch = [0.0] * 6
        self.log_ratio_max = torch.tensor(0.0)
        # One scalar per microbatch, read at the end of the update, because reading synchronizes with the device.
        self.critic_losses: list[Tensor] = []
        self.logged: dict[str, list[Tensor]] = {}
        self.logged_first: dict[str, list[Tensor]] = {}
        self.mismatch = self.mismatch_kl = self.mismatch_decisions = 0.0
        self.weights = self.squared_weights = 0.0  # sums over importance weights of trainer over sampler
        self.grad_norms: list[float] = []
        self.applied = self.skipped = self.epochs = 0
        self.critic_applied = self.critic_skipped = self.critic_epochs = 0

    @torch.no_grad()
    def add_policy(self, part: Batch, output: PolicyOutput, terms: LossTerms) -> None:
        """Add a microbatch of the policy."""
        mask_BT = part.mask_BT
        old_to_new_BT = k3(torch.zeros_like(terms.log_ratio_BT), terms.log_ratio_BT)
        added = torch.stack(
            (
                terms.loss.detach(),
                terms.clipped_low_BT.sum(),
                terms.clipped_high_BT.sum(),
                torch.where(mask_BT, output.entropy_BT, 0.0).sum(),
                old_to_new_BT.sum(),
                mask_BT.sum(),
            )
        )
        self.sums = self.sums.to(added) + added
        self.log_ratio_max = torch.maximum(self.log_ratio_max.to(added.device), terms.log_ratio_BT.max())
        for name, value_BT in terms.logged.items():
            self.logged.setdefault(name, []).append(value_BT[mask_BT].sum())
        if self.grad_norms or self.skipped:
            return
        # Before the first optimizer step, trainer and sampler have the same weights.
        gap_N = (output.logprobs_BT - part.behavior_logprobs_BT)[mask_BT]
        self.mismatch += float(gap_N.abs().sum())
        self.mismatch_kl += float(k3(torch.zeros_like(gap_N), gap_N).sum())
        self.mismatch_decisions += float(mask_BT.sum())
        weight_N = token_log_ratio(output.logprobs_BT, part.behavior_logprobs_BT, mask_BT)[mask_BT].double().exp()
        self.weights += float(weight_N.sum())
        self.squared_weights += float(weight_N.square().sum())
        for name, value_BT in terms.logged_first.items():
            self.logged_first.setdefault(name, []).append(value_BT[mask_BT].sum())

    def add_policy_step(self, result: StepResult) -> None:
        """Add an optimizer step of the policy."""
        self.applied += result.applied
        self.skipped += not result.applied
        if result.applied:
            self.grad_norms.append(result.grad_norm)

    def add_critic(self, loss: Tensor) -> None:
        """Add the value loss of a microbatch."""
        self.critic_losses.append(loss.detach())

    def add_critic_step(self, result: StepResult) -> None:
        """Add an optimizer step of the critic."""
        self.critic_applied += result.applied
        self.critic_skipped += not result.applied

    def kl_of_epoch(self) -> float:
        """Mean k3 estimate of KL(old || current) over the decisions since the last call, in nats."""
        sums = self.sums.tolist()
        kl, decisions = (sums[i] - self.sums_before_epoch[i] for i in (4, 5))
        self.sums_before_epoch = sums
        return float(kl / max(decisions, 1))

    def read(self, minibatches: int) -> dict[str, float]:
        """The metrics of the update; `minibatches` is their number in an epoch."""
        loss, low, high, entropy, kl, count = self.sums.tolist()
        decisions, first_decisions = max(count, 1), max(self.mismatch_decisions, 1)
        metrics = {
            "loss": loss / (max(self.epochs, 1) * minibatches),
            "clip/low": low / decisions,
            "clip/high": high / decisions,
            "ratio/max": float(self.log_ratio_max.exp()),
            "update/optimizer_steps": float(self.applied),
            "update/skipped_steps": float(self.skipped + self.critic_skipped),
            "update/epochs": float(self.epochs),
        }
        if count:
            metrics["entropy"] = entropy / decisions
            metrics["mismatch/mean"] = self.mismatch / first_decisions
            metrics["mismatch/kl"] = self.mismatch_kl / first_decisions
            if self.mismatch_decisions:
                metrics["mismatch/effective_sample_fraction"] = effective_sample_fraction(
                    self.weights, self.squared_weights, self.mismatch_decisions
                )
            metrics["kl/behavior"] = kl / decisions
        for logged, count in ((self.logged_first, first_decisions), (self.logged, decisions)):
            metrics |= {name: sum(map(float, values)) / count for name, values in logged.items()}
        if self.critic_losses:
            metrics["loss/value"] = float(sum(self.critic_losses)) / (self.critic_epochs * minibatches)
            metrics["update/critic_steps"] = float(self.critic_applied)
        if self.grad_norms:
            metrics["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        return metrics
