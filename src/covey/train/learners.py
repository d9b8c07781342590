"""Learners: a model with its optimizer, its loss and its passes over the rollouts of a step; their controllers.

| critic                 | learners                            |
|------------------------|-------------------------------------|
| none                   | `PolicyLearner`                     |
| with its own weights   | `PolicyLearner`, `CriticLearner`    |
| on the policy's trunk  | `SharedTrunkLearner`, `HeadLearner` |

Shapes: B rollouts, T decisions.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from covey.algorithms import Algorithm, LossTerms
from covey.core.policy_losses import Surrogate, shifted_clip_range
from covey.core.schedules import Schedule, constant
from covey.data import Batch, Critic, Policy, PolicyOutput
from covey.runtime.optimizer import MasterAdamW
from covey.train.metrics import Measure, UpdateMetrics

# ---- controllers of the KL divergence and the entropy ----

# They keep it near a target.
#
# Coefficient   the coefficient of the KL
# BonusControl  the coefficient of the entropy bonus
# ClipControl   the clip range

Rule = Callable[[float, float, int], float]  # value, measured, rollouts of the step -> value of the next step


def _unchanged(value: float, measured: float, rollouts: int) -> float:
    return value


ENTROPY = "entropy"  # the metric: mean over the decisions of an update


class Coefficient:
    """A number that follows a schedule or, with a rule, keeps a metric near a target.

    It follows the schedule until the end of the warm-up. During the warm-up the KL is penalised less than later, and a
    coefficient that rose because of this would be too high afterwards.
    """

    def __init__(self, schedule: Schedule, metric: str = "", rule: Rule = _unchanged, *, first_step: int = 1) -> None:
        """
        Args:
            schedule: the number by step; steps count from 1.
            metric: name of the metric that is measured; empty: the number is that of the schedule.
            rule: the number of the next step.
            first_step: the first step after which the number is adapted.
        """
        self.schedule, self.metric, self.rule, self.first_step = schedule, metric, rule, first_step
        self._next = math.nan  # of the next step; NaN: that of the schedule

    def at(self, step: int) -> float:
        """The number of a step."""
        return self.schedule(step) if math.isnan(self._next) else self._next

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapt the next step's number to a finished step with `rollouts` rollouts, if it measured the metric."""
        measured = metrics.get(self.metric, math.nan)
        if step >= self.first_step and not math.isnan(measured):
            self._next = self.rule(self.at(step), measured, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The number of the next step, if it was adapted."""
        return {} if math.isnan(self._next) else {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of the next step."""
        self._next = state.get("next", math.nan)


class EntropyControl(Coefficient):
    """Changes the loss of every step by its number. The entropy of a step has an effect on the next one.

    This class itself leaves the algorithm as it is.
    """

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        """The algorithm of a step."""
        return algorithm

    def coefficients(self, step: int) -> dict[str, float]:
        """Metrics: what is adapted."""
        return {}


NO_ENTROPY_CONTROL = EntropyControl(constant(0.0))


class BonusControl(EntropyControl):
    """Adapts the coefficient of the entropy bonus."""

    def __init__(self, rule: Rule, *, coefficient: float) -> None:
        """
        Args:
            rule: the coefficient of the next step.
            coefficient: of the first step.
        """
        super().__init__(constant(coefficient), ENTROPY, rule)

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        return replace(algorithm, entropy_coefficient=self.at(step))

    def coefficients(self, step: int) -> dict[str, float]:
        return {"entropy_coefficient": self.at(step)}


class ClipControl(EntropyControl):
    """Adapts the clip range by a factor: `covey.core.policy_losses.shifted_clip_range`."""

    def __init__(self, rule: Rule, *, clip_low: float, clip_high: float) -> None:
        """
        Args:
            rule: the factor of the next step.
            clip_low, clip_high: the clip range of the first step, with the factor 1.
        """
        super().__init__(constant(1.0), ENTROPY, rule)
        self.clip_range = clip_low, clip_high

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        low, high = shifted_clip_range(*self.clip_range, self.at(step))
        surrogate: Callable[..., Surrogate] = algorithm.surrogate
        return replace(algorithm, surrogate=partial(surrogate, clip_low=low, clip_high=high))

    def coefficients(self, step: int) -> dict[str, float]:
        low, high = shifted_clip_range(*self.clip_range, self.at(step))
        return {"clip/range_low": low, "clip/range_high": high}


@dataclass(frozen=True)
class UpdatePlan:
    """Epochs and minibatches of an update."""

    epochs: int = 1
    minibatches: int = 1
    single_decisions: bool = False  # minibatches are drawn from all decisions; otherwise groups stay whole
    target_kl: float = math.inf  # KL(old || current), in nats per decision, above which the policy's epochs end early
    critic_epochs: int = 0  # additional epochs in which only the critic is trained
    critic_warmup_steps: int = 0  # first steps in which only the critic is trained

    def policy_epochs(self, step: int) -> int:
        """Number of epochs in which the policy is trained; `step` counts from 1."""
        return 0 if step <= self.critic_warmup_steps else self.epochs

    def optimizer_steps(self, step: int) -> int:
        """Number of optimizer steps of the policy."""
        return self.policy_epochs(step) * self.minibatches


class Learner(Protocol):
    """A model that an update trains."""

    @property
    def plan(self) -> UpdatePlan:
        """Epochs and minibatches."""

    @property
    def optimizers(self) -> Mapping[str, MasterAdamW]:
        """The optimizers, by their names in a checkpoint."""

    @property
    def entropy_control(self) -> EntropyControl:
        """The controller of the policy's entropy."""

    def epochs(self, step: int) -> range:
        """The epoch numbers of a step; the order of the minibatches is a function of (seed, step, epoch)."""

    def microbatches(self, minibatch: Batch) -> Iterator[Tensor]:
        """Row indices of each microbatch, small enough for one backward pass."""

    def backward(self, part: Batch, step: int, metrics: UpdateMetrics, measure: Measure) -> None:
        """Accumulate the gradient of the loss of a microbatch."""

    def before_last_pass(self) -> None:
        """Called before the last microbatch of each shard."""

    def end_shard(self) -> None:
        """Called after the microbatches of each shard, if there are several shards."""

    def optimizer_step(self, step: int, metrics: UpdateMetrics) -> None:
        """Apply the accumulated gradients of a minibatch."""

    def end_epoch(self, metrics: UpdateMetrics) -> bool:
        """Count an epoch; returns whether the epochs of this step end early."""

    def coefficients(self, step: int) -> dict[str, float]:
        """Metrics: the learning rate and the coefficients of a step."""


@dataclass(frozen=True)
class PolicyLearner:
    """A policy, trained by the surrogate, the KL and the entropy of its algorithm."""

    policy: Policy
    optimizer: MasterAdamW
    algorithm: Algorithm
    plan: UpdatePlan
    learning_rate: Schedule
    kl_coefficient: Coefficient
    entropy_control: EntropyControl = field(default=NO_ENTROPY_CONTROL, kw_only=True)

    @property
    def optimizers(self) -> Mapping[str, MasterAdamW]:
        return {"optimizer": self.optimizer}

    def epochs(self, step: int) -> range:
        return range(self.plan.policy_epochs(step))

    def microbatches(self, minibatch: Batch) -> Iterator[Tensor]:
        return self.policy.microbatches(minibatch)

    def backward(self, part: Batch, step: int, metrics: UpdateMetrics, measure: Measure) -> None:
        with measure("time/forward"):
            output = self.policy.evaluate(part)
            part = part.to(output.logprobs_BT.device)
            algorithm = self.entropy_control.acting(self.algorithm, step)
            terms = algorithm.loss(output, part, self.kl_coefficient.at(step))
        loss = self._loss(terms, output, part, metrics)
        with measure("time/backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        metrics.add_policy(part, output, terms)

    def before_last_pass(self) -> None:
        self.optimizer.before_last_pass()

    def end_shard(self) -> None:
        self.optimizer.end_shard()

    def optimizer_step(self, step: int, metrics: UpdateMetrics) -> None:
        metrics.add_policy_step(self.optimizer.step(self.learning_rate(step)))

    def end_epoch(self, metrics: UpdateMetrics) -> bool:
        metrics.epochs += 1
        return metrics.kl_of_epoch() > self.plan.target_kl

    def coefficients(self, step: int) -> dict[str, float]:
        chosen = {"learning_rate": self.learning_rate(step), "kl_coefficient": self.kl_coefficient.at(step)}
        return chosen | self.entropy_control.coefficients(step)

    def _loss(self, terms: LossTerms, output: PolicyOutput, part: Batch, metrics: UpdateMetrics) -> Tensor:
        return terms.loss


@dataclass(frozen=True)
class CriticLearner:
    """A critic, trained by the value loss of its algorithm. `target_kl` does not end its epochs."""

    critic: Critic
    optimizer: MasterAdamW
    algorithm: Algorithm
    plan: UpdatePlan
    learning_rate: Schedule
    split: Callable[[Batch], Iterator[Tensor]]  # row indices of each microbatch, as `Policy.microbatches`

    @property
    def optimizers(self) -> Mapping[str, MasterAdamW]:
        return {"critic_optimizer": self.optimizer}

    @property
    def entropy_control(self) -> EntropyControl:
        return NO_ENTROPY_CONTROL

    def epochs(self, step: int) -> range:
        return range(self.plan.epochs + self.plan.critic_epochs)

    def microbatches(self, minibatch: Batch) -> Iterator[Tensor]:
        return self.split(minibatch)

    def backward(self, part: Batch, step: int, metrics: UpdateMetrics, measure: Measure) -> None:
        with measure("time/critic"):
            values_BT = self.critic.values(part)
            loss = self.algorithm.critic_loss(values_BT, part.to(values_BT.device))
            loss.backward()  # type: ignore[no-untyped-call]
        metrics.add_critic(loss)

    def before_last_pass(self) -> None:
        self.optimizer.before_last_pass()

    def end_shard(self) -> None:
        self.optimizer.end_shard()

    def optimizer_step(self, step: int, metrics: UpdateMetrics) -> None:
        metrics.add_critic_step(self.optimizer.step(self.learning_rate(step)))

    def end_epoch(self, metrics: UpdateMetrics) -> bool:
        metrics.critic_epochs += 1
        return False

    def coefficients(self, step: int) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class SharedTrunkLearner(PolicyLearner):
    """A policy that shares its trunk with the critic's value head: one backward pass for both losses."""

    head_optimizer: MasterAdamW
    head_learning_rate: Schedule

    def end_shard(self) -> None:
        super().end_shard()
        self.head_optimizer.end_shard()

    def optimizer_step(self, step: int, metrics: UpdateMetrics) -> None:
        super().optimizer_step(step, metrics)
        metrics.add_critic_step(self.head_optimizer.step(self.head_learning_rate(step)))

    def end_epoch(self, metrics: UpdateMetrics) -> bool:
        metrics.critic_epochs += 1
        return super().end_epoch(metrics)

    def _loss(self, terms: LossTerms, output: PolicyOutput, part: Batch, metrics: UpdateMetrics) -> Tensor:
        assert output.values_BT is not None
        value_loss = self.algorithm.critic_loss(output.values_BT, part)
        metrics.add_critic(value_loss)
        return terms.loss + value_loss


@dataclass(frozen=True)
class HeadLearner(CriticLearner):
    """The value head of a critic on the policy's trunk, in the epochs in which the policy is not trained."""

    def epochs(self, step: int) -> range:
        return range(self.plan.policy_epochs(step), self.plan.epochs + self.plan.critic_epochs)


def actor_critic(policy: PolicyLearner, critic: CriticLearner) -> tuple[Learner, Learner]:
    """The learners of a critic whose value head is on the policy's trunk."""
    shared = SharedTrunkLearner(
        **vars(policy), head_optimizer=critic.optimizer, head_learning_rate=critic.learning_rate
    )
    return shared, HeadLearner(**vars(critic))
