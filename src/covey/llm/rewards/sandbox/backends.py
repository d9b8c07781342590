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


def try_backend(name: str) -> Sandbox:
    """The first variant of a backend of `CANDIDATES` that passes the probe.

    Raises:
        SandboxFailure: if there is none, with the reason of the first; one line.
    """
    reason = ""
    for variant in CANDIDATES[name]:
        try:
            sandbox = variant()
            check_isolation(sandbox)
            return sandbox
        except (SandboxFailure, InterpreterError) as error:
            reason = reason or str(error)
    raise SandboxFailure(reason)


@lru_cache(maxsize=1)
def find_sandbox() -> Sandbox:
    """The first backend that passes the probe, which is run once in a process.

    Raises:
        ConfigError: if there is none; one line with each reason and what to install.
    """
    reasons = []
    for name in CANDIDATES:
        try:
            return try_backend(name)
        except SandboxFailure as error:
            reasons.append(f"{name}: {error}")
    raise ConfigError(
        "programs of a model run in a sandbox only, and none works here: install bubblewrap (apt install bubblewrap) "
        f'or sandlock (pip install "covey[sandbox]"); {"; ".join(reasons)}; unsafe_without_sandbox = true in '
        "[[rewards]] runs them without protection"
    )


def choose_sandbox(*, unsafe: bool) -> Sandbox:
    """`find_sandbox`, or no sandbox at all if `unsafe` is set."""
    return LocalProcess() if unsafe else find_sandbox()
