"""Graded rollouts as bytes, which ranks exchange without pickles. Starts are not sent, because every rank draws them.

A message is one line of JSON and then arrays: int64 tokens and float64 log-probabilities of all rollouts, one after the
other. JSON keeps every float64 exactly, NaN and infinity included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from covey.data.types import EndReason, Group, Rollout, Start

_ARRAYS = ("context", "actions", "behavior_logprobs")  # the sequences of a rollout that are sent as arrays
_DTYPES = {"context": np.int64, "actions": np.int64, "behavior_logprobs": np.float64}
_PLAIN = (
    "text", "decided", "messages", "observation", "turn_rewards", "environment", "failure", "step_rewards",
    "step_texts", "step_ends", "reward", "reward_parts", "extras", "score", "version",
)  # fmt: skip


def encode_groups(groups: Sequence[Group]) -> bytes:
    """The rollouts of the groups, in order.

    Raises:
        TypeError: if a value that a reward logged cannot be written as JSON.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    head = {
        "groups": [{"rollouts": len(group.rollouts), "logged": group.logged} for group in groups],
        "rollouts": [
            {"lengths": [len(getattr(rollout, name)) for name in _ARRAYS], "end": rollout.end}
            | {name: _plain(getattr(rollout, name)) for name in _PLAIN}
            for rollout in rollouts
        ],
    }
    arrays = [np.asarray(getattr(rollout, name), dtype=_DTYPES[name]) for name in _ARRAYS for rollout in rollouts]
    return json.dumps(head).encode() + b"\n" + b"".join(array.tobytes() for array in arrays)


def _plain(value: Any) -> Any:
    """Lists instead of other sequences."""
    return list(value) if isinstance(value, (tuple, np.ndarray)) else value


def decode_groups(message: bytes, starts: Sequence[Start]) -> list[Group]:
    """The groups of a message; `starts` are theirs, in order."""
    line, _, data = message.partition(b"\n")
    head = json.loads(line)
    lengths = np.array([one["lengths"] for one in head["rollouts"]], dtype=np.int64).reshape(-1, len(_ARRAYS))
    columns: dict[str, list[list[Any]]] = {}
    begin = 0
    for column, name in enumerate(_ARRAYS):
        ends = np.cumsum(lengths[:, column])
        total = int(ends[-1]) if len(ends) else 0
        array = np.frombuffer(data, dtype=_DTYPES[name], count=total, offset=begin)
        begin += array.nbytes
        columns[name] = [piece.tolist() for piece in np.split(array, ends[:-1])]
    rollouts = iter(
        Rollout(
            context=tuple(columns["context"][row]),
            actions=columns["actions"][row],
            behavior_logprobs=columns["behavior_logprobs"][row],
            end=EndReason(one["end"]),
            **{name: one[name] for name in _PLAIN},
        )
        for row, one in enumerate(head["rollouts"])
    )
    return [
        Group(start, [next(rollouts) for _ in range(one["rollouts"])], logged=one["logged"])
        for start, one in zip(starts, head["groups"], strict=True)
    ]
