"""ASGI middleware that asks every request for the access token."""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN_FILE = "COVEY_TOKEN_FILE"  # environment variable: the file with the token
LARGEST_TOKEN = 1 << 10  # bytes

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """Answers 401 to requests without the token, for every path but `/health`, and closes such web sockets.

    vLLM's own `--api-key` guards `/v1`, `/v2` and `/inference` alone; `/update_weights` and `/collective_rpc`, which
    calls any method of a worker by its name, stay open (vLLM issue 23052). The token comes from a file, because other
    users of the machine can read arguments, and vLLM logs its own.

    Raises:
        ValueError: if the file that `COVEY_TOKEN_FILE` names is missing, readable by others, or has no token.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.expected = app, b"Bearer " + _read_token()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and (scope["path"] == "/health" or self._has_token(scope))):
            await self.app(scope, receive, send)
        elif kind == "http":
            await send(
                {
                    "type": "http.response.start",
                    "status": 401,
                    "headers": [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")],
                }
            )
            body = b'{"error": {"reason": "token", "message": "the access token is missing or wrong"}}'
            await send({"type": "http.response.body", "body": body})
        elif self._has_token(scope):
            await self.app(scope, receive, send)
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008})

    def _has_token(self, scope: Scope) -> bool:
        """Compares in a time that does not depend on where the first difference is."""
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)


def _read_token() -> bytes:
    path = Path(os.environ.get(TOKEN_FILE, ""))
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would block
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ValueError(f"{TOKEN_FILE}: {path} may be read or changed by others: run chmod 600 {path}")
            content = (file.read(2 * LARGEST_TOKEN) or b"").strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_FILE} must name the file with the access token ({error})") from None
    if not re.fullmatch(rb"[\x21-\x7e]{1,%d}" % LARGEST_TOKEN, content):
        raise ValueError(f"{TOKEN_FILE}: {path} has no token: one word of printable ASCII characters is needed")
    return content
