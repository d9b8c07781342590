"""Parts that runs of both kinds are built from: algorithm, optimizer, update plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from covey.algorithms import ALGORITHMS, Algorithm, KLPenalty
from covey.config import ConfigError, ControlConfig, LossBase, RewardConfig, RunConfig, UpdateBase
from covey.core import kl, schedules
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.optimizer import MasterAdamW
from covey.tracking.console import Display
from covey.tracking.run_store import CHECKPOINTS_FOLDER, RunStore
from covey.train.state import Components, LoopConfig
from covey.train.update import UpdatePlan

Evaluation = dict[str, Any]
# A function with TRL's signature, a built-in reward's name, file.py:function, or a RewardConfig.
Reward = Callable[..., Any] | RewardConfig | str

SCHEDULES: dict[str, Callable[..., schedules.Schedule]] = {"linear": schedules.linear, "cosine": schedules.cosine}
KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "exact": kl.exact}


@dataclass(frozen=True)
class Experiment:
    """The components of a run, ready for training."""

    parts: Components
    settings: LoopConfig
    measure: Callable[[str], list[Evaluation]]  # greedy evaluation on held-out starts; the label is for the display
    save: Callable[[Path], None]  # writes the trained policy into the run folder
    machine: dict[str, Any]  # settings beside seed, config and inputs that the bits of a result depend on
    facts: Callable[[], dict[str, Any]]  # additional keys of summary.json for this kind of run


class ExperimentBuilder(Protocol):
    """Builds the experiment of one kind of run: language model or control."""

    name: str  # "language" or "control"

    @property
    def score_kind(self) -> str:
        """Kind of the evaluations' scores: a key of `covey.tracking.score_kinds.SCORE_KINDS`."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user before the run, one line each."""

    @property
    def config(self) -> RunConfig | ControlConfig:
        """The config of the run, as it is written to its folder."""

    def describe(self) -> str:
        """A short description of the run."""

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load models or create environments, and build the components."""

    def drawable(self) -> bool:
        """True if an episode can be rendered here."""

    def close(self) -> None:
        """End processes that it started."""


def build_algorithm(name: str, loss: LossBase, **options: Any) -> Algorithm:
    """Build an algorithm by its name, with the fields of [loss] that are set.

    Args:
        name: a key of `ALGORITHMS`.
        loss: the [loss] table of either kind of run.
        options: further arguments of the algorithm's builder; those that it does not have are ignored.

    Raises:
        ConfigError: for clipping if the algorithm has none.
    """
    build = ALGORITHMS[name]
    parameters = inspect.signature(build).parameters
    default: KLPenalty = parameters["kl"].default
    coefficient = default.coefficient(1) if loss.kl_coefficient is None else loss.kl_coefficient
    to_behavior = loss.kl_anchor == "behavior"
    estimator = KL_ESTIMATORS[loss.kl_estimator] if loss.kl_estimator else default.estimator
    penalty = replace(
        default,
        coefficient=schedules.constant(coefficient, warmup_steps=loss.kl_warmup_steps),
        estimator=estimator,
        to_behavior=to_behavior,
        # For the KL to the reference, k1 is effective only in the reward: in the loss its expected gradient is zero.
        # The others are effective only in the loss: in the reward the two terms of k3 cancel.
        in_reward=estimator is kl.k1 and not to_behavior,
        controller=_kl_controller(loss),
    )
    chosen = {name: value for name, value in options.items() if name in parameters}
    for field in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(loss, field)
        if value is not None:
            if field not in parameters:
                raise ConfigError(f"algorithm {name!r} does not clip: leave out loss.{field}")
            chosen[field] = value
    return replace(build(kl=penalty, **chosen), importance_cap=getattr(loss, "importance_cap", None))


def _kl_controller(loss: LossBase) -> schedules.KLController | None:
    """Controller of the KL coefficient after the warm-up, if there is a target."""
    if loss.adaptive_kl_target is None:
        return None
    return schedules.KLController(
        loss.adaptive_kl_target, loss.adaptive_kl_horizon, first_step=max(1, loss.kl_warmup_steps)
    )


def build_optimizer(module: nn.Module, update: UpdateBase) -> MasterAdamW:
    """Build AdamW over a module's parameters with the fields of [update]."""
    return MasterAdamW(
        module,
        lr=update.learning_rate,
        betas=(update.beta1, update.beta2),
        weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm,
    )


def learning_rate(peak: float, update: UpdateBase, steps: int) -> schedules.Schedule:
    """The schedule of the learning rate."""
    if update.schedule == "constant":
        return schedules.constant(peak, warmup_steps=update.warmup_steps)
    return SCHEDULES[update.schedule](peak, steps=steps, warmup_steps=update.warmup_steps)


def update_plan(update: UpdateBase, *, single_decisions: bool = False) -> UpdatePlan:
    """Epochs and minibatches of the update; with `single_decisions` a minibatch may hold a part of a rollout."""
    return UpdatePlan(
        update.epochs,
        update.minibatches,
        single_decisions=single_decisions,
        target_kl=update.target_kl,
        critic_epochs=update.critic_epochs,
        critic_warmup_steps=update.critic_warmup_steps,
    )


def build_checkpoints(store: RunStore, keep: int) -> CheckpointFolder:
    """The checkpoints of a run folder; the records of earlier steps are flushed to the disk before each."""
    return CheckpointFolder(store.run_dir / CHECKPOINTS_FOLDER, keep, before_save=store.sync)
