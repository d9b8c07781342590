"""`covey serve`: covey's own decoder behind the routes of `wire.py`.

Every route but `/health` needs the access token, those that do not exist too.
"""

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from torch import Tensor

from covey.config.fields import command
from covey.config.files import path_error
from covey.config.servers import ServeOptions
from covey.config.terminal import say
from covey.llm.generation.generator import FailureReason, GenerationFailure
from covey.llm.generation.local_generator import Engine
from covey.llm.model.architecture import vocabulary_of
from covey.llm.model.chat import Chat
from covey.llm.model.loading import load_model
from covey.llm.model.stop_strings import stop_strings
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.fleet import end_with_parent
from covey.llm.remote.weights import (
    BadWeights,
    FileUpdate,
    Gloo,
    GroupUpdate,
    Sender,
    check_weights,
    connect_to_sender,
    dtype_name,
    private_folders,
    read_weights,
    receive,
)
from covey.runtime.device import build_machine
from covey.runtime.foreign_json import BadJson, convert, read_json
from covey.runtime.web_server import Refusal, Refuse, failure, json_response, listen, one_line, web_server

T = TypeVar("T")

MOST_BODY_BYTES = 64 << 10
MOST_LISTED_BYTES = 16 << 20  # of a body that lists tokens or tensors
FIRST_VERSION = ""  # of the weights that the model was loaded with; no run requests it


class _Folder(Struct):
    folder: str  # of the files with weights


class _Init(Struct):
    init_info: dict[str, Any]  # of `_Folder` or `Sender`


class _Update(Struct):
    update_info: dict[str, Any]  # of `Versioned`, and `FileUpdate` or `GroupUpdate`


INIT = msgspec.json.Decoder(_Init)
UPDATE = msgspec.json.Decoder(_Update)


class Conflict(Exception):
    """A request that contradicts the server's weights or another update of them; the message is one line."""


@dataclass
class _Opened:
    """An update of the weights that has begun."""

    version: str
    staged: dict[str, Tensor] | None = None


