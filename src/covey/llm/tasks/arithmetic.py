"""Sums, differences and products of small numbers: a task on which training shows an effect within minutes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from covey.config import ArithmeticConfig, ConfigError, RewardConfig
from covey.data import Start
from covey.llm.tasks.generated import GeneratedTask, Problem, checked

CHOICES_OF_OPERATORS = 200  # after which a task without negative answers is refused as impossible
DRAWS_OF_NUMBERS = 100  # for one choice of operators, before the next choice

Products = list[tuple[int, list[int]]]  # sign and factors of every term


class Arithmetic(GeneratedTask):
    """Questions like "What is 47 + 38?".

    Number of terms, digits of each operand and each operator are drawn evenly from their lists. A number of d digits
    is drawn evenly from 10^(d-1) to 10^d - 1. Products have precedence. Unless `negative` is set, numbers are redrawn
    until the answer is not below 0. Two expressions that differ only in the order of their terms or factors are always
    on the same side of the held-out split.

    >>> Arithmetic(digits=(1, 2), operators=("+",))

    Raises:
        ConfigError: if a field's value is invalid.
    """

    name = "arithmetic"
    default_rewards = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of ArithmeticConfig."""
        self.config = checked(ArithmeticConfig, fields)

    def problem(self, rng: random.Random) -> Problem:
        for _ in range(CHOICES_OF_OPERATORS):
            count = rng.choice(self.config.terms)
            operators = [rng.choice(self.config.operators) for _ in range(count - 1)]
            # Numbers are redrawn first, so that operators remain uniformly distributed if possible.
            for _ in range(DRAWS_OF_NUMBERS):
                numbers = [_number(rng, rng.choice(self.config.digits)) for _ in range(count)]
                products = _signed_products(numbers, operators)
                answer = sum(sign * math.prod(factors) for sign, factors in products)
                if answer >= 0 or self.config.negative:
                    return self._problem(numbers, operators, products, answer)
        raise ConfigError("task arithmetic finds no expression whose result is not negative: set task.negative = true")

    def _problem(self, numbers: list[int], operators: list[str], products: Products, answer: int) -> Problem:
        expression = str(numbers[0]) + "".join(f" {o} {n}" for o, n in zip(operators, numbers[1:], strict=True))
        return Problem(
            key=f"arithmetic {sorted((sign, sorted(factors)) for sign, factors in products)}",
            question=f"What is {expression}? {self.config.instruction}".strip(),
            columns={"answer": str(answer)},
            kind=problem_kind(numbers, operators),
        )

    def held_out(self, count: int) -> list[Start]:
        """As `GeneratedTask.held_out`, with operands of `held_out_digits` if it is set."""
        if not self.config.held_out_digits:
            return super().held_out(count)
        narrowed = replace(self.config, digits=self.config.held_out_digits, held_out_digits=())
        return Arithmetic(**vars(narrowed)).held_out(count)


def _signed_products(numbers: list[int], operators: list[str]) -> Products:
    """The expression as signed products: 3 * 4 - 5 is [(1, [3, 4]), (-1, [5])]."""
    products: Products = [(1, [numbers[0]])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            products[-1][1].append(number)
        else:
            products.append((1 if operator == "+" else -1, [number]))
    return products


def problem_kind(numbers: list[int], operators: list[str]) -> str:
    """Operators, digits and, for one sum or difference, the carry: "2-digit - 1-digit, borrow"."""
    digits = [f"{len(str(number))}-digit" for number in numbers]
    shape = digits[0] + "".join(f" {operator} {digit}" for operator, digit in zip(operators, digits[1:], strict=True))
    if len(numbers) != 2 or operators[0] == "*":
        return shape
    first, second = numbers
    if operators[0] == "+":
        return f"{shape}, carry" if _carries(first, second) else shape
    if first < second:
        return f"{shape}, negative"
    return f"{shape}, borrow" if _carries(second, first - second) else shape


def _carries(first: int, second: int) -> bool:
    """True if a column of the sum is above 9. A difference a - b borrows where the sum b + (a - b) carries."""
    while first and second:
        if first % 10 + second % 10 > 9:
            return True
        first, second = first // 10, second // 10
    return False


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)
