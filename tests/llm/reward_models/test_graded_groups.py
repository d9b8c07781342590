"""Examples for a reward model from graded groups: which are made, how many, from what, and their state."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data import Group
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps
from covey.llm.reward_models.graded_groups import (
    GradeSource,
    PairSource,
    decode_state,
    encode_state,
    graded_completions,
    prompt_of,
)
from helpers.graded import group, start

CHAT = [{"role": "user", "content": "2 + 2?"}]


def graded(texts: dict[str, float | None], index: int = 0, prompt: Any = "2 + 2?") -> Group:
    made = group(start(index, prompt), *texts)
    return replace(
        made,
        rollouts=[replace(one, score=score) for one, score in zip(made.rollouts, texts.values(), strict=True)],
    )


def test_pairs_are_a_right_and_a_wrong_completion_of_one_prompt() -> None:
    groups = [
        graded({"4": 1.0, "four": 1.0, "5": 0.0, "?": None}, 0, CHAT),
        graded({"1": 0.0, "2": 0.0}, 1),
        graded({"3": 1.0, "0": 0.0}, 2, "1 + 2?"),
    ]
    found = PairSource(seed=3, most=8).examples(groups, step=7)
    assert sorted((one.chosen, one.rejected) for one in found if isinstance(one, Pair)) == [
        ("3", "0"), ("4", "5"), ("four", "5"),
    ]  # fmt: skip
    assert found[0].prompt == tuple(CHAT)
    assert found[0].place == "step 7, prompt 0"
    assert found[-1].prompt == "1 + 2?"


def test_a_text_that_occurs_twice_makes_one_pair() -> None:
    made = graded({"4": 1.0, "5": 0.0})
    twice = replace(made, rollouts=[*made.rollouts, *made.rollouts])
    assert len(PairSource(seed=3, most=8).examples([twice], 1)) == 1


def test_the_pairs_of_a_large_group_are_drawn_evenly_and_by_seed_step_and_group() -> None:
    texts: dict[str, float | None] = {f"r{i}": 1.0 for i in range(4)} | {f"w{i}": 0.0 for i in range(4)}

    def drawn(seed: int = 3, step: int = 1, index: int = 0) -> tuple[tuple[str, str], ...]:
        pairs = PairSource(seed, most=3).examples([graded(texts, index)], step)
        return tuple((str(one.chosen), str(one.rejected)) for one in pairs)

    assert len(set(drawn())) == 3
    assert drawn() == drawn()
    assert len({drawn(), drawn(seed=4), drawn(step=2), drawn(index=1)}) == 4
    counts = Counter(pair for step in range(800) for pair in drawn(step=step))
    assert len(counts) == 16
    assert all(100 < count < 210 for count in counts.values())  # 150 on average, standard deviation 11


def test_grades_are_those_of_the_verifier() -> None:
    found = GradeSource(seed=3, most=8).examples([graded({"4": 1.0, "5": 0.0, "?": None})], 1)
    assert sorted((one.completion, one.grade) for one in found if isinstance(one, Graded)) == [("4", 1.0), ("5", 0.0)]
    assert len(GradeSource(seed=3, most=1).examples([graded({"4": 1.0, "5": 0.0})], 1)) == 1
    everything = graded_completions([graded({"4": 1.0, "?": None, "5": 0.0})])
    assert [(one.completion, one.grade) for one in everything] == [("4", 1.0), ("5", 0.0)]


TEXTS = st.text(max_size=8)
PROMPTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=2).map(
    lambda texts: tuple({"role": "user", "content": text} for text in texts)
)
EXAMPLES = st.one_of(
    st.builds(Pair, TEXTS, PROMPTS, TEXTS, TEXTS, st.floats(0, 1)),
    st.builds(Graded, TEXTS, PROMPTS, TEXTS, st.sampled_from([0.0, 1.0])),
    st.integers(1, 3).flatmap(
        lambda count: st.builds(
            Steps,
            TEXTS,
            PROMPTS,
            st.lists(TEXTS, min_size=count, max_size=count).map(tuple),
            st.lists(st.floats(0, 1), min_size=count, max_size=count).map(tuple),
        )
    ),
)


@given(st.lists(EXAMPLES, max_size=4))
def test_a_state_gives_the_same_examples(examples: list[Example]) -> None:
    assert decode_state(encode_state(examples)) == examples


@pytest.mark.parametrize("prompt", ["2 + 2?", CHAT])
def test_a_prompt_is_the_one_of_data_files(prompt: Any) -> None:
    assert prompt_of(start(0, prompt)) == (prompt if isinstance(prompt, str) else tuple(prompt))
