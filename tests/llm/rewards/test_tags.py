"""The reward `tags`."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.config import ConfigError, RewardConfig
from covey.llm.grader import build_grader
from covey.llm.rewards.tags import tagged_parts


def graded(text: str, *, tags=("think", "answer"), first_tag_in_prompt: bool = False) -> float:
    (value,) = tagged_parts([text], tags=tags, first_tag_in_prompt=first_tag_in_prompt)
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>2 + 2</think><answer>4</answer>", 1),
        ("<think>\n2 + 2\n</think>\n\n<answer>\n4\n</answer>\n", 1),
        ("<think>a < b <b>bold</b></think> <answer>x</answer>", 1),
        ("2 + 2</think><answer>4</answer>", 0),
        ("<think>2 + 2<answer>4</answer>", 0),
        ("<think>2 + 2</think><answer>4", 0),
        ("<think>2 + 2</think>4", 0),
        ("<answer>4</answer><think>2 + 2</think>", 0),
        ("Well: <think>2 + 2</think><answer>4</answer>", 0),
        ("<think>2 + 2</think> so <answer>4</answer>", 0),
        ("<think>2 + 2</think><answer>4</answer> done", 0),
        ("<think> </think><answer>4</answer>", 0),
        ("<think>2 + 2</think><answer></answer>", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>a<think>b</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think>a <answer>4</answer></think><answer>4</answer>", 0),
        ("<think>a</think><answer>4 </think> 5</answer>", 0),
        ("<Think>a</Think><answer>4</answer>", 0),
        ("", 0),
    ],
)
def test_tags_by_hand(text, value):
    assert graded(text) == value


def test_the_first_tag_may_be_in_the_prompt():
    assert graded("2 + 2</think><answer>4</answer>", first_tag_in_prompt=True) == 1
    assert graded("<think>2 + 2</think><answer>4</answer>", first_tag_in_prompt=True) == 0


def test_other_tags():
    assert graded("<plan>a</plan>", tags=("plan",)) == 1
    assert graded("<a>1</a><b>2</b><c>3</c>", tags=("a", "b", "c")) == 1
    assert graded("<a>1</a><c>3</c>", tags=("a", "b", "c")) == 0


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=9)


@given(PIECES)
@example(["<think>", "x", "</think>", "\n", "<answer>", "x", "</answer>"])
@example(["<think>", "<think>", "x", "</think>", "<answer>", "x", "</answer>"])
def test_tags_agree_with_the_grammar(pieces):
    """A text is right if, without white space, its marks are the four in their order, with text in both parts alone."""
    text = "".join(pieces)
    solid = [piece for piece in pieces if piece.strip()]
    merged = [p for i, p in enumerate(solid) if not (p == "x" and i and solid[i - 1] == "x")]
    assert graded(text) == (merged == ["<think>", "x", "</think>", "<answer>", "x", "</answer>"])


def test_tags_that_cannot_work_are_refused():
    for tags, message in [
        (("<think>",), "must be a word, such as think, without brackets"),
        (("think", "think"), "names a tag twice"),
        ((), "tags is empty"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_grader([RewardConfig(name="tags", tags=tags)], ())
