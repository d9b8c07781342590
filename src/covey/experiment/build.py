"""Builders of components that both kinds of run have: algorithm, learners, optimizers, schedules, checkpoints."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from covey.algorithms import (
    ALGORITHMS,
    Algorithm,
    HighCovariance,
    KLEstimator,
    KLInLoss,
    KLInReward,
    KLPenalty,
    KLPlacement,
    KLToBehavior,
)
from covey.config import (
    ConfigError,
    ControlConfig,
    LossBase,
    ReplayConfig,
    RewardConfig,
    RunConfig,
    UpdateBase,
)
from covey.config.files import faults_of
from covey.core import kl, ratios, schedules
from covey.data import Critic, Policy, Team
from covey.experiment.advice import Config, Finished, after_training
from covey.runtime.checkpoint import CheckpointFolder, PartOfCheckpoints, ReadCheckpoints
from covey.runtime.distributed import ALONE
from covey.runtime.optimizer import MasterAdamW, learning_rate_schedule
from covey.runtime.sharding import WHOLE, Weights
from covey.tracking.console import Display
from covey.tracking.curve import draw_curve
from covey.tracking.iterations import draw_iterations
from covey.tracking.run_store import CHECKPOINTS_FOLDER, CURVE_FILE, RunStore
from covey.tracking.wording import Wording, find_wording
from covey.train.controllers import (
    NO_ENTROPY_CONTROL,
    BonusControl,
    ClipControl,
    Coefficient,
    EntropyControl,
)
from covey.train.learners import CriticLearner, Learner, PolicyLearner, UpdatePlan, actor_critic
from covey.train.loop import train
from covey.train.replay import NoReplay, RecentGroups, Replay
from covey.train.state import Components, Limits, Progress
from covey.train.supervised import SupervisedRun

Evaluation = dict[str, Any]
# A function with TRL's signature, a built-in reward's name, file.py:function, or a RewardConfig.
Reward = Callable[..., Any] | RewardConfig | str

KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "exact": kl.exact}


class Loop(Protocol):
    """A loop of a training, such as `covey.train.loop.train`."""

    def __call__(self, run: Any, limits: Any, progress: Progress, /, *, should_stop: Callable[[], bool]) -> None:
        """Train until the end or `should_stop()`."""


@dataclass(frozen=True)
class Experiment:
    """The components of a run, ready for training."""

    parts: Components | SupervisedRun
    settings: Limits
    measure: Callable[[str], list[Evaluation]]  # evaluation on held-out data; the label is for the display
    # Collects the trained weights of all ranks; returns a function that writes them into the run folder.
    collect: Callable[[], Callable[[Path], None]]
    machine: dict[str, Any]  # hardware and versions that affect the bits of a result
    facts: Callable[[], dict[str, Any]]  # additional keys of summary.json for this kind of run
    loop: Loop = train


class ExperimentBuilder(Protocol):
    """Builds the experiment of one kind of training, and knows how it differs from the others.

    A policy (`PolicyBuilder`) on a language model or an environment, `covey sft`, `covey reward-model train`.
    """

    name: str  # "language" or "control"
    has_rollouts: bool  # its steps record rollouts

    @property
    def score_name(self) -> str:
        """The score whose best value is kept, in words."""

    @property
    def score_kind(self) -> str:
        """Kind of the evaluations' scores: a key of `covey.tracking.score_kinds.SCORE_KINDS`."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user before the run, one line each."""

    @property
    def config(self) -> Config:
        """The config of the run, as written to its folder."""

    @property
    def algorithm_name(self) -> str:
        """The algorithm, as in the summary."""

    @property
    def wording(self) -> Wording:
        """The texts of the display."""

    @property
    def show_rollouts_every(self) -> int:
        """Steps between printed rollouts; 0: never."""

    @property
    def saves_if_stopped(self) -> bool:
        """True if a run that is stopped writes its weights."""

    def describe(self) -> str:
        """A short description of the run."""

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load models or create environments, and build the components."""

    def tracked(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """The metrics of an evaluation before or after training."""

    def results(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> dict[str, Any]:
        """The keys of the summary that have the evaluations; `after` is empty for a stopped run."""

    def draw(self, store: RunStore) -> None:
        """Draw the pictures of a run that has ended or was stopped."""

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        """Show the result of a finished run, with advice."""

    def drawable(self) -> bool:
        """True if an episode can be rendered here."""

    def close(self) -> None:
        """End the processes that the builder started."""


class PolicyBuilder:
    """What the builders of both kinds of policies share; a base of `ExperimentBuilder`."""

    name: str
    config: Any
    algorithm: Algorithm  # that of the config, or the user's own
    has_rollouts = True

    @property
    def score_kind(self) -> str:
        raise NotImplementedError

    @property
    def score_name(self) -> str:
        return self.score_kind

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @property
    def wording(self) -> Wording:
        return find_wording({"domain": self.name, "score_kind": self.score_kind})

    @property
    def show_rollouts_every(self) -> int:
        return int(self.config.show_rollouts_every)

    @property
    def saves_if_stopped(self) -> bool:
        return bool(self.config.checkpoint.model_if_stopped)

    def tracked(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        return {"eval/score": evaluations[0]["score"]}

    def results(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> dict[str, Any]:
        evaluations = [{key: one[key] for key in ("max_new_tokens",) if key in one} | {"before": one} for one in before]
        for evaluation, measured in zip(evaluations, after, strict=False):
            evaluation["after"] = measured
        return {"evaluations": evaluations}

    def draw(self, store: RunStore) -> None:
        with faults_of(store.run_dir / CURVE_FILE):
            draw_curve(store.run_dir)
            if isinstance(self.config, RunConfig) and self.config.iteration.steps:
                draw_iterations(store.run_dir)

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        display.show_summary(summary, after_training(run, summary))


def build_algorithm(name: str, loss: LossBase, **options: Any) -> Algorithm:
    """Build an algorithm by its name, with the fields of [loss] that are set.

    Args:
        name: a key of `ALGORITHMS`.
        loss: the [loss] table of either kind of run.
        options: further arguments of the algorithm's function; those that it does not have are ignored.

    Raises:
        ConfigError: if a clip range is set and the algorithm does not clip.
    """
    build = ALGORITHMS[name]
    parameters = inspect.signature(build).parameters
    default: KLPenalty = parameters["kl"].default
    coefficient = default.coefficient(1) if loss.kl_coefficient is None else loss.kl_coefficient
    estimator = KL_ESTIMATORS[loss.kl_estimator] if loss.kl_estimator else default.placement.estimator
    schedule = schedules.constant(coefficient, warmup_steps=loss.kl_warmup_steps)
    penalty = KLPenalty(schedule, _kl_placement(loss.kl_to, estimator))
    chosen = {name: value for name, value in options.items() if name in parameters}
    for field in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(loss, field)
        if value is not None:
            if field not in parameters:
                raise ConfigError(f"algorithm {name!r} does not clip: leave out loss.{field}")
            chosen[field] = value
    return replace(
        build(kl=penalty, **chosen), importance=_importance_weights(loss), high_covariance=_high_covariance(loss)
    )


def _importance_weights(loss: LossBase) -> ratios.ImportanceWeights | None:
    if loss.importance_cap is None and not loss.importance_mask:
        return None
    low, high = loss.importance_mask or (0.0, math.inf)
    cap = math.inf if loss.importance_cap is None else loss.importance_cap
    of_token = loss.importance_level == "token"
    log_ratio = ratios.token_log_ratio if of_token else ratios.sequence_product_log_ratio
    return ratios.ImportanceWeights(cap, low, high, log_ratio)


def _high_covariance(loss: LossBase) -> HighCovariance:
    low, high = loss.clip_cov_bounds
    return HighCovariance(loss.clip_cov_fraction, (low, high), loss.kl_cov_fraction, loss.kl_cov_coefficient)


def _kl_placement(to: str, estimator: KLEstimator) -> KLPlacement:
    if to == "behavior":
        return KLToBehavior(estimator)
    # To the reference, k1 acts only in the reward: in the loss the expectation of its gradient is zero. The others act
    # only in the loss: in the reward the two halves of k3 cancel.
    return KLInReward() if estimator is kl.k1 else KLInLoss(estimator)


def build_kl_coefficient(penalty: KLPenalty, loss: LossBase) -> Coefficient:
    """The KL coefficient of every step: adaptive after the warm-up if there is a target, otherwise scheduled."""
    if loss.adaptive_kl_target is None:
        return Coefficient(penalty.coefficient)
    target, horizon = loss.adaptive_kl_target, loss.adaptive_kl_horizon

    def rule(coefficient: float, measured: float, rollouts: int) -> float:
        return schedules.adaptive_kl_coefficient(
            coefficient, measured, target=target, horizon=horizon, rollouts=rollouts
        )

    first_step = max(1, loss.kl_warmup_steps)
    return Coefficient(penalty.coefficient, penalty.placement.metric, rule, first_step=first_step)


def build_entropy_control(name: str, loss: LossBase) -> EntropyControl:
    """The controller of the entropy if there is a target.

    Args:
        name: of the algorithm, a key of `ALGORITHMS`.
        loss: the [loss] table of either kind of run.
    """
    if loss.entropy_target is None:
        return NO_ENTROPY_CONTROL
    target, gain = loss.entropy_target, loss.entropy_gain
    by_bonus = loss.entropy_controller == "bonus"
    low, high = (factor * (loss.entropy_coefficient if by_bonus else 1.0) for factor in loss.entropy_factors)

    def rule(value: float, measured: float, rollouts: int) -> float:
        return schedules.adaptive_entropy_value(value, measured, target=target, gain=gain, low=low, high=high)

    if by_bonus:
        return BonusControl(rule, coefficient=loss.entropy_coefficient)
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    given = {field: getattr(loss, field) for field in ("clip_low", "clip_high")}
    return ClipControl(
        rule, **{field: parameters[field].default if value is None else value for field, value in given.items()}
    )


def build_learners(
    config: RunConfig | ControlConfig,
    algorithm: Algorithm,
    policy: Policy,
    kl_coefficient: Coefficient,
    modules: Sequence[tuple[nn.Module, Weights]],
    critics: Sequence[Critic] = (),
    *,
    single_decisions: bool = False,
    shared_trunk: bool = False,
    team: Team = ALONE,
) -> tuple[Learner, ...]:
    """The learners of a run, with their optimizers and learning rates.

    Args:
        config: with the name of the algorithm and the tables [update] and [loss].
        algorithm: defines the losses.
        policy: the policy to train.
        kl_coefficient: of the KL penalty.
        modules: the trainable modules of the policy and of the critic, if there is one, each with the division of its
            weights among the ranks.
        critics: the critic, if there is one.
        single_decisions: if True, a minibatch may have a part of a rollout.
        shared_trunk: if True, the critic's value head is on the policy's trunk.
        team: the ranks, whose gradients are added.
    """
    update = config.update
    plan = update_plan(update, single_decisions=single_decisions)
    optimizers = [build_optimizer(module, update, team, weights) for module, weights in modules]
    rate = learning_rate(update.learning_rate, update, config.steps)
    control = build_entropy_control(config.algorithm, config.loss)
    actor = PolicyLearner(policy, optimizers[0], algorithm, plan, rate, kl_coefficient, entropy_control=control)
    if not critics:
        return (actor,)
    critic_rate = learning_rate(update.critic_learning_rate or update.learning_rate, update, config.steps)
    critic = CriticLearner(critics[0], optimizers[1], algorithm, plan, critic_rate, policy.microbatches)
    return actor_critic(actor, critic) if shared_trunk else (actor, critic)


def build_optimizer(module: nn.Module, update: UpdateBase, team: Team = ALONE, weights: Weights = WHOLE) -> MasterAdamW:
    """Build AdamW over a module's parameters with the fields of [update]."""
    return MasterAdamW(
        module,
        lr=update.learning_rate,
        weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm,
        team=team,
        weights=weights,
        eight_bit_moments=update.eight_bit_moments,
    )


