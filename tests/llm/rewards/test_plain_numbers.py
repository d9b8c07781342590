"""The exact verdicts on plain numbers, which come before math-verify."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.llm.rewards.math import math_equal
from covey.llm.rewards.numbers import plain_verdicts


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
