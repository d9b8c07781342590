"""Chooses the sandbox: bubblewrap, else sandlock, else a refusal. A backend counts only if it passes the probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from covey.config import ConfigError
from covey.llm.rewards.sandbox.bubblewrap import bubblewrap_variants
from covey.llm.rewards.sandbox.interpreter import InterpreterError
from covey.llm.rewards.sandbox.local import LocalProcess
from covey.llm.rewards.sandbox.probe import check_isolation
from covey.llm.rewards.sandbox.sandlock import Sandlock
from covey.llm.rewards.sandbox.session import Sandbox, SandboxFailure
from covey.runtime.worker.child import one_printable_line

CANDIDATES: dict[str, Callable[[], Mapping[str, Callable[[], Sandbox]]]] = {  # variants of each, by what to call them
    "bubblewrap": bubblewrap_variants,
    "sandlock": lambda: {"sandlock": Sandlock},
}


def try_backend(name: str) -> Sandbox:
    """The first variant of a backend of `CANDIDATES` that passes the probe.

    Raises:
        SandboxFailure: if there is none, with the reason of each; one line.
    """
    reasons = []
    for variant, make in CANDIDATES[name]().items():
        try:
            sandbox = make()
            check_isolation(sandbox)
            return sandbox
        except (SandboxFailure, InterpreterError, NotImplementedError, OSError) as error:
            reasons.append(f"{variant}: {one_printable_line(str(error))}")
    raise SandboxFailure("; ".join(reasons))


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
            reasons.append(str(error))
    raise ConfigError(
        "programs of a model run in a sandbox only, and none works here: install bubblewrap (apt install bubblewrap) "
        f'or sandlock (pip install "covey[sandbox]"); {"; ".join(reasons)}; unsafe_without_sandbox = true in '
        "[[rewards]] runs them without protection"
    )


def choose_sandbox(*, unsafe: bool) -> Sandbox:
    """`find_sandbox`, or no sandbox at all if `unsafe` is set."""
    return LocalProcess() if unsafe else find_sandbox()
