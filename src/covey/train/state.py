"""Components, settings and progress of a run, and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey.algorithms import Algorithm
from covey.config import SamplerLost
from covey.data import (
    Checkpoints,
    Critic,
    Grader,
    Group,
    Observer,
    Policy,
    ReferenceUpdater,
    RewardModelUpdater,
    Sampler,
    SamplerWeights,
    Task,
    Team,
)
from covey.runtime.distributed import ALONE, WHOLE
from covey.train.collect import Collector, FixedGroups, GroupSize
from covey.train.learners import Coefficient, EntropyControl, Learner
from covey.train.pace import Pace
from covey.train.prepare import NO_REFERENCE
from covey.train.record import Recorder, RolloutRecorder
from covey.train.replay import Replay
from covey.train.selection import PromptSelection


class Trainable(Protocol):
    """What the training loop trains: the components of a run, or those of a supervised training."""

    @property
    def evaluate(self) -> Callable[[int], dict[str, float]]:
        """Held-out metrics after a step, if they are due."""

    @property
    def observers(self) -> Sequence[Observer]:
        """Objects that get the record of every step."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Where checkpoints are written."""

    @property
    def team(self) -> Team:
        """The ranks that train together."""

    def stateful(self) -> dict[str, Any]:
        """The components whose state is saved, by their names in a checkpoint."""

    def begin_at(self, progress: Progress) -> None:
        """Prepare for the step after `progress`, with the present weights."""


@dataclass(frozen=True)
class Components:
    """The components of a run on a policy; implements `Trainable`."""

    task: Task
    sampler: Sampler
    grader: Grader
    policy: Policy
    algorithm: Algorithm
    learners: Sequence[Learner]  # the policy's first; with a value loss also the critic's
    kl_coefficient: Coefficient
    critics: Sequence[Critic] = ()  # the critic, if the algorithm has a value loss
    reference: Policy = NO_REFERENCE
    reference_updater: ReferenceUpdater = field(default_factory=ReferenceUpdater)
    reward_model: RewardModelUpdater = field(default_factory=RewardModelUpdater)
    selection: PromptSelection = field(default_factory=PromptSelection)
    replay: Replay = field(default_factory=Replay)
    collector: Collector = field(default_factory=FixedGroups)
    evaluate: Callable[[int], dict[str, float]] = lambda step: {}  # held-out metrics after a step, if they are due
    recorder: Recorder = field(default_factory=RolloutRecorder)
    observers: Sequence[Observer] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    team: Team = ALONE
    weights: SamplerWeights = WHOLE

    @property
    def entropy_control(self) -> EntropyControl:
        """The policy's."""
        return self.learners[0].entropy_control

    def adapt(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapt KL and entropy to the metrics of a finished step with `rollouts` rollouts."""
        self.kl_coefficient.after(step, metrics, rollouts)
        self.entropy_control.after(step, metrics, rollouts)

    def stateful(self) -> dict[str, Any]:
        """The components whose state is saved, by their names in a checkpoint."""
        return optimizers_of(self) | {
            "reference": self.reference_updater,
            "kl_coefficient": self.kl_coefficient,
            "entropy_control": self.entropy_control,
            "selection": self.selection,
            "replay": self.replay,
            "reward_model": self.reward_model,
            "sampler": self.sampler,
        }

    def begin_at(self, progress: Progress) -> None:
        """Give the sampler the present weights."""
        self.sampler.refresh(progress.version)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a training ends, and when it saves a checkpoint."""

    steps: int
    checkpoint_every: int = 20
    decision_budget: float = math.inf  # training also ends when this number of decisions was sampled
    patience: float = math.inf  # training also ends after this number of evaluations without a better score
    keep_best: bool = False  # a checkpoint of the step with the best score is kept
    score_metric: str = "eval/score"  # the metric that is the score of an evaluation
    lower_is_better: bool = False  # as for a loss
    pace: Pace = field(default_factory=Pace)

    def is_done(self, progress: Progress) -> bool:
        """Whether training has ended."""
        used_up = progress.decisions >= self.decision_budget or self.pace.is_used_up
        return self.ends_early(progress) or used_up or progress.step >= self.steps

    def ends_early(self, progress: Progress) -> bool:
        """Whether the held-out score has not become better for `patience` evaluations."""
        return progress.evaluations_since_best >= self.patience

    def saves_checkpoint(self, progress: Progress) -> bool:
        """Whether a checkpoint follows the last step."""
        is_best = self.keep_best and progress.best_step == progress.step
        return is_best or progress.step % self.checkpoint_every == 0

    def count_evaluation(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Count the evaluation after a step, if its metrics have the score of one."""
        score = metrics.get(self.score_metric, math.nan)
        progress.count_evaluation(score, lower_is_better=self.lower_is_better)


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Limits):
    """Settings of the training loop of a policy."""

    seed: int
    starts_per_step: int
    group_size: GroupSize
    mask_truncated: bool = False
    iteration_steps: int = 0  # steps between two trainings of the reward model; 0: it is not trained


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    version: int = 0  # of the weights; every update adds 1
    decisions: int = 0  # sampled so far
    starts: int = 0  # drawn so far
    skipped_in_a_row: int = 0
    best_step: int = 0  # that with the best held-out score, the first of several; 0: no evaluation yet
    best_score: float = 0.0
    evaluations_since_best: int = 0
    seconds: float = 0.0  # in a run with a time budget, those so far

    def count_evaluation(self, score: float, *, lower_is_better: bool = False) -> None:
        """Count the evaluation after a step; NaN: there was none."""
        if math.isnan(score):
            return
        self.evaluations_since_best += 1
        is_better = score < self.best_score if lower_is_better else score > self.best_score
        if is_better or not self.best_step:
            self.best_step, self.best_score, self.evaluations_since_best = self.step, score, 0

    def advance(self, groups: Sequence[Group], metrics: dict[str, float]) -> None:
        """Count a finished step."""
        self.step += 1
        self.version += 1
        self.starts += len(groups)
        self.decisions += int(metrics["decisions/sampled"])
        skipped = bool(metrics["update/skipped_steps"]) and not metrics["update/optimizer_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0


def optimizers_of(run: Components) -> dict[str, Any]:
    """The optimizers, by their names in a checkpoint."""
    return {name: item for learner in run.learners for name, item in learner.optimizers.items()}


def checksums_of(run: Components) -> dict[str, Any]:
    """Checksums of what the optimizers train, which all ranks must agree on."""
    return {f"weights of the {name}": item.checksum() for name, item in optimizers_of(run).items()}


def save_checkpoint(run: Trainable, progress: Progress) -> None:
    """Save everything that the run needs to continue from here, bit for bit."""
    state = {name: component.state_dict() for name, component in run.stateful().items()}
    run.checkpoints.save(progress.step, {"progress": vars(progress)} | state, progress.best_step)


@contextmanager
def saved_if_lost(run: Trainable, progress: Progress) -> Iterator[None]:
    """Context manager of a step: if its sampler is lost, the weights are those before the step, and are saved."""
    try:
        yield
    except SamplerLost:
        save_checkpoint(run, progress)
        raise


def progress_of(state: dict[str, Any]) -> Progress:
    """The progress in the state of a checkpoint; older ones of supervised trainings have the number of steps alone."""
    return Progress(**state.get("progress", {"step": state.get("step")}))


def load_checkpoint(run: Trainable, state: dict[str, Any]) -> Progress:
    """Restore a saved state; returns the progress of the run at that checkpoint."""
    progress = progress_of(state)
    for name, component in run.stateful().items():
        component.load_state_dict(state[name])
    run.begin_at(progress)
    return progress
