"""Graded rollouts as bytes, which ranks exchange without pickles. Starts are not sent, because every rank draws them.

A message is one line of JSON and then arrays: int64 tokens and float64 log-probabilities of all rollouts, one after the
other. JSON keeps every float64 exactly, NaN and infinity included.
"""

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

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


# The sequences of a rollout; all but `context` may be None.
_CONTEXTS = ("context", "teacher_context")
_SEQUENCES = (*_CONTEXTS, "actions", "behavior_logprobs", "decided", "step_rewards", "step_ends")
_NONE = -1  # length of a sequence that is None


def for_learning(rollout: Rollout) -> Rollout:
    """The rollout without texts, messages and other records, and with its sequences as arrays.

    Contexts of token ids stay tuples, because rollouts of one prompt share them. The others are copies, because a view
    would keep the whole step in memory.
    """
    arrays: dict[str, Any] = {
        name: None if getattr(rollout, name) is None else np.array(getattr(rollout, name))
        for name in _SEQUENCES
        if name not in _CONTEXTS
    }
    return Rollout(
        context=rollout.context,
        teacher_context=rollout.teacher_context,
        end=rollout.end,
        reward=None if rollout.reward is None else float(rollout.reward),
        reward_parts={name: None if part is None else float(part) for name, part in rollout.reward_parts.items()},
        version=rollout.version,
        **arrays,
    )


def to_state(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rollouts of `for_learning` as tensors, numbers and strings, exactly.

    Their sequences are stored one after the other: `tensors` has a tensor for each name, `lengths` the length in every
    rollout.
    """
    tensors: dict[str, torch.Tensor] = {}
    lengths: dict[str, list[int]] = {}
    for name in _SEQUENCES:
        arrays = [_array(name, getattr(rollout, name)) for rollout in rollouts]
        lengths[name] = [_NONE if array is None else len(array) for array in arrays]
        present = [array for array in arrays if array is not None]
        if present:
            tensors[name] = torch.from_numpy(np.concatenate(present))
    return {
        "lengths": lengths,
        "tensors": tensors,
        "token_contexts": all(isinstance(rollout.context, tuple) for rollout in rollouts),
        "ends": [str(rollout.end) for rollout in rollouts],
        "rewards": [rollout.reward for rollout in rollouts],
        "reward_parts": [rollout.reward_parts for rollout in rollouts],
        "versions": [rollout.version for rollout in rollouts],
    }


def from_state(state: dict[str, Any]) -> list[Rollout]:
    """The rollouts of a state of `to_state`."""
    names = [name for name in _SEQUENCES if name in state["lengths"]]  # older checkpoints have no teacher's prompts
    columns = {name: _parts(state["tensors"].get(name), state["lengths"][name]) for name in names}
    for name in (name for name in _CONTEXTS if name in columns and state["token_contexts"]):
        columns[name] = [None if context is None else tuple(context.tolist()) for context in columns[name]]
    return [
        Rollout(
            end=EndReason(end),
            reward=reward,
            reward_parts=parts,
            version=version,
            **{name: columns[name][row] for name in names},
        )
        for row, (end, reward, parts, version) in enumerate(
            zip(state["ends"], state["rewards"], state["reward_parts"], state["versions"], strict=True)
        )
    ]


def _array(name: str, values: Any) -> Any:
    kind = np.int64 if name == "teacher_context" else None  # also of an empty one
    return None if values is None else np.asarray(values, dtype=kind)


def _parts(joined: torch.Tensor | None, lengths: Sequence[int]) -> list[Any]:
    """The arrays of which a tensor was joined; None where the length says so."""
    ends = accumulate((max(length, 0) for length in lengths), initial=0)
    array = np.empty(0) if joined is None else joined.numpy()
    return [
        None if length == _NONE else array[begin:end]
        for (begin, end), length in zip(pairwise(ends), lengths, strict=True)
    ]
