"""Problems and scores of the package reasoning_gym, in a process that can be killed and has limited resources.

Some of its scorers pass the model's text to `eval` or to sympy's `parse_expr`, which evaluates it too. Such a text is
scored only if it consists of numbers, names, strings, brackets, operators and calls of known functions
(`is_plain_expression`). The limits of resources and the deadline of the call remain for expensive expressions.
"""

import contextlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from covey.config.fields import did_you_mean
from covey.llm.rewards.final_answer import completion_text
from covey.runtime.worker.child import MARK, limit_resources

MOST_MEMORY_BYTES = 8 << 30  # of address space
LONGEST_EXPRESSION = 2000  # characters
DEEPEST_BRACKETS = 40
LONGEST_DIGITS = 20
LARGEST_POWER = 1000  # product of the numbers in exponents
# A scorer raises one of these for an answer that it cannot read. Others, such as MemoryError, are failures.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "Abs", "abs"),
}

_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_STRING = r"""'[^'"\\\n]*'|"[^'"\\\n]*\""""
_TOKEN = re.compile(
    rf"(?P<string>{_STRING})|(?P<name>[A-Za-z_]\w*)|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"|(?P<sign>\*\*|//|[-+*/(),\[\]%])|(?P<space>\s+)",
    re.ASCII,
)

_EXPONENT = re.compile(
    r"\s*(?:-?(?P<number>[0-9]+)|-?[A-Za-z]\w*|\(-?(?P<top>[0-9]+)(?:/[0-9]+)?\)|\((?P<term>[^()]*)\))"
)


def _limit_resources() -> None:
    """Limit memory, and forbid core dumps, new processes and written files, in the process of a worker."""
    if MARK not in os.environ:
        return
    with contextlib.suppress(ValueError, OSError):
        limit_resources(RLIMIT_AS=MOST_MEMORY_BYTES, RLIMIT_CORE=0, RLIMIT_FSIZE=0, RLIMIT_NPROC=0)


from reasoning_gym import factory  # noqa: E402 -- it starts threads, which the limits would forbid

_limit_resources()


def generate(
    completions: Sequence[int],
    source_dataset: str,
    options: dict[str, Any],
    log_extra: Callable[[str, list[Any]], None],
) -> list[float]:
    """Generate a problem for each seed; logs the columns "question", "answer" and "error". The results are all 0.

    Args:
        completions: the seeds.
        source_dataset, options: name of the data set, and the fields of its config other than seed and size.
    """
    entries: list[dict[str, Any]] = []
    errors = []
    for seed in completions:
        error = _fault(source_dataset, options)
        entry: dict[str, Any] = {"question": "", "answer": ""}
        if not error:
            try:
                entry = _problem(source_dataset, json.dumps(options, sort_keys=True), seed)[1]
            except AssertionError as fault:
                error = f"data set {source_dataset}: {fault}"
        entries.append(entry)
        errors.append(error)
    log_extra("question", [str(entry["question"]) for entry in entries])
    log_extra("answer", [None if entry["answer"] is None else str(entry["answer"]) for entry in entries])
    log_extra("error", errors)
    return [0.0] * len(completions)


def _fault(source_dataset: str, options: dict[str, Any]) -> str:
    """The mistake in a data set's name or in the names of its options; empty if there is none."""
    known = {name: config for name, (_, config) in factory.DATASETS.items() if name != "composite"}
    if source_dataset not in known:
        return f"reasoning_gym has no data set {source_dataset!r}{did_you_mean(source_dataset, list(known))}"
    names = [field.name for field in fields(known[source_dataset]) if field.name not in ("seed", "size")]
    for name in options:
        if name not in names:
            near = did_you_mean(name, names)
            return f"data set {source_dataset} has no option {name!r}{near}; it has {', '.join(names)}"
    return ""


@lru_cache(maxsize=4096)  # the completions of a group have the same problem
def _problem(source_dataset: str, options: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The data set of one problem, and the problem; `options` is JSON."""
    source = factory.create_dataset(source_dataset, seed=seed, size=1, **json.loads(options))
    return source, source[0]


def score(completions: Sequence[Any], reasoning_gym: Sequence[dict[str, Any]]) -> list[float]:
    """The data set's own score of each completion's answer, from 0 to 1; NaN if its scorer is broken.

    The answer is the text in the last <answer> and </answer>, else the whole completion. An answer that the scorer
    cannot read is wrong.

    Args:
        reasoning_gym: for each completion, `source_dataset`, `options` and `seed` of its problem.
    """
    return [
        _score(
            _answer(completion_text(completion)),
            *_problem(row["source_dataset"], json.dumps(row["options"], sort_keys=True), row["seed"]),
        )
        for completion, row in zip(completions, reasoning_gym, strict=True)
    ]


def _answer(text: str) -> str:
    tagged = _ANSWER_TAG.findall(text)
    return (tagged[-1] if tagged else text).strip()


def _score(answer: str, source: Any, entry: dict[str, Any]) -> float:
    if _EVALUATES.search(inspect.getsource(type(source).score_answer)) and not is_plain_expression(answer):
        return 0.0
    try:
        return float(source.score_answer(answer, entry))
    except UNREADABLE:
        pass
    except (MemoryError, RecursionError):
        return math.nan
    try:
        source.score_answer(entry["answer"], entry)
    except Exception:
        return math.nan
    return 0.0


def is_plain_expression(text: str) -> bool:
    """True if evaluating the text as Python can neither reach an attribute nor call anything but known functions.

    Allowed are numbers, names, strings, brackets, + - * / // % ** and calls of `FUNCTIONS`, with limits on the length,
    the depth of brackets, the digits of numbers and the size of powers.
    """
    if len(text) > LONGEST_EXPRESSION:
        return False
    position, depth, before, power = 0, 0, "", 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return False
        position, token, kind = match.end(), match[0], match.lastgroup
        if kind == "space":
            continue
        if not _may_follow(token, str(kind), before):
            return False
        if token == "**":
            power = _power_after(text[position:], power)
            if power > LARGEST_POWER:
                return False
        depth += (token in "([") - (token in ")]") if kind == "sign" else 0
        if depth > DEEPEST_BRACKETS:
            return False
        before = token
    return True


def _may_follow(token: str, kind: str, before: str) -> bool:
    """False for a token that, after `before`, is a call, an attribute, or a string or list of unlimited length."""
    if kind == "name":
        return "__" not in token and token not in ("lambda", "import", "yield", "await")
    if kind == "number":
        return len(token) <= LONGEST_DIGITS
    if kind == "string":  # 'a' * 9 and f'...' are refused
        return before not in ("*", "%") and not re.fullmatch(r"[A-Za-z_]\w*", before)
    if token == "(":
        return before in FUNCTIONS or not re.fullmatch(r"[A-Za-z_]\w*|\)|\]|['\"].*", before)
    if token == "[":
        return before not in ("*", "%")
    return not (token in ("*", "%") and re.fullmatch(r"\]|['\"].*", before))


def _power_after(rest: str, power: int) -> int:
    """The product of the exponents so far and the next; too large if it is no number, name or fraction in brackets."""
    match = _EXPONENT.match(rest)
    if match is None or rest[match.end() :].lstrip().startswith("**"):  # a tower of powers
        return LARGEST_POWER + 1
    digits = match["number"] or match["top"]
    if digits:
        return power * max(1, int(digits)) if len(digits) < 6 else LARGEST_POWER + 1
    term = match["term"]
    if term is not None and ("**" in term or not re.search("[A-Za-z]", term)):
        return LARGEST_POWER + 1
    return power
