"""Protocols of the components that the training loop uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from covey.data.types import Batch, Group, PolicyOutput, Start


class Task(Protocol):
    """Source of starts. Draws are a function of their arguments alone, so a resumed run repeats them."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` training starts of one step, their indices counted from `first`.

        A step that needs more starts draws again, with `first` at the number that it has. `before` is how many starts
        the run has drawn before these; None stands for (step - 1) * count + first, as where no step drew again. A
        finite data set goes on from there, so that each of its rows comes once before any comes twice.
        """

    def held_out(self, count: int) -> list[Start]:
        """`count` starts that training never sees, or if there are fewer, all of them."""


class Sampler(Protocol):
    """Rolls the policy out."""

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """`group_size` rollouts from each start. Randomness depends on (seed, step, start, rollout, position).

        Rollouts count from `first_rollout`: eight at once are those of four and then four more from number 4.
        """

    def refresh(self, version: int) -> None:
        """Take over the policy's weights; later rollouts carry `version`."""

    def state_dict(self) -> dict[str, Any]:
        """State that is carried from one step to the next beside the weights, for a checkpoint; often empty."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


class Grader(Protocol):
    """Fills in `reward`, `reward_parts` and `score` of every rollout."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups, graded. A rollout whose grading failed keeps `reward` None."""


class Policy(Protocol):
    """A trainable policy."""

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision, with gradients if they are enabled.

        The batch lies on the CPU; the answer may lie on the policy's own device.
        """

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices, in pieces small enough for one backward; every row exactly once."""


class Critic(Protocol):
    """Estimates the return from each state."""

    def values(self, batch: Batch) -> Tensor:
        """values_BT: of the state before every decision, with gradients if they are enabled."""

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B: of the state after the last decision of every row, whether or not the episode was over."""


class ReferenceUpdater(Protocol):
    """Moves the weights of the reference towards those of the policy."""

    def after(self, step: int) -> None:
        """Update the reference if this step is one after which it is due: a copy, or a moving average (EMA)."""

    def state_dict(self) -> dict[str, Any]:
        """The reference's weights, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


class Observer(Protocol):
    """Records each step before the next one begins: the run store, the live display."""

    def record(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """One finished step; `step` counts from 1."""


class Checkpoints(Protocol):
    """Keeps what a run needs to go on exactly where it stopped."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint atomically; `step` steps are complete."""

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is whole; None if there is none."""

    def load(self, step: int) -> dict[str, Any]:
        """The state that was saved at `step`."""
