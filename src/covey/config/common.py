"""Config fields that runs on language models and on environments share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

CRITIC_FREE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce_pp")
ALGORITHM_NAMES = (*CRITIC_FREE, "ppo")
# Algorithms that compare with a critic or with the whole step, so that no group is without a signal for them.
NOT_BY_GROUP = ("ppo", "reinforce_pp")
BY_GROUP = tuple(name for name in ALGORITHM_NAMES if name not in NOT_BY_GROUP)
WITHOUT_RATIO = ("rloo", "reinforce")  # algorithms whose surrogate has no ratio to clip, so they are on-policy only
CLIPPED = tuple(name for name in ALGORITHM_NAMES if name not in WITHOUT_RATIO)
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")  # each is also the name of its package and of the extra


class _OneLine(Exception):
    """An exception that a notebook and IPython show as one line, because the lines of covey say nothing to its user."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ConfigError(_OneLine, ValueError):
    """A mistake in the user's input; the message is one line that names the fix."""


class RunError(_OneLine, RuntimeError):
    """A run that cannot continue; the message is one line. The run folder keeps the progress so far."""


class SamplerLost(RunError):
    """No sampler is left that could generate a step's rollouts. Nothing of the step was learnt yet."""


class MachineError(_OneLine, RuntimeError):
    """A fault of the machine (disk, memory, permissions), in one line with the path and what to do about it."""


class Fault(NamedTuple):
    """A contradiction between values of a config.

    Attributes:
        message: one line that names the field and the remedy.
        mends: dotted field -> a value that mends the fault. If the command line caused the fault, the first of these
            fields that it did not give gets its value (`covey.config.recipe`).
        subject: fields that are refused instead if the command line gave them.
    """

    message: str
    mends: Mapping[str, Any] = MappingProxyType({})
    subject: tuple[str, ...] = ()


def refuse(faults: Iterable[Fault]) -> None:
    """Raise the first of these contradictions as a ConfigError."""
    for fault in faults:
        raise ConfigError(fault.message)


class Default:
    """In `Fault.mends`: the default of the field."""


def config_field(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    because: str = "",
    used_by: tuple[str, ...] = (),
    needs: str = "",
    advanced: bool = False,
) -> Any:
    """A config field: its default, its help text and the values it may take.

    Args:
        min, max: inclusive limits; in a list they hold for every item.
        above, below: exclusive limits.
        because: reason for the limits, which a refusal adds.
        used_by: the only algorithms, or kinds of rollouts, that use the field; empty: all.
        needs: another field of the table, or the dotted name of one of another table, without which this one has no
            effect.
        advanced: shown by `--help-all` only.
    """
    limits = {"min": min, "max": max, "above": above, "below": below}
    metadata = {"help": text, "choices": choices, "limits": limits, "because": because, "advanced": advanced}
    return field(default=default, metadata=metadata | {"used_by": used_by, "needs": needs})


if TYPE_CHECKING:
    from dataclasses import dataclass as table
else:  # `Table` has the other methods: a dataclass compiles its own in each class, a tenth of the time of start-up
    table = partial(dataclass, eq=False, repr=False)


class Table:
    """Base of config tables. A list that a Python program gives becomes a tuple, which cannot change."""

    SWITCH: ClassVar[tuple[str, ...]] = ()  # fields; unless one of them is set, no other field has an effect

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # of the dataclass below
            value = getattr(self, item.name)
            if isinstance(value, list) and isinstance(item.default, tuple):
                object.__setattr__(self, item.name, tuple(value))

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def faults(self) -> Iterator[Fault]:
        """Contradictions between values of this table, each of which has its type and is within its limits."""
        yield from ()

    def check(self) -> None:
        """Refuse what the file system or missing packages rule out.

        Raises:
            ConfigError: one line that names the field and the remedy.
        """


