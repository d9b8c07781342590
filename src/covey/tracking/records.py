"""The lines of a run folder's JSONL files: rollouts and held-out answers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import Group, Rollout, RolloutCredit, Start


def rollout_record(step: int, group: Group, rollout: Rollout, credit: RolloutCredit) -> dict[str, Any]:
    """One rollout as a line of the rollouts file, without observations; `group` is the start's index within the step.

    >>> {"step": 3, "group": 0, "prompt": "2+2=", "columns": {"answer": "4"}, "text": "4", "reward": 1.0,
    ...  "reward_parts": {"numeric": 1.0}, "score": 1.0, "end": "stop", "decisions": 2, "version": 2,
    ...  "advantage": 1.73, "baseline": 0.25}

    "decisions" counts the actions that the policy decided. "version" is that of the weights that sampled, which every
    update raises by 1. "advantage" is the mean over the decisions; null if the grading failed or the group was dropped.
    "baseline" is the mean reward of the graded rollouts of the group, null if they are fewer than two; with a critic it
    is the mean of its values over the decisions, null if the grading failed.

    Conversations have "messages", the chat after the prompt, and "turn_rewards", what the environment paid for each
    turn; "observation", the environment's first text, which follows the prompt, if there is one; and "failure", the
    reason, if the environment failed.

    Some keys are in some lines only. "kind": the kind of problem, if the task names kinds. "undecided": positions after
    the prompt, as [first, after the last] pairs, of actions that the policy did not decide, such as the tokens of a
    tool's output. "model_prompt": what a language model read before the completion, as "text" with special tokens and
    as "ids"; it is in the first rollout of a group, and in one that read another prompt than the rollout before it.
    "dropped": true in groups that were replaced by others, and not trained on. "tokens", with record.tokens: the fields
    of `covey.data.TokenTable`.
    """
    record = {
        "step": step,
        "group": group.start.index,
        **({"kind": group.start.kind} if group.start.kind else {}),
        **_attempt(group.start, rollout),
        "end": str(rollout.end),
        "decisions": rollout.decisions,
        **_undecided(rollout),
        "version": rollout.version,
        "advantage": credit.advantage,
        "baseline": credit.baseline,
    }
    record |= {"model_prompt": vars(credit.prompt)} if credit.prompt is not None else {}
    record |= {"dropped": True} if group.dropped else {}
    record |= {"tokens": vars(credit.tokens)} if credit.tokens is not None else {}
    return record | _steps(rollout)


def answer_record(step: int, max_new_tokens: int, start: Start, rollout: Rollout) -> dict[str, Any]:
    """A held-out answer as a line of its file; `problem` is the start's index among the held-out problems.

    >>> {"step": 20, "max_new_tokens": 64, "problem": 0, "prompt": "2+2=", "columns": {"answer": "4"}, "text": "5",
    ...  "reward": 0.0, "reward_parts": {"numeric": 0.0}, "score": 0.0, "tokens": 2, "truncated": False}

    "score" is the value that the evaluation averages, "reward" the weighted sum of "reward_parts"; null: not graded.
    "truncated" is true if the token limit ended the answer. "tokens" counts those that the model sampled; "undecided"
    is as in `rollout_record`.
    """
    return {
        "step": step,
        "max_new_tokens": max_new_tokens,
        "problem": start.index,
        **({"kind": start.kind} if start.kind else {}),
        **_attempt(start, rollout),
        "tokens": rollout.decisions,
        **_undecided(rollout),
        "truncated": rollout.end.is_limit,
    } | _steps(rollout)


def _attempt(start: Start, rollout: Rollout) -> dict[str, Any]:
    """The common fields of rollouts and held-out answers: the prompt with its columns, the completion, the rewards."""
    return {
        "prompt": start.prompt,
        "columns": dict(start.columns),
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        **({"extra": rollout.extras} if rollout.extras else {}),
        **({"observation": rollout.observation} if rollout.observation else {}),
        **({} if rollout.messages is None else {"messages": list(rollout.messages)}),
        **({} if rollout.turn_rewards is None else {"turn_rewards": list(rollout.turn_rewards)}),
        **({"failure": rollout.failure} if rollout.failure else {}),
    }


def _undecided(rollout: Rollout) -> dict[str, Any]:
    """Stretches of actions that the policy did not decide, as [first, after the last]; nothing if it decided all."""
    if rollout.decided is None:
        return {}
    known = [True, *map(bool, rollout.decided), True]
    edges = [place for place, (before, now) in enumerate(pairwise(known)) if before != now]
    spans = [list(span) for span in zip(edges[::2], edges[1::2], strict=True)]
    return {"undecided": spans} if spans else {}


def _steps(rollout: Rollout) -> dict[str, Any]:
    """The reasoning steps of a completion with their rewards; empty if it has none."""
    if rollout.step_texts is None or rollout.step_ends is None or rollout.step_rewards is None:
        return {}
    earned = [rollout.step_rewards[end] for end in rollout.step_ends]
    return {"steps": [list(step) for step in zip(rollout.step_texts, earned, strict=True)]}


def encode(value: Any, indent: int | None = None) -> bytes:
    """Standard JSON in UTF-8; NaN and infinity become null, a lone surrogate stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError):  # rare, and checking every value first takes twice as long
        text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Nested values in JSON's types; a value of any other type becomes its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):  # NumPy's numbers too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
