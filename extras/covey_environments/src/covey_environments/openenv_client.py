"""Client of an OpenEnv server: JSON over a WebSocket, or over HTTP. The only file that contacts such a server.

A WebSocket connection is a session of the server, with an environment of its own. Over HTTP the server has no sessions:
it makes an environment for every request, or, in early versions, has one for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2
from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from covey.config.servers import hide, is_local, token_in
from covey.llm.conversation.adapter import WrongEnvironment
from covey.runtime.worker.child import one_printable_line

CONNECT_SECONDS = 10.0
SCHEMA_SECONDS = 10.0
CAPACITY_SECONDS = 5.0  # in which a session of an ended conversation becomes free
MOST_BYTES = 1 << 24  # of a message
LONGEST_REASON = 300  # characters of a server's text in a message
Json = dict[str, Any]


class RefusedAction(Exception):
    """An action that does not fit the server's schema; the message is for the model."""


class Client(Protocol):
    """An episode on a server. The methods raise WrongEnvironment if the server is at fault.

    A result has the keys `observation` (a dict), `reward` and `done`.
    """

    def reset(self, arguments: Mapping[str, Any]) -> Json:
        """Begin an episode."""

    def step(self, action: Mapping[str, Any]) -> Json:
        """Take an action. Raises RefusedAction."""

    def close(self) -> None:
        """End the episode."""


class Address:
    """Where a server is, and the headers of requests to it.

    >>> Address("http://127.0.0.1:8000/").websocket
    'ws://127.0.0.1:8000/ws'
    """

    def __init__(self, url: str, token_variable: str = "") -> None:
        """Read an address.

        Args:
            token_variable: name of the environment variable with the access token; empty: none is sent.

        Raises:
            WrongEnvironment: if it is not an address, there is no token, or the token would be sent in the clear.
        """
        scheme, _, rest = str(url).rstrip("/").partition("://")
        kinds = {"http": "", "ws": "", "https": "s", "wss": "s"}
        host = ""
        try:
            parts = urlsplit(f"//{rest}")
            if scheme in kinds and parts.port != 0:
                host = parts.hostname or ""
        except ValueError:  # a port that is not a number
            pass
        if host and parts.username is not None:
            raise WrongEnvironment(
                "the option url has a user name or a password: give the address alone, and the name of an environment "
                "variable with an access token in the option token_variable"
            )
        if not host:
            raise WrongEnvironment(
                f"the option url is {url!r}: give the address of an OpenEnv server, http://host:port"
            )
        self.http = f"http{kinds[scheme]}://{rest}"
        self.websocket = f"ws{kinds[scheme]}://{rest}/ws"
        self.headers: dict[str, str] = {}
        self.token = ""
        if token_variable:
            if not kinds[scheme] and not is_local(host):
                raise WrongEnvironment(
                    f"the option url is {url!r}, which is not encrypted, and token_variable names an access token: use "
                    "https"
                )
            self.token = _token(token_variable)
            self.headers = {"Authorization": f"Bearer {self.token}"}

    def read(self, content: str | bytes, where: str = "") -> Json:
        """A JSON object from the server, without the token."""
        text = content if isinstance(content, str) else content.decode(errors="replace")
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(hide(text, self.token))
            if isinstance(found, dict):
                return found
        raise WrongEnvironment(
            f"the server at {where or self.http} answered something other than a JSON object, so "
            "it is not an OpenEnv server"
        )

    def short(self, text: Any) -> str:
        """A text from the server, or about it, in one line and without the token."""
        return _short(hide(str(text) or type(text).__name__, self.token))

    def schema(self) -> Json:
        """JSON Schemas of the server's `action` and `observation`; {} if it does not tell them."""
        try:
            with httpx2.Client(timeout=SCHEMA_SECONDS, trust_env=False, headers=self.headers) as client:
                response = client.get(f"{self.http}/schema")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise WrongEnvironment(
                f"no OpenEnv server answers at {self.http} ({self.short(error)}): start it, or correct the option url"
            ) from None
        if response.status_code == 404:
            return {}
        if response.status_code in (401, 403):
            raise WrongEnvironment(
                f"the server at {self.http} refuses access (status {response.status_code}): give the name of an "
                "environment variable with a valid access token in the option token_variable"
            )
        found = self.read(response.content) if response.status_code == 200 else {}
        if not isinstance(found.get("action"), dict):
            raise WrongEnvironment(
                f"the server at {self.http} is not an OpenEnv server: /schema has no schema of actions"
            )
        return found


