"""Asks one sampler over HTTP. Beside `rewards/judge.py` the only file of covey that contacts a server.

A fault of the server or of the network, of whatever kind, is a `LostServer`. Nothing is asked twice here: the caller
asks another server. The access token is in the `Authorization` header only; messages from outside are searched for it.
"""

import asyncio
import json
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from covey.config.servers import hide
from covey.llm.generation.generator import Completion, FailureReason, GenerationFailure, GenerationRequest
from covey.llm.remote import wire
from covey.runtime.foreign_json import BadJson, read_json

CONNECT_SECONDS = 10.0
STATUS_SECONDS = 20.0  # of a request without work for the server
LONGEST_REASON = 200  # characters of a server's own text in a message
MOST_ANSWER_BYTES = 1 << 20  # of every route but the one that generates


class LostServer(Exception):
    """A server does not answer, or not as it should; the message is one line."""


class OtherWeights(LostServer):
    """A server has other weights than those that were asked for."""


class FailedRequest(Exception):
    """A request that every server with these weights would refuse."""

    def __init__(self, failure: GenerationFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class Client:
    """One server. Its methods raise `LostServer`, `OtherWeights` or `FailedRequest`."""

    address: str  # http://host:port
    token: str
    timeout_seconds: float  # of one request, from its first byte to the last of its answer

    async def get(self, route: str) -> bytes:
        """What a route answers at once."""
        return await self._exchange("GET", route, b"", MOST_ANSWER_BYTES, min(STATUS_SECONDS, self.timeout_seconds))

    async def post(self, route: str, body: dict[str, Any], most_bytes: int = MOST_ANSWER_BYTES) -> bytes:
        """What a route answers to a body."""
        return await self._exchange("POST", route, json.dumps(body).encode(), most_bytes, self.timeout_seconds)

    async def generate(
        self, request: GenerationRequest, version: str, vocabulary: int, *, covey: bool
    ) -> list[Completion]:
        """Completions by weights of this version; `covey` is True for covey's own server."""
        body = wire.request_body(request, version, covey=covey)
        content = await self.post(wire.GENERATE, body, wire.answer_bytes(request))
        try:
            return wire.read_answer(content, request, version, vocabulary)
        except wire.WrongVersion as error:
            raise OtherWeights(f"{self.address}: {error}") from None
        except BadJson as error:
            raise LostServer(f"{self.address} sent an answer that cannot be used: {error}") from None

    async def _exchange(self, method: str, route: str, body: bytes, most_bytes: int, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds), self._connection() as client:
                headers = {
                    "Content-Type": "application/json",
                    "Accept-Encoding": "identity",
                    "Authorization": f"Bearer {self.token}",
                }
                url = self.address + route
                async with client.stream(method, url, content=body, headers=headers) as response:
                    status, content = response.status_code, await self._content(response, most_bytes)
        except TimeoutError:
            raise LostServer(f"{self.address} did not answer within {seconds:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            reason = self._own_words(str(error) or type(error).__name__)
            raise LostServer(f"{self.address} did not answer ({reason})") from None
        if status != 200:
            raise self._refusal(route, status, content)
        return content

    def _connection(self) -> httpx2.AsyncClient:
        """A connection for one request: an idle one may have been closed by the server when it is used again."""
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        return httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False, verify=_tls())

    async def _content(self, response: httpx2.Response, most_bytes: int) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise LostServer(f"{self.address} sent a compressed answer, which was not asked for")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > most_bytes:
                raise LostServer(f"{self.address} sent an answer of more than {most_bytes:,} bytes")
        return bytes(content)

    def _refusal(self, route: str, status: int, content: bytes) -> Exception:
        """The exception for an answer with another status than 200."""
        reason, message = _error_of(content)
        message = self._own_words(message)
        if status == 401:
            return LostServer(f"{self.address} does not accept the access token: sampler.token_file must be its own")
        if status == 409:
            return OtherWeights(f"{self.address} refuses: {message}")
        if status == 422 and reason in (FailureReason.PROMPT_TOO_LONG, FailureReason.NON_FINITE_LOGITS):
            return FailedRequest(GenerationFailure(FailureReason(reason), message))
        return LostServer(f"{self.address} answered {route} with status {status}: {message}")

    def _own_words(self, text: str) -> str:
        """A text from outside in one line, without the token."""
        line = "".join(c if c.isprintable() else " " for c in hide(text, self.token))
        line = " ".join(line.split())
        return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."


@cache
def _tls() -> ssl.SSLContext:
    """The certificates of https, read once."""
    return ssl.create_default_context()


class _Error(Struct):
    reason: str = ""  # vLLM has none
    message: str = ""


class _Refusal(Struct):
    error: _Error | str


REFUSAL = msgspec.json.Decoder(_Refusal)


def _error_of(content: bytes) -> tuple[str, str]:
    """The reason and the message of a refusal."""
    try:
        error = read_json(content, REFUSAL).error
    except BadJson:
        return "", content.decode(errors="replace")
    return ("", error) if isinstance(error, str) else (error.reason, error.message)
