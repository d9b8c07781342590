"""Observers of the user's own: `covey.run(..., observers=[...])`."""

from __future__ import annotations

from collections.abc import Sequence

from covey.config import ConfigError, RunError
from covey.data import Observer, StepRecord

Observers = Observer | Sequence[Observer]


def check_observers(observers: Observers) -> tuple[Observer, ...]:
    """One observer or several as a tuple.

    Raises:
        ConfigError: for an object without the method `record`.
    """
    listed = (observers,) if hasattr(observers, "record") or not isinstance(observers, Sequence) else tuple(observers)
    for one in listed:
        if isinstance(one, type) or not callable(getattr(one, "record", None)):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"of type {type(one).__name__}"
            raise ConfigError(
                f"observers: one is {kind}: give objects with the method record(step), which gets a covey.StepRecord"
            )
    return listed


class OwnObservers:
    """Calls the observers of the user's own after those of covey; implements `covey.data.Observer`.

    The first exception is kept, and the run ends after the step as if it had been stopped: the step is recorded already
    and a checkpoint follows, so nothing is lost.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._fault: RunError | None = None

    def record(self, step: StepRecord) -> None:
        """Give the step to each observer."""
        for observer in self._observers:
            try:
                observer.record(step)
            except Exception as error:
                name, reason = type(observer).__name__, " ".join(str(error).split())
                self._fault = RunError(
                    f"the observer {name} raised {type(error).__name__}{f' ({reason:.200})' if reason else ''} in step "
                    f"{step.step}, which is recorded and saved"
                )
                self._fault.__cause__ = error
                return

    @property
    def failed(self) -> bool:
        """True if an observer has raised an exception."""
        return self._fault is not None

    def raise_fault(self, how_to_continue: str) -> None:
        """Raise the error of the observer that failed, if one has.

        Args:
            how_to_continue: the end of the message.

        Raises:
            RunError: naming the observer; its exception is the cause.
        """
        if self._fault is not None:
            raise RunError(f"{self._fault}. {how_to_continue}") from self._fault.__cause__
