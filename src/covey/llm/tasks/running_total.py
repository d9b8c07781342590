"""Running totals: several small steps, each on the previous result, so that one error makes the final answer wrong."""

from __future__ import annotations

import random
from typing import Any

from covey.config import RewardConfig, RunningTotalConfig
from covey.config.fields import plural
from covey.llm.tasks.generated import GeneratedTask, Problem, checked

Change = tuple[str, int]  # "+" or "-", and the number

# Earlier turns of the chat; RunningTotalConfig.examples has this number as its limit.
EXAMPLES: tuple[tuple[int, tuple[Change, ...]], ...] = (
    (2, (("+", 3), ("-", 1), ("+", 4))),
    (5, (("-", 2), ("+", 4), ("-", 1))),
    (4, (("+", 5), ("+", 3), ("-", 1))),
)


class RunningTotal(GeneratedTask):
    """Questions like "7 - 4 + 9 + 5 step by step", answered with one line per step: "7 - 4 = 3", "3 + 9 = 12", ...

    Made for comparing process with outcome supervision: every line has one right total, independent of the lines before
    it. The column `answer` is the last total, `totals` the list of all. No total is below 0. Worked examples are
    earlier turns of the chat, and are never asked.

    >>> RunningTotal(steps=(3, 4), largest=20)

    Raises:
        ConfigError: if a field's value is invalid.
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
            kind=plural(count, "step"),
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
