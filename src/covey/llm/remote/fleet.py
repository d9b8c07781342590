"""The samplers of a run: which have the current weights, and how the others get them; those that the run starts.

`Children` are servers that a run starts on its machine, starts again if they end, and ends. The standard input of such
a server is a pipe from the run. When the run ends, also by `kill -9`, the pipe is closed, and the server ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import torch
from torch import Tensor

from covey.config import RunError, SamplerLost
from covey.data import Team
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.weights import Transport, gathered, give, is_sharded
from covey.llm.remote.wire import HEALTH, SLEEP, WAKE
from covey.runtime.distributed import ALONE, exchange_json
from covey.runtime.event_loop import EventLoop

PAUSE_SECONDS = 0.5  # between two attempts to find a server


@dataclass
class Fleet:
    """Servers by their numbers. `rotation` has those that can be asked."""

    policy: LanguagePolicy
    clients: Sequence[Client]
    transport: Transport
    covey: bool  # True if they are covey's own
    children: Children  # those of them that this rank starts
    team: Team = ALONE
    timeout_seconds: float = 600.0
    sleeps: bool = False  # the servers free their memory of this process's GPU between samplings
    _asleep: bool = False
    loop: EventLoop = field(default_factory=EventLoop)
    rotation: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # the last fault of each server
    given: Counter[int] = field(default_factory=Counter)  # how often each has taken weights
    version: int = 0
    _run: str = ""  # a random word, so that weights of another run, or of this one before it was resumed, are others

    @property
    def label(self) -> str:
        """The version of the weights, as the servers know it."""
        return f"{self._run}-{self.version}"

    def refresh(self, version: int) -> None:
        """Give the policy's weights to all servers; those that take them are the rotation. Every rank must call it."""
        self._run = self._run or exchange_json(self.team, secrets.token_hex(8))[0]
        self.version = version
        self._publish(range(len(self.clients)))

    def wake(self) -> None:
        """Let the servers take their memory of the GPU, before weights or requests are sent."""
        if self.sleeps:
            torch.cuda.empty_cache()  # what the update has left
            if self._asleep:
                self._tell(WAKE)
            self._asleep = False

    def sleep(self) -> None:
        """Let the servers free their memory of the GPU, for the update; those that are not asked too."""
        if self.sleeps:
            self._tell(SLEEP)
            self._asleep = True

    def _tell(self, route: str) -> None:
        told = [self.loop.submit(client.post(route, {})) for client in self.clients]
        wait(told)
        for server, future in enumerate(told):
            try:
                future.result()
            except LostServer as error:
                self.lose(server, str(error))

    def lose(self, server: int, fault: str) -> None:
        """Ask this server no more until it has been given weights."""
        self.faults[server] = fault
        if server in self.rotation:
            self.rotation.remove(server)

    def revive(self) -> None:
        """Wait until some server takes the weights.

        Raises:
            SamplerLost: if none does within `timeout_seconds`.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while not self.rotation:
            if not is_sharded(self.policy.module):
                self._give_to_waiting()
            if self.rotation:
                return
            if is_sharded(self.policy.module) or time.monotonic() + PAUSE_SECONDS > deadline:
                raise SamplerLost(f"no sampler is left: {self.describe_faults()}")
            time.sleep(PAUSE_SECONDS)

    def describe_faults(self) -> str:
        """The last fault of every server that cannot be asked, or else of all, in one line."""
        lost = [fault for server, fault in sorted(self.faults.items()) if server not in self.rotation]
        return "; ".join(lost or self.faults.values())

    def close(self) -> None:
        """End the requests in the background, and the servers of this run."""
        self.loop.close()
        self.children.close()

    def _give_to_waiting(self) -> None:
        """Give the weights to servers that answer again. Only this rank takes part."""
        self.children.ensure()
        asked = {number: self.loop.submit(client.get(HEALTH)) for number, client in enumerate(self.clients)}
        wait(asked.values())
        alive = []
        for number, future in asked.items():
            with suppress(LostServer):
                future.result()
                alive.append(number)
        if alive:
            self._offer(gathered(self.policy.module, self.policy.dtype), alive)

    def _publish(self, servers: Sequence[int]) -> None:
        """Rank 0 gives the weights to these servers, and all ranks learn which of them have taken them."""
        first = self.team.rank == 0
        self.wake()
        tensors = gathered(self.policy.module, self.policy.dtype, keep=first)
        self.rotation = []
        if first:
            self.children.ensure()
            self._offer(tensors, servers)
        self.rotation, faults = exchange_json(self.team, [self.rotation, list(self.faults.items())])[0]
        self.faults = dict(map(tuple, faults))

    def _offer(self, tensors: dict[str, Tensor], servers: Sequence[int]) -> None:
        with self.transport.offered(tensors, self.label) as offer:
            given = {
                number: self.loop.submit(give(self.clients[number], offer, self.label, covey=self.covey))
                for number in servers
            }
            wait(given.values())
            for number, future in given.items():
                try:
                    future.result()
                except LostServer as error:
                    self.faults[number] = str(error)
                else:
                    self.rotation.append(number)
                    self.given[number] += 1


POLL_SECONDS = 0.05
STOP_SECONDS = 10.0  # after which a server that was asked to end is killed


@dataclass
class _Child:
    """One server: its port, and its process once it was started."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None  # what the process has written to its standard error


