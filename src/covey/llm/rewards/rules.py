"""Built-in rewards that are rules of the text: `exact`, `format`, `tags`, `length`, `repetition`, `language`,
`countdown`; and `environment`.

No completion is evaluated as code.
"""

import ast
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from covey.llm.rewards.final_answer import column_of, completion_text, last_answer_tag, last_boxed


def environment(completions: Sequence[Any], *, turn_rewards: Sequence[Sequence[float]]) -> list[float]:
    """The sum of the rewards of the turns of each conversation."""
    return [sum(rewards) for rewards in turn_rewards]


def zero(completions: Sequence[Any]) -> list[float]:
    """0 for every completion: of a run that learns from a teacher alone."""
    return [0.0] * len(completions)


def exact(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the completion is the answer, apart from white space at both ends; case and inner spaces matter.

    Raises:
        ValueError: if the column is missing.
    """
    answers = column_of(columns, answer_column)
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


# Beginnings of the Unicode names of a script's letters; for the other scripts it is the script's name.
_NAMES = {"han": ("CJK", "IDEOGRAPHIC")}
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")


def script_share(completions: Sequence[Any], *, scripts: Sequence[str]) -> list[float]:
    """Fraction of the letters of a completion that belong to one of the scripts; 1 if it has no letter.

    As the language consistency reward of DeepSeek-R1 (arXiv 2501.12948), section 2.3.2, by letters instead of words.
    Digits, punctuation and LaTeX commands do not count. It distinguishes scripts, not languages: French instead of
    English has the value 1 for Latin.

    Args:
        scripts: names in lower case, such as ("latin",), or ("han", "hiragana", "katakana") for Japanese.
    """
    beginnings = tuple(name for script in scripts for name in _NAMES.get(script, (script.upper(),)))
    return [_share(completion_text(completion), beginnings) for completion in completions]


def _share(text: str, beginnings: tuple[str, ...]) -> float:
    # Compatibility forms, such as full-width letters, are replaced by the letters that they stand for.
    letters = [letter for letter in unicodedata.normalize("NFKC", _LATEX_COMMAND.sub(" ", text)) if letter.isalpha()]
    if not letters:
        return 1.0
    return sum(_name(letter).startswith(beginnings) for letter in letters) / len(letters)


@lru_cache(maxsize=1 << 16)
def _name(letter: str) -> str:
    return unicodedata.name(letter, "")


def length_penalty(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    unit: str,
    length_target: int,
    length_limit: int,
    length_shape: str,
    length_both_sides: bool,
) -> list[float]:
    """Length penalty: 0 up to the target, then falling to -1 at the limit, and -1 beyond it.

    x = min(1, max(0, n - target) / (limit - target)) for n units

    linear    R = -x                      DAPO (arXiv 2503.14476), eq. 13, with any target and limit
    cosine    R = -(1 - cos(pi x)) / 2    the cosine reward of Yeo et al. (arXiv 2502.03373), from 0 to -1

    Args:
        completion_ids: the tokens of each completion, with the end token.
        unit: tokens, words (separated by white space) or characters.
        length_target: longest completion without a penalty.
        length_limit: shortest completion with the penalty 1; above the target.
        length_shape: linear or cosine.
        length_both_sides: if True, |n - target| replaces max(0, n - target), so that short completions have a penalty
            too: L1 (arXiv 2503.04697), eq. 1.
    """
    penalties = []
    for units in units_of(completions, completion_ids, unit):
        excess = len(units) - length_target
        x = min(1.0, (abs(excess) if length_both_sides else max(0, excess)) / (length_limit - length_target))
        penalties.append(0.0 - x if length_shape == "linear" else (math.cos(math.pi * x) - 1) / 2)
    return penalties


def repetition_penalty(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, unit: str, ngram_size: int
) -> list[float]:
    """Fraction of the n-grams of a completion that occurred before in it, negated.

    R = -(1 - distinct n-grams / n-grams)      the n-gram penalty of Yeo et al. (arXiv 2502.03373)

    0 if nothing is repeated, also in a completion of fewer units than an n-gram; near -1 for a loop.

    Args:
        completion_ids: the tokens of each completion, with the end token.
        unit: tokens, words (separated by white space, in lower case) or characters.
        ngram_size: units of an n-gram.
    """
    penalties = []
    for units in units_of(completions, completion_ids, unit):
        ngrams = [tuple(units[i : i + ngram_size]) for i in range(len(units) - ngram_size + 1)]
        penalties.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return penalties


def tagged_parts(completions: Sequence[Any], *, tags: Sequence[str], first_tag_in_prompt: bool) -> list[float]:
    """1 if a completion is the tagged parts in their order, none of them empty, with white space alone between, else 0.

    Every opening and closing tag occurs once. The format reward of DeepSeek-R1 (arXiv 2501.12948), section 2.2.2.

    Args:
        tags: names without brackets, such as ("think", "answer").
        first_tag_in_prompt: the prompt ends with the first opening tag, so the completion begins after it.
    """
    return [
        float(_has_parts(completion_text(completion), tags, first_tag_in_prompt=first_tag_in_prompt))
        for completion in completions
    ]


def _has_parts(text: str, tags: Sequence[str], *, first_tag_in_prompt: bool) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest = f"<{tags[0]}>{text}" if first_tag_in_prompt else text
    for tag in tags:
        before, opening, rest = rest.partition(f"<{tag}>")
        content, closing, rest = rest.partition(f"</{tag}>")
        if before.strip() or not opening or not closing or not content.strip():
            return False
        if any(mark in content for mark in marks):
            return False
    return not rest.strip()


def units_of(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], unit: str) -> list[Sequence[Any]]:
    """The units of every completion: token ids (with the end token), words in lower case, or characters."""
    if unit == "tokens":
        return list(completion_ids)
    texts = [completion_text(completion) for completion in completions]
    return [text.lower().split() for text in texts] if unit == "words" else list(texts)


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
