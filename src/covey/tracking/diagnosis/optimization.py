"""Checks of gradients, updates and the critic."""

from __future__ import annotations

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import History
from covey.tracking.diagnosis.settings import Settings


def skipped_updates(history: History, settings: Settings) -> Seen | None:
    skipped = history.total("update/skipped_steps")
    if not skipped:
        return None
    rate = settings.number("update.learning_rate", 1e-5)
    return Seen(
        f"{skipped:.0f} optimizer steps were left out, because loss or gradient was not finite",
        f"try {settings.change('update.learning_rate', rate / 3)}",
        "problem" if history.recent("update/skipped_steps")[-1] else "warning",
    )


CHECKS = (
    Check(
        "skipped updates",
        ("update/skipped_steps", "grad_norm", "ratio/max"),
        skipped_updates,
        "any optimizer step was left out",
        "A loss or gradient that is not finite would destroy the weights, so its step is left out.",
    ),
)
