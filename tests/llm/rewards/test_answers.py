"""`numeric` and `math` over a table of answers in the forms that models write, with verdicts decided beforehand."""

import re
from collections import Counter
from pathlib import Path

import pytest

from covey.llm.rewards.math import math_equal
from covey.llm.rewards.numbers import numeric, plain_verdicts

TABLE = Path(__file__).with_name("answers.tsv")
REFUSED = "-"


def rows():
    """(numeric, math, right answer, completion) for each row."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            text = re.sub("⟨([0-9a-f]{4})⟩", lambda code: chr(int(code[1], 16)), line.replace("⏎", "\n"))
            yield tuple(text.split("\t"))


def of_numeric(answer, completion):
    return _verdict(numeric, answer, completion)


def of_math(answer, completion):
    (verdict,) = plain_verdicts([completion], answer=[answer])
    return str(int(verdict)) if verdict is not None else _verdict(math_equal, answer, completion)


def _verdict(reward, answer, completion):
    try:
        return str(int(reward([completion], answer=[answer])[0]))
    except ValueError:
        return REFUSED


def of_math_verify(answer, completion):
    """math-verify as its documentation shows it."""
    from math_verify import parse, verify

    gold = parse(f"${answer}$", parsing_timeout=None)
    return str(int(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))) if gold else REFUSED


JUDGES = {"numeric": (0, of_numeric), "math": (1, of_math), "math-verify": (1, of_math_verify)}


def wrong(judge):
    """The rows that a judge gets wrong: (decided, given, right answer, completion)."""
    column, verdict_of = JUDGES[judge]
    given = ((row[column], verdict_of(*row[2:]), *row[2:]) for row in rows())
    return [row for row in given if row[0] != row[1]]


# Right, but neither reads them as right.
MISREAD = {
    ("72", "The answer is 72, or six dozen."),
    ("2.5", "two and a half, 2.5"),
    ("36", "So, it takes 36 minutes for 2 people."),
    ("72", "x = 72. So the answer is x."),
    ("5", "He has five apples left."),
    ("12", "12 is the smallest number with 6 divisors."),
    ("12", ">>> 12"),
    ("0.25", "The probability is 1 in 4."),
}


@pytest.mark.parametrize("judge", ["numeric", pytest.param("math", marks=pytest.mark.slow)])
def test_every_verdict_is_the_decided_one_but_for_eight_right_answers(judge):
    assert {(decided, given, *rest) for decided, given, *rest in wrong(judge)} == {("1", "0", *row) for row in MISREAD}


if __name__ == "__main__":
    for name, (column, _) in JUDGES.items():
        print(name, dict(Counter(row[column] for row in rows())), dict(Counter(row[:2] for row in wrong(name))))
