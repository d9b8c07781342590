"""The reward `numeric`."""

import pytest

from covey.llm.rewards.numeric import numeric


def test_numeric_compares_exactly():
    assert numeric(["0.3", "0.30000000000000004", "3e-1"], answer=["0.3", "0.3", 0.3]) == [1, 0, 1]
    assert numeric(["1/3", "0.3333333333333333"], answer=["1/3", "1/3"]) == [1, 0]
    assert numeric([str(2**60 + 1)], answer=[2**60]) == [0]  # equal as floats
    assert numeric(["six", "sick"], answer=["6", "6"]) == [1, 0]
    assert numeric(["72"], answer=["48 / 2 = <<48/2=24>>24\n#### 72"]) == [1]
    assert numeric([[{"role": "assistant", "content": "5"}]], answer_column="gold", gold=["5"]) == [1]


def test_numeric_refuses_data_that_it_cannot_use():
    with pytest.raises(ValueError, match="no column 'answer', it has gold"):
        numeric(["5"], gold=["5"])
    with pytest.raises(ValueError, match="'five' is not a number"):
        numeric(["5"], answer=["five"])
