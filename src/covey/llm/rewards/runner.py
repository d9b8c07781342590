"""Calls reward functions under a deadline: in processes of their own, or in a thread of the run's process."""

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from covey.config.named_modules import search_path
from covey.llm.rewards import reward_call
from covey.llm.rewards.reward_call import Log, Results, call_function, checked_positions, checked_values
from covey.runtime.event_loop import background
from covey.runtime.worker.child import InvalidResult, Message, ProcessState, one_line
from covey.runtime.worker.process import CallError, Worker

FAILURES_ALLOWED = 0.2  # fraction of a step's rollouts that may have no reward
LOAD_LEAST_SECONDS = 60.0  # to import a file, which may import torch on a busy machine; longer if a call's deadline is
NOT_SENT = ("prompts", "completion_ids")  # arguments that a function does not get that is called for one completion

T = TypeVar("T")
_STATE = threading.Lock()  # reading the process state changes it for a moment


class RewardHung(Exception):
    """A function hangs in this process, so it cannot be stopped."""


class RewardRunner:
    """Calls a reward function under a deadline."""

    workers: int = 1  # number of calls that can run side by side
    early: bool = True  # a call may run while other groups are sampled
    by_group: bool = False  # a call compares the completions of one group, so its values say nothing beyond it
    by_model: bool = False  # a language model answers, which may fail on one completion and not on the next

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """Start a call: one float or None per completion; with `step_counts` one list of that length or None.

        The future raises CallError if this call failed; InvalidResult or RewardHung if every further one would too.
        A reward that is not `early` may have `call` in its place.
        """
        raise NotImplementedError

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """As `start`, and wait for the results."""
        return self.start(arguments, global_step, seconds, step_counts).result()

    def close(self) -> None:
        """Release the resources of the calls."""


class InProcess(RewardRunner):
    """Calls a function in a thread of this process. A function that hangs cannot be killed, so it ends the run.

    The function gets a copy of its arguments, and its changes of the process state are reverted (`ProcessState`). A
    coroutine function waits for most of the time, so it runs in the background; another function would compete with the
    sampler for Python's interpreter, so it is not `early`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.early = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 -- of an object
        )

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        return in_thread(partial(self.call, arguments, global_step, seconds, step_counts))

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        process = os.getpid()
        with _STATE:
            state = ProcessState()
        own = {name: _copied(value) for name, value in arguments.items()}

        def work() -> Results:
            try:
                return call_function(self.function, own, global_step, step_counts)
            except InvalidResult:
                raise
            except BaseException as error:
                raise CallError(one_line(error)) from None  # in this thread, because its str() may hang too
            finally:
                if os.getpid() != process:  # a child that the function forked must not continue as a second run
                    os._exit(0)

        future = in_thread(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            raise RewardHung(
                f"took longer than {seconds:g} s inside this process, where it cannot be stopped; raise its "
                f"timeout_seconds, or name it as file.py:function to run it in a process of its own"
            ) from None
        finally:
            with _STATE:
                state.restore()


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The result of a call in a thread of its own, which does not keep an interrupted run alive."""
    future: Future[T] = Future()

    def fill() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fill, daemon=True, name="covey-reward").start()
    return future


