"""The built-in rewards: number, text, format and countdown expression. They are 1 for right and 0 for wrong
(`covey.config.llm.BINARY_REWARDS`), except `digits` and `step_numbers`, which give partial credit.

They have TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list of float`, so they also work
in other trainers. They never evaluate a completion as code, and their time is bounded by its length.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

LONGEST_NUMBER = 100  # characters; longer numbers are not read
LONGEST_EXPRESSION = 200  # characters; bounds the arithmetic of a countdown answer

# A sign counts only if it cannot be a minus between two numbers. Quantifiers that end in + are possessive: they do not
# backtrack, so "12" is never matched as "1".
_NUMBER = (
    r"(?:(?<![A-Za-z0-9_)\]}])(?P<sign>[-+−–]))?(?P<currency>[$€£]?)(?<![A-Za-z_])(?<![0-9])"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}+(?![0-9])|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]))?(?:/(?P<divisor>[0-9]++)(?!\.[0-9]))?"
)
_ANY_NUMBER = re.compile(_NUMBER)
# "The answer is **57**", but not the 47 of "the answer is 47 + 10 = 57", which is read as its last number.
_ANSWER_IS = re.compile(
    r"(?i:\banswer)\W{0,4}(?:(?i:is)|:|=)[\s*_`$(\\:=]{0,10}" + _NUMBER + r"(?!\s*[-+−–*×/÷=^]\s*[0-9(])"
)
_NO_COLUMNS = ("prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,100})\}\{([0-9]{1,100})\}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}")


def completion_text(completion: Any) -> str:
    """The text of a completion: the string itself, or the content of its chat messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


# ---- numbers ----


def read_number(text: str) -> Fraction | None:
    """Read the number that a text states as its answer, exactly; None if there is none.

    Forms in order of precedence, each at its last occurrence: `\\boxed{5}`, `<answer>5</answer>`, `#### 5`,
    "answer is 5"; without any of these the last number of the text. Accepts thousands' commas, decimals, signs (the
    Unicode minus too), currency signs, fractions such as 3/4 or \\frac{3}{4}, and exponents such as 1.5e3. Does no
    algebra: in "2^5" it reads 5.
    """
    marked = [_last_boxed(text), _last_group(_ANSWER_TAG, text), _last_group(_HASHES, text)]
    for inner in marked:
        number = _last_number(inner) if inner is not None else None
        if number is not None:
            return number
    said = [match for match in map(_to_fraction, _ANSWER_IS.finditer(_plain(text))) if match is not None]
    return said[-1] if said else _last_number(text)


def _last_number(text: str) -> Fraction | None:
    last = None
    for last in _ANY_NUMBER.finditer(_plain(text)):  # noqa: B007 -- only the last one counts
        pass
    return None if last is None else _to_fraction(last)


