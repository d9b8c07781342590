"""Copies of an environment in one process of their own, under a deadline: the default for an environment of the user.

    the run  <-- a pipe: calls of a `ManualResetVectorEnv`, their results -->  a fork of the run, with all copies
       \\__ shared memory: the reset seed and the step of the present call __/

One process for all copies exchanges one message in a step; `AsyncWithDeadline` has a process for each copy. A process
that dies or hangs is started again, and the episodes that it had begun are played again. If it dies or hangs a second
time in the same call of a copy, the episode of that copy has failed.

Shape legend: N slots (copies).
"""

import contextlib
import mmap
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.control.envs.checked import EnvironmentFault, fault_of
from covey.control.envs.manual_reset import FAILED, ManualResetVectorEnv, place_of
from covey.control.envs.registration import refuse_broken
from covey.runtime.worker.child import end_with_parent, ending

CLOSE_SECONDS = 2.0  # for the `close` of the environments
DESCRIBED = (
    "num_envs", "observation_space", "single_observation_space", "single_action_space", "action_space", "metadata",
)  # fmt: skip


class ProcessFault(EnvironmentFault):
    """The process of an environment died, or did not answer in time, in a call of the copy `slot`; -1: in none."""

    slot = -1


class IsolatedVectorEnv(VectorEnv):
    """A `ManualResetVectorEnv` in a process of its own.

    Args:
        make: makes the copies, in the process.
        name: of the environment, for messages.
        timeout_seconds: deadline of a call.

    Raises:
        ConfigError: if the copies cannot be made.
    """

    def __init__(self, make: Callable[[], ManualResetVectorEnv], name: str, timeout_seconds: float) -> None:
        self._make, self._name, self._timeout_seconds = make, name, timeout_seconds
        self._place = np.frombuffer(mmap.mmap(-1, 24), dtype=np.int64)
        self._start()
        # Of the episode in each slot: the seed or the packed state in which it began, the actions since, and the last
        # observation.
        self._origins: list[int | bytes] = [0] * self.num_envs
        self._actions: list[list[Any]] = [[] for _ in range(self.num_envs)]
        self._observed: list[Any] = [None] * self.num_envs
        self._going_N, self._failed_N = np.zeros((2, self.num_envs), dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask_N = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=np.bool_))
        self._failed_N &= ~mask_N
        observations, infos = self._repeated("reset_slots", seed, options)
        for slot in np.flatnonzero(mask_N).tolist():
            self._origins[slot], self._actions[slot] = seed[slot], []
        self._going_N |= mask_N
        self._observed = list(iterate(self.observation_space, observations))
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated_N, truncated_N, infos = self._repeated("step", actions)
        failed_N = self._failed_N & self._going_N
        if failed_N.any():
            truncated_N, infos = truncated_N | failed_N, infos | {FAILED: failed_N}
        for slot in np.flatnonzero(self._going_N).tolist():
            self._actions[slot].append(actions[slot])
        self._going_N &= ~(terminated_N | truncated_N)
        self._observed = list(iterate(self.observation_space, observations))
        return observations, rewards, terminated_N, truncated_N, infos

    def copies_states(self) -> bool:
        """True if a state of the environment can be packed, and a copy of it behaves exactly like the original."""
        exact: bool = self._ask("packs_states")
        return exact

    def snapshot(self, slot: int) -> bytes:
        """The state of a copy."""
        state: bytes = self._ask("pack", slot)
        return state

    def restore(self, slot: int, state: bytes) -> Any:
        """Put a copy of a state, also of another vector environment, into a slot; returns its last observation."""
        self._failed_N[slot] = False
        observation = self._repeated("unpack", slot, state)
        self._origins[slot], self._actions[slot] = state, []
        self._going_N[slot], self._observed[slot] = True, observation
        return observation

    def render(self) -> Any:
        return self._ask("render")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._ask("get_attr", name)
        return found

    def close_extras(self, **_: Any) -> None:
        with contextlib.suppress(EnvironmentFault):
            self._ask("close", seconds=CLOSE_SECONDS)
        self._process.end()

    def _repeated(self, call: str, *arguments: Any) -> Any:
        """The result of a call. A slot in which the process dies or hangs twice has failed, and rests."""
        once: set[int] = set()
        while True:
            try:
                return self._ask(call, *arguments)
            except ProcessFault as fault:
                if fault.slot < 0 or self._observed[fault.slot] is None:
                    raise  # nothing has begun
                self._failed_N[fault.slot] |= fault.slot in once
                what = "that episode is left out" if fault.slot in once else "its episodes were played again"
                once.add(fault.slot)
                self._start()
                self._replay(fault, skips_reset=call != "step")
                warnings.warn(f"{fault}. It was started again, and {what}", stacklevel=2)

    def _replay(self, fault: ProcessFault, *, skips_reset: bool) -> None:
        """Play the begun episodes again, except those that failed.

        Raises:
            ProcessFault: if they end in another observation.
        """
        for slot, observed in enumerate(self._observed):
            if observed is None:
                continue
            if self._failed_N[slot]:
                self._ask("rest", slot, observed, skips_reset)
                continue
            found = self._ask("replay", slot, self._origins[slot], self._actions[slot])
            flat, known = (
                np.asarray(gym.spaces.flatten(self.single_observation_space, one)) for one in (found, observed)
            )
            if not np.array_equal(flat, known):
                raise ProcessFault(
                    f"{fault}, and its episodes cannot be played again, because they do not depend on reset(seed) and "
                    "the actions alone"
                ) from fault

    def _start(self) -> None:
        self._place[:] = -1
        self._process = _Process(partial(_serve, self._make, self._name, self._place))
        weakref.finalize(self, self._process.end)
        for attribute, value in zip(DESCRIBED, self._ask("describe"), strict=True):
            setattr(self, attribute, value)

    def _ask(self, call: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The result of a call in the process.

        Raises:
            ProcessFault: if it dies, or does not answer in time.
            EnvironmentFault: if an environment raises or returns an invalid value.
            ConfigError: if the copies cannot be made.
        """
        seconds = self._timeout_seconds if seconds is None else seconds
        try:
            self._process.pipe.send((call, arguments))
            in_time = self._process.pipe.poll(seconds)
            result = self._process.pipe.recv() if in_time else None
        except (EOFError, OSError):
            raise self._fault(f"its process {self._process.end()}") from None
        if not in_time:
            self._process.end()
            raise self._fault(
                f"it did not answer within {seconds:g} s: if it is only slow, raise environment.timeout_seconds"
            )
        if isinstance(result, EnvironmentFault | ConfigError):
            self._process.end()
            raise result
        return result

    def _fault(self, what: str) -> ProcessFault:
        slot, seed, steps = self._place.tolist()
        made = steps >= 0
        place = place_of(self._name, None if seed < 0 else seed, steps) if made else f"environment {self._name!r}"
        fault = ProcessFault(f"{place}{'' if made else ', while it was made'}: {what}")
        fault.slot = slot
        return fault


class _Process:
    """A fork of this process, in a process group of its own, that runs `serve`."""

    def __init__(self, serve: Callable[[Connection], NoReturn]) -> None:
        self.pipe, theirs = Pipe()
        self._owner, self._ended = os.getpid(), ""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the fork prints what is in their buffers again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, if there are other threads
            self._number = os.fork()
        if not self._number:
            serve(theirs)
        theirs.close()

    def end(self) -> str:
        """Kill it with all that it started, and return how it had ended if it had."""
        if self._ended or os.getpid() != self._owner:
            return self._ended
        self.pipe.close()
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._number, signal.SIGKILL)
        self._ended = ending(os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1]))
        return self._ended


def _serve(make: Callable[[], ManualResetVectorEnv], name: str, place: NDArray[np.int64], pipe: Connection) -> NoReturn:
    """Answer calls, and end with the pipe or with the run."""
    code = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C in a terminal does not reach it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent()
        _answer_calls(make, name, place, pipe)
        code = 0
    except SystemExit as error:  # of the environment
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except (EOFError, OSError):  # the run is over, or the environment closed the pipe
        pass
    finally:
        os._exit(code & 0xFF)


def _answer_calls(
    make: Callable[[], ManualResetVectorEnv], name: str, place: NDArray[np.int64], pipe: Connection
) -> None:
    vector: Any = None
    result: Any
    call = ""
    while call != "close":
        call, arguments = pipe.recv()
        try:
            if call == "describe":
                with refuse_broken(name):
                    vector = make()
                for slot, env in enumerate(vector.envs):
                    env.slot, env.known_place = slot, place
                result = [getattr(vector, attribute) for attribute in DESCRIBED]
            else:
                result = getattr(vector, call)(*arguments)
        except Exception as error:
            result = error if isinstance(error, ConfigError) else fault_of(error, f"environment {name!r}")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        pipe.send(result)
