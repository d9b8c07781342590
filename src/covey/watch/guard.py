"""Refuses requests that are not the page's own, and has the headers that protect the page.

The pages of other sites in the same browser reach a server on the loopback interface too. They are refused in three
ways: the Host must be this machine's, which that of a site whose name was rebound to 127.0.0.1 is not; a request with
an Origin must name this server; and of requests that a browser marks as another site's, only the opening of the page
itself is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.runtime.web_server import Refusal

HOSTS = ("127.0.0.1", "localhost", "[::1]")  # of any port, because that of an ssh tunnel may be another
METHODS = ("GET", "HEAD")
MOST_CONNECTIONS = 100
MOST_WAITING = 32  # of them, without a request; those of a page that is open wait for five seconds

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


def refuse(scope: Mapping[str, Any], headers: Mapping[str, str]) -> Refusal | None:
    """The refusal of a request; None if it may be answered."""
    if scope["method"] not in METHODS:
        return Refusal(405, "method", "this server only answers GET and HEAD", {"allow": ", ".join(METHODS)})
    host = headers.get("host", "").lower()
    if not is_own_host(host):
        return Refusal(
            403, "host", "the Host of the request is not this machine's: open the address that covey watch printed"
        )
    site = headers.get("sec-fetch-site", "none")
    opens_page = scope["raw_path"] == b"/" and headers.get("sec-fetch-dest") == "document"
    own_site = site in ("none", "same-origin") or opens_page
    if headers.get("origin", f"http://{host}").lower() != f"http://{host}" or not own_site:
        return Refusal(403, "origin", "requests of other sites are not answered")
    return None


def is_own_host(host: str) -> bool:
    """True for a loopback address, or localhost, with any port or none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host in HOSTS
    return name in HOSTS and port.isascii() and port.isdecimal() and len(port) <= 5
