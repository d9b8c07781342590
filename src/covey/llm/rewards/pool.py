"""Processes of one reward function that serve calls side by side, in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.reward_process import LOAD_LEAST_SECONDS, RewardProcess

INTERRUPT_SECONDS = 0.05  # between attempts to end the calls that are still running when the pool is closed


class RewardPool:
    """`workers` processes of a function named `file.py:function` or `module:function`; implements `RewardRunner`.

    A call is served by the first process that is free, in the order of the calls. With one process, the calls of a
    function that keeps state have the order in which they were started.
    """

    def __init__(
        self,
        function: str,
        workers: int = 1,
        load_seconds: float = LOAD_LEAST_SECONDS,
        *,
        repeat: bool = True,
        memory_mib: int = 0,
    ) -> None:
        """Processes start with their first call. Except for `workers`, arguments are as for `RewardProcess`."""
        self._processes = [
            RewardProcess(function, load_seconds, repeat=repeat, memory_mib=memory_mib) for _ in range(workers)
        ]
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: set[Future[Results]] = set()

    @property
    def workers(self) -> int:
        return len(self._processes)

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """Start a call. Its deadline begins when a process is free for it."""
        future: Future[Results] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        for process in self._processes[len(self._threads) :]:
            thread = threading.Thread(target=self._serve, args=(process,), daemon=True, name="covey-reward-pool")
            self._threads.append(thread)
            thread.start()
        self._jobs.put((future, (arguments, global_step, seconds, step_counts)))
        return future

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """Start a call and wait for its results; errors as of `RewardProcess.call`."""
        return self.start(arguments, global_step, seconds, step_counts).result()

    def close(self) -> None:
        """Cancel waiting calls, end running ones and all processes. A later call starts new processes."""
        running = {future for future in tuple(self._open) if not future.cancel()}
        while running:
            for process in self._processes:
                process.interrupt()
            running = wait(running, INTERRUPT_SECONDS).not_done
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _serve(self, process: RewardProcess) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(process.call(*call))
            except BaseException as error:
                future.set_exception(error)
        process.close()


_Job = tuple[Future[Results], tuple[Mapping[str, Any], int, float, Sequence[int] | None]]
