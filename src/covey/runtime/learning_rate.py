"""The schedule of a learning rate by its name in a recipe."""

from __future__ import annotations

from covey.core import schedules

FALLING = {"linear": schedules.linear, "cosine": schedules.cosine}


def learning_rate_schedule(name: str, peak: float, *, steps: int, warmup_steps: int) -> schedules.Schedule:
    """The schedule "constant", "linear" or "cosine", which rises to `peak` over the first `warmup_steps`."""
    if name == "constant":
        return schedules.constant(peak, warmup_steps=warmup_steps)
    return FALLING[name](peak, steps=steps, warmup_steps=warmup_steps)
