"""The reward `numeric`."""

import re

import pytest

from covey.llm.rewards.numbers import numeric


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