@table(frozen=True)
class LossBase(Table):
    """Fields of the loss that both kinds of run share. None takes the algorithm's own default."""

    clip_low: float | None = config_field(
        None, "the ratio is clipped below at 1 - clip_low", above=0, max=1, used_by=CLIPPED
    )
    clip_high: float | None = config_field(
        None, "the ratio is clipped above at 1 + clip_high", above=0, used_by=CLIPPED
    )
    dual_clip: float | None = config_field(
        None,
        "dual clip: bound of the ratio for negative advantages, above 1; unset: off",
        above=1,
        advanced=True,
        used_by=CLIPPED,
        because="it bounds the ratio of negative advantages from above, 3.0 is usual; unset turns it off",
    )
    kl_coefficient: float | None = config_field(None, "weight of the KL; 0: no KL, and no reference in memory", min=0)
    kl_estimator: str | None = config_field(
        None,
        "estimator of the KL; k1 enters the reward, the others the loss; exact sums over the vocabulary, in control "
        "over all discrete actions",
        choices=("k1", "k2", "k3", "exact"),
    )
    kl_to: str = config_field(
        "reference",
        "policy that the KL is taken to: the reference (the policy before training) or the one that sampled",
        choices=("reference", "behavior"),
        advanced=True,
    )
    kl_warmup_steps: int = config_field(0, "steps over which the KL coefficient rises from 0", min=0, advanced=True)
    adaptive_kl_target: float | None = config_field(
        None,
        "target KL in nats per token or action, which the KL coefficient is adapted to reach; unset: fixed",
        above=0,
        advanced=True,
    )
    adaptive_kl_horizon: int = config_field(
        10_000, "horizon of the adaptive KL coefficient, in rollouts", min=1, advanced=True, needs="adaptive_kl_target"
    )
    entropy_coefficient: float = config_field(0.0, "weight of the entropy bonus", min=0)
    entropy_target: float | None = config_field(
        None, "entropy in nats per token or action that a controller holds; unset: no controller", above=0
    )
    entropy_controller: str = config_field(
        "bonus",
        "what the controller adapts: entropy_coefficient (bonus), or the clip range (clip)",
        choices=("bonus", "clip"),
        advanced=True,
        needs="entropy_target",
    )
    entropy_gain: float = config_field(
        0.2,
        "relative change of it after a step whose entropy misses the target by the target's size or more; "
        "proportionally less nearer to the target",
        above=0,
        max=1,
        advanced=True,
        needs="entropy_target",
    )
    entropy_bounds: tuple[float, ...] = config_field(
        (),
        "smallest and largest factor for entropy_coefficient, or for clip_high, while clip_low is divided by it; "
        "unset: 0.01 and 100, for the clip range 0.25 and 4",
        above=0,
        advanced=True,
        needs="entropy_target",
    )
    clip_cov_fraction: float = config_field(
        0.0,
        "Clip-Cov: fraction of the tokens or actions, drawn from those of high covariance of log-probability and "
        "advantage, that have no policy gradient; 0: off",
        min=0,
        max=1,
    )
    clip_cov_bounds: tuple[float, ...] = config_field(
        (1.0, 5.0),
        "Clip-Cov: lowest and highest covariance of those that are drawn from, in nats",
        advanced=True,
        needs="clip_cov_fraction",
    )
    kl_cov_fraction: float = config_field(
        0.0,
        "KL-Cov: fraction of the tokens or actions, those of the highest covariance of log-probability and advantage, "
        "that are held near the policy that sampled; 0: off",
        min=0,
        max=1,
    )
    kl_cov_coefficient: float = config_field(
        1.0, "KL-Cov: weight of its penalty", above=0, advanced=True, needs="kl_cov_fraction"
    )
    value_coefficient: float = config_field(
        0.5,
        'ppo: weight of the value loss; with critic.trunk = "own" it matters only where max_grad_norm clips',
        min=0,
        advanced=True,
        used_by=("ppo",),
    )
    value_clip: float | None = config_field(
        None, "ppo: clip range of the value loss; unset: no clipping", above=0, advanced=True, used_by=("ppo",)
    )
    gae_lambda: float = config_field(
        0.95,
        "ppo: lambda of GAE, from 0 (one-step TD error) to 1 (Monte Carlo returns)",
        min=0,
        max=1,
        used_by=("ppo",),
    )
    whiten: bool = config_field(
        True,
        "ppo: normalise advantages to mean 0 and standard deviation 1 over the step",
        advanced=True,
        used_by=("ppo",),
    )
    importance_cap: float | None = config_field(
        None,
        "cap of the importance weight (trainer's over sampler's probability) on the loss of a decision, 2 is usual; "
        "unset: off, or 2 with replay.groups",
        above=0,
        advanced=True,
    )
    importance_mask: tuple[float, ...] = config_field(
        (),
        "IcePop: lowest and highest importance weight; a decision outside of them is left out of the surrogate loss, "
        "[0.5, 5.0] is usual; empty: off",
        advanced=True,
    )
    importance_level: str = config_field(
        "token",
        "what importance_cap and importance_mask apply to: the weight of a decision, or that of a rollout, the product "
        "of the weights of its decisions",
        choices=("token", "sequence"),
        advanced=True,
    )

    def faults(self) -> Iterator[Fault]:
        unset = {"loss.entropy_target": Default}
        yield from self._bad_pair("clip_cov_bounds", self.clip_cov_bounds)
        if self.entropy_target == 0:
            yield Fault(
                "loss.entropy_target is 0, and the controller measures deviations relative to it: set one near 0, such "
                "as 0.05",
                unset,
            )
        if self.entropy_target is not None and self.entropy_controller == "bonus" and not self.entropy_coefficient:
            yield Fault(
                "loss.entropy_target is set, but not the coefficient that it adapts: set loss.entropy_coefficient "
                'above 0 (0.001 is usual, in control 0.01), or entropy_controller to "clip"',
                unset,
            )
        if self.entropy_bounds:
            yield from self._bad_pair("entropy_bounds", self.entropy_bounds)
            if not self.entropy_bounds[0] <= 1 <= self.entropy_bounds[-1]:
                yield Fault(
                    "loss.entropy_bounds are factors, and the run begins with the factor 1, which must be between "
                    f"them, such as [0.1, 10.0] (are {list(self.entropy_bounds)})",
                    unset,
                )
        if self.importance_mask and (
            len(self.importance_mask) != 2 or not 0 <= self.importance_mask[0] < 1 < self.importance_mask[1]
        ):
            yield Fault(
                "loss.importance_mask must be a lowest weight below 1 and a highest above 1, such as [0.5, 5.0], got "
                f"{list(self.importance_mask)}"
            )
        elif (
            self.importance_mask and self.importance_cap is not None and self.importance_cap >= self.importance_mask[1]
        ):
            yield Fault(
                f"loss.importance_cap = {self.importance_cap:g} has no effect, because importance_mask leaves out "
                f"weights above {self.importance_mask[1]:g}: lower the cap, or remove one of them"
            )

    def _bad_pair(self, name: str, bounds: tuple[float, ...]) -> Iterator[Fault]:
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            yield Fault(
                f"loss.{name} must be two numbers, the lowest and the highest, such as [0.5, 5.0] (is {list(bounds)})"
            )

    @property
    def entropy_factors(self) -> tuple[float, float]:
        """The bounds of what the controller of the entropy multiplies."""
        if self.entropy_bounds:
            low, high = self.entropy_bounds
            return low, high
        return (0.01, 100.0) if self.entropy_controller == "bonus" else (0.25, 4.0)


