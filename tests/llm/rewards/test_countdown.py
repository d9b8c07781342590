"""The reward `countdown` on right, wrong and hostile completions."""

import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.llm.rewards.rules import countdown, solves_countdown

NUMBERS, TARGET = [3, 5, 2, 2], 16


@pytest.mark.parametrize(
    "text",
    [
        "(3 + 5) * 2",
        "Let me see: 3 + 5 is 8.\n(3+5)*2 = 16",
        "**Answer:** `(3 + 5) × 2`",
        "<answer>(3 + 5) * 2</answer> which is what you wanted",
        "first \\boxed{1} then $\\boxed{(3 + 5) \\times 2}$",
        "2 * 5 + 3 * 2",
        "-(-3 - 5) * 2",
        "(3 − -5) * 2",
        "3 * 5 + 2 / 2",
    ],
)
def test_right_countdown_answers(text):
    assert solves_countdown(text, NUMBERS, TARGET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(3 + 5)",
        "16",  # the target is not a given number
        "16 = (3 + 5) * 2",
        "(3 + 5) + 5 + 3",  # numbers used twice
        "2 * 2 * 2 * 2",
        "2 ** 2 ** 2",  # a power
        "35 - 22 + 3",  # glued numbers
        "33 // 2",
        "16.0",
        "1_6",
        "0x10",
        "1e1 + 6",
        "True * 16",
        "8 << 1",
        "(3 + 5) * 2 if 1 else 0",
        "[16][0]",
        "(3 + 5) (2)",  # a call
        "(3 + 5), 2",
        "+" * 150 + "2",  # unary plus
        "(3 + 5) * 2; 1",
        "__import__('os').system('true') or 16",
        "(lambda: 16)()",
        "5 / (2 - 2)",
        "(3 + 5) * 2)",
        "((((3 + 5) * 2",
        "(" * 90 + "16" + ")" * 90,
        "(" * 5000 + "2" + ")" * 5000,
        "-" * 5000 + "2",
        "--" * 100 + "(3 + 5) * 2",  # right, but longer than anything honest
        "9**9**9**9**9",
        "9" * 190,
        "9" * 5000,
        "2*" * 5000 + "2",
        "(3 + 5) * 2\x00",
        "(3 + 5) * 2\nor perhaps (3 + 5)",  # the last line counts
        "<answer>(3 + 5) * 2</answer> <answer>3</answer>",  # the last answer counts
    ],
)
def test_wrong_and_hostile_countdown_answers(text):
    assert not solves_countdown(text, NUMBERS, TARGET)


def test_countdown_allows_only_the_listed_operators_and_uses_exact_fractions():
    assert solves_countdown("8 / 2", [8, 2], 4)
    assert not solves_countdown("8 / 2", [8, 2], 4, ["+", "-", "*"])
    assert solves_countdown("8 / (3 - 8 / 3)", [8, 8, 3, 3], 24)  # wrong in floating point
    rows = {"numbers": [[8, 2], [8, 2]], "target": [4, "10"]}
    assert countdown(["8 / 2", "8 + 2"], **rows) == [1, 1]
    assert countdown(["8 / 2", "8 + 2"], **rows, operators=[["+"], ["+"]]) == [0, 1]


@given(st.text("0123456789+-*/() ", max_size=30))
def test_countdown_agrees_with_python_on_whatever_it_accepts(text):
    tokens = [int(token) for token in re.findall(r"\d+", text)]
    for target in range(4):
        if solves_countdown(text, tokens, target):
            assert eval(re.sub(r"(\d+)", r"Fraction(\1)", text.strip(" *")), {"Fraction": Fraction}) == target
            assert not solves_countdown(text, tokens[:-1] if Counter(tokens)[tokens[-1]] else [], target)