def _plain(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "").replace("\\,", "")
    return _LATEX_FRACTION.sub(r" \1/\2 ", _LATEX_TEXT.sub(" ", text))


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    digits, exponent, divisor = match["digits"].replace(",", ""), match["exponent"] or "", match["divisor"] or "1"
    if len(digits) > LONGEST_NUMBER or len(divisor) > LONGEST_NUMBER or not int(divisor):
        return None
    number = Fraction(digits + exponent) / int(divisor)
    return -number if match["sign"] in ("-", "−", "–") else number


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, with balanced braces."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def numeric(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the number in the completion (`read_number`) equals the one in the answer column exactly, else 0.

    Raises:
        ValueError: if the column is missing or an answer has no number.
    """
    pairs = _numbers(completions, answer_column, columns)
    return [float(given == right) for given, right in pairs]


def digits(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """Fraction of the places of the right number, with its sign, that the given number has right.

    Partial credit: 157 for 156 gives 3/4 (sign and two digits), 31 for -31 gives 2/3. With `numeric` a group of wrong
    answers has no gradient; with this reward, answers with a right digit or sign have a higher advantage. Digits are
    aligned at the right and counted over the longer number, so that more digits give no more reward. Use it together
    with `numeric`, which remains the score.

    Raises:
        ValueError: if the column is missing or an answer has no number.
    """
    return [_right_places(given, right) for given, right in _numbers(completions, answer_column, columns)]


def _right_places(given: Fraction | None, right: Fraction) -> float:
    if given is None:
        return 0.0
    ours, theirs = str(abs(given))[::-1], str(abs(right))[::-1]
    same = sum(a == b for a, b in zip(ours, theirs, strict=False)) + ((given < 0) == (right < 0))
    return same / (1 + max(len(ours), len(theirs)))


def _numbers(
    completions: Sequence[Any], answer_column: str, columns: dict[str, Any]
) -> list[tuple[Fraction | None, Fraction]]:
    """Pairs of the number in each completion and the right one."""
    pairs = []
    for completion, answer in zip(completions, _column(columns, answer_column), strict=True):
        right = read_number(str(answer))
        if right is None:
            raise ValueError(f"the {answer_column} {str(answer)!r:.60} is not a number; use the exact reward for texts")
        pairs.append((read_number(completion_text(completion)), right))
    return pairs


def step_numbers(
    completions: Sequence[Any], steps: Sequence[Sequence[str]], *, answer_column: str = "answer", **columns: Any
) -> list[list[float]]:
    """For each step 1 if its number (`read_number`) equals the one at its position in the answer column, else 0.

    The column has a list of the right intermediate results. A step beyond the list gets 0.

    Raises:
        ValueError: if the column is missing, or has a value that is not a list of numbers.
    """
    return [
        [float(number < len(right) and read_number(text) == right[number]) for number, text in enumerate(texts)]
        for texts, right in zip(steps, map(_right_steps, _column(columns, answer_column)), strict=True)
    ]


def _right_steps(answers: Any) -> list[Fraction | None]:
    if not isinstance(answers, (list, tuple)):
        raise ValueError(
            f"the answer {str(answers)!r:.60} is no list: set answer_column to a column with one number for each step"
        )
    right = [read_number(str(answer)) for answer in answers]
    if None in right:
        raise ValueError(f"{str(answers)!r:.60} holds something that is not a number")
    return right


# ---- texts ----


def exact(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the completion is the answer, apart from white space at both ends; case and inner spaces matter.

    Raises:
        ValueError: if the column is missing.
    """
    answers = _column(columns, answer_column)
    return [
        float(completion_text(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, answers, strict=True)
    ]


def format_match(completions: Sequence[Any], *, pattern: str) -> list[float]:
    """1 if the regular expression matches the whole completion; a dot also matches a line end.

    A pattern may need exponential time for some completions, so the grader calls this in a process with a deadline.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion)) is not None) for completion in completions]


def _column(columns: dict[str, Any], name: str) -> Any:
    if name not in columns:
        there = ", ".join(name for name in columns if name not in _NO_COLUMNS) or "no column"
        raise ValueError(f"the data has no column {name!r}, it has {there}; set answer_column")
    return columns[name]


# ---- length ----


def overlong(completion_ids: Sequence[Sequence[int]], *, max_new_tokens: int, overlong_tokens: int) -> list[float]:
    """Length penalty: 0 up to `overlong_tokens` before the token limit, then linear to -1 at the limit.

    R = 0 if |y| <= L - C, else (L - C - |y|) / C      DAPO (arXiv 2503.14476), eq. 13

    Args:
        completion_ids: |y| tokens each, with the end token.
        max_new_tokens: L; no completion is longer.
        overlong_tokens: C, the number of penalised tokens before the limit; above 0.
    """
    free = max_new_tokens - overlong_tokens
    return [min(0.0, (free - len(ids)) / overlong_tokens) for ids in completion_ids]


# ---- countdown ----


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
    found = _last_boxed(text)
    if found is None:
        found = _last_group(_ANSWER_TAG, text)
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
