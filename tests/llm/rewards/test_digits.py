"""The reward `digits`."""

import pytest

from covey.llm.rewards.digits import digits
from covey.llm.rewards.numeric import numeric


@pytest.mark.parametrize(
    ("text", "answer", "share"),
    [
        ("156", "156", 1.0),
        ("89 + 67 = 157.", "156", 3 / 4),
        ("56", "156", 3 / 4),
        ("1560", "156", 1 / 5),  # aligned at the right: 0 for 6, 6 for 5, 5 for 1; only the sign is right
        ("31", "-31", 2 / 3),
        ("-31", "31", 2 / 3),
        ("-45", "-31", 1 / 3),
        ("45", "-31", 0.0),
        ("no number", "7", 0.0),
        ("7777777777", "7", 2 / 11),  # more digits earn nothing
    ],
)
def test_digits_pays_for_each_right_place(text, answer, share):
    assert digits(completions=[text], answer=[answer]) == pytest.approx([share])


def test_digits_orders_a_group_that_numeric_calls_all_wrong():
    texts = ["10", "66", "60", "-66"]
    assert numeric(completions=texts, answer=["61"] * 4) == [0.0] * 4
    assert digits(completions=texts, answer=["61"] * 4) == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])
