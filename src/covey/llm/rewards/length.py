"""The reward `length`: a penalty of completions that are longer than wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.units import units_of


def length_penalty(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    unit: str,
    length_target: int,
    length_limit: int,
    length_shape: str,
    length_both_sides: bool,
) -> list[float]:
    """Length penalty: 0 up to the target, then falling to -1 at the limit, and -1 beyond it.

    x = min(1, max(0, n - target) / (limit - target)) for n units

    linear    R = -x                      DAPO (arXiv 2503.14476), eq. 13, with any target and limit
    cosine    R = -(1 - cos(pi x)) / 2    the cosine reward of Yeo et al. (arXiv 2502.03373), from 0 to -1

    Args:
        completion_ids: the tokens of each completion, with the end token.
        unit: tokens, words (separated by white space) or characters.
        length_target: longest completion without a penalty.
        length_limit: shortest completion with the penalty 1; above the target.
        length_shape: linear or cosine.
        length_both_sides: if True, |n - target| replaces max(0, n - target), so that short completions have a penalty
            too: L1 (arXiv 2503.04697), eq. 1.
    """
    penalties = []
    for units in units_of(completions, completion_ids, unit):
        excess = len(units) - length_target
        x = min(1.0, (abs(excess) if length_both_sides else max(0, excess)) / (length_limit - length_target))
        penalties.append(-x if length_shape == "linear" else (math.cos(math.pi * x) - 1) / 2)
    return penalties
