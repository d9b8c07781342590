"""Rewards that are rules over the text or the tokens of a completion, and the run's own term `overlong`."""

import math
import unicodedata
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.config import ArithmeticConfig, ConfigError, RewardConfig, RunConfig, SamplingConfig
from covey.config.rewards import SCRIPTS
from covey.config.rules import validate
from covey.data import Group, Start
from covey.experiment.problem import build_problem
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.numbers import digits, numeric
from covey.llm.rewards.rules import (
    exact,
    format_match,
    length_penalty,
    repetition_penalty,
    script_share,
    tagged_parts,
)
from covey.llm.rewards.weighted_reward import WeightedReward
from helpers.graded import group, start
from helpers.tabular_policy import rollout

THINKING = partial(format_match, pattern="<think>.*</think>-?[0-9]+")
TAGS: dict[str, Any] = {"tags": ("think", "answer"), "first_tag_in_prompt": False}
IN_PROMPT = TAGS | {"first_tag_in_prompt": True}
JAPANESE = ("han", "hiragana", "katakana")


@pytest.mark.parametrize(
    ("reward", "text", "columns", "value"),
    [
        (exact, " Paris\n", {"answer": ["Paris"]}, 1),
        (exact, "paris", {"answer": ["Paris"]}, 0),
        (exact, "Pa ris", {"answer": ["Paris"]}, 0),
        (exact, "Paris.", {"answer": ["Paris"]}, 0),
        (exact, "5", {"answer": [5]}, 1),
        (THINKING, "<think>a\nb</think>5", {}, 1),
        (THINKING, "x<think>a</think>5", {}, 0),
        (THINKING, "<think>a</think>5 ", {}, 0),
        (THINKING, "<think>a</think>5\n", {}, 0),
        # each right place is paid
        (digits, "156", {"answer": ["156"]}, 1.0),
        (digits, "89 + 67 = 157.", {"answer": ["156"]}, 3 / 4),
        (digits, "56", {"answer": ["156"]}, 3 / 4),
        (digits, "1560", {"answer": ["156"]}, 1 / 5),  # aligned at the right: only the sign is right
        (digits, "31", {"answer": ["-31"]}, 2 / 3),
        (digits, "-31", {"answer": ["31"]}, 2 / 3),
        (digits, "-45", {"answer": ["-31"]}, 1 / 3),
        (digits, "45", {"answer": ["-31"]}, 0.0),
        (digits, "no number", {"answer": ["7"]}, 0.0),
        (digits, "7777777777", {"answer": ["7"]}, 2 / 11),  # more digits earn nothing
        (script_share, "The answer is 57.", {"scripts": ("latin",)}, 1),
        (script_share, "Ça coûte 5 €, à peu près.", {"scripts": ("latin",)}, 1),
        (script_share, "答案是57。", {"scripts": ("latin",)}, 0),
        (script_share, "答案是57。", {"scripts": ("han",)}, 1),
        (script_share, "ab答案", {"scripts": ("latin",)}, 0.5),
        (script_share, "ab答案", {"scripts": ("latin", "han")}, 1),
        (script_share, "答えはコーヒー。", {"scripts": JAPANESE}, 1),
        (script_share, "答えはコーヒー。", {"scripts": ("han",)}, 1 / 7),
        (script_share, "인사", {"scripts": ("hangul",)}, 1),
        (script_share, "Привет", {"scripts": ("cyrillic",)}, 1),
        (script_share, "नमस्ते", {"scripts": ("devanagari",)}, 1),
        (script_share, "Ａｂ", {"scripts": ("latin",)}, 1),  # full-width
        (script_share, "人々", {"scripts": ("han",)}, 1),
        (script_share, r"\frac{1}{2} 是答案", {"scripts": ("han",)}, 1),  # a LaTeX command is not a word
        (script_share, "12 + 5 = 17", {"scripts": ("latin",)}, 1),  # no letter at all
        (script_share, "", {"scripts": ("latin",)}, 1),
        (tagged_parts, "<think>2 + 2</think><answer>4</answer>", TAGS, 1),
        (tagged_parts, "<think>\n2 + 2\n</think>\n\n<answer>\n4\n</answer>\n", TAGS, 1),
        (tagged_parts, "<think>a < b <b>bold</b></think> <answer>x</answer>", TAGS, 1),
        (tagged_parts, "2 + 2</think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "2 + 2</think><answer>4</answer>", IN_PROMPT, 1),
        (tagged_parts, "<think>2 + 2</think><answer>4</answer>", IN_PROMPT, 0),
        (tagged_parts, "<think>2 + 2<answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>2 + 2</think><answer>4", TAGS, 0),
        (tagged_parts, "<think>2 + 2</think>4", TAGS, 0),
        (tagged_parts, "<answer>4</answer><think>2 + 2</think>", TAGS, 0),
        (tagged_parts, "Well: <think>2 + 2</think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>2 + 2</think> so <answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>2 + 2</think><answer>4</answer> done", TAGS, 0),
        (tagged_parts, "<think> </think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>2 + 2</think><answer></answer>", TAGS, 0),
        (tagged_parts, "<think>a</think><think>b</think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>a<think>b</think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>a</think><answer>4</answer><answer>5</answer>", TAGS, 0),
        (tagged_parts, "<think>a <answer>4</answer></think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "<think>a</think><answer>4 </think> 5</answer>", TAGS, 0),
        (tagged_parts, "<Think>a</Think><answer>4</answer>", TAGS, 0),
        (tagged_parts, "", TAGS, 0),
        (tagged_parts, "<plan>a</plan>", TAGS | {"tags": ("plan",)}, 1),
        (tagged_parts, "<a>1</a><b>2</b><c>3</c>", TAGS | {"tags": ("a", "b", "c")}, 1),
        (tagged_parts, "<a>1</a><c>3</c>", TAGS | {"tags": ("a", "b", "c")}, 0),
    ],
)
def test_rules_of_the_text_by_hand(reward: Any, text: str, columns: dict[str, Any], value: float) -> None:
    assert reward([text], **columns) == pytest.approx([value])


def penalties(lengths: list[int], *, target: int = 10, limit: int = 20, **how: Any) -> list[float]:
    """The reward `length` of completions of these lengths."""
    options = {"unit": "tokens", "length_shape": "linear", "length_both_sides": False} | how
    ids = [[7] * length for length in lengths]
    return length_penalty([""] * len(ids), ids, length_target=target, length_limit=limit, **options)


@pytest.mark.parametrize(
    ("penalty", "lengths", "values"),
    [
        (penalties, [1, 10, 11, 15, 20, 500], [0, 0, -0.1, -0.5, -1, -1]),
        (partial(penalties, length_shape="cosine"), [1, 10, 15, 20, 500], [0, 0, -0.5, -1, -1]),
        (
            partial(penalties, length_shape="cosine"),
            [12, 18],
            [-(1 - math.cos(0.2 * math.pi)) / 2, -(1 + math.cos(0.2 * math.pi)) / 2],
        ),
        (partial(penalties, length_both_sides=True), [0, 5, 8, 10, 12, 30], [-1, -0.5, -0.2, 0, -0.2, -1]),
    ],
)
def test_lengths_by_hand(penalty: Any, lengths: list[int], values: list[float]) -> None:
    assert penalty(lengths) == pytest.approx(values)


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
def test_repetition_by_hand(ids: list[int], size: int, penalty: float) -> None:
    assert repetition_penalty([""], [ids], unit="tokens", ngram_size=size) == pytest.approx([penalty])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "language"}, r'needs a value for scripts, such as scripts = \["latin"\]'),
        ({"name": "language", "scripts": ("latn",)}, r"did you mean 'latin'\?"),
        ({"name": "tags", "tags": ("<think>",)}, "must be a word, such as think, without brackets"),
        ({"name": "tags", "tags": ("think", "think")}, "names a tag twice"),
        ({"name": "tags", "tags": ()}, "tags is empty"),
        ({"name": "length"}, "needs a value for length_limit, such as length_limit = 200"),
        (
            {"name": "length", "length_limit": 20, "length_target": 20},
            r"length_limit \(20\) must be above length_target \(20\)",
        ),
        ({"name": "length", "length_limit": 20, "length_shape": "round"}, "must be linear or cosine"),
        ({"name": "length", "length_limit": 20, "unit": "token"}, "did you mean 'tokens'?"),
    ],
)
def test_options_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_grader([RewardConfig(**fields)], ())