def learning_rate(peak: float, update: UpdateBase, steps: int) -> schedules.Schedule:
    """The schedule of the learning rate."""
    return learning_rate_schedule(update.schedule, peak, steps=steps, warmup_steps=update.warmup_steps)


def update_plan(update: UpdateBase, *, single_decisions: bool = False) -> UpdatePlan:
    """Epochs and minibatches of the update; with `single_decisions`, a minibatch may have a part of a rollout."""
    return UpdatePlan(
        update.epochs,
        update.minibatches,
        single_decisions=single_decisions,
        target_kl=math.inf if update.target_kl is None else update.target_kl,
        critic_epochs=update.critic_epochs,
        critic_warmup_steps=update.critic_warmup_steps,
    )


def build_replay(replay: ReplayConfig) -> Replay:
    """The groups of earlier steps that a step learns from again."""
    return RecentGroups(**vars(replay)) if replay.groups else NoReplay()


def build_checkpoints(
    store: RunStore, keep: int, team: Team = ALONE, *, best: bool = False, in_parts: bool = False
) -> CheckpointFolder:
    """The checkpoints of a run folder, which rank 0 writes; with `in_parts`, ranks that have some rows of the trained
    weights each write theirs. Records of earlier steps are flushed to the disk before.
    """
    path = store.shared_dir / CHECKPOINTS_FOLDER
    if in_parts:
        kind: type[CheckpointFolder] = PartOfCheckpoints if team.rank else CheckpointFolder
        return kind(path, keep, before_save=store.sync, team=team, keep_best=best)
    return (ReadCheckpoints if team.rank else CheckpointFolder)(path, keep, before_save=store.sync, keep_best=best)
