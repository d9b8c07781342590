"""A reward whose function is a language model behind an OpenAI-compatible address.

The only other file of covey that contacts a server is `remote/client.py`. A question that gets no reply has an error in
place of a score; it never raises. The access token is in the `Authorization` header only: texts from the server and
from exceptions are searched for it before they are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx2

from covey.config import ConfigError, MachineError, RewardConfig
from covey.config.files import make_folder, user_path
from covey.config.servers import endpoint, hide, is_this_machine, judge_token
from covey.llm.data.rows import as_text, filled, places
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import RewardPool, RewardRunner
from covey.runtime.event_loop import background
from covey.runtime.rng import RANKING, permutation
from covey.runtime.variables import cache_folder
from covey.runtime.worker.child import InvalidResult, one_printable_line
from covey.runtime.worker.process import CallError

MOST_REPLY_BYTES = 1 << 20
LONGEST_REASON = 150  # characters of a server's own text in a message
FIRST_PAUSE_SECONDS = 0.25  # before the second attempt; doubled before each further one
LONGEST_PAUSE_SECONDS = 8.0
GIVE_UP_AFTER = 8  # questions in a row without a reply, or as many as are asked at a time if that is more
RETRIED_STATUSES = (408, 409, 425, 429, *range(500, 600))
Server = tuple[httpx2.AsyncClient, list[str]]  # a connection, and the addresses of the host


class JudgeError(Exception):
    """A question cannot be answered; further attempts are useless."""


class PassingFault(JudgeError):
    """An attempt failed; the next may succeed."""

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        """`pause_seconds`: the pause that the server asked for."""
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Judge(RewardRunner):
    """Fills a template for every completion and asks a model for its score, equal questions once.

    A question has its own deadline, so one without a reply costs its own rollout only. A regular expression of the
    config may need exponential time for some replies, so it is matched in a process.

    A judge that ranks is asked once for a group, with its different completions in a random order, and replies with a
    list: their scores, or their numbers from the best to the worst (RULER of OpenPipe's ART). Completions that are all
    equal have a score too, because without one the mean reward of a step would fall with their number.
    """

    by_model = True

    def __init__(self, config: RewardConfig) -> None:
        """The config is checked, and the template read.

        Raises:
            ConfigError: if the template cannot be read.
        """
        self.config, self.template = config, config.judge_question
        self.address, self.request = endpoint(config.judge), config.judge_body
        self.by_group = config.ranks
        self.cache = ReplyCache(user_path(config.judge_cache) if config.judge_cache else cache_folder() / "judges")
        low, high = config.judge_range
        self.reader = ScoreReader(low, high, config.judge_pattern, config.judge_field, config.judge_scores)
        self._matching = RewardPool("covey.llm.rewards.judge:read_one") if config.judge_pattern else None
        self.slots = asyncio.Semaphore(config.judge_concurrency)  # of all calls together: each group is one
        self._calls: set[Future[Results]] = set()

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """A score for each completion, or None and an entry in `errors`; None alone for equal completions of a group
        that a judge cannot score.

        Args:
            seconds: not used, because the config has a deadline for each question.

        The future raises InvalidResult if the template names a column that the data does not have.
        """
        call = background().submit(self._rank(arguments) if self.by_group else self._grade(arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def close(self) -> None:
        """Cancel the questions."""
        for call in list(self._calls):
            call.cancel()
        if self._matching is not None:
            self._matching.close()

    async def _grade(self, arguments: Mapping[str, Any]) -> Results:
        questions = self._questions(arguments)
        different = list(dict.fromkeys(questions))
        outcomes = dict(zip(different, await _Questions(self, different).outcomes(), strict=True))
        read = {question: await self._score(outcome) for question, outcome in outcomes.items()}
        errors = {row: read[question][1] for row, question in enumerate(questions) if read[question][1]}
        replies = [outcome.text if isinstance(outcome := outcomes[one], Reply) else "" for one in questions]
        values = [None if row in errors else read[question][0] for row, question in enumerate(questions)]
        return Results(values, {}, {"reply": replies}, errors)

    async def _rank(self, arguments: Mapping[str, Any]) -> Results:
        """Scores of the completions of one group, which have the same prompt and columns."""
        texts = [as_text(completion) for completion in arguments["completions"]]
        shown = _shuffled(list(dict.fromkeys(texts)), as_text(arguments["prompts"][0]))
        own = [shown.index(text) for text in texts]  # the place of each completion
        if len(shown) < 2 and self.config.judge_order:
            middle = sum(self.config.judge_range) / 2  # the mean of any order
            return Results([middle] * len(texts), {}, {"reply": [""] * len(texts), "number": [1] * len(texts)})
        listed = "\n".join(
            f'<completion number="{number}">\n{text}\n</completion>' for number, text in enumerate(shown, 1)
        )
        (question,) = self._questions({**arguments, "completions": [listed]})
        (outcome,) = await _Questions(self, [question]).outcomes()
        scores, error = [math.nan] * len(shown), str(outcome)
        if isinstance(outcome, Reply):
            scores, error = self.reader.read_list(outcome.text, len(shown), order=self.config.judge_order)
            error = error and _unread(error, outcome)
        logs: dict[str, list[Any]] = {
            "reply": [outcome.text if isinstance(outcome, Reply) else ""] * len(texts),
            "number": [place + 1 for place in own],
        }
        values = [None if error else scores[place] for place in own]
        failed = error and len(shown) > 1  # of equal completions nothing is compared
        return Results(values, {}, logs, dict.fromkeys(range(len(texts)), error) if failed else {})

    async def _score(self, outcome: Reply | JudgeError) -> tuple[float, str]:
        """The score, and the reason why there is none."""
        if isinstance(outcome, JudgeError):
            return math.nan, str(outcome)
        if self._matching is None:
            score, error = self.reader.read_or_reason(outcome.text, cut=outcome.cut)
        else:
            request = {"completions": [outcome.text], "cut": outcome.cut, "reader": vars(self.reader)}
            try:
                results = await self._matching.ask(request, 0, self.config.timeout_seconds)
                score, error = results.values[0], results.extras["error"][0]
            except CallError as fault:
                score, error = math.nan, f"judge_pattern {fault}"
        return score, error and _unread(error, outcome)

    def _questions(self, arguments: Mapping[str, Any]) -> list[str]:
        """The template filled for each completion. What is filled in is not searched for places again."""
        columns = {"prompt": arguments["prompts"], "completion": arguments["completions"], **arguments}
        for name in places(self.template):
            if name not in columns:
                there = ", ".join(f"{{{name}}}" for name in columns if name not in ("prompts", "completions"))
                raise InvalidResult(f"has {{{name}}} in its question, but there is only {there}")
        return [
            filled(self.template, {name: columns[name][row] for name in places(self.template)})
            for row in range(len(arguments["completions"]))
        ]


def _unread(why: str, reply: Reply) -> str:
    """Why there is no score, with the end of the reply, where models put it."""
    line = one_printable_line(reply.text)
    shown = line if len(line) <= LONGEST_REASON else "..." + line[-LONGEST_REASON:]
    return f"could not be read: {why}; the reply: {shown!r}"


def _shuffled(texts: Sequence[str], prompt: str) -> list[str]:
    """Different completions in a random order, so that a judge's preference for a place favours none of them.

    The order is a function of the texts, not of the step or of the order in which they were sampled, so that an equal
    group is an equal question, whose reply is stored.
    """
    texts = sorted(texts)
    digest = hashlib.sha256(json.dumps([prompt, *texts]).encode()).digest()
    seed, step = (int.from_bytes(digest[place : place + 4]) for place in (0, 4))
    return [texts[place] for place in permutation(seed, step, 0, len(texts), stream=RANKING)]


# ---- asking ----


class _Questions:
    """Questions of one call, answered from the cache or by the server."""

    def __init__(self, judge: Judge, questions: Sequence[str]) -> None:
        self.config, self.address, self.cache, self.slots = judge.config, judge.address, judge.cache, judge.slots
        self.requests = [{**judge.request, "messages": [{"role": "user", "content": text}]} for text in questions]
        self.keys = [ReplyCache.key(judge.address, request) for request in self.requests]
        self.failed_in_a_row = 0
        self.cache_works = True
        self.token = ""

    async def outcomes(self) -> list[Reply | JudgeError]:
        """A reply or an error for each question."""
        found: list[Reply | JudgeError | None] = [self.cache.get(key) for key in self.keys]
        waiting = iter([number for number, reply in enumerate(found) if reply is None])
        together = min(self.config.judge_concurrency, found.count(None))
        if together:
            try:
                self.token = self._token()
                addresses = await self._addresses()
            except JudgeError as error:
                return [error if reply is None else reply for reply in found]
            # Each question has a deadline. A proxy of the environment is another machine.
            async with httpx2.AsyncClient(
                timeout=None,
                limits=httpx2.Limits(max_connections=together, max_keepalive_connections=together),
                follow_redirects=False,
                trust_env=self.config.allow_remote,
            ) as client:
                server = client, addresses
                await asyncio.gather(*(self._work(server, waiting, found) for _ in range(together)))
        return [reply if reply is not None else JudgeError("was not asked") for reply in found]

    async def _work(self, server: Server, waiting: Iterator[int], found: list[Reply | JudgeError | None]) -> None:
        """Ask one waiting question after the other."""
        for number in waiting:
            if self.failed_in_a_row >= max(GIVE_UP_AFTER, self.config.judge_concurrency):
                found[number] = JudgeError(f"was not asked, because {self.failed_in_a_row} in a row had no reply")
                continue
            try:
                async with self.slots:
                    reply = await self._ask(server, self.requests[number])
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

    async def _ask(self, server: Server, request: dict[str, Any]) -> Reply:
        """The reply to one request, under its deadline.

        Raises:
            JudgeError: if all attempts fail.
        """
        body = json.dumps(request).encode()
        last, attempts, pause, seconds = "", 0, FIRST_PAUSE_SECONDS, self.config.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    attempts += 1
                    try:
                        return await self._attempt(server, body)
                    except PassingFault as fault:
                        last = str(fault)
                        if attempts > self.config.judge_retries:
                            break
                        await asyncio.sleep(max(pause, fault.pause_seconds))
                        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        except TimeoutError:
            last = f"took longer than {seconds:g} s" + (f", after it {last}" if last else "")
        raise JudgeError(last + (f" ({attempts} attempts)" if attempts > 1 else ""))

    async def _attempt(self, server: Server, body: bytes) -> Reply:
        """Ask once; a host that has several addresses is asked at the first that accepts the connection."""
        client, addresses = server
        *others, last = addresses or [""]
        try:
            for address in others:
                with contextlib.suppress(httpx2.ConnectError):
                    return await self._exchange(client, body, address)
            return await self._exchange(client, body, last)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            reason = self._own_words(str(error) or type(error).__name__)
            raise PassingFault(f"had no reply from {self.address}: {reason}") from None

    async def _exchange(self, client: httpx2.AsyncClient, body: bytes, address: str) -> Reply:
        parts = urlsplit(self.address)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Host": parts.netloc}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        url, extensions = self.address, {}
        if address:  # the checked address itself: the name could be resolved to another one the next time
            host = f"[{address}]" if ":" in address else address
            url = parts._replace(netloc=f"{host}:{_port(parts)}").geturl()
            extensions = {"sni_hostname": parts.hostname}
        async with client.stream("POST", url, content=body, headers=headers, extensions=extensions) as response:
            if response.is_redirect:
                target = self._own_words(response.headers.get("location", "another address"))
                raise JudgeError(f"was redirected to {target}, which is not followed: name the final address")
            # A compressed reply may be of any size.
            if response.headers.get("content-encoding", "identity") != "identity":
                raise JudgeError("got a compressed reply, which was not asked for")
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MOST_REPLY_BYTES:
                    raise JudgeError(f"got a reply of more than {MOST_REPLY_BYTES >> 20} MiB")
        return self._reply(response, content.decode(errors="replace"))

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
            raise PassingFault(f"got a reply that is not a chat completion: {self._own_words(content)}") from None
        if not isinstance(text, str):
            if cut:  # some servers reply with null if the limit was reached in the reasoning
                raise JudgeError(f"got no text: the reply {_CUT}")
            raise PassingFault("got a chat completion without text")
        return Reply(hide(text.encode(errors="replace").decode(), self.token), cut)

    def _own_words(self, text: str) -> str:
        """The beginning of a text from outside, in one line and without the token."""
        line = one_printable_line(hide(text, self.token))
        return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."

    def _token(self) -> str:
        """The access token; empty if the judge has none."""
        variable, file = self.config.judge_token_variable, self.config.judge_token_file
        if not variable and not file:
            return ""
        try:
            return judge_token(variable, file and str(user_path(file).absolute()))
        except (ConfigError, MachineError) as error:
            raise JudgeError(f"was not asked: {one_printable_line(str(error))}") from None

    async def _addresses(self) -> list[str]:
        """The addresses of a judge on this machine; empty if it may be on another one: the client resolves its name.

        Raises:
            JudgeError: if its name is unknown, or belongs to another machine.
        """
        if self.config.allow_remote:
            return []
        parts = urlsplit(self.address)
        host = parts.hostname or ""
        lookup: Awaitable[Any] = asyncio.get_running_loop().getaddrinfo(host, _port(parts), type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(self.config.timeout_seconds):
                found = list(dict.fromkeys(str(entry[4][0]) for entry in await lookup))
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            reason = one_printable_line(str(getattr(error, "strerror", "") or error or "no reply from the name server"))
            raise JudgeError(f"was not asked: the host name {host} cannot be resolved ({reason})") from None
        remote = [address for address in found if not is_this_machine(address)]
        if remote:
            which = "" if remote[0] == host else f" ({remote[0]})"
            raise JudgeError(f"was not asked: {host}{which} is another machine; allow it with allow_remote = true")
        return found


def _port(address: SplitResult) -> int:
    return address.port or (443 if address.scheme == "https" else 80)


def _retry_after(value: str) -> float:
    """The pause in seconds that a server asks for; 0 for none, and for a date."""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0.0


# ---- replies on disk, so that a question is asked once, also by a run that is killed and resumed ----


@dataclass(frozen=True)
class Reply:
    """A judge's reply."""

    text: str
    cut: bool  # it ended at its token limit


class ReplyCache:
    """A file for each reply, named by a hash of address and request.

    A file appears whole or not at all: it is written under another name, which is then changed. A damaged file counts
    as missing. A question keeps its first reply, also if several runs ask it at the same time.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is made when the first reply is stored."""
        self.folder = folder

    @staticmethod
    def key(address: str, request: Mapping[str, Any]) -> str:
        """The name of a question: SHA-256 of the address and the whole request."""
        return hashlib.sha256(json.dumps([address, request], sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Reply | None:
        """The stored reply; None if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            stored = json.loads(self._file(key).read_bytes())
            reply = Reply(stored["text"], stored["cut"])
            if stored["key"] == key and isinstance(reply.text, str) and isinstance(reply.cut, bool):
                return reply
        return None

    def put(self, key: str, request: Mapping[str, Any], reply: Reply) -> Reply:
        """Store a reply, which only the user can read, unless another run has stored one; returns the stored one.

        Raises:
            OSError: if it cannot be written.
        """
        file = self._file(key)
        make_folder(file.parent)
        document = {"key": key, "request": request, "text": reply.text, "cut": reply.cut}
        beside = file.with_name(f".{key}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(document, out)
            with contextlib.suppress(OSError):  # it exists, or the file system has no links
                os.link(beside, file)
            stored = self.get(key)
            if stored is None:
                beside.rename(file)
            return stored or reply
        finally:
            beside.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


MOST_OBJECTS = 200  # opening braces of a reply at which a JSON object is looked for; bounds the time

# A comma separates thousands; "0,8" is refused, because it may be a decimal comma or a list.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = rf"(?<![\w.])(?<![0-9],)[-+−]?(?:{_DIGITS})(?:[eE][-+]?[0-9]+)?(?!\w|[.,][0-9])"
_SCORE = re.compile(rf"(?P<number>{_NUMBER})(?:(?P<percent>\s?%)|\s*\(?(?:/|out of\b|of\b)\s*(?P<scale>{_NUMBER})\)?)?")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')  # without a group, a backslash that JSON does not allow
_EMPHASIS = re.compile(r"[*`]")
_CUT = "was cut at its token limit: raise max_tokens in judge_request"
_AROUND = " \t\r\n\"'.!:"


class UnreadableReply(ValueError):
    """The reply has no valid score; the message says why, in one line."""


@dataclass(frozen=True)
class ScoreReader:
    """How a score is read: the text that states it, then its number.

    The text is the whole reply, the group of `pattern` at its last match, or the field of the last JSON object that
    has it. The number is the last one in the text, or that of the last of `words` in it.
    """

    low: float
    high: float
    pattern: str = ""
    field: str = ""
    words: Mapping[str, float] | None = None  # in lower case

    def read(self, reply: str, *, cut: bool = False) -> float:
        """The score in a reply, from `low` to `high`.

        A number may be written on its scale, as in "8/10", if the scale ends at `high`.

        Args:
            cut: the reply ended at its token limit, so its last number may lack digits.

        Raises:
            UnreadableReply: if there is no score, or it is not finite or out of range.
        """
        if cut and not self.field and not self.words:
            raise UnreadableReply(f"the reply {_CUT}")
        return self._valid(self._stated(_answer(reply)))

    def _valid(self, found: Any) -> float:
        """The score that a text or a number of a JSON object is.

        Raises:
            UnreadableReply: if it is none, not finite or out of range.
        """
        if not isinstance(found, (bool, int, float, str)):
            raise UnreadableReply("there is no number where the score should be")
        try:
            score = self._number(found) if isinstance(found, str) else float(found)
        except OverflowError:
            raise UnreadableReply("the score is too large") from None
        if not math.isfinite(score):
            raise UnreadableReply(f"the score {score} is not finite")
        if not self.low <= score <= self.high:
            raise UnreadableReply(f"the score {score:g} is outside judge_range ({self.low:g} to {self.high:g})")
        return score

    def read_list(self, reply: str, count: int, *, order: bool) -> tuple[list[float], str]:
        """The scores of several texts, and "" or the reason why there are none.

        They are the list in the last JSON object that has the field. Of the list of an order, the scores are equally
        spaced from `high`, for the best, to `low`.

        Args:
            count: number of texts, of an order at least 2.
            order: the list has their numbers, from 1, from the best to the worst.
        """
        try:
            found = self._values(_answer(reply))[-1:]
            if not found or not isinstance(found[0], list) or len(found[0]) != count:
                raise UnreadableReply(f"the reply has no JSON object with a list of {count} in {self.field!r}")
            if not order:
                return [self._valid(one) for one in found[0]], ""
            numbers = [_whole(one) for one in found[0]]
            if sorted(numbers) != list(range(1, count + 1)):
                raise UnreadableReply(f"the list in {self.field!r} is not an order of the numbers 1 to {count}")
        except UnreadableReply as fault:
            return [], str(fault)
        step = (self.high - self.low) / (count - 1)
        return [self.high - step * numbers.index(number) for number in range(1, count + 1)], ""

    def read_or_reason(self, reply: str, *, cut: bool) -> tuple[float, str]:
        """The score, and "" or the reason why there is none."""
        try:
            return self.read(reply, cut=cut), ""
        except UnreadableReply as fault:
            return math.nan, str(fault)

    def _stated(self, reply: str) -> Any:
        """The part of the reply that states the score: text, or a number of a JSON object."""
        if self.pattern:
            matches = list(re.finditer(self.pattern, reply, re.DOTALL))
            if not matches or matches[-1][1] is None:
                raise UnreadableReply("the reply does not match judge_pattern")
            return matches[-1][1]
        if not self.field:
            return reply
        values = self._values(reply)
        if not values or not isinstance(values[-1], (bool, int, float, str)):
            raise UnreadableReply(f"the reply has no JSON object with a number or text in {self.field!r}")
        return values[-1]

    def _values(self, reply: str) -> list[Any]:
        """The values of the field in the JSON objects of a reply that have it."""
        return [value for document in _objects(reply) for value in _at(document, self.field.split("."))]

    def _number(self, text: str) -> float:
        if self.words:
            return self._word(text)
        whole = bool(self.pattern or self.field)  # then the text must be the score and nothing else
        plain = _EMPHASIS.sub("", text)
        matches = list(_SCORE.finditer(plain))
        if not matches or (whole and matches[-1][0] != plain.strip(_AROUND)):
            raise UnreadableReply("there is no number where the score should be")
        match = matches[-1]
        scale = "100" if match["percent"] else match["scale"]
        if scale is not None and _float(scale) != self.high:
            raise UnreadableReply(f"the score is on a scale up to {scale}, but judge_range ends at {self.high:g}")
        return _float(match["number"])

    def _word(self, text: str) -> float:
        assert self.words is not None
        by_length = sorted(self.words, key=len, reverse=True)
        one_of = "|".join(map(re.escape, by_length))
        found = re.findall(rf"(?<!\w)(?:{one_of})(?!\w)", text.lower())
        if not found:
            raise UnreadableReply("the reply has none of judge_words")
        return self.words[found[-1]]


def read_one(
    completions: Sequence[str], cut: bool, reader: Mapping[str, Any], log_extra: Callable[[str, list[str]], None]
) -> list[float]:
    """The score in one reply, in a process; logs the column "error". `reader` has the fields of a `ScoreReader`."""
    score, error = ScoreReader(**reader).read_or_reason(completions[0], cut=cut)
    log_extra("error", [error])
    return [score]


def _answer(reply: str) -> str:
    """The reply without the reasoning that it begins with, which may have drafts of a score.

    Raises:
        UnreadableReply: if there is nothing else.
    """
    if not reply.lstrip().startswith("<think>"):
        return reply
    _, ended, answer = reply.partition("</think>")
    if not ended:
        raise UnreadableReply(f"the reply is reasoning alone; it {_CUT}")
    return answer


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def _whole(value: Any) -> int:
    """The number of a text in a list; 0 if it is none."""
    return int(value) if type(value) is int or (isinstance(value, str) and re.fullmatch("[0-9]{1,2}", value)) else 0


def _objects(reply: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text that are not inside another one, in their order.

    Models write line ends and LaTeX in strings as they are, which JSON does not allow.
    """
    reply = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", reply)
    decoder, position = json.JSONDecoder(strict=False), 0
    for _ in range(MOST_OBJECTS):
        position = reply.find("{", position)
        if position < 0:
            return
        try:
            document, position = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):  # also an integer with too many digits
            position += 1
        else:
            yield document


def _at(document: Any, path: list[str]) -> Iterator[Any]:
    """The value at a path of keys, if there is one."""
    for key in path:
        if not isinstance(document, dict) or key not in document:
            return
        document = document[key]
    yield document
