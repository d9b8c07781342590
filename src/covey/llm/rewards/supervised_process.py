"""A process of the user's code under a supervisor, which ends it with everything that it started (`worker.py`)."""

from __future__ import annotations

import codecs
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

from covey.llm.rewards import worker
from covey.llm.rewards.reward_call import printable

MOST_OUTPUT_CHARACTERS = 1 << 18  # printed output of one call; the rest is left out


class SupervisedProcess:
    """A started process: supervisor and worker, with file descriptors for their requests and replies."""

    def __init__(self, script: str, descriptors: Sequence[int]) -> None:
        """
        Args:
            script: file whose `main` calls `worker.run_supervised`.
            descriptors: its arguments, which are closed in this process.
        """
        self.mark = secrets.token_hex(16)
        # Run by its path and with -P, so that neither the package nor its folder is imported by accident. In its own
        # session it does not receive the terminal's Ctrl-C.
        self.supervisor = subprocess.Popen(
            [sys.executable, "-P", script, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=tuple(descriptors),
            start_new_session=True,
            # With the same hashes in every process, a function that iterates over a set gives the same results again.
            env=os.environ | {worker.MARK: self.mark, "PYTHONHASHSEED": "0"},
        )
        for descriptor in descriptors:
            os.close(descriptor)
        assert self.supervisor.stdout is not None
        self.output = Output(self.supervisor.stdout.fileno())

    def end(self) -> None:
        """End the supervisor, which first ends its descendants; if it was killed itself, find them by their mark."""
        self.interrupt()
        if sys.platform.startswith("linux"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.supervisor.wait(2 * worker.END_SECONDS)
        if self.supervisor.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()
        if self.supervisor.returncode < 0:
            worker.end_marked(self.mark)
        self.output.drain()
        assert self.supervisor.stdout is not None
        self.supervisor.stdout.close()
        self.close_pipes()

    def interrupt(self) -> None:
        """Make the supervisor end the worker, so that a thread that waits for a reply finds the pipe closed."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        self.supervisor.send_signal(signal.SIGCONT)  # the function may have stopped it

    def last_words(self) -> str:
        """Description of the exit status after `end`; the supervisor exits with the worker's."""
        code = self.supervisor.returncode
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        if code == worker.BROKEN:
            return "its process cannot reply any more: a function must not close files that it did not open"
        return f"its process ended by itself with exit code {code}"

    def close_pipes(self) -> None:
        """Close this process's ends of the descriptors."""
        raise NotImplementedError


class Output:
    """Copies the function's output to stderr, without control characters and at most `left` bytes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.left = descriptor, MOST_OUTPUT_CHARACTERS
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(descriptor, False)

    def pass_on(self) -> bool:
        """Print the available output; False at its end."""
        try:
            read = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not self.left:
            return bool(read)
        text = printable(self._decoder.decode(read).replace("\r\n", "\n"))
        rest = len(text) - self.left
        self.left = max(-rest, 0)
        text = text if rest < 0 else text[: len(text) - rest] + "\n(further output of the function is left out)\n"
        with contextlib.suppress(OSError, ValueError):  # the reader of stderr may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
        return bool(read)

    def drain(self) -> None:
        """Print the remaining output."""
        while self.pass_on():
            pass