@table(frozen=True)
class ClusterConfig(Table):
    shards: int = config_field(
        0,
        "logical shards of a step, a power of two; results depend on this number and not on that of the ranks "
        "(torchrun), which must divide it; 0: as many as there are ranks",
        min=0,
        max=1024,
        advanced=True,
    )
    weights: str = config_field(
        "auto",
        "weights of several ranks, with LoRA the frozen ones: replicate (each rank has all), fsdp (sharded by FSDP2, "
        "which needs less memory and more messages), or auto, which replicates if the memory suffices; a resumed run "
        "may change it",
        choices=("auto", "replicate", "fsdp"),
        advanced=True,
    )
    exact: bool = config_field(
        True,
        "for fsdp: the bits of replicated weights, for an fp32 gradient of all weights on each rank; false saves its "
        "memory and adds in another order; no effect with LoRA, whose sums are always exact",
        advanced=True,
    )


def check_shards(shards: int, items: int, of_step: str) -> None:
    """Refuse shards that cannot be summed in the order of a binary tree, or of which one could never have a row.

    Args:
        items: prompts or examples of a step.
        of_step: the field with their number.

    Raises:
        ConfigError: naming the field and the remedy.
    """
    if shards & (shards - 1):
        raise ConfigError(
            f"cluster.shards must be a power of two, got {shards}: set it to {1 << (shards.bit_length() - 1)}"
        )
    if shards > items:
        raise ConfigError(
            f"{shards} shards are more than {of_step} = {items}, so some would never have a row: lower cluster.shards "
            f"or the number of ranks, or raise {of_step.rpartition('.')[2]}"
        )


