"""One sandboxed process as seen by the parent: frames to and from the harness, and its end."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from covey.llm.rewards.sandbox.limits import Limits
from covey.llm.rewards.sandbox.pipes import Pipes, Process, ProgramFault, TimeLimit

END_SECONDS = 10.0  # for killed processes to disappear


class SandboxFailure(Exception):
    """The sandbox did not work, so the program is not judged; one line."""


class Launched(Protocol):
    """A started sandbox."""

    @property
    def process(self) -> Process: ...

    def end_descriptor(self) -> int:
        """A new descriptor that is readable once the process has ended."""

    def kill_all(self) -> None:
        """Kill every process of the sandbox, and return when none is left.

        Raises:
            SandboxFailure: if a process remains.
        """


class Sandbox(Protocol):
    """A way to start the harness in isolation."""

    name: str

    def launch(self, limits: Limits) -> Launched:
        """Start the harness with pipes as its stdin, stdout and stderr.

        Raises:
            SandboxFailure: if it cannot be started within `limits.start_seconds`.
        """


class Session:
    """A harness in a sandbox, until `close`; a context manager.

    Raises:
        SandboxFailure: from the constructor, if the harness does not report that it is ready.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self.limits = limits
        deadline = time.monotonic() + limits.start_seconds
        self.launched = sandbox.launch(limits)
        process = self.launched.process
        try:
            self.pipes = Pipes(process, self.launched.end_descriptor(), limits.output_bytes)
        except OSError:  # no descriptor left
            self.launched.kill_all()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            raise
        reason = ""
        try:
            ready = self.receive(deadline - time.monotonic())
        except TimeLimit:
            ready, reason = {}, f"took longer than {limits.start_seconds:g} s"
        except ProgramFault as error:
            ready, reason = {}, str(error)
        except BaseException:
            self.close()
            raise
        if ready != {"ready": True}:
            reason = self.pipes.last_line() or reason or "it sent something else than that it is ready"
            self.close()
            raise SandboxFailure(f"the sandbox ({sandbox.name}) did not start: {reason}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the sandbox."""
        try:
            self.launched.kill_all()
        finally:
            self.pipes.close()

    def send(self, message: dict[str, Any], rest: bytes | None = None) -> None:
        """Queue a frame; with `rest`, also the bytes after it, which are the last."""
        payload = json.dumps(message).encode()
        self.pipes.write(len(payload).to_bytes(4, "big") + payload + (rest or b""), last=rest is not None)

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next frame.

        Raises:
            ProgramFault: at the deadline, if the process ended, or for anything else than a frame.
        """
        pipes = self.pipes
        pipes.pump(seconds, lambda: self._frame_end() is not None or pipes.has_ended)
        end = self._frame_end()
        if end is None:
            raise ProgramFault(pipes.description_of_end())
        payload = bytes(pipes.received[4:end])
        del pipes.received[:end]
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ProgramFault("sent something that is not a reply")
        return message

    def _frame_end(self) -> int | None:
        received, most = self.pipes.received, self.limits.output_bytes
        if len(received) < 4:
            return None
        length = int.from_bytes(received[:4], "big")
        if length > most:
            raise ProgramFault(f"returned more than {most >> 10} KiB, or something that is not a reply")
        return 4 + length if len(received) >= 4 + length else None

    def run_script(
        self, source: str, stdin: bytes, most_output: int, prefix: str = "", seconds: float | None = None
    ) -> bytes:
        """Run a program to its end; returns its stdout.

        Args:
            most_output: bytes of stdout after which the program is ended.
            prefix: source text before the program.
            seconds: wall time after which it is ended; None: that of the limits.

        Raises:
            ProgramFault: if it broke a limit, or its exit code is not 0.
        """
        pipes = self.pipes
        pipes.most_output = most_output
        self.send({"mode": "script", "prefix": prefix, "source": source}, rest=stdin)
        pipes.pump(self.limits.seconds if seconds is None else seconds, lambda: pipes.has_ended)
        if pipes.process.wait() != 0:
            raise ProgramFault(pipes.description_of_end())
        return bytes(pipes.received)
