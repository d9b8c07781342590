"""The routes of `covey watch`. All are GET (or HEAD), all but the page itself and recordings answer JSON.

Conventions: keys are snake_case. A key with null has no known value: the run is older than that record, or has not
got so far. NaN and infinities are null. A page must ignore keys that it does not know. `{id}` is a run's "id": opaque,
URL-safe, and the same after a restart of the server. Errors have a status of 400 (a parameter is wrong), 403 (refused:
another site, a link that leads out of the run folder), 404 (no such run, step, group or file), 405, 413 (the file is
too large to show), 414, 431 or 500, and the body

    {"error": {"reason": "not_found", "message": "one line"}}

GET /                      the page: static/index.html
GET /static/{path}         its modules, styles and pictures (html, js, css, svg, png, woff2, txt, json, map)

GET /api/runs              all watched runs, those that changed last first
    {"runs": [RUN, ...],
     "root": "/home/me/runs" | null,                 the folder whose runs are shown, null if runs were named
     "version": "0.2.0"}                             covey's

  RUN = {"id": "arithmetic_grpo-001.3f9ac1",
         "name": "arithmetic_grpo-001",              unique among the runs, as short as possible
         "path": "/home/me/runs/arithmetic_grpo-001",
         "state": "running" | "finished" | "stopped" | "crashed",
         "domain": "language" | "control" | null,    null: config.toml is missing or damaged
         "score_kind": "accuracy" | "score" | "return" | "loss" | null,
         "recipe": "arithmetic_grpo" | null,
         "algorithm": "grpo" | null,
         "seconds": 65.0 | null,                     of training and evaluations, once it has ended
         "seed": 0 | null,
         "last_step": 31,                            0 before the first step
         "steps": 60 | null,                         planned
         "updated": 1764036125.2 | null,             Unix seconds of the last change
         "generation": 0,                            grows when recorded steps were taken back (a resume) or the folder
                                                     was made again: forget what was fetched of this run
         "result": {"before": ESTIMATE | null, "after": ESTIMATE | null} | null,   at the training's token limit;
                                                     "after" is the last evaluation so far
         "score": 0.62 | null}                       score/mean of the last step
  ESTIMATE = {"score": 0.62, "low": 0.56 | null, "high": 0.68 | null, "count": 256 | null}

GET /api/runs/{id}         one run: RUN and
    {"config": {...} | null,                         config.toml as tables
     "defaults": {"steps": 100, ...},                the default of each setting by its dotted name
     "verdict": {"outcome": "better" | "worse" | "unclear", "text": "one sentence"} | null,
     "next": "what to do after the run" | null, "repeat": "the command that trains the same again" | null,
     "machine": {...},                               versions and hardware; {} if they are not recorded
     "summary": {...} | null,                        summary.json, else stopped.json
     "evaluations": [{"max_new_tokens": 14 | null, "before": ESTIMATE | null, "after": ESTIMATE | null,
                      "kinds": [{"kind": "3 steps", "before": ESTIMATE | null, "after": ESTIMATE | null}, ...]}, ...],
                                                     "kinds": of problems; [] if there are not at least two
     "metrics": [{"name": "reward/mean", "unit": "reward", "meaning": "...", "healthy": "..."}, ...],
                                                     those that the run has, in the order of the glossary
     "wording": {"measured": "problem", "evaluation": "held-out accuracy, greedy", "x_metric": "step",
                 "x_label": "training step", "prompt": "prompt", "score_name": "accuracy", "counted": "tokens"} | null,
     "steps_with_rollouts": [[1, 31], [35, 40]],     ranges, both ends included
     "held_out_steps": [0, 20, 40],
     "token_limits": [14, 96],                       of the held-out answers; the first is the training's
     "records_tokens": false,                        the last step's rollouts have "tokens"
     "iterations": [{...}, ...],                     lines of iterations.jsonl; [] if the run is not iterative
     "files": [{"name": "curve.png", "bytes": 52113, "kind": "image", "type": "image/png"}, ...],
     "index": INDEX}
  INDEX = {"state": "absent" | "building" | "ready", "files": 120, "indexed": 84, "texts": 20}
    Counts of files of rollouts. Until the index is ready, /rollouts sees the indexed ones alone, the newest first.
    "texts": how many have a text index, which is made once a text is searched for; a search is slower without it.

GET /api/runs/{id}/metrics?names=reward/mean,entropy&points=600&after=0&last=84
    Steps after `after` up to `last`, in at most `points` (2 to 5000, default 600) buckets of about equal numbers of
    steps. Without `names` all metrics of the run.
    {"last_step": 84, "generation": 0, "downsampled": false,
     "steps": [1, 2, ...],                           last step of each bucket
     "first_steps": [1, 2, ...],                     its first step
     "series": {"reward/mean": {"mean": [0.1, null, ...], "low": [...], "high": [...]}, ...}}
    "low" and "high" are the least and the largest value in the bucket, and absent unless downsampled. A bucket without
    a value of the metric has null. A name that the run does not have is left out. For another x axis ask for its metric
    (environment/steps): the "mean" of each bucket belongs to the "mean" of the others.

GET /api/runs/{id}/steps/{step}/groups
    {"step": 12, "groups": [{"group": 0, "size": 8, "reward_mean": 0.5 | null, "reward_low": 0.0 | null,
      "reward_high": 1.0 | null, "reward_std": 0.5 | null, "score_mean": 0.5 | null, "baseline": 0.5 | null,
      "signal": true, "truncated": 1, "failed": 0, "dropped": false, "decisions_mean": 10.5 | null,
      "prompt": "the first 200 characters"}, ...],
     "damaged": 0}                                   lines that could not be read
    "signal": the rewards differ, so that the group has a gradient. Numbers are over graded rollouts.

GET /api/runs/{id}/steps/{step}/groups/{group}
    {"step": 12, "group": 0, "prompt": "..." | [{"role": "user", "content": "..."}, ...] | null,
     "model_prompt": "..." | null,                    the text that the model read, with its special tokens
     "columns": {...}, "baseline": 0.5 | null, "signal": true, "dropped": false, "rollouts": [ROLLOUT, ...]}
  ROLLOUT = {"index": 0,                             within the group
      "text": "...", "reward": 1.0 | null, "reward_parts": {"numeric": 1.0}, "score": 1.0 | null,
      "advantage": 0.9 | null, "baseline": 0.5 | null,
      "end": "stop" | "terminated" | "length" | "truncated" | "cut", "truncated": false, "failed": false,
      "decisions": 12, "version": 11 | null, "extra": {...} | null, "undecided": [[5, 9]] | null,
      "steps": [["text of a step", 0.5], ...] | null,
      "turns": [TURN, ...] | null,                   of a conversation
      "failure": "its environment failed: ..." | null,
      "tokens": {"ids": [...], "texts": [...], "logprobs": [...], "reference_logprobs": [...] | null,
                 "advantages": [...], "updated_logprobs": [...] | null} | null}
  TURN = {"role": "assistant" | "user" | "tool" | "environment" | ...,      "environment": its first observation
      "name": "" | "calculate",                      of the tool that replies
      "text": "...", "calls": [{"name": "calculate", "arguments": [["expression", "12 + 3"], ...]}, ...],
      "unread": ["{...", ...],                       calls that could not be read
      "reward": 0.5 | null}                          null in all turns: none was paid

GET /api/runs/{id}/rollouts?filter=best&text=apple&first=1&last=84&offset=0&limit=50
    filter: best (reward, highest first), worst, truncated, failed, no_signal; without it the newest first.
    text: a part of the completion or of the prompt; case is ignored. limit: 1 to 200. An answer takes two seconds at
    most, so it may have fewer rollouts than `limit`, even none, with a "next_offset" at which to go on.
    {"total": 8123 | null,                           null: not counted, because too many must be read
     "offset": 0, "next_offset": 50 | null,          null: no more
     "rollouts": [{"step": 12, "group": 0, "index": 3, "reward": 1.0 | null, "score": ..., "advantage": ...,
       "end": "stop", "truncated": false, "failed": false, "signal": true, "decisions": 12,
       "reward_parts": {...}, "prompt": "200 characters", "text": "400 characters around the match",
       "text_from": 0,                               position of that excerpt in the completion
       "match": [3, 8] | null}, ...],                positions in "text"; null if the match is in the prompt
     "index": INDEX}

GET /api/runs/{id}/held_out?first=0&last=40&max_new_tokens=14&offset=0&limit=200&order=worse&kind=worse&text=
    Held-out answers of two evaluations beside each other. first, last: steps of "held_out_steps" (default: the first
    and the last). order: better (largest gain first), worse, problem (default). kind: better, worse, same, truncated.
    {"first": 0, "last": 40, "max_new_tokens": 14, "count": 256, "total": 12,      total: after `kind` and `text`
     "offset": 0, "next_offset": null, "changes": {"better": 120, "worse": 9, "same": 127, "unknown": 0},
     "answers": [{"problem": 0, "prompt": "..." | [...], "columns": {...}, "first": ANSWER | null,
                  "last": ANSWER | null, "change": 1.0 | null}, ...]}
  ANSWER = {"text": "...", "reward": 1.0 | null, "score": 1.0 | null, "reward_parts": {...}, "tokens": 9,
            "truncated": false, "extra": {...} | null, "turns": [TURN, ...] | null, "failure": "..." | null}

GET /api/runs/{id}/diagnosis
    {"step": 84, "findings": [{"check": "entropy_collapse", "severity": "warning" | "problem", "first_step": 40,
      "last_step": 84, "evidence": "...", "explanation": "...", "remedy": "...", "metrics": ["entropy"]}, ...],
     "available": true}                              false: nothing can be said yet

GET /api/runs/{id}/files/{name}   a file of "files": a picture or recording of the run (png, gif, jpg, webp, mp4, webm).

GET /api/events            server-sent events, at once and then whenever something changes:
    event: run       data: {"id", "state", "last_step", "generation", "updated"}       it appeared, grew, or ended
    event: gone      data: {"id"}                                                      its folder was deleted
    event: index     data: {"id", "index": INDEX}
    A comment line every 15 seconds keeps the connection. It ends when the server ends.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from covey.config.files import Refused, TooLarge
from covey.runtime.web_server import failure, one_line
from covey.tracking.evaluations import KINDS, ORDERS
from covey.tracking.run_store import encode
from covey.watch.answers import FEWEST_POINTS, MOST_POINTS, POINTS, Answers, NotFound
from covey.watch.files import OpenFile, open_recording, open_static
from covey.watch.index import FILTERS, LONGEST_QUERY, Indexer, Query, index_path, progress
from covey.watch.library import Library

LARGEST_STEP, MOST_ROWS, ROWS = 1 << 53, 200, 50
STEPS, LIMITS, OFFSETS = range(LARGEST_STEP + 1), range(1, MOST_ROWS + 1), range((1 << 31) + 1)
TEXT = object()  # any text of a bounded length
MOST_NAMES = 200  # metrics in one request
AT_ONCE = 4  # answers that are computed side by side
Handler = Callable[[Request], Awaitable[Response]]

LOOK_SECONDS = 1.0  # between two looks at the files
LOAD = 0.05  # fraction of the time that looking may take; with many runs there are fewer looks
STOP_SECONDS = 0.2  # after which a stream notices that the server ends
HEARTBEAT_SECONDS = 15.0
MOST_STREAMS = 50

State = dict[tuple[str, str], dict[str, Any]]  # (event, id of the run) -> its data


class Server:
    """The routes of the watched runs."""

    def __init__(self, answers: Answers, indexer: Indexer, is_ending: Callable[[], bool]) -> None:
        self.answers = answers
        self.events = Events(answers.library, indexer, is_ending)
        self._turns = asyncio.Semaphore(AT_ONCE)

    def app(self) -> ASGIApp:
        """The routes, without their gate."""
        routes: dict[str, Handler] = {
            "/": self.page,
            "/static/{path:path}": self.static,
            "/api/events": self.stream,
            "/api/runs": self._json(lambda request: self.answers.runs()),
            "/api/runs/{id}": self._json(lambda request: self.answers.run(_id(request))),
            "/api/runs/{id}/metrics": self._json(self.metrics),
            "/api/runs/{id}/steps/{step}/groups": self._json(
                lambda request: self.answers.groups(_id(request), **_given(request, step=(0, STEPS)))
            ),
            "/api/runs/{id}/steps/{step}/groups/{group}": self._json(
                lambda request: self.answers.group(_id(request), **_given(request, step=(0, STEPS), group=(0, STEPS)))
            ),
            "/api/runs/{id}/rollouts": self._json(self.rollouts),
            "/api/runs/{id}/held_out": self._json(self.held_out),
            "/api/runs/{id}/diagnosis": self._json(lambda request: self.answers.diagnosis(_id(request))),
            "/api/runs/{id}/files/{name}": self.file,
        }
        handlers: Any = {
            BadParameter: _answer_to(400, "parameter"),
            NotFound: _answer_to(404, "not_found"),
            FileNotFoundError: _answer_to(404, "not_found", "there is no such file"),
            NotADirectoryError: _answer_to(404, "not_found", "there is no such file"),
            HTTPException: _answer_to(404, "not_found", "there is no such page"),
            Refused: _answer_to(403, "refused"),
            TooLarge: _answer_to(413, "too_large"),
            PermissionError: _answer_to(403, "refused", "this file may not be read"),
            OSError: _answer_to(500, "file", "this file cannot be read"),
            sqlite3.Error: _answer_to(500, "index", "the index of this run cannot be read"),
            ClientDisconnect: _answer_to(499, "gone"),
            Exception: _answer_to(500, "internal", "an error within covey watch"),
        }
        listed = [Route(path, handler) for path, handler in routes.items()]
        return Starlette(routes=listed, exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        return _file_response(request, await asyncio.to_thread(open_static, "index.html"))

    async def static(self, request: Request) -> Response:
        return _file_response(request, await asyncio.to_thread(open_static, request.path_params["path"]))

    async def file(self, request: Request) -> Response:
        run = self.answers.find(_id(request))
        return _file_response(request, await asyncio.to_thread(open_recording, run.folder, request.path_params["name"]))

    async def stream(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.events.streams >= MOST_STREAMS:
            return failure(503, "too_many", "too many pages are open")
        return StreamingResponse(self.events.stream(), media_type="text/event-stream")

    def metrics(self, request: Request) -> dict[str, Any]:
        names = request.query_params.get("names")
        listed = None if names is None else [name for name in names.split(",") if name]
        if listed is not None and len(listed) > MOST_NAMES:
            raise BadParameter(f"names has more than {MOST_NAMES} metrics")
        points = POINTS, range(FEWEST_POINTS, MOST_POINTS + 1)
        given = _given(request, points=points, after=(0, STEPS), last=(None, STEPS))
        return self.answers.metrics(_id(request), listed, **given)

    def rollouts(self, request: Request) -> dict[str, Any]:
        given = _given(
            request, filter=("", FILTERS), text=("", TEXT), first=(0, STEPS), last=(LARGEST_STEP, STEPS),
            offset=(0, OFFSETS), limit=(ROWS, LIMITS),
        )  # fmt: skip
        return self.answers.rollouts(_id(request), Query(**given))

    def held_out(self, request: Request) -> dict[str, Any]:
        given = _given(
            request, first=(None, STEPS), last=(None, STEPS), max_new_tokens=(None, STEPS), order=("problem", ORDERS),
            kind=("", KINDS), text=("", TEXT), offset=(0, OFFSETS), limit=(MOST_ROWS, LIMITS),
        )  # fmt: skip
        return self.answers.held_out(_id(request), wanted=given.pop("text"), **given)

    def _json(self, answer: Callable[[Request], Mapping[str, Any]]) -> Handler:
        """The handler that computes an answer in another thread."""

        async def handler(request: Request) -> Response:
            async with self._turns:
                body = await asyncio.to_thread(lambda: encode(answer(request)))
            return Response(body, media_type="application/json")

        return handler


class BadParameter(Exception):
    """A parameter of a request is wrong; the message is one line."""


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _given(request: Request, **known: tuple[Any, Any]) -> dict[str, Any]:
    """The parameters of a request, in its path or its query.

    Args:
        known: for each its default, and the values that it may have: a range, some texts, or `TEXT`.
    """
    values = {**request.query_params, **request.path_params}
    return {
        name: _checked(name, values[name], allowed) if values.get(name) else default
        for name, (default, allowed) in known.items()
    }


def _checked(name: str, given: str, allowed: Any) -> Any:
    if allowed is TEXT:
        if len(given) > LONGEST_QUERY or "\0" in given:
            raise BadParameter(f"{name} must have at most {LONGEST_QUERY} characters, and no NUL")
    elif not isinstance(allowed, range):
        if given not in allowed:
            raise BadParameter(f"{name} must be one of {', '.join(filter(None, allowed))}")
    elif not (given.isascii() and given.isdecimal() and len(given) <= 16 and int(given) in allowed):
        raise BadParameter(f"{name} must be an integer of {allowed.start} to {allowed.stop - 1}")
    else:
        return int(given)
    return given


def _answer_to(status: int, reason: str, message: str = "") -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of an exception, with a message of its own or that of the exception."""

    async def answer(request: Request, error: Exception) -> Response:
        return failure(status, reason, message or one_line(error))

    return answer


