"""The length penalty near the token limit, which a run adds to its rewards (`sampling.overlong_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence


def overlong(completion_ids: Sequence[Sequence[int]], *, max_new_tokens: int, overlong_tokens: int) -> list[float]:
    """Length penalty: 0 up to `overlong_tokens` before the token limit, then linear to -1 at the limit.

    R = 0 if |y| <= L - C, else (L - C - |y|) / C      DAPO (arXiv 2503.14476), eq. 13

    Args:
        completion_ids: |y| tokens each, with the end token.
        max_new_tokens: L; no completion is longer.
        overlong_tokens: C, the number of penalised tokens before the limit; above 0.
    """
    free = max_new_tokens - overlong_tokens
    return [min(0.0, (free - len(ids)) / overlong_tokens) for ids in completion_ids]
