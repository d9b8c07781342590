"""Asks a judge over HTTP; the only other file of covey that contacts a server is `remote/client.py`. It runs in the
process of `worker.py`.

A question that gets no reply has an error in place of a score; it never raises. The access token is in the
`Authorization` header only: texts from the server and from exceptions are searched for it before they are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from covey.config import ConfigError, MachineError
from covey.config.servers import hide, is_this_machine, judge_token
from covey.llm.rewards.judge_cache import Reply, ReplyCache
from covey.llm.rewards.judge_score import ScoreReader, UnreadableReply
from covey.runtime.worker.child import one_printable_line

MOST_REPLY_BYTES = 1 << 20
LONGEST_REASON = 150  # characters of a server's own text in a message
FIRST_PAUSE_SECONDS = 0.25  # before the second attempt; doubled before each further one
LONGEST_PAUSE_SECONDS = 8.0
GIVE_UP_AFTER = 8  # questions in a row without a reply, or as many as are asked at a time if that is more
RETRIED_STATUSES = (408, 409, 425, 429, *range(500, 600))


@dataclass(frozen=True)
class JudgeSettings:
    """How questions are asked and their replies read; plain values, because they are sent to the worker as JSON."""

    address: str  # of the endpoint, .../chat/completions
    request: dict[str, Any]  # every field but the messages
    score: dict[str, Any]  # arguments of ScoreReader
    seconds: float  # deadline of a question with all its attempts
    concurrency: int
    retries: int
    allow_remote: bool
    cache: str
    token_variable: str = ""
    token_file: str = ""


class JudgeError(Exception):
    """A question cannot be answered; further attempts are useless."""


class PassingFault(JudgeError):
    """An attempt failed; the next may succeed."""

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        """`pause_seconds`: the pause that the server asked for."""
        super().__init__(message)
        self.pause_seconds = pause_seconds


async def grade(
    completions: Sequence[str], settings: dict[str, Any], log_extra: Callable[[str, list[str]], None]
) -> list[float]:
    """Ask each question once, several at a time; the score of each reply, NaN if there is none.

    The columns "reply" and "error" are logged, with the text of each reply and the reason why there is no score.

    Args:
        completions: the different questions.
        settings: the fields of `JudgeSettings`.
    """
    judge = JudgeSettings(**settings)
    outcomes = await _Questions(judge, completions).outcomes()
    reader = ScoreReader(**judge.score)
    scores, errors = [], []
    for outcome in outcomes:
        score, error = math.nan, str(outcome)
        if isinstance(outcome, Reply):
            try:
                score, error = reader.read(outcome.text, cut=outcome.cut), ""
            except UnreadableReply as fault:
                error = f"could not be read: {fault}"
        scores.append(score)
        errors.append(error)
    log_extra("reply", [outcome.text if isinstance(outcome, Reply) else "" for outcome in outcomes])
    log_extra("error", errors)
    return scores


class _Questions:
    """Questions of one call, answered from the cache or by the server."""

    def __init__(self, judge: JudgeSettings, questions: Sequence[str]) -> None:
        self.judge, self.cache = judge, ReplyCache(Path(judge.cache))
        self.requests = [{**judge.request, "messages": [{"role": "user", "content": text}]} for text in questions]
        self.keys = [ReplyCache.key(judge.address, request) for request in self.requests]
        self.failed_in_a_row = 0
        self.cache_works = True

    async def outcomes(self) -> list[Reply | JudgeError]:
        """A reply or an error for each question."""
        found: list[Reply | JudgeError | None] = [self.cache.get(key) for key in self.keys]
        waiting = iter([number for number, reply in enumerate(found) if reply is None])
        missing = found.count(None)
        if missing:
            try:
                token = _token(self.judge)
                addresses = await _addresses(self.judge)
            except JudgeError as error:
                return [error if reply is None else reply for reply in found]
            async with _client(self.judge) as client:
                server = _Server(self.judge, client, token, addresses)
                together = min(self.judge.concurrency, missing)
                await asyncio.gather(*(self._work(server, waiting, found) for _ in range(together)))
        return [reply if reply is not None else JudgeError("was not asked") for reply in found]

    async def _work(self, server: _Server, waiting: Iterator[int], found: list[Reply | JudgeError | None]) -> None:
        """Ask one waiting question after the other."""
        for number in waiting:
            if self.failed_in_a_row >= max(GIVE_UP_AFTER, self.judge.concurrency):
                found[number] = JudgeError(f"was not asked, because {self.failed_in_a_row} in a row had no reply")
                continue
            try:
                reply = await server.ask(self.requests[number])
            except JudgeError as error:
                found[number] = error
                self.failed_in_a_row += 1
                continue
            self.failed_in_a_row = 0
            found[number] = self._store(self.keys[number], self.requests[number], reply)

    def _store(self, key: str, request: dict[str, Any], reply: Reply) -> Reply:
        """Store a reply, and return the one that counts, the first. A full disk is no reason to lose the score, so it
        is only reported, once a call.
        """
        try:
            return self.cache.put(key, request, reply)
        except OSError as error:
            if self.cache_works:
                print(f"the judge's replies cannot be stored in {self.cache.folder}: {error.strerror}", file=sys.stderr)
            self.cache_works = False
            return reply


@dataclass
class _Server:
    """A connection to the judge's server."""

    judge: JudgeSettings
    client: httpx2.AsyncClient
    token: str
    addresses: list[str]  # of the host; empty: the client resolves its name

    async def ask(self, request: dict[str, Any]) -> Reply:
        """The reply to one request, under its deadline.

        Raises:
            JudgeError: if all attempts fail.
        """
        body = json.dumps(request).encode()
        last, attempts, pause = "", 0, FIRST_PAUSE_SECONDS
        try:
            async with asyncio.timeout(self.judge.seconds):
                while True:
                    attempts += 1
                    try:
                        return await self._attempt(body)
                    except PassingFault as fault:
                        last = str(fault)
                        if attempts > self.judge.retries:
                            break
                        await asyncio.sleep(max(pause, fault.pause_seconds))
                        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        except TimeoutError:
            last = f"took longer than {self.judge.seconds:g} s" + (f", after it {last}" if last else "")
        tries = f" ({attempts} attempts)" if attempts > 1 else ""
        raise JudgeError(f"{last}{tries}")

    async def _attempt(self, body: bytes) -> Reply:
        """Ask once; a host that has several addresses is asked at the first that accepts the connection."""
        *others, last = self.addresses or [""]
        try:
            for address in others:
                with contextlib.suppress(httpx2.ConnectError):
                    return await self._exchange(body, address)
            return await self._exchange(body, last)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            reason = self._own_words(str(error) or type(error).__name__)
            raise PassingFault(f"had no reply from {self.judge.address}: {reason}") from None

    async def _exchange(self, body: bytes, address: str) -> Reply:
        parts = urlsplit(self.judge.address)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Host": parts.netloc}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        url, extensions = self.judge.address, {}
        if address:  # the checked address itself: the name could be resolved to another one the next time
            host = f"[{address}]" if ":" in address else address
            url = parts._replace(netloc=f"{host}:{_port(self.judge)}").geturl()
            extensions = {"sni_hostname": parts.hostname}
        async with self.client.stream("POST", url, content=body, headers=headers, extensions=extensions) as response:
            if response.is_redirect:
                target = self._own_words(response.headers.get("location", "another address"))
                raise JudgeError(f"was redirected to {target}, which is not followed: name the final address")
            content = await self._content(response)
        return self._reply(response, content.decode(errors="replace"))

    async def _content(self, response: httpx2.Response) -> bytes:
        """The body of a response, of limited size. A compressed one may be of any size, so it is refused."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise JudgeError("got a compressed reply, which was not asked for")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > MOST_REPLY_BYTES:
                raise JudgeError(f"got a reply of more than {MOST_REPLY_BYTES >> 20} MiB")
        return bytes(content)

    def _reply(self, response: httpx2.Response, content: str) -> Reply:
        """The text in a response of the chat completions API."""
        status = response.status_code
        if status != 200:
            message = f"got HTTP status {status}: {self._own_words(content)}"
            if status in RETRIED_STATUSES:
                raise PassingFault(message, _retry_after(response.headers.get("retry-after", "")))
            raise JudgeError(message)
        try:
            choice = json.loads(content)["choices"][0]
            text, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise PassingFault(f"got a reply that is no chat completion: {self._own_words(content)}") from None
        if not isinstance(text, str):
            raise PassingFault("got a chat completion without text")
        return Reply(hide(text.encode(errors="replace").decode(), self.token), cut)

    def _own_words(self, text: str) -> str:
        """The beginning of a text from outside, in one line and without the token."""
        line = one_printable_line(hide(text, self.token))
        return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."


def _client(judge: JudgeSettings) -> httpx2.AsyncClient:
    """A client without limits of time, because each question has a deadline.

    Proxies of the environment are used for remote addresses only: a proxy is another machine.
    """
    limits = httpx2.Limits(max_connections=judge.concurrency, max_keepalive_connections=judge.concurrency)
    return httpx2.AsyncClient(timeout=None, limits=limits, follow_redirects=False, trust_env=judge.allow_remote)


def _token(judge: JudgeSettings) -> str:
    """The access token; empty if the judge has none."""
    if not judge.token_variable and not judge.token_file:
        return ""
    try:
        return judge_token(judge.token_variable, judge.token_file)
    except (ConfigError, MachineError) as error:
        raise JudgeError(f"was not asked: {one_printable_line(str(error))}") from None


async def _addresses(judge: JudgeSettings) -> list[str]:
    """The addresses of a judge on this machine; empty if it may be on another one.

    Raises:
        JudgeError: if its name is unknown, or belongs to another machine.
    """
    if judge.allow_remote:
        return []
    host = urlsplit(judge.address).hostname or ""
    lookup: Awaitable[Any] = asyncio.get_running_loop().getaddrinfo(host, _port(judge), type=socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(judge.seconds):
            found = list(dict.fromkeys(str(entry[4][0]) for entry in await lookup))
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        reason = one_printable_line(str(getattr(error, "strerror", "") or error or "no reply from the name server"))
        raise JudgeError(f"was not asked: the host name {host} cannot be resolved ({reason})") from None
    remote = [address for address in found if not is_this_machine(address)]
    if remote:
        which = "" if remote[0] == host else f" ({remote[0]})"
        raise JudgeError(f"was not asked: {host}{which} is another machine; allow it with allow_remote = true")
    return found


def _port(judge: JudgeSettings) -> int:
    parts = urlsplit(judge.address)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _retry_after(value: str) -> float:
    """The pause in seconds that a server asks for; 0 for none, and for a date."""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0.0