def _file_response(request: Request, file: OpenFile) -> Response:
    """A file, which is sent in parts and then closed."""
    headers = {"content-length": str(file.size), "content-type": file.type, "content-disposition": "inline"}
    if request.method == "HEAD":
        file.opened.close()
        return Response(headers=headers)
    return StreamingResponse(file.parts(), headers=headers)


class Events:
    """Looks at the runs while somebody listens, once for all listeners."""

    def __init__(self, library: Library, indexer: Indexer, is_ending: Callable[[], bool]) -> None:
        self._library, self._indexer, self._is_ending = library, indexer, is_ending
        self._state: State = {}
        self._lock = asyncio.Lock()
        self._next_look = 0.0
        self.streams = 0

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of one listener: all runs at once, then what changes."""
        sent: State = {}
        heard = time.monotonic()
        self.streams += 1
        try:
            yield b": covey watch\n\n"
            while not self._is_ending():
                state = await self._look()
                lines = [_event(name, data) for (name, id), data in state.items() if sent.get((name, id)) != data]
                lines += [_event("gone", {"id": id}) for name, id in sent.keys() - state.keys() if name == "run"]
                sent = state
                if lines or time.monotonic() - heard > HEARTBEAT_SECONDS:
                    heard = time.monotonic()
                    yield b"".join(lines) or b": still here\n\n"
                await asyncio.sleep(STOP_SECONDS)
        finally:
            self.streams -= 1

    async def _look(self) -> State:
        async with self._lock:
            if time.monotonic() >= self._next_look:
                began = time.monotonic()
                self._state = await asyncio.to_thread(self._read)
                now = time.monotonic()
                self._next_look = now + max(LOOK_SECONDS, (now - began) / LOAD)
            return self._state

    def _read(self) -> State:
        state: State = {}
        for run in self._library.runs():
            state["run", run.id] = run.progress()
            if run.folder in self._indexer.wanted:
                index = progress(run.folder, index_path(run.folder))
                if index["state"] != "ready":
                    self._indexer.ask(run.folder)
                state["index", run.id] = {"id": run.id, "index": index}
        return state


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
