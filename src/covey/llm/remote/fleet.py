"""The samplers of a run: which have the current weights, and how the others get them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from covey.config import SamplerLost
from covey.data import Team
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.children import Children
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.weights import Transport, gathered, give, is_sharded
from covey.llm.remote.wire import HEALTH
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
    loop: EventLoop = field(default_factory=EventLoop)
    rotation: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # the last fault of each server
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
