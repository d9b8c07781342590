"""The turns of a recorded conversation, for display: `messages` and `turn_rewards` of a rollout or a held-out answer.

Records may be damaged or written by others, so every value is checked, and a wrong one is left out or shown as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from covey.tracking.run_reader import number, table, text

MODEL = "assistant"  # the role of the model
ENVIRONMENT = "environment"  # of the first observation, which the model reads at the end of its prompt


@dataclass(frozen=True)
class Call:
    """A call of a tool: its arguments by name. A text is as it is, any other value JSON."""

    name: str
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: str
    text: str
    name: str = ""  # of the tool that replies
    calls: tuple[Call, ...] = ()
    reward: float | None = None  # of a turn of the model; None if no turn of the conversation was paid


def conversation_turns(record: Mapping[str, Any]) -> list[Turn]:
    """The turns of a rollout or a held-out answer, its first observation before them; [] if it is no conversation.

    The reward of a turn is its weighted sum if the record has `steps`, otherwise what the environment paid.
    """
    messages = record.get("messages")
    if not isinstance(messages, list):
        return []
    observation = text(record.get("observation"))
    found = [Turn(ENVIRONMENT, observation)] if observation else []
    rewards = iter(_rewards(record))
    for message in map(table, messages):
        role = text(message.get("role")) or "message"
        calls = message.get("tool_calls")
        found.append(
            Turn(
                role,
                shown(message.get("content")),
                text(message.get("name")),
                tuple(map(_call, calls)) if isinstance(calls, list) else (),
                next(rewards, None) if role == MODEL else None,
            )
        )
    return found


def turns_table(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The turns as values for JSON; None if the record has none."""
    return [asdict(turn) for turn in conversation_turns(record)] or None


def searched_text(record: Mapping[str, Any]) -> str:
    """The text in which a rollout or an answer is searched: its completion.

    That of a conversation has all turns and replies. It shows arguments of calls as Python does, so those with line
    ends and quotation marks follow as they are.
    """
    completion, others = text(record.get("text")), list[str]()
    for turn in conversation_turns(record):
        others += [turn.text] if turn.role == ENVIRONMENT else []
        others += [value for call in turn.calls for _, value in call.arguments]
    return "\n".join([completion, *(other for other in others if other not in completion)])


def shown(value: Any) -> str:
    """A text as it is, nothing as an empty text, any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call(value: Any) -> Call:
    function = table(table(value).get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return Call(shown(function.get("name")), (("", shown(arguments)),) if arguments else ())
    return Call(shown(function.get("name")), tuple((name, shown(given)) for name, given in arguments.items()))


def _rewards(record: Mapping[str, Any]) -> list[float | None]:
    """The reward of each turn of the model; [] if none was paid."""
    steps, paid = record.get("steps"), record.get("turn_rewards")
    given = [step[-1] for step in steps if isinstance(step, list) and step] if isinstance(steps, list) else paid
    rewards = [number(reward) for reward in given] if isinstance(given, list) else []
    return rewards if any(rewards) else []
