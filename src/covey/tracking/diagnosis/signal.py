"""Checks of rewards and groups."""

from __future__ import annotations

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import RECENT, History
from covey.tracking.diagnosis.settings import Settings

NO_SIGNAL = 0.75  # fraction of groups without signal at which the standard error of the gradient has doubled
NO_SIGNAL_PROBLEM = 0.95


def groups_without_signal(history: History, settings: Settings) -> Seen | None:
    fraction = history.level("groups/zero_advantage_fraction")
    if fraction is None or fraction < NO_SIGNAL:
        return None
    return Seen(
        f"in the last {RECENT} steps {fraction:.0%} of the groups had equal rewards",
        f"try {settings.change('sampling.group_size', 2 * settings.number('sampling.group_size', 8))}",
        "problem" if fraction >= NO_SIGNAL_PROBLEM else "warning",
    )


CHECKS = (
    Check(
        "groups without signal",
        ("groups/zero_advantage_fraction", "reward/mean", "reward/std"),
        groups_without_signal,
        f"median fraction of groups with equal rewards of the last {RECENT} steps at least {NO_SIGNAL:.0%}",
        "A group whose rewards are all equal has advantages of 0 and no gradient.",
    ),
)
