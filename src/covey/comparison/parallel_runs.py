"""Runs many jobs with bounded parallelism, one process each, so that no state leaks between runs.

A process for every run also separates their peak memory and their failures. Importing torch takes seconds, so on Linux
it is imported once, in a server from which the processes are forked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from covey.config import ConfigError, ControlConfig, MachineError, RunConfig, RunError
from covey.config.files import machine_error
from covey.runtime.variables import leave_safe_path, safe_path, variable
from covey.tracking.output import plain_console
from covey.tracking.run_folder import LOG_FILE
from covey.tracking.run_state import last_step

LOOK_SECONDS = 0.5  # interval of polling the runs' progress
STOP_SECONDS = 60.0  # deadline of a run that was asked to stop; it ends after its step, or is killed


@dataclass(frozen=True)
class SeedJob:
    """One run of a comparison."""

    label: str  # of its recipe
    recipe: str  # as typed, for the run's advice, like `fields`
    seed: int
    config: RunConfig | ControlConfig  # with the seed and the folder
    run_dir: Path
    fields: tuple[str, ...] = ()  # the `--field value` words

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.label}, seed {self.seed}"


@dataclass
class _Running:
    job: SeedJob
    process: Any
    outcome: Connection
    bar: TaskID
    step: int = 0


@dataclass
class ParallelRunner:
    """Runs jobs in processes. `work` must be a module's top-level function, because the processes import it by name.

    It raises ConfigError for a mistake and RunError for a run that cannot continue, and returns None if it was stopped.
    """

    work: Callable[[SeedJob], Any]
    at_once: int
    preload: Sequence[str] = ()  # modules that every process needs
    console: Console = field(default_factory=plain_console)

    def run(self, jobs: Sequence[SeedJob]) -> dict[str, str]:
        """Run every job; returns name -> reason of those that failed.

        Raises:
            ConfigError: for a mistake that one of them reported, which affects all of them.
            MachineError: for a fault of the machine, which affects all of them too.
            KeyboardInterrupt: after Ctrl-C, when the runs have written their checkpoints.
        """
        failures: dict[str, str] = {}
        waiting = list(jobs)
        running: list[_Running] = []
        with self._progress() as progress, _one_thread_each(self.at_once), safe_path(), _terminated_as_interrupted():
            total = progress.add_task("all runs", total=sum(job.config.steps for job in jobs))
            try:
                while waiting or running:
                    while waiting and len(running) < self.at_once:
                        self._start(waiting.pop(0), progress, running)
                    wait([one.process.sentinel for one in running], timeout=LOOK_SECONDS)
                    self._look(running, progress, total)
                    for one in [one for one in running if one.process.exitcode is not None]:
                        running.remove(one)
                        self._finish(one, progress, failures)
            except BaseException:
                self._stop(running)
                raise
        return failures

    def _progress(self) -> Progress:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def _start(self, job: SeedJob, progress: Progress, running: list[_Running]) -> None:
        forks = sys.platform == "linux"  # elsewhere a fork of a process that has loaded torch may hang
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(list(self.preload))
        job.run_dir.mkdir(parents=True, exist_ok=True)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(self.work, job, there), name=job.name)
        # Before the process starts, because after Ctrl-C only the runs in this list are asked to stop.
        running.append(_Running(job, process, here, progress.add_task(f"  {job.name}", total=job.config.steps)))
        process.start()
        there.close()

    def _look(self, running: Sequence[_Running], progress: Progress, total: TaskID) -> None:
        for one in running:
            step = last_step(one.job.run_dir)
            progress.update(one.bar, completed=step)
            progress.advance(total, step - one.step)
            one.step = step

    def _finish(self, one: _Running, progress: Progress, failures: dict[str, str]) -> None:
        progress.remove_task(one.bar)
        log = one.job.run_dir / LOG_FILE
        try:
            kind, text = one.outcome.recv()
        except EOFError:
            kind, text = "failed", f"its process ended with code {one.process.exitcode}; see {log}"
        if kind == "mistake":
            raise ConfigError(f"{one.job.name}: {text}")
        if kind == "machine":
            raise MachineError(f"{one.job.name}: {text}")
        if kind == "stopped":
            raise KeyboardInterrupt
        if kind == "failed":
            failures[one.job.name] = text
        if kind == "failed" or not self.console.is_terminal:
            self.console.print(f"{one.job.name}: {text}", soft_wrap=True)

    def _stop(self, running: Sequence[_Running]) -> None:
        """Terminate the runs: each writes a checkpoint after its step; those that do not end in time are killed."""
        started = [one for one in running if one.process.pid is not None]
        for one in started:
            one.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for one in started:
            one.process.join(max(0.0, deadline - time.monotonic()))
            if one.process.exitcode is None:
                one.process.kill()
                one.process.join()


def _child(work: Callable[[SeedJob], Any], job: SeedJob, outcome: Connection) -> None:
    """Main function of a run's process: output goes to its log, the outcome to the parent."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent alone, which asks its processes to stop
    leave_safe_path()
    log = os.open(job.run_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        finished = work(job) is not None
        outcome.send(("done", "done") if finished else ("stopped", "stopped"))
    except ConfigError as error:
        outcome.send(("mistake", str(error)))
    except KeyboardInterrupt:
        outcome.send(("stopped", "stopped"))
    except RunError as error:
        outcome.send(("failed", str(error)))
    except Exception as error:
        if fault := machine_error(error):
            outcome.send(("machine", str(fault)))
            return
        outcome.send(("failed", f"unexpected {type(error).__name__}: {error}; see {job.run_dir / LOG_FILE}"))
        raise


def _end_with_parent() -> None:
    """Wait for the parent's end, then stop this run as after Ctrl-C, so that it does not outlive its comparison."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _one_thread_each(at_once: int) -> Iterator[None]:
    """Limit the threads of NumPy's products if several runs share the cores.

    The processes read this when they load NumPy, so it cannot be set in them.
    """
    with variable("OPENBLAS_NUM_THREADS", "1") if at_once > 1 else nullcontext():
        yield


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Context manager in which SIGTERM stops a comparison like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
