"""The reward `countdown`: an expression of given numbers reaches the target.

The completion is never evaluated as code.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.llm.rewards.answer_text import completion_text, last_answer_tag, last_boxed

LONGEST_EXPRESSION = 200  # characters; bounds the arithmetic of a countdown answer


def countdown(
    completions: Sequence[Any],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    operators: Sequence[Sequence[str]] | None = None,
) -> list[float]:
    """1 if the completion's expression has the target as its value and uses each given number at most once.

    The expression is in the last `<answer>` or `\\boxed`, or else on the last line, without a label before it
    ("Answer:") and "= 24" after it. Whole numbers, + - * /, unary minus and parentheses are allowed; if there is a
    column `operators`, only its operators.
    """
    allowed = operators if operators is not None else [tuple("+-*/")] * len(completions)
    return [
        float(solves_countdown(completion_text(completion), given, goal, signs))
        for completion, given, goal, signs in zip(completions, numbers, target, allowed, strict=True)
    ]


def check_numbers(target: Any, numbers: Any) -> None:
    """Refuse a target that is not a number, and anything but a list of whole numbers to reach it. Raises ValueError."""
    try:
        if isinstance(numbers, str) or not list(map(int, numbers)):
            raise TypeError
        Fraction(target)
    except (TypeError, ValueError):
        raise ValueError(
            f"a target and a list of numbers are needed, these are {str(target)!r:.30} and {str(numbers)!r:.60}"
        ) from None


def solves_countdown(text: str, numbers: Sequence[int], target: int, operators: Sequence[str] = tuple("+-*/")) -> bool:
    """True if the text's expression reaches the target by the rules of `countdown`."""
    expression = _find_expression(text)
    # Letters, dots, commas and underscores never reach the parser.
    if len(expression) > LONGEST_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return False
    try:
        used: Counter[int] = Counter()
        value = _value(ast.parse(expression, mode="eval").body, operators, used)
    except (_NotAllowed, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == Fraction(target) and used <= Counter(map(int, numbers))


def _find_expression(text: str) -> str:
    found = last_boxed(text)
    if found is None:
        found = last_answer_tag(text)
    if found is None:
        lines = text.strip().splitlines()
        found = lines[-1] if lines else ""
    for sign, plain in (("×", "*"), ("\\times", "*"), ("\\cdot", "*"), ("÷", "/"), ("\\div", "/"), ("−", "-")):
        found = found.replace(sign, plain)
    found = found.rpartition(":")[2].partition("=")[0]
    return found.strip(" \t\r\n*`$.")


class _NotAllowed(Exception):
    """The expression has elements other than numbers and the allowed operators."""


_OPERATORS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _value(node: ast.expr, operators: Sequence[str], used: Counter[int]) -> Fraction:
    """The value of a whitelisted syntax tree; counts its numbers in `used`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, operators, used)
    if not isinstance(node, ast.BinOp) or _OPERATORS.get(type(node.op), "no") not in operators:
        raise _NotAllowed
    left, right = _value(node.left, operators, used), _value(node.right, operators, used)
    match _OPERATORS[type(node.op)]:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right
