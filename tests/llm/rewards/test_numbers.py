"""Answers that are numbers: `numeric`, `read_number`, and the verdicts that come before math-verify.

The table of `test_answers.py` has more forms.
"""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.llm.rewards.math import math_equal
from covey.llm.rewards.numbers import numeric, plain_verdicts, read_number
from covey.llm.rewards.rules import solves_countdown


def test_numeric_compares_exactly():
    assert numeric(["0.3", "0.30000000000000004", "3e-1"], answer=["0.3", "0.3", 0.3]) == [1, 0, 1]
    assert numeric(["1/3", "0.3333333333333333"], answer=["1/3", "1/3"]) == [1, 0]
    assert numeric([str(2**60 + 1)], answer=[2**60]) == [0]  # equal as floats
    assert numeric(["six", "sick"], answer=["6", "6"]) == [1, 0]
    assert numeric(["72"], answer=["48 / 2 = <<48/2=24>>24\n#### 72"]) == [1]
    assert numeric([[{"role": "assistant", "content": "5"}]], answer_column="gold", gold=["5"]) == [1]


def test_percent_is_both_the_number_and_a_hundredth_of_it():
    assert numeric(["50%", "50%", "0.5%", "50"], answer=["0.5", "50", "50", "50%"]) == [1, 1, 0, 1]
    assert numeric(["0.5", "50%", "5%"], answer=["50%", "50%", "50%"]) == [1, 1, 0]


def test_the_answer_is_the_other_side_of_a_name_or_a_calculation():
    given = ["x = 5", "2 + 3 = 5", "5 = 10 / 2", "2x = 5", "x + 1 = 5"]
    assert numeric([f"\\boxed{{{text}}}" for text in given], answer=["5"] * 5) == [1, 1, 1, 0, 0]
    assert numeric(["1/8 or 12.5%", "1/8 or 1/9"], answer=["1/8", "1/8"]) == [1, 0]


REFUSED = """five; 14, 15, 16; 3:40; x = 5; y = 2x + 1; (1, 2); [0, 1]; {1, 2}; x > 5; 5x; 2^5; \\sqrt{2}; 5\\pi; 5 or 6
5 to 6; 5 and 6; 12_7; 5 hours 20 minutes; 2024-01-15; Room 7; 1/0; 1e999; B; ?; None; nan; $; \\boxed{5x}; #### 5, 6
3,14; 5-6"""


@pytest.mark.parametrize("answer", ["", *re.split("; |\n", REFUSED)])
def test_an_answer_that_is_not_one_number_is_refused(answer):
    with pytest.raises(ValueError, match=r"the answer .* is not a number: use the reward math, or exact for texts"):
        numeric(["5"], answer=[answer])


def test_numeric_refuses_data_without_the_column():
    with pytest.raises(ValueError, match="no column 'answer', it has gold"):
        numeric(["5"], gold=["5"])


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


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1),
        ("<answer>3/6</answer>", "0.5", 1),
        ("2 + 2 = 4\n#### 4", "4", 1),
        ("The answer is **57**", "57", 1),
        ("\\boxed{57} or #### 58", "57", 1),  # the box goes first
        ("\\boxed{0.333333}", "\\frac{1}{3}", None),  # equal after rounding: for math-verify to decide
        ("The answer is 57 apples", "57", 1),
        ("The answer is 3x", "3", 0),
        ("The answer is 57. Or 58.", "57", 0),
        ("\\boxed{50 + 7}", "57", None),  # math-verify computes
        ("\\boxed{\\sqrt{9}}", "3", None),
        ("57", "x", None),
        ("", "57", None),
    ],
)
def test_verdicts_by_hand(completion, answer, verdict):
    assert plain_verdicts([completion], answer=[answer]) == [verdict]


INTEGERS = st.integers(-2000, 2000)
NUMBERS = st.one_of(
    INTEGERS.map(str),
    INTEGERS.map("{:,}".format),
    st.decimals(-100, 100, places=3).map("{:f}".format),
    st.tuples(INTEGERS, st.integers(1, 12)).map("{0[0]}/{0[1]}".format),
    st.tuples(INTEGERS, st.integers(1, 12)).map(lambda pair: f"\\frac{{{abs(pair[0])}}}{{{pair[1]}}}"),
)


@pytest.mark.slow
@given(NUMBERS, NUMBERS)
@example("1,234", "1234")
@example("0.5", "1/2")
@example("\\frac{2}{4}", "1/2")
@example("0.333", "1/3")
@example("-0", "0")
@example("-0.0", "0")
def test_every_verdict_is_that_of_math_verify(given_number, answer):
    """math-verify is the independent judge of whether two numbers are equal."""
    for number in (given_number, answer):
        (verdict,) = plain_verdicts([f"\\boxed{{{number}}}"], answer=[answer])
        if verdict is not None:
            assert math_equal([f"\\boxed{{{number}}}"], answer=[answer]) == [verdict]
