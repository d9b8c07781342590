"""Refuses requests that are not the page's own, and adds the headers that protect the page.

The pages of other sites in the same browser reach a server on the loopback interface too. They are refused in three
ways: the Host must be this machine's, which that of a site whose name was rebound to 127.0.0.1 is not; a request with
an Origin must name this server; and of requests that a browser marks as another site's, only the opening of the page
itself is answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HOSTS = ("127.0.0.1", "localhost", "[::1]")  # of any port, because that of an ssh tunnel may be another
METHODS = ("GET", "HEAD")
LONGEST_TARGET = 4096  # bytes of a path with its query
LARGEST_HEADERS = 16 << 10  # bytes of all headers
LARGEST_HEAD = 32 << 10  # bytes that uvicorn reads of a request before it gives up
MOST_CONNECTIONS = 100

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "media-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """ASGI middleware in front of the routes."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refusal = refuse(scope["method"], scope["raw_path"], scope["query_string"], scope["headers"])
        if refusal is None:
            await self.app(scope, receive, protected)
            return
        status, reason, message = refusal
        body = json.dumps({"error": {"reason": reason, "message": message}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", ", ".join(METHODS).encode()))
        await protected({"type": "http.response.start", "status": status, "headers": headers})
        await protected({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def refuse(
    method: str, path: bytes, query: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> tuple[int, str, str] | None:
    """Status, reason and message of the refusal of a request; None if it may be answered."""
    headers = list(headers)
    if method not in METHODS:
        return 405, "method", "this server only answers GET and HEAD"
    if len(path) + len(query) > LONGEST_TARGET:
        return 414, "too_long", f"the address has more than {LONGEST_TARGET} bytes"
    if sum(len(name) + len(value) for name, value in headers) > LARGEST_HEADERS:
        return 431, "too_large", f"the headers have more than {LARGEST_HEADERS} bytes"
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not is_own_host(hosts[0]):
        return 403, "host", "the Host of the request is not this machine's: open the address that covey watch printed"
    given = {name: value.decode("latin-1").lower() for name, value in headers}
    if given.get(b"origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
        return 403, "origin", "requests of other sites are not answered"
    site = given.get(b"sec-fetch-site", "none")
    opens_page = path == b"/" and given.get(b"sec-fetch-dest") == "document"
    if site not in ("none", "same-origin") and not opens_page:
        return 403, "origin", "requests of other sites are not answered"
    return None


def is_own_host(host: str) -> bool:
    """True for a loopback address, or localhost, with any port or none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host in HOSTS
    return name in HOSTS and port.isascii() and port.isdecimal() and len(port) <= 5