class WebSocketClient:
    """An episode in a session of its own; implements `Client`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: ClientConnection | None = None

    def reset(self, arguments: Mapping[str, Any]) -> Json:
        """Connect and reset. Waits for a session if the server has as many as it allows."""
        deadline = time.monotonic() + CAPACITY_SECONDS
        while True:
            self.close()
            self._connection = self._connect()
            try:
                return self._result({"type": "reset", "data": dict(arguments)})
            except _NoSession as error:
                if time.monotonic() > deadline:
                    raise WrongEnvironment(str(error)) from None
                time.sleep(0.1)

    def step(self, action: Mapping[str, Any]) -> Json:
        return self._result({"type": "step", "data": dict(action)})

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(WebSocketException, OSError):
                connection.send(json.dumps({"type": "close"}))
            connection.close()

    def _connect(self) -> ClientConnection:
        try:
            return connect(
                self._address.websocket,
                open_timeout=CONNECT_SECONDS,
                close_timeout=1.0,
                max_size=MOST_BYTES,
                proxy=None,
                compression=None,
                additional_headers=self._address.headers,
                # The server pings. The thread that would do it here draws from the global generator of `random` at
                # arbitrary times, so an environment that uses it in the same process would not be repeatable.
                ping_interval=None,
            )
        except (WebSocketException, InvalidURI, OSError) as error:
            raise WrongEnvironment(
                f"the OpenEnv server at {self._address.http} opens no session ({self._address.short(error)}); an early "
                'version without sessions needs the option transport = "http"'
            ) from None

    def _result(self, message: Json) -> Json:
        assert self._connection is not None
        try:
            with contextlib.suppress(ConnectionClosed):  # a server without a free session says so before it closes
                self._connection.send(json.dumps(message))
            answer = self._address.read(self._connection.recv())
        except (WebSocketException, OSError) as error:
            raise WrongEnvironment(
                f"the OpenEnv server at {self._address.http} closed the connection ({self._address.short(error)})"
            ) from None
        data = answer.get("data")
        if not isinstance(data, dict):
            data = {}
        if answer.get("type") == "error":
            self._fail(data)
        return _checked(data, self._address.http)

    def _fail(self, data: Json) -> None:
        code, text = data.get("code"), _short(data.get("message", "without a message"))
        if code == "VALIDATION_ERROR":
            raise RefusedAction(_faults(data.get("errors")))
        if code == "CAPACITY_REACHED":
            raise _NoSession(
                f"the OpenEnv server at {self._address.http} has no free session ({text}): start it with "
                "max_concurrent_envs of at least sampling.prompts_per_step x sampling.group_size, or of "
                "evaluation.problems if that is more"
            )
        raise WrongEnvironment(f"the OpenEnv server at {self._address.http} answered with an error: {code}: {text}")


class HttpClient:
    """An episode without a session; implements `Client`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        # The deadline of a call is that of the conversation.
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS), trust_env=False, headers=address.headers
        )

    def reset(self, arguments: Mapping[str, Any]) -> Json:
        return self._post("/reset", dict(arguments))

    def step(self, action: Mapping[str, Any]) -> Json:
        return self._post("/step", {"action": dict(action)})

    def close(self) -> None:
        self._client.close()

    def _post(self, route: str, body: Json) -> Json:
        where = f"{self._address.http}{route}"
        try:
            response = self._client.post(where, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise WrongEnvironment(
                f"the OpenEnv server does not answer {where} ({self._address.short(error)})"
            ) from None
        if response.status_code == 422 and route == "/step":
            raise RefusedAction(_faults(self._address.read(response.content, where).get("detail")))
        if response.status_code != 200:
            raise WrongEnvironment(f"the OpenEnv server answered {where} with status {response.status_code}")
        return _checked(self._address.read(response.content, where), where)


class _NoSession(Exception):
    """The server has as many sessions as it allows."""


def _token(variable: str) -> str:
    """The value of an environment variable, which is never shown: a wrong name may be the token itself."""
    if not (token := token_in(os.environ.get(variable, "").encode(errors="replace"))):
        raise WrongEnvironment(
            "the option token_variable is the name of an environment variable with an access token, and there is no "
            "such variable with one word of printable ASCII characters: set it"
        )
    return token


def _checked(result: Json, where: str) -> Json:
    if not isinstance(result.get("observation"), dict):
        raise WrongEnvironment(f"the server at {where} answered without an observation: it is not an OpenEnv server")
    return result


def _faults(errors: Any) -> str:
    """Pydantic's errors as one line for the model."""
    parts = []
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, dict):
            place = ".".join(str(part) for part in error.get("loc", ()))
            parts.append(f"{place}: {error.get('msg', '')}" if place else str(error.get("msg", "")))
    return _short("; ".join(parts) or "the action does not have the fields that it needs")


def _short(text: Any) -> str:
    """A text from outside in one line."""
    line = one_printable_line(str(text))
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."
