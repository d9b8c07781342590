"""How the grader calls rewards and adds them up."""

import pytest

from covey.comparison.compare import read_contestants, score_kind
from covey.config import ConfigError, RewardConfig, RunConfig
from covey.config.rewards import check_reward
from covey.data import Start
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.tracking.wording import SCORE_KINDS
from helpers.graded import group, rewards_of, start


def test_reward_functions_see_what_trl_shows_them():
    seen = {}

    def look(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "hi"}]
    groups = [group(start(prompt="raw", answer="1"), "a", "b"), group(start(prompt=chat, hint="h"), "c")]
    build_grader([look], ()).grade(groups)
    assert seen.pop("trainer_state").global_step == 0
    assert all(callable(seen.pop(name)) for name in ("log_metric", "log_extra"))
    assert seen == {
        "prompts": ["raw", "raw", chat],
        "completions": ["a", "b", [{"role": "assistant", "content": "c"}]],
        "completion_ids": [[7], [7, 7], [7]],
        "answer": ["1", "1", None],
        "hint": [None, None, "h"],
    }


def test_functions_get_only_what_they_name_and_may_log():
    def sparse(completions, trainer_state, log_metric, log_extra):
        log_metric("x", 1.0)
        log_extra("column", list(completions))
        return [trainer_state.global_step] * len(completions)

    groups = [group(start(answer="1"), "a", "b")]
    for rollout in groups[0].rollouts:
        rollout.version = 4
    assert rewards_of(build_grader([sparse], ()).grade(groups)) == [[4.0, 4.0]]


def test_async_functions_and_callable_objects_work():
    async def later(completions, **_):
        return [len(text) for text in completions]

    class Judge:
        def __call__(self, completions, **_):
            return [True for _ in completions]

    groups = build_grader([later, Judge()], ()).grade([group(start(), "abc", "d")])
    assert rewards_of(groups) == [[4.0, 2.0]]
    assert groups[0].rollouts[0].reward_parts == {"later": 3.0, "Judge": 1.0}


def test_weighted_sum_parts_and_score():
    def length(completions, **_):
        return [len(text) for text in completions]

    rewards = [
        WeightedReward.from_function(length, weight=0.5),
        RewardConfig(name="numeric", weight=2.0, score=True),
        RewardConfig(name="numeric", weight=-1.0, answer_column="other"),
    ]
    groups = build_grader(rewards, ()).grade([group(start(answer="12", other="7"), "12", "7", "123")])
    assert rewards_of(groups) == [[3.0, -0.5, 1.5]]
    assert [rollout.score for rollout in groups[0].rollouts] == [1.0, 0.0, 0.0]
    assert groups[0].rollouts[1].reward_parts == {"length": 1.0, "numeric": 0.0, "numeric_2": 1.0}


def test_none_from_one_of_several_leaves_its_term_out():
    def some(completions, **_):
        return [None if text == "skip" else 1.0 for text in completions]

    def always(completions, **_):
        return [0.25] * len(completions)

    assert rewards_of(build_grader([some, always], ()).grade([group(start(), "skip", "take")])) == [[0.25, 1.25]]


def test_none_from_all_is_a_failed_rollout_and_many_stop_the_run():
    def some(completions, **_):
        return [None if text == "skip" else 1.0 for text in completions]

    groups = [group(start(), "skip", "a", "b", "c", "d")]
    assert rewards_of(build_grader([some], ()).grade(groups)) == [[None, 1.0, 1.0, 1.0, 1.0]]
    assert groups[0].rollouts[0].score is None
    message = r"2 of 5 rollouts could not be graded, more than 20 %: reward 'some': returned None"
    with pytest.raises(GradingError, match=message):
        build_grader([some], ()).grade([group(start(), "skip", "skip", "b", "c", "d")])


def own(score, **options):
    def mine(completions, **columns):
        return [score] * len(completions)

    return WeightedReward.from_function(mine, **options)


def test_what_evaluations_average_is_an_accuracy_by_the_rewards_kind_alone(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completions, **columns):\n    return [1.0] * len(completions)\n")
    function = f"{tmp_path}/mine.py:mine"
    kinds = {
        "accuracy": [
            *(RewardConfig(name=name) for name in ("numeric", "exact", "countdown")),
            RewardConfig(name="format", pattern="a"),
            RewardConfig(function=function, binary=True),
            own(1.0, binary=True),
        ],
        "score": [
            RewardConfig(name="digits"), RewardConfig(name="step_numbers"), RewardConfig(function=function), own(1.0),
        ],
    }  # fmt: skip
    for kind, rewards in kinds.items():
        for reward in rewards:
            grader = build_grader([reward], ())
            assert grader.score_kind == kind, reward
            grader.close()
    assert (
        build_grader([RewardConfig(name="digits"), RewardConfig(name="numeric", score=True)], ()).score_kind
        == "accuracy"
    )


def test_a_binary_reward_that_gives_partial_credit_has_failed():
    starts = [Start(0, "p", {"answer": "1"})]
    with pytest.raises(ConfigError, match=r"returned 0.5, but it is binary: let it return 0 or 1"):
        build_grader([own(0.5, binary=True)], ()).check(starts)
    for score in (0, 1, True, 1.0):
        build_grader([own(score, binary=True)], ()).check(starts)
    build_grader([own(0.5)], ()).check(starts)
    with pytest.raises(ConfigError, match="a reward per step is not binary"):
        own([1.0], binary=True, per_step=True)
    for fields, said in (
        ({"name": "numeric", "binary": True}, "binary is set, but not used with numeric"),
        ({"function": f"{__file__}:own", "binary": True, "per_step": True}, "remove binary"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_reward(RewardConfig(**fields), "[[rewards]] number 1")


def test_recipes_with_different_kinds_of_scores_are_not_compared(tmp_path):
    same = ["arithmetic_grpo", "family"]
    assert {score_kind(one.config) for one in read_contestants(same)} == {"accuracy"}
    other = tmp_path / "other.toml"
    other.write_text('[task]\nname = "arithmetic"\n[[rewards]]\nname = "digits"\n')
    with pytest.raises(ConfigError, match=r"arithmetic_grpo by its accuracy and other by its score is measured"):
        read_contestants([same[0], str(other)])
    partial = RunConfig(rewards=(RewardConfig(name="digits"),))
    assert (score_kind(partial), score_kind(RunConfig())) == ("score", "accuracy")


@pytest.mark.parametrize(
    ("reward", "limits"),
    [
        (RewardConfig(name="digits"), (0, 1)),
        (RewardConfig(name="length", length_limit=9), (-1, 0)),
        (RewardConfig(name="numeric"), (0, 1)),
        (
            RewardConfig(judge="http://127.0.0.1:1", judge_model="m", judge_prompt="{completion}", judge_range=(0, 10)),
            (0, 10),
        ),
        (lambda completions, **_: [0.0], None),
    ],
    ids=["digits", "length", "numeric", "judge", "function"],
)
def test_an_interval_is_inside_the_range_of_the_reward(reward, limits):
    grader = build_grader([reward], ())
    kind = SCORE_KINDS[grader.score_kind].within(grader.score_range)
    low, high = limits or (0.0, 1.0)
    for found in (kind.estimate([low, high]), kind.estimate_best([low, high])):
        assert (low <= found["low"] and found["high"] <= high) == (limits is not None)
