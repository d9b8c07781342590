"""Countdown: reach a target from given numbers. Answers are expressions, and many are right."""

from __future__ import annotations

import random
from typing import Any

from covey.config import ConfigError, CountdownConfig, RewardConfig
from covey.llm.tasks.generated import GIVE_UP_AFTER, GeneratedTask, Problem, checked


class Countdown(GeneratedTask):
    """Solvable problems: the target is the value of a random expression over all the given numbers.

    Every intermediate result of that expression is a whole number and not negative; the target is at most ten times
    the largest number and none of the given ones. The column `answer` is this expression; any other solution that uses
    each number at most once and only the listed operators is right too.

    >>> Countdown(numbers=4, operators=("+", "-", "*", "/"))

    Raises:
        ConfigError: if a field's value is invalid, or the fields allow no problem.
    """

    name = "countdown"
    default_rewards = (RewardConfig(name="countdown"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of CountdownConfig."""
        self.config = checked(CountdownConfig, fields)

    def problem(self, rng: random.Random) -> Problem:
        for _ in range(GIVE_UP_AFTER):
            numbers = [rng.randint(1, self.config.largest) for _ in range(self.config.numbers)]
            found = self._combine(rng, numbers)
            if found is not None and 1 <= found[1] <= 10 * self.config.largest and found[1] not in numbers:
                break
        else:
            raise ConfigError("task countdown: no problem can be made; allow more operators or larger numbers")
        solution, target = found
        operators = list(dict.fromkeys(self.config.operators))
        question = (
            f"Reach {target} from the numbers {', '.join(map(str, numbers))}. Use each number at most once, "
            f"only the operators {' '.join(operators)} and parentheses. End with the expression alone on the last line."
        )
        columns = {"answer": solution, "numbers": numbers, "target": target, "operators": operators}
        used = [operator for operator in operators if operator in solution]
        return Problem(
            key=f"countdown {sorted(numbers)} {target}", question=question, columns=columns, kind=f"by {' '.join(used)}"
        )

    def _combine(self, rng: random.Random, numbers: list[int]) -> tuple[str, int] | None:
        """A random expression over all the numbers and its value; None when a result is negative or broken."""
        parts = [(str(number), number) for number in numbers]
        while len(parts) > 1:
            rng.shuffle(parts)
            (left_text, left), (right_text, right) = parts.pop(), parts.pop()
            operator = rng.choice(self.config.operators)
            if operator == "+":
                value = left + right
            elif operator == "-":
                value = left - right
            elif operator == "*":
                value = left * right
            elif right == 0 or left % right:
                return None
            else:
                value = left // right
            if value < 0:
                return None
            parts.append((f"({left_text} {operator} {right_text})", value))
        text, value = parts[0]
        return text[1:-1], value
