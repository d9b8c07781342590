"""Rollouts as the API shows them: groups of a step, one group, and lines of a list."""

import re
from typing import Any

import numpy as np

from covey.tracking.run_reader import (
    Group,
    conversation_turns,
    is_failed,
    is_truncated,
    number,
    prompt_text,
    searched_text,
    table,
    text,
)

PROMPT_CHARACTERS, TEXT_CHARACTERS = 200, 400  # of a rollout in a list


def group_row(group: Group) -> dict[str, Any]:
    """A group in the list of a step."""
    rewards, lines = group.rewards, group.rollouts
    scores, lengths = ([value for line in lines if (value := number(line.get(key))) is not None]
                       for key in ("score", "decisions"))  # fmt: skip
    return {
        "group": group.number,
        "size": len(lines),
        "reward_mean": _mean(rewards),
        "reward_low": min(rewards, default=None),
        "reward_high": max(rewards, default=None),
        "reward_std": float(np.std(rewards)) if rewards else None,
        "score_mean": _mean(scores),
        "baseline": _baseline(group),
        "signal": group.has_signal,
        "truncated": sum(is_truncated(line) for line in lines),
        "failed": sum(is_failed(line) for line in lines),
        "dropped": group.is_dropped,
        "decisions_mean": _mean(lengths),
        "prompt": prompt_text(lines[0].get("prompt"))[:PROMPT_CHARACTERS],
    }


def group_page(step: int, group: Group) -> dict[str, Any]:
    """A group with its rollouts."""
    first = group.rollouts[0]
    return {
        "step": step,
        "group": group.number,
        "prompt": first.get("prompt"),
        "model_prompt": group.model_prompt() or None,
        "columns": table(first.get("columns")),
        "baseline": _baseline(group),
        "signal": group.has_signal,
        "dropped": group.is_dropped,
        "rollouts": [rollout(index, line) for index, line in enumerate(group.rollouts)],
    }


def rollout(index: int, line: dict[str, Any]) -> dict[str, Any]:
    """The table ROLLOUT of the API."""
    return {
        "index": index,
        "text": text(line.get("text")),
        **_outcome(line),
        "baseline": number(line.get("baseline")),
        "version": number(line.get("version")),
        "extra": table(line.get("extra")) or None,
        "undecided": line.get("undecided"),
        "steps": line.get("steps"),
        "turns": conversation_turns(line) or None,
        "failure": text(line.get("failure")) or None,
        "tokens": table(line.get("tokens")) or None,
    }


def list_row(place: tuple[int, int, int], line: dict[str, Any], signal: bool, wanted: str) -> dict[str, Any] | None:
    """A rollout in a list; None if it does not contain the wanted text, in any case."""
    step, group, index = place
    completion, prompt = searched_text(line), prompt_text(line.get("prompt"))
    begin, match = 0, None
    if wanted:
        pattern = re.compile(re.escape(wanted), re.IGNORECASE)
        if found := pattern.search(completion):
            begin = max(0, min(found.start() - TEXT_CHARACTERS // 4, len(completion) - TEXT_CHARACTERS))
            match = [utf16_length(completion[begin : found.start()]), utf16_length(completion[begin : found.end()])]
        elif not pattern.search(prompt):
            return None
    return {
        "step": step,
        "group": group,
        "index": index,
        **_outcome(line),
        "signal": signal,
        "prompt": prompt[:PROMPT_CHARACTERS],
        "text": completion[begin : begin + TEXT_CHARACTERS],
        "text_from": utf16_length(completion[:begin]),
        "match": match,
    }


def utf16_length(part: str) -> int:
    """The length of a text in JavaScript."""
    return len(part) + sum(character > "\uffff" for character in part)


def _outcome(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": number(line.get("reward")),
        "reward_parts": table(line.get("reward_parts")),
        "score": number(line.get("score")),
        "advantage": number(line.get("advantage")),
        "end": text(line.get("end")) or None,
        "truncated": is_truncated(line),
        "failed": is_failed(line),
        "decisions": number(line.get("decisions")),
    }


def _baseline(group: Group) -> float | None:
    """The baseline that the rollouts have in common; None with a critic, whose values differ."""
    values = {number(line.get("baseline")) for line in group.rollouts}
    return values.pop() if len(values) == 1 else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
