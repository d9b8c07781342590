"""The built-in rewards on honest, awkward and hostile completions, and how the grader adds rewards up."""

import re
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.comparison.compare import read_contestants, score_kind
from covey.config import ConfigError, RewardConfig, RunConfig
from covey.config.validate import check_reward
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.builtin import countdown, digits, exact, format_match, numeric, read_number, solves_countdown
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.tasks import Arithmetic, Countdown, WordProblems


def start(index=0, prompt="2 + 2?", **columns):
    return Start(index=index, prompt=prompt, columns=columns)


def group(of, *texts):
    rollouts = [
        Rollout(context=(1,), actions=[7] * (i + 1), behavior_logprobs=[0.0] * (i + 1), end=EndReason.STOP, text=text)
        for i, text in enumerate(texts)
    ]
    return Group(of, rollouts)


def rewards_of(groups):
    return [[rollout.reward for rollout in one.rollouts] for one in groups]


# ---- reading numbers ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("57", 57),
        ("47 + 10 = 57", 57),
        ("It is 57.", 57),
        ("-57", -57),
        ("−57", -57),  # Unicode minus
        ("x=-5", -5),
        ("47-38", 38),  # a difference, not a negative number
        ("(3)-4", 4),
        ("-3-4", 4),
        ("5-", 5),
        ("1,234", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1,2,34", 34),  # a list
        ("12,34", 34),
        ("1{,}000", 1000),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("3/4", Fraction(3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("5/0", None),
        ("$5.00", 5),
        ("-$5", -5),
        ("$-5$", -5),
        ("20 - $5", 5),
        ("1.5e3", 1500),
        ("2 eggs", 2),
        ("50%", 50),
        ("x2", None),  # a name, not a number
        ("答案是5", 5),
        ("", None),
        ("no number", None),
        ("9" * 5000, None),  # int() itself refuses this one
        # what is marked as the answer goes first
        ("\\boxed{5} and 6", 5),
        ("\\boxed{4} \\boxed{5}", 5),
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("\\boxed{5\\text{ m in 2 s}} 7", 5),
        ("\\boxed{x = 5} 7", 5),
        ("\\boxed{5", 5),
        ("\\boxed{none} 6", 6),
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
        ("The answer is 120 + 3", 3),  # not 12 or 120
        ("The answer is\n\\[ 15 \\]", 15),
    ],
)
def test_read_number(text, number):
    assert read_number(text) == number


@given(st.integers(-(10**18), 10**18), st.text("abc .,:;=()\n", max_size=5), st.sampled_from(["{}", "{:,}", "+{}"]))
def test_any_integer_is_read_from_any_sentence(number, words, style):
    if style == "+{}" and number < 0:
        style = "{}"
    written = style.format(number)
    assert read_number(f"7 8{words} {written}") == number
    assert read_number(f"{written.replace('-', '−')} {words.replace('.', '').replace(',', '')} \\boxed{{}}") == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_decimals_are_read_exactly(number):
    assert read_number(f"so it is {number:f}!") == Fraction(number)


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
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_long_hostile_completions_take_no_time(piece):
    text = piece * (40_000 // len(piece))
    began = time.process_time()
    read_number(text)
    solves_countdown(text, [1, 2], 3)
    assert time.process_time() - began < 2.0, "seconds of the processor, of a hundredth that are expected"


def test_numeric_compares_exactly():
    assert numeric(["0.3", "0.30000000000000004", "3e-1"], answer=["0.3", "0.3", 0.3]) == [1, 0, 1]
    assert numeric(["1/3", "0.3333333333333333"], answer=["1/3", "1/3"]) == [1, 0]
    assert numeric([str(2**60 + 1)], answer=[2**60]) == [0]  # equal as floats
    assert numeric(["six"], answer=["6"]) == [0]
    assert numeric(["72"], answer=["48 / 2 = <<48/2=24>>24\n#### 72"]) == [1]
    assert numeric([[{"role": "assistant", "content": "5"}]], answer_column="gold", gold=["5"]) == [1]


def test_numeric_refuses_data_that_it_cannot_use():
    with pytest.raises(ValueError, match="no column 'answer', it has gold"):
        numeric(["5"], gold=["5"])
    with pytest.raises(ValueError, match="'five' is not a number"):
        numeric(["5"], answer=["five"])


def test_exact_forgives_outer_white_space_only():
    assert exact([" Paris\n", "paris", "Pa ris", "Paris."], answer=["Paris"] * 4) == [1, 0, 0, 0]
    assert exact(["5"], answer=[5]) == [1]


def test_format_matches_the_whole_completion():
    pattern = "<think>.*</think>-?[0-9]+"
    texts = ["<think>a\nb</think>5", "x<think>a</think>5", "<think>a</think>5 ", "<think>a</think>5\n"]
    assert format_match(texts, pattern=pattern) == [1, 0, 0, 0]


# ---- countdown ----

NUMBERS, TARGET = [3, 5, 2, 2], 16


@pytest.mark.parametrize(
    "text",
    [
        "(3 + 5) * 2",
        "Let me see: 3 + 5 is 8.\n(3+5)*2 = 16",
        "**Answer:** `(3 + 5) × 2`",
        "<answer>(3 + 5) * 2</answer> which is what you wanted",
        "first \\boxed{1} then $\\boxed{(3 + 5) \\times 2}$",
        "2 * 5 + 3 * 2",
        "-(-3 - 5) * 2",
        "(3 − -5) * 2",
        "3 * 5 + 2 / 2",
    ],
)
def test_right_countdown_answers(text):
    assert solves_countdown(text, NUMBERS, TARGET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(3 + 5)",
        "16",  # the target is no given number
        "16 = (3 + 5) * 2",
        "(3 + 5) + 5 + 3",  # numbers used twice
        "2 * 2 * 2 * 2",
        "2 ** 2 ** 2",  # a power
        "35 - 22 + 3",  # glued numbers
        "33 // 2",
        "16.0",
        "1_6",
        "0x10",
        "1e1 + 6",
        "True * 16",
        "8 << 1",
        "(3 + 5) * 2 if 1 else 0",
        "[16][0]",
        "(3 + 5) (2)",  # a call
        "(3 + 5), 2",
        "+" * 150 + "2",  # unary plus
        "(3 + 5) * 2; 1",
        "__import__('os').system('true') or 16",
        "(lambda: 16)()",
        "5 / (2 - 2)",
        "(3 + 5) * 2)",
        "((((3 + 5) * 2",
        "(" * 90 + "16" + ")" * 90,
        "(" * 5000 + "2" + ")" * 5000,
        "-" * 5000 + "2",
        "--" * 100 + "(3 + 5) * 2",  # right, but longer than anything honest
        "9**9**9**9**9",
        "9" * 190,
        "9" * 5000,
        "2*" * 5000 + "2",
        "(3 + 5) * 2\x00",
        "(3 + 5) * 2\nor perhaps (3 + 5)",  # the last line counts
        "<answer>(3 + 5) * 2</answer> <answer>3</answer>",  # the last answer counts
    ],
)
def test_wrong_and_hostile_countdown_answers(text):
    assert not solves_countdown(text, NUMBERS, TARGET)


def test_countdown_allows_only_the_listed_operators_and_uses_exact_fractions():
    assert solves_countdown("8 / 2", [8, 2], 4)
    assert not solves_countdown("8 / 2", [8, 2], 4, ["+", "-", "*"])
    assert solves_countdown("8 / (3 - 8 / 3)", [8, 8, 3, 3], 24)  # wrong in floating point
    rows = {"numbers": [[8, 2], [8, 2]], "target": [4, "10"]}
    assert countdown(["8 / 2", "8 + 2"], **rows) == [1, 1]
    assert countdown(["8 / 2", "8 + 2"], **rows, operators=[["+"], ["+"]]) == [0, 1]


@given(st.text("0123456789+-*/() ", max_size=30))
def test_countdown_agrees_with_python_on_whatever_it_accepts(text):
    tokens = [int(token) for token in re.findall(r"\d+", text)]
    for target in range(4):
        if solves_countdown(text, tokens, target):
            assert eval(re.sub(r"(\d+)", r"Fraction(\1)", text.strip(" *")), {"Fraction": Fraction}) == target
            assert not solves_countdown(text, tokens[:-1] if Counter(tokens)[tokens[-1]] else [], target)


def test_every_task_grades_its_own_answers_as_right():
    for task in (Arithmetic(operators=("+", "-", "*")), Countdown(), WordProblems(steps=(1, 2, 3, 4))):
        grader = build_grader([], task.default_rewards)
        starts = task.draw(0, 1, 20)
        grader.check(starts)
        groups = grader.grade([group(one, one.columns["answer"], "nothing") for one in starts])
        assert rewards_of(groups) == [[1.0, 0.0]] * 20
        assert all(rollout.score == rollout.reward for one in groups for rollout in one.rollouts)


# ---- the grader ----


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


def test_impossible_rewards_are_refused():
    for config, message in [
        (RewardConfig(), "neither name nor function"),
        (RewardConfig(name="numbers"), "numeric"),
        (RewardConfig(name="format"), "needs a pattern"),
        (RewardConfig(name="format", pattern="(a"), "no regular expression"),
        (RewardConfig(name="numeric", weight=float("nan")), "finite"),
        (RewardConfig(name="numeric", timeout_seconds=0.0), "timeout_seconds"),
        (RewardConfig(function="no_colon"), "file.py:function or module:function"),
        (RewardConfig(function="missing_file.py:f"), "no file missing_file.py"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_grader([config], ())
    two = [RewardConfig(name="numeric", score=True), RewardConfig(name="exact", score=True)]
    with pytest.raises(ConfigError, match="more than one reward has score"):
        build_grader(two, ())
    with pytest.raises(ConfigError, match="there is no reward"):
        build_grader([], ())


def test_dry_run_finds_data_that_does_not_fit_the_reward():
    with pytest.raises(ConfigError, match=r"reward 'numeric', in a dry run.*no column 'answer', it has solution"):
        build_grader([RewardConfig(name="numeric")], ()).check([start(solution="4")])


def test_the_worker_needs_neither_torch_nor_transformers():
    imports = "import sys, covey.llm.rewards.worker, covey.llm.rewards.builtin"
    code = f"{imports}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# ---- partial credit ----


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
        ({"name": "numeric", "binary": True}, "which is for functions of your own"),
        ({"function": "os:getpid", "binary": True, "per_step": True}, "take binary out"),
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
