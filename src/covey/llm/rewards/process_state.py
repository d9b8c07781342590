"""Process state that a reward function may change by accident, saved before a call and restored after it.

This file imports the standard library only, so that the reward worker starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import locale
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

TIMER_TOLERANCE_SECONDS = 1.0  # a running timer that differs by less is considered unchanged
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


class ProcessState:
    """Working folder, file mode mask, locale, resource limits, recursion limit and timers; torch's default type and
    number of threads if torch is loaded. Limits that a function raised are not restored.
    """

    def __init__(self) -> None:
        """Save the present state."""
        self._folder = _working_folder()
        self._mask = _file_mode_mask()
        self._locale = locale.setlocale(locale.LC_ALL)
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._recursion = sys.getrecursionlimit()
        self._began = time.monotonic()
        self._timers = {timer: signal.getitimer(timer) for timer in _TIMERS}
        torch = sys.modules.get("torch")
        self._torch = (torch, torch.get_default_dtype(), torch.get_num_threads()) if torch else None

    def restore(self) -> bool:
        """Restore the state. Returns False if a part cannot be restored, such as a lowered hard limit."""
        failed = False
        for step in self._steps():
            try:
                step()
            except (OSError, ValueError, locale.Error):
                failed = True
        return not failed

    def _steps(self) -> Iterator[Callable[[], Any]]:
        """Actions that restore the parts that differ."""
        if sys.getrecursionlimit() < self._recursion:
            yield partial(sys.setrecursionlimit, self._recursion)
        for number, before in self._limits.items():
            if any(map(_is_tighter, resource.getrlimit(number), before)):
                yield partial(resource.setrlimit, number, before)
        for timer, (left, interval) in self._timers.items():
            passed = time.monotonic() - self._began if timer == signal.ITIMER_REAL else 0.0
            left = max(left - passed, 0.0)
            now = signal.getitimer(timer)[0]
            if bool(now) != bool(left) or abs(now - left) > TIMER_TOLERANCE_SECONDS:
                yield partial(signal.setitimer, timer, left, interval)
        if _working_folder() != self._folder:
            yield partial(os.chdir, self._folder)
        if _file_mode_mask() != self._mask:
            yield partial(os.umask, self._mask)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            yield partial(locale.setlocale, locale.LC_ALL, self._locale)
        if self._torch is not None:
            yield self._restore_torch

    def _restore_torch(self) -> None:
        assert self._torch is not None
        torch, dtype, threads = self._torch
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _is_tighter(limit: int, before: int) -> bool:
    return limit != resource.RLIM_INFINITY and (before == resource.RLIM_INFINITY or limit < before)


def _working_folder() -> str:
    """The current folder; empty if it has been deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _file_mode_mask() -> int:
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    return mask
