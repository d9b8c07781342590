"""A batch of completions that begin alike and have undecided tokens."""

from __future__ import annotations

import torch

from covey.data import Batch, EndReason, Group, Rollout, Start, collate


def batch_of(seed: int = 0) -> Batch:
    """Two groups of completions, some of which begin alike; in the first, tokens in the middle are undecided."""
    generator = torch.Generator().manual_seed(seed)

    def rollout(prompt: int, number: int) -> Rollout:
        length = 4 + 3 * number
        actions = torch.randint(3, 40, (length,), generator=generator).tolist()
        actions[:2] = 9, 8
        decided = [not (prompt == 0 and 1 <= place < 3) for place in range(length)]
        return Rollout((5, 6, 7 + prompt), actions, [-1.0] * length, EndReason.STOP, decided=decided, reward=0.0)

    return collate([Group(Start(one, ""), [rollout(one, number) for number in range(3)]) for one in range(2)])
