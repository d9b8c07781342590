"""The environment `calculator`: exact arithmetic. An expression is parsed by a whitelist and never run as code."""

import ast
import re
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from covey.llm.conversation.tools import ToolError

LONGEST_EXPRESSION = 200  # characters
MOST_BITS = 10_000  # of a number that occurs in the calculation
DIGITS = 12  # of a result that is not a whole number
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "", "[": "(", "]": ")"} | {"^": "**"})


class Calculator:
    """A calculator for + - * / // % ** and parentheses, with exact fractions.

    >>> Calculator().calculate("123 + 456")
    '579'
    >>> Calculator().calculate("1 / 3")
    '0.333333333333'
    """

    def reset(self, **columns: Any) -> None:
        """Nothing is kept between calls."""

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: the expression, such as "12 + 3 * 4"
        """
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression).translate(_SIGNS).strip().rstrip("= ")
        if len(text) > LONGEST_EXPRESSION:
            raise ToolError(f"the expression has more than {LONGEST_EXPRESSION} characters")
        # Letters and underscores never reach the parser.
        if not re.fullmatch(r"[0-9+\-*/%.() ]+", text, re.ASCII):
            raise ToolError("the expression may only have numbers, + - * / // % ** and parentheses")
        try:
            return shown(_value(ast.parse(text, mode="eval").body, text))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (SyntaxError, RecursionError, MemoryError):
            raise ToolError("the expression is not complete or has a wrong sign") from None


def shown(value: Fraction) -> str:
    """A number in decimals, a whole one exactly."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = DIGITS
        return str((Decimal(value.numerator) / Decimal(value.denominator)).normalize())


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a whitelisted syntax tree."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(text[node.col_offset : node.end_col_offset].rstrip("."))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ToolError("the expression is not complete or has a wrong sign")
    result = _combined(node.op, _value(node.left, text), _value(node.right, text))
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MOST_BITS:
        raise ToolError("the result is too large")
    return result


def _combined(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
    raise ToolError("the expression may only have the signs + - * / // % **")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent must be a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MOST_BITS:
        raise ToolError("the result is too large")
    return Fraction(base**exponent.numerator)
