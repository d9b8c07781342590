"""Reading the number that a text states as its answer: forms that the table of `test_answers.py` does not have."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.llm.rewards.numbers import read_number
from covey.llm.rewards.rules import solves_countdown


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("(3)-4", None),
        ("-3-4", None),
        ("5-", None),
        ("-$5", -5),
        ("$-5$", -5),
        ("20 - $5", None),
        ("", None),
        ("3-\\frac{1}{2}", None),
        ("x\\frac{1}{2}", None),
        ("1,234 1/2", None),
        ("1.5×10⁻³", Fraction(3, 2000)),
        ("2*10**3 m", 2000),
        ("1.5e−3", Fraction(3, 2000)),
        ("1e400", None),
        ("(-2)^3", None),
        ("10⁵", 100_000),
        ("\\sqrt[3]{8} = 2", 2),
        ("\\boxed{5\\text{ cm}^{2}}", 5),
        ("5\\text{ and }-3", None),
        ("‑５７", -57),
        ("1\u202f234\u00a0567", 1234567),
        ("12\u00a034", None),
        ("9" * 5000, None),  # int() itself refuses this one
        ("\\boxed{5} and 6", 5),
        ("\\boxed{4} \\boxed{5}", 5),
        ("\\boxed{5\\text{ m in 2 s}} 7", None),
        ("\\boxed{x = 5} 7", 5),
        ("\\boxed{none} 6", None),
        ("<answer> 5 </answer> 6", 5),
        ("#### 1,200\nthat is 3", 1200),
        ("12 / 2 = <<12/2=6>>6\n#### 6", 6),
        ("The answer is 5, since 2 + 3 is 5 and not 9", 5),
        ("The answer is **-12**. Check: 3", -12),
        ("Answer: $\\$1,050$ (3 items)", 1050),
        ("answer = 7 (of 9)", 7),
        ("answer is 3/4 of 8", Fraction(3, 4)),
        ("The answer is 4. No: the answer is 5! 6", 5),
        ("The answer is 47 + 10 = 57", 57),  # not 47
        ("The answer is 120 + 3", None),  # not 3, 12 or 120
    ],
)
def test_read_number(text, number):
    read = read_number(text)
    assert (read and read.value) == number


@pytest.mark.slow
@given(st.integers(-(10**18), 10**18), st.text("abc .:;\n", max_size=5), st.sampled_from(["{}", "{:,}", "+{}"]))
def test_any_integer_is_read_from_any_sentence(number, words, style):
    if style == "+{}" and number < 0:
        style = "{}"
    written = style.format(number)
    assert read_number(f"7 8 so{words} it is {written}").value == number
    assert read_number(f"7 8 so{words} it is {written.replace('-', '−')} \\boxed{{}}").value == number
    assert read_number(f"\\boxed{{{written}}} {words} 9").value == number


@pytest.mark.slow
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_decimals_are_read_exactly(number):
    assert read_number(f"so it is {number:f}!").value == Fraction(number)


HOSTILE = [
    "1,",
    "1,111",
    "answer is ",
    "9",
    "\\boxed{",
    "<answer>",
    "#### ",
    "-",
    "1/",
    "\\frac{1",
    "answer",
    "1e",
    "$",
    "１",
    "^",
    "2^{",
    "1x10^1",
    "\\sqrt[",
    "\\text{a}^",
    "(2)^",
    "1 1/1",
    "1\u00a0000",
    "²",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_long_hostile_completions_take_no_time(piece):
    text = piece * (40_000 // len(piece))
    began = time.process_time()
    read_number(text)
    solves_countdown(text, [1, 2], 3)
    assert time.process_time() - began < 2.0, "seconds of the processor, of a hundredth that are expected"
