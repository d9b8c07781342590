"""Running totals: several small steps, each on the result of the one before, so that one slip spoils the end."""

from __future__ import annotations

import random
from typing import Any

from covey.config import RewardConfig, RunningTotalConfig
from covey.llm.tasks.generated import GeneratedTask, Problem, checked

Change = tuple[str, int]  # "+" or "-", and the number

# Shown as earlier turns of the chat, at most as many as RunningTotalConfig.examples may ask for.
EXAMPLES: tuple[tuple[int, tuple[Change, ...]], ...] = (
    (2, (("+", 3), ("-", 1), ("+", 4))),
    (5, (("-", 2), ("+", 4), ("-", 1))),
    (4, (("+", 5), ("+", 3), ("-", 1))),
)


class RunningTotal(GeneratedTask):
    """Questions like "7 - 4 + 9 + 5 step by step", to be answered with one line a step: "7 - 4 = 3", "3 + 9 = 12", ...

    Made for comparing process with outcome supervision: every line has one right total, whatever came before it. The
    column `answer` holds the last total, `totals` the list of all. No total is below 0. Worked examples stand before
    the question as earlier turns of the chat, and are never asked.

    >>> RunningTotal(steps=(3, 4), largest=20)

    Raises:
        ConfigError: if a field's value is impossible.
    """

    name = "running_total"
    default_rewards = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of RunningTotalConfig."""
        self.config = checked(RunningTotalConfig, fields)
        self._examples = tuple(
            (_question(start, changes), "\n".join(_lines(start, changes)))
            for start, changes in EXAMPLES[: self.config.examples]
        )

    def problem(self, rng: random.Random) -> Problem:
        while True:
            count = rng.choice(self.config.steps)
            start = total = rng.randint(1, self.config.largest)
            changes: list[Change] = []
            for _ in range(count):
                sign = rng.choice("+-") if total else "+"
                number = rng.randint(1, self.config.largest if sign == "+" else min(total, self.config.largest))
                changes.append((sign, number))
                total += number if sign == "+" else -number
            question = _question(start, changes)
            if all(question != shown for shown, _ in self._examples):
                break
        totals = _totals(start, changes)
        return Problem(
            key=f"running total {question}",
            question=question,
            columns={"answer": str(totals[-1]), "totals": totals},
            examples=self._examples,
        )


def _question(start: int, changes: list[Change] | tuple[Change, ...]) -> str:
    return f"{start} {' '.join(f'{sign} {number}' for sign, number in changes)} step by step"


def _totals(start: int, changes: list[Change] | tuple[Change, ...]) -> list[int]:
    totals = [start]
    for sign, number in changes:
        totals.append(totals[-1] + (number if sign == "+" else -number))
    return totals[1:]


def _lines(start: int, changes: list[Change] | tuple[Change, ...]) -> list[str]:
    """The right answer, line by line."""
    totals = _totals(start, changes)
    before = [start, *totals]
    return [
        f"{left} {sign} {number} = {right}"
        for left, (sign, number), right in zip(before, changes, totals, strict=False)
    ]
