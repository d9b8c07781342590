"""Turns of recorded conversations: of a run's own records, and of damaged ones."""

import json
from typing import Any

import pytest

from covey.data import EndReason, Group, Rollout, RolloutCredit, Start
from covey.tracking.run_reader import conversation_turns, searched_text
from covey.tracking.run_store import answer_record, encode, rollout_record
from helpers.conversation_records import conversation


def test_the_turns_of_a_conversation() -> None:
    assert conversation_turns(conversation()) == [
        {"role": "environment", "name": "", "text": "Begin.", "calls": [], "unread": [], "reward": None},
        {
            "role": "assistant",
            "name": "",
            "text": "I compute.",
            "calls": [{"name": "calculate", "arguments": [("expression", "12 +\n3")]}],
            "unread": ["12 +\n3}"],
            "reward": 0.25,
        },
        {"role": "tool", "name": "calculate", "text": "15", "calls": [], "unread": [], "reward": None},
        {"role": "assistant", "name": "", "text": "I compute. again", "calls": [], "unread": [], "reward": 0.5},
    ]
    assert conversation_turns({"text": "no conversation"}) == []


def test_the_records_of_a_run_have_all_of_it() -> None:
    given = conversation()
    rollout = Rollout(
        (1,), [2, 3, 4], [-1.0, 0.0, -1.0], EndReason.TERMINATED, decided=[True, False, True], failure="it broke",
        **given,
    )  # fmt: skip
    credit = RolloutCredit(None, None)
    start = Start(0, "2+2=")
    for record in (rollout_record(1, Group(start, [rollout]), rollout, credit), answer_record(1, 9, start, rollout)):
        written = json.loads(encode(record))
        assert conversation_turns(written) == conversation_turns(given)
        assert written["failure"] == "it broke"


@pytest.mark.parametrize(
    ("others", "rewards"),
    [
        ({"turn_rewards": [0.0, -1.5]}, [0.0, -1.5]),
        ({"turn_rewards": [0.0, 0.0]}, [None, None]),
        ({"turn_rewards": None}, [None, None]),
        ({"turn_rewards": [1.0]}, [1.0, None]),
        ({"turn_rewards": ["1", 2.0, 3.0]}, [None, 2.0]),
        ({"steps": [["I compute.", 0.75], ["I compute. again", 2.0]]}, [0.75, 2.0]),
        ({"steps": [7, [], ["a", 1.0]]}, [1.0, None]),
    ],
)
def test_rewards_belong_to_the_turns_of_the_model(others: dict[str, Any], rewards: list[float | None]) -> None:
    turns = conversation_turns(conversation() | others)
    assert [turn["reward"] for turn in turns if turn["role"] == "assistant"] == rewards
    assert all(turn["reward"] is None for turn in turns if turn["role"] != "assistant")


@pytest.mark.parametrize(
    ("message", "text", "calls"),
    [
        ("no object", "", []),
        ({}, "", []),
        ({"content": None}, "", []),
        ({"content": [{"type": "text", "text": "ü"}]}, '[{"type": "text", "text": "ü"}]', []),
        ({"content": "a", "tool_calls": "none"}, "a", []),
        ({"content": "a", "tool_calls": [7]}, "a", [{"name": "", "arguments": []}]),
        (
            {"content": "", "tool_calls": [{"function": {"name": 3, "arguments": '{"a"'}}]},
            "",
            [{"name": "3", "arguments": [("", '{"a"')]}],
        ),
        (
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None], "b": "x\ny"}}}]},
            "",
            [{"name": "f", "arguments": [("a", "[1, null]"), ("b", "x\ny")]}],
        ),
    ],
)
def test_damaged_messages_are_shown_as_far_as_they_can_be_read(message: Any, text: str, calls: list[Any]) -> None:
    (turn,) = conversation_turns({"messages": [message]})
    assert (turn["role"], turn["text"], turn["calls"]) == ("message", text, calls)


@pytest.mark.parametrize("words", ["I compute. again", "[tool] 15", "12 +\n3", "3}", "Begin.", "calculate(expression="])
def test_a_search_finds_turns_replies_and_arguments(words: str) -> None:
    assert words in searched_text(conversation())


def test_a_completion_is_searched_as_it_is() -> None:
    assert searched_text({"text": "four"}) == "four"