@dataclass
class Server:
    """The routes of one model."""

    engine: Engine
    chat: Chat
    folders: tuple[Path, ...]  # below which files with weights are read
    version: str = FIRST_VERSION  # of the weights, as runs know it
    update: _Opened | None = None
    group: Gloo | None = None  # of the next update
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while weights are received or put in place

    async def health(self, request: Request) -> Response:
        return Response()

    async def weight_info(self, request: Request) -> Response:
        return json_response({"weight_version": self.version})

    async def generate(self, request: Request) -> Response:
        vocabulary = vocabulary_of(self.engine.policy.module)
        content, version = await _content(request, MOST_LISTED_BYTES), self.version
        stop = partial(stop_strings, self.chat)
        asked = wire.read_request(content, vocabulary, (version, self.engine.version), stop)
        result = await _unless_disconnected(request, self.engine.generate(asked))
        if isinstance(result, GenerationFailure):
            return failure(409 if result.reason is FailureReason.OTHER_WEIGHTS else 422, result.reason, result.message)
        return Response(wire.answer_body(result, version), media_type="application/json")

    async def init(self, request: Request) -> Response:
        """The folder of later files, which must be below one of the server's; or the process group of an update."""
        info = read_json(await _content(request), INIT).init_info
        if "port" in info:
            sender = convert(info, Sender)
            self._refuse_if_busy()
            async with self.busy:
                self.group = await asyncio.to_thread(connect_to_sender, sender)
            return json_response({})
        folder = convert(info, _Folder).folder
        try:
            real = Path(folder).resolve()
        except (OSError, ValueError, RuntimeError):  # RuntimeError: links that lead to each other
            raise BadJson("init_info.folder is not a path") from None
        if not any(own.resolve() in (real, *real.parents) for own in self.folders):
            places = " or ".join(map(str, self.folders))
            raise Conflict(f"weights are read from files below {places} alone: start the server with --folder")
        return json_response({})

    async def start_update(self, request: Request) -> Response:
        """Begin an update. A second one at the same time ends both, so that never parts of two are mixed."""
        version = read_json(await _content(request), wire.VERSIONED).weight_version
        self._refuse_if_busy()
        if self.update is not None:
            self.update = None
            raise Conflict("another update of the weights had begun, and both have ended: begin again")
        self.update = _Opened(version)
        return json_response({})

    async def receive(self, request: Request) -> Response:
        """Read the weights and check them; the model keeps its own."""
        info = read_json(await _content(request, MOST_LISTED_BYTES), UPDATE).update_info
        update = self._open_update(convert(info, wire.Versioned).weight_version)
        async with self.busy:
            try:
                staged = await asyncio.to_thread(self._staged, info)
                check_weights(staged, self.engine.weights)
            except BaseException:
                self.update = None
                raise
        update.staged = staged
        return json_response({})

    def _staged(self, info: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of an update, from a file or over the process group."""
        own = self.engine.weights
        if "path" in info:
            file = convert(info, FileUpdate)
            return read_weights(file.path, file.sha256, self.folders, sum(tensor.nbytes for tensor in own.values()))
        group, self.group = self.group, None
        if group is None:
            raise Conflict("no process group was made for the weights")
        announced = convert(info, GroupUpdate)
        check_weights(announced.tensors(), own)
        return receive(group, announced.names, own, announced.sha256)

    async def finish_update(self, request: Request) -> Response:
        """Put the received weights in place."""
        version = read_json(await _content(request), wire.VERSIONED).weight_version
        update = self._open_update(version)
        if update.staged is None:
            raise Conflict("no weights were received")
        async with self.busy:
            self.update = None
            await asyncio.wrap_future(self.engine.change_weights(update.staged, self.engine.version + 1))
            self.version = version
        return json_response({})

    async def nothing(self, request: Request) -> Response:
        """Routes of vLLM that covey's server does not need: it puts weights in place between two batches, and forgets
        the keys and values of the old ones then.
        """
        return json_response({"success": True})

    def _refuse_if_busy(self) -> None:
        if self.busy.locked():
            raise Conflict("another update of the weights is going on")

    def _open_update(self, version: str) -> _Opened:
        """The update of this version.

        Raises:
            Conflict: if none has begun, or that of another version.
        """
        self._refuse_if_busy()
        if self.update is None or self.update.version != version:
            raise Conflict("no update of this version has begun")
        return self.update

    def app(self) -> ASGIApp:
        """The routes, without their gate."""
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            wire.GENERATE: self.generate,
            wire.INIT: self.init,
            wire.START: self.start_update,
            wire.UPDATE: self.receive,
            wire.FINISH: self.finish_update,
            wire.PAUSE: self.nothing,
            wire.RESUME: self.nothing,
            wire.RESET_CACHE: self.nothing,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(wire.HEALTH, self.health), Route(wire.WEIGHT_INFO, self.weight_info)]
        handlers: Any = {
            BadJson: _answer_to(400),
            wire.WrongVersion: _answer_to(409),
            Conflict: _answer_to(409),
            BadWeights: _answer_to(409),
            ClientDisconnect: _answer_to(499),
            Exception: _answer_to(500),
        }
        return Starlette(routes=routes, exception_handlers=handlers)


def token_guard(token: str) -> Refuse:
    """Refuses requests without the token, for every path but `/health`."""
    expected = f"Bearer {token}".encode()

    def refuse(scope: Mapping[str, Any], headers: Mapping[str, str]) -> Refusal | None:
        given = headers.get("authorization", "").encode("latin-1")
        if scope["path"] == wire.HEALTH or hmac.compare_digest(given, expected):
            return None
        return Refusal(401, "token", "the access token is missing or wrong", {"www-authenticate": "Bearer"})

    return refuse


async def _content(request: Request, most_bytes: int = MOST_BODY_BYTES) -> bytes:
    """The JSON in a request.

    Raises:
        BadJson: if it is too large.
    """
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most_bytes:
            raise BadJson(f"the body has more than {most_bytes >> 10} KiB")
    return bytes(content)


async def _unless_disconnected(request: Request, future: Future[T]) -> T:
    """The result of a request; cancelled if the client has gone before it was begun."""
    result = asyncio.wrap_future(future)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            result.cancel()
            raise ClientDisconnect
        return result.result()
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer_to(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of an exception: its message in one line."""

    async def answer(request: Request, error: Exception) -> Response:
        return failure(status, type(error).__name__, one_line(error))

    return answer


def serve(server: Server, token: str, listening: socket.socket) -> None:
    """Answer requests until a signal.

    Raises:
        KeyboardInterrupt: after SIGINT, SIGTERM or SIGHUP.
    """
    server.engine.start()
    try:
        web_server(server.app(), token_guard(token)).run(sockets=[listening])
    finally:
        server.engine.stop()


def serve_model(options: ServeOptions) -> None:
    """Load a model and answer requests until Ctrl-C.

    Raises:
        ConfigError: if the token file, the address or the model cannot be used.
    """
    if options.child:
        end_with_parent()
    token, folder = options.token(), options.weights_folder()
    folders = (folder,) if folder else private_folders()
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        raise path_error(error, f"the address {options.host}:{options.port} cannot be used") from error
    with listening:
        machine = build_machine(options.device, options.precision, options.threads)
        loaded = load_model(options.model, dtype=machine.dtype, device=machine.device)
        policy = LanguagePolicy(loaded.module.requires_grad_(False))
        host, port = listening.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        say(f"serving {options.model} in {dtype_name(machine.dtype)} on {machine.device.type} at {address}")
        say(policy.backend.describe())
        say(f"Use it: {command('train', 'RECIPE', '--sampler.kind', 'covey', '--servers', address)}")
        serve(Server(Engine(policy, options.rows), loaded.chat, folders), token, listening)
