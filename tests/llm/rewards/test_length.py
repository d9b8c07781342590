"""The reward `length`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config import ArithmeticConfig, ConfigError, RewardConfig, RunConfig, SamplingConfig
from covey.config.rules import validate
from covey.llm.grader import build_grader
from covey.llm.rewards.length import length_penalty
from covey.llm.rewards.overlong import overlong
from helpers.graded import group, start


def penalties(lengths, *, target=10, limit=20, shape="linear", both_sides=False):
    ids = [[7] * length for length in lengths]
    return length_penalty(
        [""] * len(ids), ids,
        unit="tokens", length_target=target, length_limit=limit, length_shape=shape, length_both_sides=both_sides,
    )  # fmt: skip


def test_linear_by_hand():
    assert penalties([1, 10, 11, 15, 20, 500]) == pytest.approx([0, 0, -0.1, -0.5, -1, -1])


def test_cosine_by_hand():
    assert penalties([1, 10, 15, 20, 500], shape="cosine") == pytest.approx([0, 0, -0.5, -1, -1])
    (early, late) = penalties([12, 18], shape="cosine")
    assert early == pytest.approx(-(1 - math.cos(0.2 * math.pi)) / 2)
    assert late == pytest.approx(-1 - early)


def test_both_sides_by_hand():
    assert penalties([0, 5, 8, 10, 12, 30], both_sides=True) == pytest.approx([-1, -0.5, -0.2, 0, -0.2, -1])


@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 140))
def test_linear_is_dapos_penalty_where_that_is_defined(length, tokens, free):
    """DAPO's L is the limit here, and its L - C the target."""
    most = free + tokens
    expected = overlong([[0] * min(length, most)], max_new_tokens=most, overlong_tokens=tokens)
    assert penalties([length], target=free, limit=most) == pytest.approx(expected)


def test_units():
    for unit, value in [("tokens", -0.2), ("words", -0.4), ("characters", -1.0)]:
        config = RewardConfig(name="length", length_limit=10, unit=unit)
        (graded,) = build_grader([config], ()).grade([group(start(), "x", "  four words\nare here")])
        assert graded.rollouts[1].reward == pytest.approx(value), unit


def test_lengths_that_cannot_work_are_refused():
    for options, message in [
        ({}, "needs a value for length_limit, such as length_limit = 200"),
        ({"length_limit": 20, "length_target": 20}, r"length_limit \(20\) must be above length_target \(20\)"),
        ({"length_limit": 20, "length_shape": "round"}, "must be linear or cosine"),
        ({"length_limit": 20, "unit": "token"}, "did you mean 'tokens'?"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_grader([RewardConfig(name="length", **options)], ())


def test_a_target_that_no_completion_exceeds_is_refused():
    def config(**options):
        reward = RewardConfig(name="length", length_target=64, length_limit=100, **options)
        return RunConfig(task=ArithmeticConfig(), rewards=(reward,), sampling=SamplingConfig(max_new_tokens=64))

    with pytest.raises(ConfigError, match=r"length_target \(64\).*max_new_tokens \(64\)"):
        validate(config())
    validate(config(unit="words"))
    validate(config(length_both_sides=True))