@table(frozen=True)
class UpdateBase(Table):
    """Fields of the update that both kinds of run share."""

    learning_rate: float = config_field(1e-5, "peak learning rate of AdamW", above=0)
    schedule: str = config_field(
        "constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = config_field(0, "steps over which the learning rate rises from 0", min=0)
    weight_decay: float = config_field(0.0, "AdamW's decoupled weight decay", min=0, advanced=True)
    eight_bit_moments: bool = config_field(
        False, "keep AdamW's two moments in 8 bits: 2 bytes for each weight instead of 8, with rounding", advanced=True
    )
    max_grad_norm: float = config_field(1.0, "clip gradients to this norm", above=0)
    epochs: int = config_field(1, "passes over the rollouts of a step", min=1)
    minibatches: int = config_field(1, "optimizer steps per pass; the prompts of a step are split evenly", min=1)
    target_kl: float | None = config_field(
        None,
        "KL to the policy that sampled, in nats, beyond which the epochs of a step end early",
        above=0,
        advanced=True,
    )
    critic_learning_rate: float | None = config_field(
        None, "ppo: the critic's learning rate; unset: learning_rate", above=0, advanced=True, used_by=("ppo",)
    )
    critic_epochs: int = config_field(
        0, "ppo: further passes for the critic alone", min=0, advanced=True, used_by=("ppo",)
    )
    critic_warmup_steps: int = config_field(
        0, "ppo: first steps in which only the critic is trained", min=0, advanced=True, used_by=("ppo",)
    )


@table(frozen=True)
class CheckpointConfig(Table):
    every: int = config_field(20, "steps between checkpoints", min=1)
    keep: int = config_field(2, "checkpoints kept, at least 2", min=2, advanced=True)
    best: bool = config_field(
        False, "also keep the checkpoint with the best held-out score, RUN@best", needs="evaluation.every"
    )
    model_if_stopped: bool = config_field(
        False, "write model/ also if the run is stopped before its end", advanced=True
    )


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(rf"(\d{{1,9}}(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def last_restart(config: Any) -> int:
    """The step after which the schedules of a training begin last; 0: at its beginning."""
    restarts: tuple[int, ...] = config.schedule_restarts
    return restarts[-1] if restarts else 0


def restarts_field() -> Any:
    """The field of the steps after which a training was continued."""
    return config_field(
        (),
        "steps after which the schedules of learning rate and group size begin again, without warm-up; a finished run "
        "that goes on (--resume RUN --steps N) adds its last step",
        min=1,
        advanced=True,
    )


@table(frozen=True)
class RunBase(Table):
    """Top-level fields that both kinds of run share."""

    algorithm: str = config_field("grpo", "training algorithm: advantage, loss and KL", choices=ALGORITHM_NAMES)
    steps: int = config_field(100, "training steps", min=1)
    time_budget: str | None = config_field(
        None,
        "time for training and evaluations, such as 90s, 8min or 1.5h: if it is used before the last step, training "
        "ends, and what depends on the share of steps so far, such as the learning rate, follows the time; unset: none",
    )
    schedule_restarts: tuple[int, ...] = restarts_field()
    seed: int = config_field(0, "seed of all random choices", min=0, max=2**32 - 1)
    run_dir: str = config_field("", "folder of the run; empty: runs/<recipe>-<number>")
    threads: int = config_field(0, "CPU threads; 0: one per core", min=0)
    show_rollouts_every: int = config_field(10, "steps between printed rollouts; 0: never", min=0)
    trackers: tuple[str, ...] = config_field(
        (), "experiment trackers that receive metrics and rollouts as well; each needs its extra", choices=TRACKERS
    )

    @property
    def budget_seconds(self) -> float:
        """time_budget in seconds; infinity if it is not set.

        Raises:
            ConfigError: if it is not a time.
        """
        if self.time_budget is None:
            return math.inf
        match = _TIME.fullmatch(self.time_budget)
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not seconds:
            raise ConfigError(f"time_budget must be a time above 0 such as 90s, 8min or 1.5h (is {self.time_budget!r})")
        return seconds

    def check(self) -> None:
        _ = self.budget_seconds
        check_trackers(self.trackers)


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse a tracker that is named twice, and one whose package is missing.

    Raises:
        ConfigError: naming the tracker and the remedy.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"trackers has {name} twice: remove one")
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of this name in the working folder is not a package
            raise ConfigError(f'trackers: {name} needs a package: pip install "covey[{name}]"')


REPLAY_IMPORTANCE_CAP = 2.0


@table(frozen=True)
class ReplayConfig(Table):
    SWITCH = ("groups",)

    groups: int = config_field(
        0,
        "groups of earlier steps that a step learns from again, at most; they are added to its own groups; 0: off",
        min=0,
        max=1_000_000,
    )
    max_age: int = config_field(4, "steps after which a group is no longer replayed", min=1, max=10_000)
    max_uses: int = config_field(1, "times that a group is replayed at most", min=1, advanced=True)


def importance_cap(loss: LossBase, replay: ReplayConfig) -> float | None:
    """loss.importance_cap. If it is unset, replay has importance weights up to REPLAY_IMPORTANCE_CAP, unless
    loss.importance_mask bounds them.
    """
    if loss.importance_cap is None and replay.groups and not loss.importance_mask:
        return REPLAY_IMPORTANCE_CAP
    return loss.importance_cap
