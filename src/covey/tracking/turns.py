"""The turns of a recorded conversation, for display: `messages` and `turn_rewards` of a rollout or a held-out answer.

Records may be damaged or written by others, so every value is checked, and one of another type is shown as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from covey.tracking.run_reader import number, table, text

MODEL = "assistant"  # the role of the model
ENVIRONMENT = "environment"  # role of the first observation, which the model reads at the end of its prompt
SHOWN_AT_FIRST = 40  # turns, where not all of them are asked for


class Call(TypedDict):
    """A call of a tool: name and text of each argument. A value that is not text is JSON."""

    name: str
    arguments: list[tuple[str, str]]


class Turn(TypedDict):
    """A message of a conversation."""

    role: str
    name: str  # of the tool that replies
    text: str
    calls: list[Call]
    unread: list[str]  # texts of calls that could not be read
    reward: float | None  # of a turn of the model; None if no turn of the conversation was paid


def conversation_turns(record: Mapping[str, Any]) -> list[Turn]:
    """The turns of a rollout or a held-out answer, the first observation before them; [] if it is not a conversation.

    The reward of a turn is the weighted sum of its rewards if the record has `steps`, else what the environment paid.
    """
    messages = record.get("messages")
    if not isinstance(messages, list):
        return []
    rewards = iter(_rewards(record))
    found = []
    if observation := text(record.get("observation")):
        found.append(Turn(role=ENVIRONMENT, name="", text=observation, calls=[], unread=[], reward=None))
    for message in map(table, messages):
        role = text(message.get("role")) or "message"
        calls, unread = message.get("tool_calls"), message.get("unread_calls")
        found.append(
            Turn(
                role=role,
                name=text(message.get("name")),
                text=_shown(message.get("content")),
                calls=list(map(_call, calls)) if isinstance(calls, list) else [],
                unread=list(map(_shown, unread)) if isinstance(unread, list) else [],
                reward=next(rewards, None) if role == MODEL else None,
            )
        )
    return found


def searched_text(record: Mapping[str, Any]) -> str:
    """The text in which a rollout or an answer is searched: its completion, which has all turns and replies.

    A first observation follows, calls that could not be read, and arguments, which the completion shows with escapes
    as Python does.
    """
    completion, others = text(record.get("text")), list[str]()
    for turn in conversation_turns(record):
        others += [turn["text"]] if turn["role"] == ENVIRONMENT else []
        others += turn["unread"]
        others += [value for call in turn["calls"] for _, value in call["arguments"]]
    return "\n".join([completion, *(other for other in others if other not in completion)])


def _shown(value: Any) -> str:
    """A text as it is, nothing as an empty text, any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call(value: Any) -> Call:
    function = table(table(value).get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        given = [(name, _shown(argument)) for name, argument in arguments.items()]
    else:
        given = [("", _shown(arguments))] if arguments else []
    return Call(name=_shown(function.get("name")), arguments=given)


def _rewards(record: Mapping[str, Any]) -> list[float | None]:
    """The reward of each turn of the model; [] if none was paid."""
    steps, paid = record.get("steps"), record.get("turn_rewards")
    given = [step[-1] for step in steps if isinstance(step, list) and step] if isinstance(steps, list) else paid
    rewards = [number(reward) for reward in given] if isinstance(given, list) else []
    return rewards if any(rewards) else []
