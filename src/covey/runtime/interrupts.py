"""Signals SIGINT, SIGTERM and SIGHUP: they end a command within two seconds, and a run after its current step.

In a command the first of these signals raises KeyboardInterrupt. Within `stop_requests` it is a request: the run
finishes its step and saves a checkpoint, and a second signal raises KeyboardInterrupt. Python delivers a signal between
two bytecodes, so a long call of a library delays it. Commands run in `watched`, in which a watcher thread then ends the
process.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
GRACE_SECONDS = 1.5  # time that an interrupted command has for its cleanup
EXIT_CODE = 130  # shells' code for SIGINT
SHOW_CURSOR = b"\x1b[?25h"


class _State:
    """The meaning of the next signal. One for the process, because its signal handlers are."""

    def __init__(self) -> None:
        self.asks = False  # True: the next signal is a request to stop a run
        self.asked = threading.Event()
        self.patience = 0  # number of further signals before the process is ended
        self.say: Callable[[str], None] | None = None  # prints the run's answer to a request
        self.last_words: Callable[[], str] = lambda: ""
        self.said = False
        self.watched = False


_state = _State()


@contextmanager
def watched(last_words: Callable[[], str]) -> Iterator[None]:
    """Context manager in which a signal ends the process after at most `GRACE_SECONDS`, even during a library call.

    Args:
        last_words: returns the text to print then, such as the command that continues.
    """
    _state.__init__()  # type: ignore[misc]  # a process may run one command after another
    _state.last_words = last_words
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    here, there = os.pipe()
    os.set_blocking(there, False)
    threading.Thread(target=_watch, args=(here,), daemon=True).start()
    wakeup = signal.set_wakeup_fd(there, warn_on_full_buffer=False)
    before = _handle_signals()
    _state.watched = True
    try:
        yield
    finally:
        _state.watched = False
        signal.set_wakeup_fd(wakeup)
        _restore(before)
        os.close(there)  # ends the thread


@contextmanager
def stop_requests(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Make the first signal a request to stop, which the yielded function reports; the second raises KeyboardInterrupt.

    Args:
        say: prints a line for the user; called from another thread.
    """
    before = {} if _state.watched else _handle_signals()
    _state.asked.clear()
    _state.asks, _state.patience, _state.say = True, 1, say
    try:
        yield _state.asked.is_set
    finally:
        _state.asks, _state.patience, _state.say = False, 0, None
        _restore(before)


@contextmanager
def patient() -> Iterator[None]:
    """Context manager: the first signal raises KeyboardInterrupt without a deadline, the second ends the process."""
    _state.patience = 1
    try:
        yield
    finally:
        _state.patience = 0


def set_last_words(last_words: Callable[[], str]) -> None:
    """Set the lines that an interrupted command prints."""
    _state.last_words, _state.said = last_words, False


def say_last_words() -> None:
    """Print these lines, once."""
    if not _state.said:
        _state.said = True
        with suppress(OSError, ValueError):
            print(f"\n{_state.last_words()}", file=sys.stderr, flush=True)


def end_now() -> None:
    """End the process with its children and without waiting for threads, as after Ctrl-C."""
    if not _state.said:
        with suppress(OSError):  # not through sys.stderr, which the main thread may hold
            os.write(2, f"\n{_state.last_words()}\n".encode(errors="replace"))
    for child in _children():
        with suppress(OSError):
            os.kill(child, signal.SIGTERM)
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)  # a live display hides it
    os._exit(EXIT_CODE)


def _handle_signals() -> dict[int, object]:
    """Install the handlers; returns the previous ones. An ignored signal, as by nohup, remains ignored."""
    try:
        found = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in found.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _on_signal)
    except ValueError:  # not in the main thread
        return {}
    return dict(found)


def _restore(handlers: dict[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def _on_signal(number: int, frame: object) -> None:
    """Signal handler, in the main thread. A watcher thread receives the signal too, possibly later."""
    if _state.asks and not _state.asked.is_set():
        _state.asked.set()
        return
    raise KeyboardInterrupt


def _watch(pipe: int) -> None:
    """Watcher thread: reads one byte for each signal, immediately after it."""
    deadline: threading.Timer | None = None
    while number := os.read(pipe, 1):
        if number[0] not in SIGNALS:
            continue
        if _state.patience:
            _state.patience -= 1
            if _state.say is not None:
                with suppress(Exception):
                    _state.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        elif deadline is None:
            deadline = threading.Timer(GRACE_SECONDS, end_now)
            deadline.daemon = True
            deadline.start()
    os.close(pipe)
    if deadline is not None:
        deadline.cancel()


def _children() -> list[int]:
    """Child processes of this one on Linux; empty on other systems."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError, ValueError):
            found += [int(word) for word in task.read_text().split()]
    return found


def leave(code: int) -> None:
    """End the process with this exit code; after an interrupt without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == EXIT_CODE:
        _state.said = True  # the command has returned, so it printed its own
        end_now()
    sys.exit(code)