# ---- what tables do not say ----


def test_digits_orders_a_group_that_numeric_calls_all_wrong():
    texts = ["10", "66", "60", "-66"]
    assert numeric(completions=texts, answer=["61"] * 4) == [0.0] * 4
    assert digits(completions=texts, answer=["61"] * 4) == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_letters(script):
    """The name of a script is how the names of its letters begin in Unicode, so a misspelt one would match nothing."""
    letters = [chr(code) for code in range(0x20000) if chr(code).isalpha() and not unicodedata.decomposition(chr(code))]
    shares = script_share(letters, scripts=(script,))
    assert 26 <= sum(shares) < len(letters) / 2 or script == "han"
    assert 0 < sum(shares) < len(letters)


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=9)


@given(PIECES)
@example(["<think>", "x", "</think>", "\n", "<answer>", "x", "</answer>"])
@example(["<think>", "<think>", "x", "</think>", "<answer>", "x", "</answer>"])
def test_tags_agree_with_the_grammar(pieces):
    """A text is right if, without white space, its marks are the four in their order, with text in both parts alone."""
    solid = [piece for piece in pieces if piece.strip()]
    merged = [p for i, p in enumerate(solid) if not (p == "x" and i and solid[i - 1] == "x")]
    right = merged == ["<think>", "x", "</think>", "<answer>", "x", "</answer>"]
    assert tagged_parts(["".join(pieces)], **TAGS) == [right]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_counts_ngrams_that_occurred_before(ids, size):
    ngrams = [ids[i : i + size] for i in range(len(ids) - size + 1)]
    again = sum(ngram in ngrams[:i] for i, ngram in enumerate(ngrams))
    expected = -again / len(ngrams) if ngrams else 0
    assert repetition_penalty([""], [ids], unit="tokens", ngram_size=size) == pytest.approx([expected])


