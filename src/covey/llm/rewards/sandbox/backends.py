"""Chooses the sandbox: bubblewrap, else sandlock, else a refusal. A backend counts only if it passes the probe."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from covey.config import ConfigError
from covey.llm.rewards.sandbox.bubblewrap import Bubblewrap
from covey.llm.rewards.sandbox.interpreter import InterpreterError
from covey.llm.rewards.sandbox.local import LocalProcess
from covey.llm.rewards.sandbox.probe import check_isolation
from covey.llm.rewards.sandbox.sandlock import Sandlock
from covey.llm.rewards.sandbox.session import Sandbox, SandboxFailure

CANDIDATES: dict[str, tuple[Callable[[], Sandbox], ...]] = {
    "bubblewrap": (Bubblewrap, lambda: Bubblewrap(disable_userns=False)),
    "sandlock": (Sandlock,),
}


@lru_cache(maxsize=1)
def find_sandbox() -> Sandbox:
    """The first backend that passes the probe, which is run once in a process.

    Raises:
        ConfigError: if there is none; one line with each reason and what to install.
    """
    reasons = []
    for name, variants in CANDIDATES.items():
        reason = ""
        for variant in variants:
            try:
                return _tried(variant)
            except (SandboxFailure, InterpreterError) as error:
                reason = reason or str(error)
        reasons.append(f"{name}: {reason}")
    raise ConfigError(
        "programs of a model run in a sandbox only, and there is none: install bubblewrap (apt install bubblewrap) or "
        f'sandlock (pip install "covey[sandbox]"); {"; ".join(reasons)}; unsafe_without_sandbox = true in [[rewards]] '
        "runs them without protection"
    )


def choose_sandbox(*, unsafe: bool) -> Sandbox:
    """`find_sandbox`, or no sandbox at all if `unsafe` is set."""
    return LocalProcess() if unsafe else find_sandbox()


def _tried(variant: Callable[[], Sandbox]) -> Sandbox:
    sandbox = variant()
    check_isolation(sandbox)
    return sandbox
