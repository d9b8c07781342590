"""Chooses rollouts of a run: the most informative group of a step, the best and the worst, those that match filters."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.files import Refused
from covey.tracking.run_reader import LIMITS, Group, RunReader, number, prompt_text, ranges
from covey.tracking.turns import searched_text

Keep = Callable[["Found"], bool]


@dataclass(frozen=True)
class Found:
    """One rollout of a run."""

    step: int
    group: Group
    index: int  # within the group, from 0
    line: dict[str, Any]

    @property
    def reward(self) -> float | None:
        return number(self.line.get("reward"))

    def contains(self, words: str) -> bool:
        """True if the completion or the prompt has these words, in any case."""
        texts = (searched_text(self.line), prompt_text(self.line.get("prompt")))
        return any(words.casefold() in one.casefold() for one in texts)


def is_failed(found: Found) -> bool:
    """True if the rollout could not be graded."""
    return found.reward is None


def is_truncated(found: Found) -> bool:
    """True if a token limit or a time limit ended the rollout."""
    return found.line.get("end") in LIMITS


def has_no_signal(found: Found) -> bool:
    """True if all graded rollouts of the group have the same reward, so that none of them has a gradient."""
    return not found.group.has_signal


def last_recorded(reader: RunReader) -> int:
    """The last step with rollouts.

    Raises:
        ConfigError: if there is none.
    """
    steps = reader.rollout_steps()
    if not steps:
        raise ConfigError(f"the run in {reader.run_dir} has no rollouts yet")
    return steps[-1]


def read_groups(reader: RunReader, step: int) -> list[Group]:
    """The groups of a step.

    Raises:
        ConfigError: if it has none that can be read; the message names the steps that have.
    """
    try:
        groups, _ = reader.groups(step)
    except OSError as error:
        steps = reader.rollout_steps()
        known = f"it has those of {steps_text(steps)}" if steps else "it has none yet"
        reason = f" ({error})" if isinstance(error, Refused) else ""
        raise ConfigError(f"the run in {reader.run_dir} has no rollouts of step {step}{reason}: {known}") from None
    if not groups:
        raise ConfigError(f"the rollouts of step {step} in {reader.run_dir} are damaged: name another step")
    return groups


def choose_group(groups: Sequence[Group], number: int | None) -> tuple[Group, str]:
    """The group with a number or, without one, the most informative: that with the largest spread of rewards.

    Returns:
        The group, and the reason why it was chosen; the reason is empty for a group that the user named.

    Raises:
        ConfigError: if there is no group with that number.
    """
    if number is not None:
        for group in groups:
            if group.number == number:
                return group, ""
        raise ConfigError(
            f"there is no group {number}: the step has the groups {steps_text([g.number for g in groups])}"
        )
    chosen = max(groups, key=information)
    return chosen, "the largest spread of rewards" if chosen.has_signal else "no group has different rewards"


def search(reader: RunReader, steps: Sequence[int], keep: Keep, limit: int) -> list[Found]:
    """The first rollouts that match, from the last of the steps backwards."""
    found: list[Found] = []
    for each in _all(reader, reversed(steps)):
        if keep(each):
            found.append(each)
            if len(found) == limit:
                break
    return found


def extremes(reader: RunReader, steps: Sequence[int], keep: Keep, limit: int, *, best: bool) -> list[Found]:
    """The graded rollouts with the highest rewards (or the lowest) among those that match; of equal ones the latest."""
    sign = 1.0 if best else -1.0
    graded = (each for each in _all(reader, reversed(steps)) if each.reward is not None and keep(each))
    return heapq.nlargest(limit, graded, key=lambda found: sign * (found.reward or 0.0))


def steps_text(steps: Sequence[int]) -> str:
    """[1, 2, 3, 7] as '1 to 3, 7'."""
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges(steps)]
    return ", ".join(parts if len(parts) <= 6 else [*parts[:5], f"{plural(len(parts) - 5, 'other range')}"])


def information(group: Group) -> tuple[bool, float, int]:
    """The order of groups by what they teach: those that were trained on, then those with a large spread of rewards."""
    return not group.is_dropped, pstdev(group.rewards) if group.rewards else -1.0, -group.number


def _all(reader: RunReader, steps: Iterator[int]) -> Iterator[Found]:
    for step in steps:
        with suppress(OSError):  # deleted in between, or damaged
            for group in reader.groups(step)[0]:
                for index, line in enumerate(group.rollouts):
                    yield Found(step, group, index, line)
