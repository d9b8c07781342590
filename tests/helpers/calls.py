"""How many calls of functions something makes: a measure of its cost that other work cannot change."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(run: Callable[[], object]) -> int:
    """Calls of functions, of Python or C, that `run` makes.

    The garbage collector is off meanwhile, because it calls finalizers and hypothesis's callback at any time.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return count
