"""The reward `environment`: what the environment of a conversation has paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def environment(completions: Sequence[Any], *, turn_rewards: Sequence[Sequence[float]]) -> list[float]:
    """The sum of the rewards of the turns of each conversation."""
    return [sum(rewards) for rewards in turn_rewards]
