"""The reward `repetition`: a penalty of n-grams that a completion repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.units import units_of


def repetition_penalty(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, unit: str, ngram_size: int
) -> list[float]:
    """Fraction of the n-grams of a completion that occurred before in it, negated.

    R = -(1 - distinct n-grams / n-grams)      the n-gram penalty of Yeo et al. (arXiv 2502.03373)

    0 if nothing is repeated, also in a completion of fewer units than an n-gram; near -1 for a loop.

    Args:
        completion_ids: the tokens of each completion, with the end token.
        unit: tokens, words (separated by white space, in lower case) or characters.
        ngram_size: units of an n-gram.
    """
    penalties = []
    for units in units_of(completions, completion_ids, unit):
        ngrams = [tuple(units[i : i + ngram_size]) for i in range(len(units) - ngram_size + 1)]
        penalties.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return penalties
