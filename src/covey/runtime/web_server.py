"""The common parts of covey's two servers, `covey serve` and `covey watch`: their socket, uvicorn, and JSON responses.

The only file that imports uvicorn. The routes are in `llm/remote/server.py` and `watch/server.py`.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp

WebServer = uvicorn.Server
GRACE_SECONDS = 1  # that open requests have when the server ends


def json_response(content: Any, status: int = 200) -> Response:
    """The value as JSON."""
    return Response(json.dumps(content), status, media_type="application/json")


def failure(status: int, reason: str, message: str) -> Response:
    """An error as JSON, with a reason for programs and a message for people."""
    return json_response({"error": {"reason": reason, "message": message}}, status)


def one_line(error: Exception) -> str:
    """The message of an error without line breaks, truncated."""
    return " ".join(str(error).split())[:500]


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at this address; port 0 is a free one.

    Raises:
        OSError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except BaseException:
        listening.close()
        raise
    return listening


def web_server(app: ASGIApp, **options: Any) -> WebServer:
    """A server that answers requests by `app`; `run(sockets=[...])` ends at SIGINT or SIGTERM.

    Args:
        options: further ones of `uvicorn.Config`.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS, **options,
    )  # fmt: skip
    return WebServer(config)
