"""A completion of the model in a report: its text or, of a conversation, its turns."""

from __future__ import annotations

from collections.abc import Sequence

from covey.config.fields import plural
from covey.tracking.report.html import Html, element, pre
from covey.tracking.score_kinds import number as short
from covey.tracking.turns import MODEL, Turn

LONGEST_TEXT, LONGEST_NAME = 1500, 80  # characters that are shown
LONGEST_CONVERSATION = 12_000  # characters of markup after which no further turn is shown
MOST_CALLS = MOST_ARGUMENTS = 5  # of a turn, of a call


def completion(content: str, turns: Sequence[Turn], failure: str) -> Html:
    """The text `content` or, if there are any, the turns; the failure of the environment before them."""
    parts = [element("p", f"Failed: {one_line(failure)}", class_="bad")] if failure else []
    parts += [] if turns else [pre(content, LONGEST_TEXT)]
    for place, turn in enumerate(turns):
        if sum(map(len, parts)) > LONGEST_CONVERSATION:
            parts.append(_more(len(turns) - place, "turn"))
            break
        parts.append(_turn(turn))
    return element("div", *parts)


def _turn(turn: Turn) -> Html:
    reward = turn["reward"]
    head = " ".join(filter(None, (one_line(turn["role"]), one_line(turn["name"]))))
    parts = [element("div", head, "" if reward is None else f", reward {short(reward)}", class_="label")]
    only_calls = not turn["text"] and (turn["calls"] or turn["unread"])
    parts += [] if only_calls else [pre(turn["text"], LONGEST_TEXT)]
    for call in turn["calls"][:MOST_CALLS]:
        parts.append(element("div", "calls ", element("code", one_line(call["name"])), class_="label"))
        for name, value in call["arguments"][:MOST_ARGUMENTS]:
            parts += [element("div", f"{one_line(name)}:", class_="label"), pre(value, LONGEST_TEXT)]
        if len(call["arguments"]) > MOST_ARGUMENTS:
            parts.append(_more(len(call["arguments"]) - MOST_ARGUMENTS, "argument"))
    for content in turn["unread"][:MOST_CALLS]:
        parts += [element("div", "call that could not be read:", class_="label"), pre(content, LONGEST_TEXT)]
    if len(turn["calls"]) > MOST_CALLS:
        parts.append(_more(len(turn["calls"]) - MOST_CALLS, "call"))
    return element("div", *parts, class_="turn model" if turn["role"] == MODEL else "turn")


def _more(count: int, what: str) -> Html:
    return element("p", f"... {plural(count, f'more {what}')}", class_="muted")


def one_line(value: object) -> str:
    """A short text on one line."""
    words = " ".join(str(value).split())
    return words if len(words) <= LONGEST_NAME else f"{words[:LONGEST_NAME]} ..."
