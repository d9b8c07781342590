"""Task and grader of control: reset seeds, and the environment's rewards."""

from __future__ import annotations

import numpy as np

from covey.data import Group, Start
from covey.runtime.rng import EVALUATING, STARTING, uniforms


def reset_seeds(seed: int, step: int, group: object, position: object, *, stream: int = STARTING) -> list[int]:
    """Seeds for `reset`, from 0 to 2^31 - 1, one for each (group, position); a function of the arguments alone."""
    drawn_N = uniforms(seed, step, group, 0, position, stream=stream)  # type: ignore[arg-type]
    return (drawn_N * 2.0**31).astype(np.int64).tolist()


class ResetSeeds:
    """Task of reset seeds; implements `covey.data.Task`. A start's prompt is its seed."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` reset seeds of one step; `before` is ignored."""
        drawn = reset_seeds(seed, step, np.arange(first, first + count), 0)
        return [Start(index, prompt) for index, prompt in enumerate(drawn, start=first)]

    def held_out(self, count: int) -> list[Start]:
        """The same `count` seeds for every run, so that runs are evaluated on the same episodes."""
        drawn = reset_seeds(0, 0, np.arange(count), 0, stream=EVALUATING)
        return [Start(index, prompt) for index, prompt in enumerate(drawn)]


class EnvironmentReward:
    """A no-op grader, because rollouts already have the environment's rewards; implements `covey.data.Grader`."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups."""
        return groups
