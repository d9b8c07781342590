"""A completion of the model in a report: its text or, of a conversation, its turns."""

from __future__ import annotations

from collections.abc import Sequence

from covey.tracking.report.html import Html, element, pre
from covey.tracking.score_kinds import number as short
from covey.tracking.turns import MODEL, SHOWN_AT_FIRST, Turn

LONGEST_TEXT, LONGEST_NAME = 1500, 80  # characters that are shown


def completion(content: str, turns: Sequence[Turn], failure: str) -> Html:
    """The text `content` or, if there are any, the turns; the failure of the environment before them."""
    parts = [element("p", f"Failed: {one_line(failure)}", class_="bad")] if failure else []
    parts += [_turn(turn) for turn in turns[:SHOWN_AT_FIRST]] if turns else [pre(content, LONGEST_TEXT)]
    if len(turns) > SHOWN_AT_FIRST:
        parts.append(element("p", f"... {len(turns) - SHOWN_AT_FIRST:,} more turns", class_="muted"))
    return element("div", *parts)


def _turn(turn: Turn) -> Html:
    reward = turn["reward"]
    head = " ".join(filter(None, (one_line(turn["role"]), one_line(turn["name"]))))
    parts = [element("div", head, "" if reward is None else f", reward {short(reward)}", class_="label")]
    parts += [pre(turn["text"], LONGEST_TEXT)] if turn["text"] or not turn["calls"] else []
    for call in turn["calls"]:
        parts.append(element("div", "calls ", element("code", one_line(call["name"])), class_="label"))
        for name, value in call["arguments"]:
            parts += [element("div", f"{one_line(name)}:", class_="label"), pre(value, LONGEST_TEXT)]
    return element("div", *parts, class_="turn model" if turn["role"] == MODEL else "turn")


def one_line(value: object) -> str:
    """A short text on one line."""
    words = " ".join(str(value).split())
    return words if len(words) <= LONGEST_NAME else f"{words[:LONGEST_NAME]} ..."
