"""Metrics of a training step: rollouts, values of the critic, update; and the clock of its phases."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, TypeVar

import torch
from torch import Tensor

from covey.algorithms import LossTerms
from covey.core.kl import k3
from covey.core.precision import widened
from covey.core.ratios import effective_sample_fraction, token_log_ratio
from covey.core.returns import explained_variance
from covey.data import Batch, Group, PolicyOutput, Team
from covey.runtime.distributed import ALONE, of_all_shards, own_shards
from covey.runtime.optimizer import StepResult

T = TypeVar("T")


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of graded rollouts: rewards, lengths, end reasons."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.decisions for rollout in rollouts]
    steps = [len(ends) for ends in present(one.step_ends for one in rollouts if one.messages is None)]
    of_truncated = present(rollout.reward for rollout in rollouts if rollout.end.is_limit)
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.logged.items():
            logged.setdefault(f"reward/{name}", []).extend(values)
    return describe_rewards(groups) | {
        **{name: fmean(values) for name, values in logged.items()},
        **({"length/steps": fmean(steps)} if steps else {}),
        "groups/failed_rollouts": float(len(rollouts) - len(present(rollout.reward for rollout in rollouts))),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_fraction": fmean(rollout.end.is_limit for rollout in rollouts),
        **({"length/truncated_reward": fmean(of_truncated)} if of_truncated else {}),
        "decisions/sampled": float(sum(lengths)),
        **describe_conversations(groups),
    }


def describe_conversations(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of conversations; none of other rollouts."""
    rollouts = [one for group in groups for one in group.rollouts if one.messages is not None]
    if not rollouts:
        return {}
    calls = [len(message.get("tool_calls", ())) for one in rollouts for message in one.messages or ()]
    different = [len({one.context for one in group.rollouts}) > 1 for group in groups]
    return {
        "conversation/turns": fmean(len(one.turn_rewards or ()) for one in rollouts),
        "conversation/tool_calls": sum(calls) / len(rollouts),
        "conversation/failed": float(sum(bool(one.failure) for one in rollouts)),
        "conversation/different_prompts": float(sum(different)),
    }


def describe_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Means of rewards and scores, without the rollouts whose grading failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = present(rollout.reward for rollout in rollouts)
    scores = present(rollout.score for rollout in rollouts)
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}
    if scores:
        metrics["score/mean"] = fmean(scores)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(f"reward/{name}", []).extend(present([value]))
    return metrics | {name: fmean(values) for name, values in parts.items() if values}


def present(values: Iterable[T | None]) -> list[T]:
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


@dataclass
class ShardSums:
    """Sums over the microbatches of a shard, in the order in which they were added."""

    # Sums of loss, clipped low, clipped high, entropy, KL to the old policy, and number of decisions.
    of_policy: Tensor = field(default_factory=lambda: torch.zeros(6))
    log_ratio_max: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    # One scalar per microbatch, read at the end of the update, because reading synchronizes with the device.
    critic_losses: list[Tensor] = field(default_factory=list)
    logged: dict[str, list[Tensor]] = field(default_factory=dict)
    logged_first: dict[str, list[Tensor]] = field(default_factory=dict)
    # Before the first optimizer step: sums of |gap|, k3, decisions, importance weights and their squares.
    mismatch: list[float] = field(default_factory=lambda: [0.0] * 5)
    # Of rows of earlier steps: decisions, sums of importance weights and of their squares, weights out of bounds.
    replayed: list[float] = field(default_factory=lambda: [0.0] * 4)

    def add_replayed(self, mask_BT: Tensor, terms: LossTerms) -> None:
        """Add the decisions of earlier steps."""
        assert terms.importance is not None
        weight_BT, capped_BT, masked_BT = terms.importance
        weight_N = widened(weight_BT[mask_BT])
        found = (mask_BT.sum(), weight_N.sum(), weight_N.square().sum(), (capped_BT | masked_BT)[mask_BT].sum())
        self.replayed = [total + float(value) for total, value in zip(self.replayed, found, strict=True)]

    def numbers(self) -> dict[str, Any]:
        """The sums as numbers, for other ranks."""
        return {
            "of_policy": self.of_policy.tolist(),
            "log_ratio_max": float(self.log_ratio_max),
            "critic_losses": [float(sum(self.critic_losses)), len(self.critic_losses)],
            "logged": {name: sum(map(float, values)) for name, values in self.logged.items()},
            "logged_first": {name: sum(map(float, values)) for name, values in self.logged_first.items()},
            "mismatch": self.mismatch,
            "replayed": self.replayed,
        }


