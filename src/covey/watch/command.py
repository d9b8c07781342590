"""`covey watch`: finds the runs, starts the server, ends it at Ctrl-C; refuses requests that are not the page's own.

The pages of other sites in the same browser reach a server on the loopback interface too. They are refused in three
ways: the Host must be this machine's, which that of a site whose name was rebound to 127.0.0.1 is not; a request with
an Origin must name this server; and of requests that a browser marks as another site's, only the opening of the page
itself is answered.
"""

import errno
import socket
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.fields import did_you_mean_file
from covey.config.files import unusual_kind, user_path
from covey.config.terminal import say
from covey.runtime.web_server import Refusal, WebServer, listen, web_server
from covey.tracking.run_folder import find_runs, is_run
from covey.watch.answers import Advise, Answers, no_advice
from covey.watch.index import Indexer
from covey.watch.library import Library
from covey.watch.server import Server

HOST = "127.0.0.1"  # and no other, because everybody who reaches the server can read the runs
PORT = 8808
PORTS = 20  # that are tried if the first is taken
ROOT = Path("runs")


def watch(runs: Sequence[str], *, port: int | None = None, open_page: bool = False, advise: Advise = no_advice) -> None:
    """Show runs on a page until Ctrl-C.

    Args:
        runs: run folders, folders with runs below them, or names below runs/; none for all runs below runs/.
        port: the port; 0 is any free one, None is `PORT` or the next free one.
        open_page: open the page in the browser.
        advise: see `Answers`.

    Raises:
        ConfigError: if a folder or the port cannot be used.
        KeyboardInterrupt: at Ctrl-C.
    """
    library = find_library(runs)
    with bind(port) as listening, Indexer() as indexer:
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        count = len(library.runs())
        places = ", ".join(map(str, runs)) or f"{ROOT}/"
        say(f"showing {count or 'no'} run{'' if count == 1 else 's'} of {places}; new ones appear on the page")
        say("Ctrl-C ends it. Only this machine can open the page:")
        print(address, flush=True)
        if open_page:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        page_server(Answers(library, indexer, advise), indexer).run(sockets=[listening])


def page_server(answers: Answers, indexer: Indexer) -> WebServer:
    """The server of the page; `run(sockets=[...])` ends at a signal, with every stream of events."""

    def is_ending() -> bool:
        return running.should_exit

    app = Server(answers, indexer, is_ending).app()
    running = web_server(
        app, refuse, most_waiting=MOST_WAITING, most_connections=MOST_CONNECTIONS, headers=HEADERS.items()
    )
    return running


def bind(port: int | None) -> socket.socket:
    """A socket that listens on the loopback interface.

    Raises:
        ConfigError: if the port is taken.
    """
    tried = range(PORT, PORT + PORTS) if port is None else (port,)
    for each in tried:
        try:
            return listen(HOST, each)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise ConfigError(f"port {each} is for the system alone: name one above 1023, or 0") from None
            if error.errno != errno.EADDRINUSE:
                raise
    taken = f"port {port} is" if port is not None else f"the ports {PORT} to {PORT + PORTS - 1} are"
    raise ConfigError(f"{taken} taken by other programs: name another one by --port, or --port 0 for any free one")


def find_library(runs: Sequence[str]) -> Library:
    """The library of the runs that the command names.

    Raises:
        ConfigError: for a folder that does not exist or has no runs.
    """
    if not runs:
        return Library([ROOT])
    roots, named = [], []
    for word in runs:
        folder = _folder_of(word)
        if is_run(folder):
            named.append(folder)
        elif find_runs(folder):
            roots.append(folder)
        else:
            raise ConfigError(f"{word} is neither a run folder nor a folder with runs below it")
    return Library(roots, named)


def _folder_of(word: str) -> Path:
    path = user_path(word)
    for folder in (path, ROOT / path):
        if folder.is_dir():
            return folder
    kind = "a file" if path.is_file() else unusual_kind(path)
    if kind:
        raise ConfigError(f"{word} is {kind}; name the folder of a run")
    near = did_you_mean_file(path) or did_you_mean_file(ROOT / path)
    raise ConfigError(f"there is no run {word}{near}; without a name, all runs below {ROOT}/ are shown")


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
