"""The [selection] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import config_field


@dataclass(frozen=True)
class SelectionConfig:
    candidates: int = config_field(
        1,
        "prompts drawn for each one of a step; those are kept whose rewards are expected to differ most within a "
        "group; 1: prompts are drawn evenly",
        min=1,
        max=1000,
    )
    floor: float = config_field(
        0.1,
        "weight of a prompt whose rewards are expected to be all equal, beside 1 for the largest expected difference; "
        "1: prompts are drawn evenly",
        above=0,
        max=1,
    )
    half_life: float = config_field(
        10.0, "steps after which a reward has half of its weight in what is expected", above=0, advanced=True
    )
    back_to_data: bool = config_field(
        False,
        "weight groups in the loss so that the objective is the mean over all prompts, and not over those that are "
        "drawn; the gradient has a larger variance",
        advanced=True,
    )
