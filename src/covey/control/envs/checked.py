"""Checks of an environment's results; an error is one line with environment, episode and step."""

import ctypes
import re
import threading
import time
import weakref
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from covey.config import RunError
from covey.runtime.worker.child import user_line

LARGEST_REWARD = 1e12  # the square of the sum over an episode is a number in fp32

_UNPACKED = re.compile(r"\(expected 5, got (\d+)\)|\(expected 5\)")  # of Python's ValueError, in Gymnasium's wrappers


class EnvironmentFault(RunError):
    """An environment raised an exception, returned invalid values, or did not return in time."""


def checked_observation(observation: Any, space: Space) -> Any:
    """Check an observation; returns it with the shape of its space.

    Raises:
        TypeError, ValueError: if it does not belong to this space.
    """
    if isinstance(space, spaces.Box):
        if type(observation) is np.ndarray and observation.shape == space.shape and observation.dtype.kind in "fiub":
            return observation
        array = np.asarray(observation)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"its observation is {_shown(observation)}, not {space.shape} numbers")
        if array.shape != space.shape:
            raise ValueError(f"its observation has the shape {array.shape}, not {space.shape} as its space says")
        return array
    try:
        spaces.flatten(space, observation)
    except Exception as error:  # a user's space may raise anything
        raise ValueError(f"its observation {_shown(observation)} does not belong to {space}") from error
    return observation


def checked_reward(reward: Any) -> float:
    """Check a reward; returns it as a finite float.

    Raises:
        TypeError, ValueError: if it is not a number of at most LARGEST_REWARD.
    """
    if type(reward) is not float:
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "fiub":
            raise TypeError(f"its reward is {_shown(reward)}, not a number")
        reward = float(array.item())
    if not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
        much = "" if reward - reward else f", and the largest is {LARGEST_REWARD:g}: scale it"
        raise ValueError(f"its reward is {reward:g}{much}")
    return reward


def checked_flag(flag: Any, name: str) -> bool:
    """Check `terminated` or `truncated`; returns it as a bool.

    Raises:
        TypeError: if it is not a bool.
    """
    if flag is True or flag is False:
        return flag
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in "bi":
        raise TypeError(f"{name} is {_shown(flag)}, neither True nor False")
    return bool(array.item())


def fault_of(error: Exception, where: str) -> EnvironmentFault:
    """An EnvironmentFault of one line for any exception; `where` names the environment, the episode and the step."""
    if isinstance(error, EnvironmentFault):
        return error
    unpacked = _UNPACKED.search(str(error)) if isinstance(error, ValueError) else None
    if unpacked:
        count = unpacked[1] or "more"
        return EnvironmentFault(
            f"{where}: it returned {count} values instead of 5 (observation, reward, terminated, truncated, info): "
            "adapt it to the API of Gymnasium 1"
        )
    try:
        text = " ".join(str(error).split())
    except Exception:  # an exception whose text raises
        text = ""
    kind = type(error).__name__
    if "reset() got an unexpected keyword argument" in text:
        return EnvironmentFault(f"{where}: {text[:300]}: its reset must take seed and options, as in Gymnasium 1")
    own = isinstance(error, TypeError | ValueError) and text.startswith(("its ", "terminated is", "truncated is"))
    what = text[:300] if own else f"{kind}: {text[:300]}" if text else kind
    return EnvironmentFault(f"{where}: {what}{user_line(error)}")


def _shown(value: Any) -> str:
    """The repr of any value, short and on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value whose repr raises
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


class _Overdue(BaseException):
    """Raised by a `Watchdog` in the thread that it watches; passes through `except Exception` of an environment."""


class Watchdog:
    """Context manager that ends a call in this process that takes too long.

    Python code is interrupted immediately, code in C when it returns; a process of its own can be killed instead.
    """

    def __init__(self, seconds: float, where: str) -> None:
        self.seconds, self.where = seconds, where
        self._due = float("inf")
        self._fired = False
        self._thread_id = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            pause = min(self.seconds / 4, 1.0)
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), pause), daemon=True, name="covey-watchdog"
            )
            self._thread.start()
        self._thread_id = threading.get_ident()
        self._due = time.monotonic() + self.seconds

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._due = float("inf")
            fired, self._fired = self._fired, False
            if fired and kind is not _Overdue:  # the call returned at the same moment: clear the exception
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), None)
        if fired:
            raise EnvironmentFault(
                f"{self.where} did not answer within {self.seconds:g} s: if it is only slow, raise "
                "environment.timeout_seconds"
            ) from None

    def interrupt_if_overdue(self) -> None:
        """Raise `_Overdue` in the watched thread if its call takes too long; the thread of the watchdog calls this."""
        with self._lock:
            if not self._fired and time.monotonic() > self._due:
                self._fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(_Overdue))


def _watch(reference: weakref.ref[Watchdog], pause: float) -> None:
    """The thread of a watchdog. It ends when nothing refers to the watchdog any more."""
    while (watchdog := reference()) is not None:
        watchdog.interrupt_if_overdue()
        del watchdog  # not referred to during the pause
        time.sleep(pause)
