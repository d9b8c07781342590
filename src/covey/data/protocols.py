"""Protocols of the components that the training loop uses."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from covey.data.types import Batch, Group, PolicyOutput, Start, StepRecord


class Team:
    """The ranks (processes) that train one policy together; this class is one process, for which all is the identity.

    The rows of a step are divided into `shards` logical shards, of which each rank has equally many neighbours. Results
    depend on their number and not on that of the ranks.
    """

    rank, size = 0, 1  # this process, and the number of ranks

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order. Every rank must call it."""
        return [message]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks in place, in the order of a binary tree. Every rank must call it."""

    def passes(self, own: int) -> int:
        """The number of passes over microbatches that this rank must make if it has `own`. Sharded weights are gathered
        in every pass, so all ranks make as many as the one with the most. Every rank must call it.
        """
        return own


class TrainingExample(Protocol):
    """An example of a supervised training."""

    @property
    def tokens(self) -> int:
        """The number of tokens of its longest sequence."""

    @property
    def content(self) -> Hashable:
        """Key that is equal for examples with the same prompt, which is computed once."""


class SamplerWeights(Protocol):
    """The weights that a sampler in this process reads."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which they can be read. Every rank enters it."""


class Task(Protocol):
    """Source of starts. A draw depends on its arguments alone, so a resumed run repeats it."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """Training starts of one step.

        Args:
            seed: of the run.
            step: counts from 1.
            count: number of starts to draw.
            first: index of the first start in the step. A step that needs more starts draws again, with `first` equal
                to the number that it has drawn.
            before: number of starts that the run has drawn before these. None: (step - 1) * count + first, which holds
                if every step draws once. A finite data set continues from there, so each of its rows is drawn once
                before any row is drawn twice.
        """

    def held_out(self, count: int) -> list[Start]:
        """`count` starts that are never drawn for training; all of them if there are fewer."""


class Stateful(Protocol):
    """A component whose state is a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What persists between steps, beside the weights of the policy; often empty."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class Stateless:
    """Base class of components without state; meets `Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ExampleTrainer(Stateful, Protocol):
    """A model with its optimizer, trained on minibatches of examples."""

    step: int  # optimizer steps so far

    def train_step(self, examples: Sequence[Any]) -> dict[str, float]:
        """One optimizer step on a minibatch; returns its metrics."""


class Sampler(Stateful, Protocol):
    """Samples rollouts from the policy."""

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """`group_size` rollouts from each start. Randomness depends on (seed, step, start, rollout, position).

        Rollouts are numbered from `first_rollout`: one call for 8 rollouts gives the same rollouts as a call for 4 and
        a call for 4 more with `first_rollout` = 4.
        """

    def refresh(self, version: int) -> None:
        """Sample later rollouts with the policy's current weights, whose version is `version`."""


class Grader(Protocol):
    """Sets `reward`, `reward_parts` and `score` of every rollout."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups, graded. The reward of a rollout whose grading failed stays None."""


class Policy(Protocol):
    """A trainable policy."""

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision, with gradients if they are enabled.

        The batch is on the CPU; the output may be on the policy's device.
        """

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices of each microbatch, small enough for one backward pass; every row is in exactly one."""


class Critic(Protocol):
    """Estimates the return from each state."""

    def values(self, batch: Batch) -> Tensor:
        """values_BT: value of the state before every decision, with gradients if they are enabled."""

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B: value of the state after the last decision of every row, even if the episode is over."""


class ReferenceUpdater(Stateless):
    """Moves the weights of the reference towards those of the policy; this class leaves them."""

    def after(self, step: int) -> None:
        """Update the reference if an update is due after this step: a copy, or a moving average (EMA)."""


class RewardModelUpdater(Stateless):
    """Trains the reward model of an iterative run; this class has none."""

    iterations = 0  # after which the reward model has been trained

    def update(self, should_stop: Callable[[], bool]) -> None:
        """Train the reward model after an iteration, from where an interrupted call has stopped. `iterations` grows by
        one, unless `should_stop()` ended the training.
        """


class Observer(Protocol):
    """Records each step before the next one begins, such as the run store and the live display."""

    def record(self, step: StepRecord) -> None:
        """Record a finished step."""


class Checkpoints:
    """Stores the state from which a run resumes exactly; this class stores nothing."""

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        """Write a checkpoint after `step` complete steps, atomically.

        `best` is the step with the best held-out score so far, 0 without an evaluation. Its checkpoint is kept if the
        run keeps the best one.
        """

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return None

    def load(self, step: int) -> dict[str, Any]:
        """The state that was saved after `step` steps."""
        raise NotImplementedError
