"""The [replay] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import LossBase, Table, config_field

REPLAY_IMPORTANCE_CAP = 2.0


@dataclass(frozen=True)
class ReplayConfig(Table):
    SWITCH = ("groups",)

    groups: int = config_field(
        0,
        "groups of earlier steps that a step learns from again, at most; they are added to its own groups; 0: off",
        min=0,
        max=1_000_000,
    )
    max_age: int = config_field(4, "steps after which a group is no longer replayed", min=1, max=10_000)
    max_uses: int = config_field(1, "times that a group is replayed at most", min=1, advanced=True)


def importance_cap(loss: LossBase, replay: ReplayConfig) -> float | None:
    """loss.importance_cap. If it is unset, replay has importance weights up to REPLAY_IMPORTANCE_CAP, unless
    loss.importance_mask bounds them.
    """
    if loss.importance_cap is None and replay.groups and not loss.importance_mask:
        return REPLAY_IMPORTANCE_CAP
    return loss.importance_cap
