"""Task and grader of control: reset seeds, and rewards that the environment gave."""

from __future__ import annotations

import numpy as np

from covey.data import Group, Start
from covey.runtime.rng import EVALUATING, STARTING, uniforms


def reset_seeds(seed: int, step: int, group: object, position: object, *, stream: int = STARTING) -> list[int]:
    """Seeds for `reset`, from 0 to 2^31 - 1, one for each (group, position); a function of the arguments alone."""
    drawn_N = uniforms(seed, step, group, 0, position, stream=stream)  # type: ignore[arg-type]
    return (drawn_N * 2.0**31).astype(np.int64).tolist()


class ResetSeeds:
    """Reset seeds; meets `covey.data.Task`. A start's prompt is its seed."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` reset seeds of one step; how many came `before` changes nothing."""
        drawn = reset_seeds(seed, step, np.arange(first, first + count), 0)
        return [Start(index, prompt) for index, prompt in enumerate(drawn, start=first)]

    def held_out(self, count: int) -> list[Start]:
        """The same `count` seeds for every run, so that runs are measured on the same episodes."""
        drawn = reset_seeds(0, 0, np.arange(count), 0, stream=EVALUATING)
        return [Start(index, prompt) for index, prompt in enumerate(drawn)]


class EnvironmentReward:
    """The rewards came with the rollouts; meets `covey.data.Grader`."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups."""
        return groups