def test_words_ignore_case_and_white_space():
    (graded,) = build_grader([RewardConfig(name="repetition", unit="words", ngram_size=2)], ()).grade(
        [group(start(), "So it is", "so it is\n\nSo  IT is", "abab")]
    )
    assert [rollout.reward for rollout in graded.rollouts] == pytest.approx([0, -2 / 5, 0])
    assert repetition_penalty(["abab"], [[]], unit="characters", ngram_size=2) == pytest.approx([-1 / 3])


def test_units():
    for unit, value in [("tokens", -0.2), ("words", -0.4), ("characters", -1.0)]:
        config = RewardConfig(name="length", length_limit=10, unit=unit)
        (graded,) = build_grader([config], ()).grade([group(start(), "x", "  four words\nare here")])
        assert graded.rollouts[1].reward == pytest.approx(value), unit


def test_a_target_that_no_completion_exceeds_is_refused():
    def config(**options):
        reward = RewardConfig(name="length", length_target=64, length_limit=100, **options)
        return RunConfig(task=ArithmeticConfig(), rewards=(reward,), sampling=SamplingConfig(max_new_tokens=64))

    with pytest.raises(ConfigError, match=r"length_target \(64\).*max_new_tokens \(64\)"):
        validate(config())
    validate(config(unit="words"))
    validate(config(length_both_sides=True))


# ---- the run's own term: completions that come near the token limit cost something ----


def graded_with_overlong(own: list[Any], lengths: list[int]) -> Group:
    grader = build_grader(own, (), [WeightedReward.overlong(10, 5)])
    return grader.grade([Group(Start(0, "1 + 1"), [rollout([1] * length, None) for length in lengths])])[0]


def test_the_term_is_added_and_is_not_the_score():
    found = graded_with_overlong([lambda completions, **_: [2.0] * len(completions)], [3, 6, 10])
    assert [item.reward for item in found.rollouts] == pytest.approx([2, 1.8, 1])
    assert [item.score for item in found.rollouts] == [2, 2, 2]
    assert [item.reward_parts["overlong"] for item in found.rollouts] == pytest.approx([0, -0.2, -1])


def test_a_rollout_that_nobody_else_graded_stays_without_a_reward():
    def mostly(completions, **_):
        return [None, *[1.0] * (len(completions) - 1)]

    assert [item.reward for item in graded_with_overlong([mostly], [2] * 6).rollouts] == [None, *[1.0] * 5]
    with pytest.raises(GradingError, match="returned None"):
        graded_with_overlong([lambda completions, **_: [None] * len(completions)], [2, 2])


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
    assert (options["length_target"], options["length_limit"]) == (64 - 13, 64)


def test_the_dry_run_does_not_take_the_term_for_a_reward():
    grader = build_grader([lambda completions, **_: [None] * len(completions)], (), [WeightedReward.overlong(10, 5)])
    with pytest.raises(ConfigError, match=r"reward '<lambda>' returned None"):
        grader.check([Start(0, "1 + 1"), Start(1, "2 + 2")])
