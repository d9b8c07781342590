"""The requests of one call of `generate` that wait for an answer. Each waits for one server at a time."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from covey.llm.generation.generator import Completion, GenerationRequest
from covey.llm.model.architecture import vocabulary_of
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer, OtherWeights
from covey.llm.remote.fleet import Fleet


@dataclass(frozen=True, eq=False)
class Answer:
    """The end of one request to one server."""

    number: int  # of the request
    server: int
    future: Future[list[Completion]]

    def completions(self) -> list[Completion]:
        """The completions; raises `LostServer` or `FailedRequest` if there are none."""
        return self.future.result()


Event = Callable[[], None]


@dataclass
class Outstanding:
    """Requests by their numbers. True while any waits. `requests` may grow."""

    fleet: Fleet
    requests: Sequence[GenerationRequest]
    tries: dict[int, int] = field(default_factory=dict)  # how often each was sent
    _waiting: dict[int, Answer] = field(default_factory=dict)
    _ended: queue.SimpleQueue[Answer | Event] = field(default_factory=queue.SimpleQueue)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def servers(self) -> set[int]:
        """The servers that requests wait for."""
        return {answer.server for answer in self._waiting.values()}

    def send(self, number: int, server: int) -> None:
        """Send a request that does not wait to a server."""
        assert number not in self._waiting
        self.tries[number] = self.tries.get(number, 0) + 1
        future = self.fleet.loop.submit(self._ask(self.fleet.clients[server], self.requests[number]))
        self._waiting[number] = answer = Answer(number, server, future)
        future.add_done_callback(lambda _: self._ended.put(answer))

    def put(self, event: Event) -> None:
        """Let `next` return an event, as if it were an answer; called in any thread."""
        self._ended.put(event)

    def next(self, seconds: float | None) -> Answer | Event | None:
        """The next answer or event; None if none comes within so many seconds."""
        while True:
            try:
                answer = self._ended.get(timeout=seconds)
            except queue.Empty:
                return None
            if not isinstance(answer, Answer):
                return answer
            if self._waiting.get(answer.number) is answer:  # else it was cancelled
                del self._waiting[answer.number]
                return answer

    def cancel(self) -> list[int]:
        """Wait for no answer any more; returns the requests that had none."""
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.future.cancel()
        return list(waiting)

    async def _ask(self, client: Client, request: GenerationRequest) -> list[Completion]:
        version, vocabulary = self.fleet.label, vocabulary_of(self.fleet.policy.module)
        body = wire.request_body(request, version, covey=self.fleet.covey)
        content = await client.post_raw(wire.GENERATE, body, wire.answer_bytes(request))
        try:
            return wire.read_answer(content, request, version, vocabulary)
        except wire.WrongVersion as error:
            raise OtherWeights(f"{client.address}: {error}") from None
        except wire.BadBody as error:
            raise LostServer(f"{client.address} sent an answer that cannot be used: {error}") from None
