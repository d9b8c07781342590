"""The reward `math`: mathematical equality by math-verify, an optional package.

This file is imported in worker processes alone. math-verify parses completions with SymPy, whose parser evaluates code
and whose simplifications may never end, so each answer has a deadline after which its process is killed.
"""

import logging
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from covey.llm.rewards.final_answer import column_of, completion_text, final_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off

_WHOLE = (LatexExtractionConfig(),)  # a stated answer is parsed as a whole, not searched for a number
_LATEX = r"\pi \infty \sqrt \leq \geq \pm \cdot \times \cup"
_COMMANDS = str.maketrans({sign: f"{latex} " for sign, latex in zip("π∞√≤≥±·×∪", _LATEX.split(), strict=True)})
_SEARCHED = (LatexExtractionConfig(), ExprExtractionConfig())

# Builds the tables of the parser, so that the deadline of the first answer does not include it.
verify(*map(partial(parse, parsing_timeout=None), ("$\\frac{x}{2}$", "$\\boxed{0.5x}$")), timeout_seconds=None)


def math_equal(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the answer of a completion is mathematically equal to the right one, else 0.

    The answer that a completion states (`final_answer`) is read as LaTeX, as a whole; math-verify looks for it in a
    completion without a mark and without a digit. The same holds for the right answer, which is LaTeX if it is not
    marked. A completion without an answer that can be parsed gets 0.

    Raises:
        ValueError: if the column is missing, or the right answer cannot be parsed.
        MemoryError: if the process has too little memory for the comparison.
    """
    return [
        _equal(completion_text(completion), str(answer))
        for completion, answer in zip(completions, column_of(columns, answer_column), strict=True)
    ]


def _equal(text: str, answer: str) -> float:
    gold_text = final_answer(answer, unmarked=False)
    gold = _parsed(_as_latex(answer if gold_text is None else gold_text))
    if not gold:
        raise ValueError(f"the answer {answer!r:.60} is not mathematics; use the exact reward for texts")
    stated = final_answer(text)
    given = _parsed(text, _SEARCHED) if stated is None else _parsed(_as_latex(stated))
    return float(any(_same(*pair) for pair in product(gold, given)))


def _same(gold: Any, given: Any) -> bool:
    try:
        # The deadline is the caller's. math-verify's own is a signal, which interrupts no computation in C.
        return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # SymPy cannot compare them
        return False


def _parsed(text: str, forms: Sequence[Any] = _WHOLE) -> list[Any]:
    """The expressions in a text; empty if there are none."""
    try:
        found: list[Any] = parse(text, forms, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []
    return found


def _as_latex(text: str) -> str:
    """An answer as math-verify finds it, in `\\boxed`, unless it has math delimiters of its own."""
    text = text.translate(_COMMANDS)
    return text if any(mark in text for mark in ("$", "\\(", "\\[")) else f"$\\boxed{{{text}}}$"
