"""The reward `repetition`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config import RewardConfig
from covey.llm.grader import build_grader
from covey.llm.rewards.repetition import repetition_penalty
from helpers.graded import group, start


@pytest.mark.parametrize(
    ("ids", "size", "penalty"),
    [
        ([1, 2, 3, 4], 2, 0),
        ([1, 2, 1, 2], 2, -1 / 3),  # 12 21 12
        ([1, 2, 1, 2, 1, 2], 2, -3 / 5),  # 12 21 12 21 12
        ([1, 1, 1, 1], 1, -3 / 4),
        ([5] * 101, 2, -0.99),
        ([1, 2], 3, 0),  # shorter than an n-gram
        ([], 1, 0),
    ],
)
def test_repetition_by_hand(ids, size, penalty):
    assert repetition_penalty([""], [ids], unit="tokens", ngram_size=size) == pytest.approx([penalty])


def test_words_ignore_case_and_white_space():
    (graded,) = build_grader([RewardConfig(name="repetition", unit="words", ngram_size=2)], ()).grade(
        [group(start(), "So it is", "so it is\n\nSo  IT is", "abab")]
    )
    assert [rollout.reward for rollout in graded.rollouts] == pytest.approx([0, -2 / 5, 0])
    assert repetition_penalty(["abab"], [[]], unit="characters", ngram_size=2) == pytest.approx([-1 / 3])


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_it_counts_ngrams_that_occurred_before(ids, size):
    ngrams = [ids[i : i + size] for i in range(len(ids) - size + 1)]
    again = sum(ngram in ngrams[:i] for i, ngram in enumerate(ngrams))
    expected = -again / len(ngrams) if ngrams else 0
    assert repetition_penalty([""], [ids], unit="tokens", ngram_size=size) == pytest.approx([expected])
