"""The process in which environments run; `EnvironmentProcesses` starts it.

The file of the environment is imported once, or a class of a Python program read, and an adapter is prepared. Then the
process forks for every conversation, so that an environment that hangs or dies ends its own conversation alone, and no
conversation sees what another one changed:

    the run  <-- a socket for each conversation -->  a fork of the worker, with one environment
       \\__ a control socket: new conversations, ended ones __  the worker, which never runs a method of an environment
        \\__ its standard input, which ends with the run ______  the supervisor (`covey.llm.rewards.worker`)

Global random generators are seeded before each conversation, so that an environment that uses them is repeatable.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from covey.llm.conversation.environment import HostedEnvironment, check_options, style_of
from covey.llm.rewards import reward_call, worker

MOST_CONTROL_BYTES = 1 << 16
REAP_SECONDS = 0.2  # between looks for ended conversations


def main() -> NoReturn:
    """Serve the control socket with the file descriptor `sys.argv[1]`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    worker.run_supervised(lambda: _Server(control).serve())


class _Server:
    """Loads the class that the first message names, then forks for every conversation."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.kind: Callable[[], Any] | None = None
        self.tools: list[Any] | None = None  # if they are known
        self.reply_characters = 0
        self.conversations: dict[int, int] = {}  # number -> process
        worker.prepare_worker()

    def serve(self) -> NoReturn:
        while True:
            ready, _, _ = select.select([self.control], [], [], REAP_SECONDS)
            self._reap()
            if not ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(self.control, MOST_CONTROL_BYTES, 1)
            if not message:
                os._exit(0)
            request = json.loads(message)
            if "load" in request:
                self.control.send(json.dumps(self._load(request, descriptors[0])).encode())
            elif "new" in request:
                self._fork(request, descriptors[0])
            elif request["end"] in self.conversations:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.conversations[request["end"]], signal.SIGKILL)

    def _load(self, request: dict[str, Any], copied: int) -> dict[str, Any]:
        """Import the class, or take the copy of it from the file with the descriptor `copied`."""
        sys.path[:] = request["path"]
        self.reply_characters = request["reply_characters"]
        try:
            with open(copied, "rb") as file:
                if request["copied"]:
                    kind, self.tools = pickle.load(file)  # of the run itself
                else:
                    kind = worker.load_function(request["load"])
            self.kind = functools.partial(kind, **request["options"])
            check_options(kind, request["options"])
            style = style_of(kind) if isinstance(kind, type) else ""
            if style == "respond":
                kind.prepare(**request["options"])  # an adapter has it
            return {"style": style}
        except BaseException as error:
            known = type(error).__name__ == "WrongEnvironment"
            return {"failed": str(error) if known else reward_call.one_line(error)}

    def _fork(self, request: dict[str, Any], descriptor: int) -> None:
        process = os.fork()
        if process:
            os.close(descriptor)
            with contextlib.suppress(OSError):  # the child does the same, whoever is first
                os.setpgid(process, process)
            self.conversations[request["new"]] = process
            return
        code = 1
        try:
            os.setpgid(0, 0)
            worker.end_with_parent()
            self.control.close()
            assert self.kind is not None
            _seed(request["seed"])
            _converse(socket.socket(fileno=descriptor), HostedEnvironment(self.kind, self.reply_characters, self.tools))
            code = 0
        except BaseException as error:
            with contextlib.suppress(BaseException):
                print(reward_call.one_line(error), file=sys.stderr, flush=True)
        os._exit(code)

    def _reap(self) -> None:
        """End what ended conversations have started in their process group."""
        for number, process in list(self.conversations.items()):
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            del self.conversations[number]


def _converse(connection: socket.socket, hosted: HostedEnvironment) -> None:
    """Answer the requests of one conversation, one line of JSON each."""
    process = os.getpid()
    with connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            reply = hosted.answer(request) | {"id": request["id"]}
            if os.getpid() != process:  # a child that the environment forked must not reply
                return
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            with contextlib.suppress(ConnectionError):  # the run waits no longer: the deadline passed, or it has ended
                connection.sendall(json.dumps(reply).encode() + b"\n")


def _seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, if they are loaded."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.manual_seed(seed % 2**63)


if __name__ == "__main__":
    main()
