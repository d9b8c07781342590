"""The run's own term of the reward: completions that come near the token limit cost something."""

from __future__ import annotations

import math

import pytest

from covey.config import ArithmeticConfig, RewardConfig, RunConfig, SamplingConfig
from covey.data import Group, Start
from covey.experiment.problem import build_problem
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.overlong import overlong
from covey.llm.rewards.weighted_reward import WeightedReward
from helpers.tabular_policy import rollout


@pytest.mark.parametrize(
    ("length", "value"),
    [(1, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1)],  # free up to 20 - 4
)
def test_overlong_by_hand(length, value):
    assert overlong([[0] * length], max_new_tokens=20, overlong_tokens=4) == [value]


def test_overlong_as_in_the_paper():
    """Section 4.1: at most 20,480 tokens, of which the last 4,096 cost."""
    ids = [range(16384), range(16384 + 1024), range(20480)]
    assert overlong(ids, max_new_tokens=20480, overlong_tokens=4096) == [0, -0.25, -1]


def graded(own, lengths, **options) -> Group:
    grader = build_grader(own, (), [WeightedReward.overlong(10, 5)])
    group = Group(Start(0, "1 + 1"), [rollout([1] * length, None) for length in lengths])
    return grader.grade([group])[0]


def test_the_term_is_added_and_is_not_the_score():
    group = graded([lambda completions, **_: [2.0] * len(completions)], [3, 6, 10])
    assert [item.reward for item in group.rollouts] == pytest.approx([2, 1.8, 1])
    assert [item.score for item in group.rollouts] == [2, 2, 2]
    assert [item.reward_parts["overlong"] for item in group.rollouts] == pytest.approx([0, -0.2, -1])


def test_a_rollout_that_nobody_else_graded_stays_without_a_reward():
    def mostly(completions, **_):
        return [None, *[1.0] * (len(completions) - 1)]

    assert [item.reward for item in graded([mostly], [2] * 6).rollouts] == [None, *[1.0] * 5]
    with pytest.raises(GradingError, match="returned None"):
        graded([lambda completions, **_: [None] * len(completions)], [2, 2])


def problem(**fields):
    return build_problem(RunConfig(task=ArithmeticConfig(), **fields))


@pytest.mark.slow
def test_a_config_adds_it_where_it_is_asked_for():
    def names(**fields) -> list[str]:
        return [reward.name for reward in problem(**fields).grader.rewards]

    assert names() == ["numeric"]
    assert names(algorithm="dapo") == ["numeric", "overlong"]
    assert names(algorithm="dapo", sampling=SamplingConfig(overlong_tokens=0)) == ["numeric"]
    assert names(algorithm="ppo", sampling=SamplingConfig(overlong_tokens=8)) == ["numeric", "overlong"]
    assert names(algorithm="dapo", rewards=(RewardConfig(name="digits"), RewardConfig(name="exact"))) == [
        "digits", "exact", "overlong",
    ]  # fmt: skip


def test_a_fifth_of_the_limit_is_dapos_default():
    options = problem(algorithm="dapo", sampling=SamplingConfig(max_new_tokens=64)).grader.rewards[-1].options
    assert options == {"max_new_tokens": 64, "overlong_tokens": 13}


def test_the_dry_run_does_not_take_the_term_for_a_reward():
    from covey.config import ConfigError

    grader = build_grader([lambda completions, **_: [None] * len(completions)], (), [WeightedReward.overlong(10, 5)])
    with pytest.raises(ConfigError, match=r"reward '<lambda>' returned None"):
        grader.check([Start(0, "1 + 1"), Start(1, "2 + 2")])
    assert math.isfinite(overlong([[1]], max_new_tokens=1, overlong_tokens=1)[0])