def _copied(value: Any) -> Any:
    """Copy lists and dicts, which belong to the data, so that a function cannot change later calls."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


class RewardPool(RewardRunner):
    """Processes of a function named `file.py:function` or `module:function`, each of which serves one call at a time.

    A call is served by a process that is free, in the order of the calls. With one process, the calls of a function
    that keeps state have the order in which they were started.
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
        """The function is loaded by the first calls.

        Args:
            function: its name.
            workers: number of processes.
            load_seconds: deadline of importing its file, at least 60.
            repeat: repeat a call that fails in a process that answered before.
            memory_mib: limit of a process's address space, which then cannot write files either; 0: none.
        """

        def setup() -> Message:
            return {"load": function, "path": search_path(function), "memory_mib": memory_mib}

        self.workers, self.load_seconds = workers, max(load_seconds, LOAD_LEAST_SECONDS)
        self._workers = [Worker(reward_call, setup, self.load_seconds, repeat=repeat) for _ in range(workers)]
        self._free = self._workers[::-1]
        self._places = asyncio.Semaphore(workers)
        self._calls: set[asyncio.Task[Any] | None] = set()

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """Start a call. Its deadline begins when a process is free for it."""
        return background().submit(self.ask(arguments, global_step, seconds, step_counts))

    async def ask(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """As `call`, in the event loop."""
        counts = None if step_counts is None else list(step_counts)
        request = {"arguments": arguments, "global_step": global_step, "step_counts": counts}
        return _results(await self._reply(request, seconds), len(arguments["completions"]), counts)

    def positions(self, text: str, seconds: float) -> list[int]:
        """Call a boundary function, which returns positions in a text; errors as of `call`."""
        reply = background().run(self._reply({"text": text}, seconds))
        return checked_positions(reply["positions"], len(text))

    def close(self) -> None:
        """Cancel all calls and end the processes. A later call starts new ones."""
        background().run(self._close())

    async def _reply(self, request: Message, seconds: float) -> Message:
        task = asyncio.current_task()
        self._calls.add(task)
        try:
            async with self._places:
                worker = self._free.pop()
                try:
                    return await worker.ask(request, seconds)
                finally:
                    self._free.append(worker)
        finally:
            self._calls.discard(task)

    async def _close(self) -> None:
        calls = [call for call in self._calls if call is not None]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for worker in self._workers:
            await worker.end()


def _results(reply: Message, count: int, step_counts: Sequence[int] | None) -> Results:
    """The results in a reply, checked again, because the function could change the process that checked them.

    Raises:
        InvalidResult: as `call_function`.
    """
    log = Log(count)
    for name, numbers in reply["metrics"].items():
        for number in numbers:
            log.log_metric(name, number)
    for column, values in reply["extras"].items():
        log.log_extra(column, values)
    return Results(checked_values(reply["values"], count, step_counts), log.metrics, log.extras)


class OneByOne(RewardRunner):
    """A call for every completion in the processes of a pool, each with the whole deadline.

    A call that times out, raises or ends its process fails for its completion alone (`Results.errors`). If more than
    20 % of the completions fail, the others are not graded.
    """

    def __init__(
        self, pool: RewardPool, options: Collection[str] = (), shortcut: Callable[..., Any] | None = None
    ) -> None:
        """
        Args:
            pool: processes of the function.
            options: arguments that are the same for all completions; the others are lists with one entry for each.
            shortcut: a function with the same arguments, called in this process for all completions; it returns the
                reward of those that it can grade, and None for those that the function must grade.
        """
        self._pool, self._options = pool, frozenset(options)
        self._shortcut = None if shortcut is None else InProcess(shortcut)

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """Start the calls; `seconds` is the deadline of each."""
        values: list[Any] = [None] * len(arguments["completions"])
        if self._shortcut is not None:
            short = self._shortcut.start(arguments, global_step, seconds)
            if short.exception():
                return short
            values = short.result().values
        sent = {name: value for name, value in arguments.items() if name not in NOT_SENT}
        calls = {
            row: {name: value if name in self._options else [value[row]] for name, value in sent.items()}
            for row, value in enumerate(values)
            if value is None
        }
        return background().submit(self._gather(values, calls, global_step, seconds))

    async def _gather(
        self, values: list[Any], calls: Mapping[int, Message], global_step: int, seconds: float
    ) -> Results:
        errors: dict[int, str] = {}

        async def grade(row: int, arguments: Message) -> None:
            try:
                values[row] = (await self._pool.ask(arguments, global_step, seconds)).values[0]
            except InvalidResult:
                raise
            except Exception as error:
                errors[row] = str(error) or one_line(error)
                if len(errors) > FAILURES_ALLOWED * len(values):
                    raise CallError from error

        tasks = {row: asyncio.ensure_future(grade(row, arguments)) for row, arguments in calls.items()}
        try:
            with contextlib.suppress(CallError):
                await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        left = [row for row, task in tasks.items() if task.cancelled()]
        why = f"was not graded, because more than 20 % failed: {next(iter(errors.values()))}" if left else ""
        return Results(values, {}, {}, errors | dict.fromkeys(left, why))

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