class UpdateMetrics:
    """Accumulates the metrics of an update over its microbatches, for each shard of this rank."""

    def __init__(self, team: Team = ALONE) -> None:
        self.team = team
        self.shard = own_shards(team)[0]  # of the next microbatches
        self.sums = {shard: ShardSums() for shard in own_shards(team)}
        self.sums_before_epoch = [0.0] * 6
        self.grad_norms: list[float] = []
        self.applied = self.skipped = self.epochs = 0
        self.critic_applied = self.critic_skipped = self.critic_epochs = 0

    @torch.no_grad()
    def add_policy(self, part: Batch, output: PolicyOutput, terms: LossTerms) -> None:
        """Add a microbatch of the policy. Rows of earlier steps have metrics of their own, and count in the loss."""
        mask_BT, sums = part.mask_BT, self.sums[self.shard]
        if part.has_replayed:
            sums.add_replayed(mask_BT & ~part.fresh_B[:, None], terms)
            mask_BT = mask_BT & part.fresh_B[:, None]
        old_to_new_BT = k3(torch.zeros_like(terms.log_ratio_BT), terms.log_ratio_BT)
        added = torch.stack(
            (
                terms.loss.detach(),
                (terms.clipped_low_BT & mask_BT).sum(),
                (terms.clipped_high_BT & mask_BT).sum(),
                torch.where(mask_BT, output.entropy_BT, 0.0).sum(),
                torch.where(mask_BT, old_to_new_BT, 0.0).sum(),
                mask_BT.sum(),
            )
        )
        sums.of_policy = sums.of_policy.to(added) + added
        sums.log_ratio_max = torch.maximum(sums.log_ratio_max.to(added.device), terms.log_ratio_BT.max())
        for name, value_BT in terms.logged.items():
            sums.logged.setdefault(name, []).append(value_BT[mask_BT].sum())
        if self.grad_norms or self.skipped:
            return
        # Before the first optimizer step, trainer and sampler have the same weights.
        gap_N = (output.logprobs_BT - part.behavior_logprobs_BT)[mask_BT]
        log_ratio_BT = token_log_ratio(output.logprobs_BT, part.behavior_logprobs_BT, mask_BT)
        weight_N = widened(log_ratio_BT[mask_BT]).exp()
        kl_N = k3(torch.zeros_like(gap_N), gap_N)
        found = (gap_N.abs().sum(), kl_N.sum(), mask_BT.sum(), weight_N.sum(), weight_N.square().sum())
        sums.mismatch = [total + float(value) for total, value in zip(sums.mismatch, found, strict=True)]
        for name, value_BT in terms.logged_first.items():
            sums.logged_first.setdefault(name, []).append(value_BT[mask_BT].sum())

    def add_policy_step(self, result: StepResult) -> None:
        """Add an optimizer step of the policy."""
        self.applied += result.applied
        self.skipped += not result.applied
        if result.applied:
            self.grad_norms.append(result.grad_norm)

    def add_critic(self, loss: Tensor) -> None:
        """Add the value loss of a microbatch."""
        self.sums[self.shard].critic_losses.append(loss.detach())

    def add_critic_step(self, result: StepResult) -> None:
        """Add an optimizer step of the critic."""
        self.critic_applied += result.applied
        self.critic_skipped += not result.applied

    def kl_of_epoch(self) -> float:
        """Mean k3 estimate of KL(old || current) over the decisions since the last call, in nats. All ranks call it."""
        sums = self._total()["of_policy"]
        kl, decisions = (sums[i] - self.sums_before_epoch[i] for i in (4, 5))
        self.sums_before_epoch = sums
        return float(kl / max(decisions, 1))

    def _total(self) -> dict[str, Any]:
        """The sums over the shards of all ranks, added in the order of the shards."""
        everyones = of_all_shards(self.team, [sums.numbers() for sums in self.sums.values()])
        total = {name: added([one[name] for one in everyones]) for name in everyones[0]}
        return total | {"log_ratio_max": max(one["log_ratio_max"] for one in everyones)}

    def read(self, minibatches: int) -> dict[str, float]:
        """The metrics of the update; `minibatches` is their number in an epoch. Every rank calls it."""
        total = self._total()
        loss, low, high, entropy, kl, count = total["of_policy"]
        mismatch, mismatch_kl, first, weights, squared_weights = total["mismatch"]
        critic_loss, critic_microbatches = total["critic_losses"]
        decisions, first_decisions = max(count, 1), max(first, 1)
        metrics = {
            "loss": loss / (max(self.epochs, 1) * minibatches),
            "clip/low": low / decisions,
            "clip/high": high / decisions,
            "ratio/max": float(torch.tensor(total["log_ratio_max"]).exp()),
            "update/optimizer_steps": float(self.applied),
            "update/skipped_steps": float(self.skipped + self.critic_skipped),
            "update/epochs": float(self.epochs),
        }
        if count:
            metrics["entropy"] = entropy / decisions
            metrics["mismatch/mean"] = mismatch / first_decisions
            metrics["mismatch/kl"] = mismatch_kl / first_decisions
            metrics["kl/behavior"] = kl / decisions
        if first:
            metrics["mismatch/effective_sample_fraction"] = effective_sample_fraction(weights, squared_weights, first)
        metrics |= _of_replayed(*total["replayed"])
        metrics |= {name: value / first_decisions for name, value in total["logged_first"].items()}
        metrics |= {name: value / decisions for name, value in total["logged"].items()}
        if critic_microbatches:
            metrics["loss/value"] = critic_loss / (self.critic_epochs * minibatches)
            metrics["update/critic_steps"] = float(self.critic_applied)
        if self.grad_norms:
            metrics["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        return metrics


def _of_replayed(decisions: float, weights: float, squared_weights: float, limited: float) -> dict[str, float]:
    """Metrics of the importance weights of earlier steps' decisions; none if there are no such decisions."""
    if not decisions:
        return {}
    of_weights = {
        "replay/importance_weight": weights / decisions,
        "replay/capped_fraction": limited / decisions,
    }
    if squared_weights:
        fraction = effective_sample_fraction(weights, squared_weights, decisions)
        of_weights["replay/effective_sample_fraction"] = fraction
    return of_weights


def added(values: Sequence[Any]) -> Any:
    """The sum of numbers, of lists by their places, or of tables by their names, from the first to the last."""
    if isinstance(values[0], list):
        return [sum(column) for column in zip(*values, strict=True)]
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for table in values for name in table)
        return {name: sum(table.get(name, 0.0) for table in values) for name in names}
    return sum(values)


Measure = Callable[[str], AbstractContextManager[None]]  # returns a context manager that times its block


class Clock:
    """Sums the seconds of every phase. Phases may be nested."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self.began


def untimed(name: str) -> AbstractContextManager[None]:
    """A `Measure` that measures nothing."""
    return nullcontext()