@dataclass
class Children:
    """Servers on free ports of 127.0.0.1."""

    count: int
    words: Sequence[str]  # of the command `covey serve`, without its port
    seconds: float  # in which a server must have loaded its model
    _children: list[_Child] = field(default_factory=list)
    _answered: bool = False

    def __post_init__(self) -> None:
        self._children = [_Child(port) for port in _free_ports(self.count)]

    @property
    def addresses(self) -> list[str]:
        """Of all servers, whether they run or not."""
        return [f"http://127.0.0.1:{child.port}" for child in self._children]

    def ensure(self) -> None:
        """Start the servers that do not run, and wait until they accept connections, or have ended.

        Raises:
            RunError: if one ends at once or takes too long, and none has answered in this run.
        """
        started = [child for child in self._children if child.process is None or child.process.poll() is not None]
        for child in started:
            self._start(child)
        deadline = time.monotonic() + self.seconds
        faults = [fault for child in started if (fault := self._wait(child, deadline))]
        if faults and not self._answered:
            raise RunError(f"a sampler that the run has started {faults[0]}")
        self._answered = True

    def _wait(self, child: _Child, deadline: float) -> str:
        """Wait until a server accepts connections; the reason why it does not, else ""."""
        while not _accepts(child.port):
            assert child.process is not None
            if child.process.poll() is not None:
                return f"ended at once: {_last_line(child)}"
            if time.monotonic() > deadline:
                return f"does not answer within {self.seconds:g} s"
            time.sleep(POLL_SECONDS)
        return ""

    def close(self) -> None:
        """End all servers."""
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in self._children:
            if child.said is not None:
                child.said.close()

    def _start(self, child: _Child) -> None:
        self._forget(child)
        child.said = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the server runs
        child.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "covey", *self.words, "--port", str(child.port), "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=child.said,
            start_new_session=True,  # Ctrl-C lets a run finish its step, for which it needs them
        )

    def _forget(self, child: _Child) -> None:
        """Close the files of a process that has ended."""
        if child.process is not None and child.process.stdin is not None:
            child.process.stdin.close()
        if child.said is not None:
            child.said.close()


def end_with_parent(before: Callable[[], object] = lambda: None) -> None:
    """End this process, at once after a call of `before`, when its standard input is closed."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        before()
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def _last_line(child: _Child) -> str:
    assert child.said is not None
    child.said.seek(0)
    lines = child.said.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it has written nothing"
