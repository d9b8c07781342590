"""Rollouts that are sent to another rank arrive as they were, to the bit."""

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.data import EndReason, Group, Rollout, Start, decode_groups, encode_groups

FLOATS = st.floats(allow_nan=False) | st.sampled_from([math.nan, math.inf, -0.0, 5e-324])
TOKENS = st.lists(st.integers(0, 2**40), max_size=5)
PARTS = st.dictionaries(st.text(max_size=3), st.none() | FLOATS, max_size=2)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    actions = draw(TOKENS)
    length = len(actions)
    return Rollout(
        context=tuple(draw(TOKENS)),
        actions=actions,
        behavior_logprobs=draw(st.lists(FLOATS, min_size=length, max_size=length)),
        end=draw(st.sampled_from(EndReason)),
        text=draw(st.text(max_size=5) | st.just("\n{\ud800")),
        decided=draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length)),
        step_rewards=draw(st.none() | st.lists(FLOATS, max_size=3)),
        step_texts=draw(st.none() | st.lists(st.text(max_size=3), max_size=2)),
        step_ends=draw(st.none() | st.lists(st.integers(0, 9), max_size=2)),
        reward=draw(st.none() | FLOATS),
        reward_parts=draw(PARTS),
        extras={"reward": draw(PARTS)},
        score=draw(st.none() | FLOATS),
        version=draw(st.integers(0, 99)),
    )


def bits(value: object) -> object:
    """A value with the bits of its numbers, so that NaN equals itself and -0.0 differs from 0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value) if not math.isnan(value) else "nan"
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(bits, value)]
    return {key: bits(one) for key, one in value.items()} if isinstance(value, dict) else value


def fields(group: Group) -> list[object]:
    names = Rollout.__dataclass_fields__
    return [group.start, bits(group.logged), [[bits(getattr(one, name)) for name in names] for one in group.rollouts]]


GROUPS = st.lists(st.tuples(st.lists(rollouts(), max_size=3), st.dictionaries(st.text(max_size=2), st.lists(FLOATS))))


@pytest.mark.slow
@given(GROUPS)
@example([])
@example([([], {})])
def test_groups_arrive_as_they_were(found: list[tuple[list[Rollout], dict[str, list[float]]]]) -> None:
    groups = [Group(Start(i, "?"), rollouts, logged=logged) for i, (rollouts, logged) in enumerate(found)]
    arrived = decode_groups(encode_groups(groups), [group.start for group in groups])
    assert [fields(group) for group in arrived] == [fields(group) for group in groups]
