"""Forged requests to the real server, over real sockets, and files of a run folder that are none."""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from covey.config.files import Refused, TooLarge
from covey.tracking import run_reader
from covey.tracking.run_reader import MetricTable
from covey.watch.answers import Answers, NotFound
from covey.watch.command import is_own_host
from covey.watch.files import open_recording
from covey.watch.index import Query, index_path, update
from covey.watch.library import Library, run_id
from covey.watch.server import Events
from helpers.large_run import write_run
from helpers.page_server import Client, serving_here

SECRET = "the secret of another folder"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, beside a secret, to which links of the runs lead."""
    folder = tmp_path_factory.mktemp("guard")
    write_run(folder / "runs" / "a", 4, 20, words=5)
    run = folder / "runs" / "a"
    (run / "curve.png").write_bytes(b"\x89PNG picture")
    (run / "notes.txt").write_text(SECRET)
    (run / "page.svg").write_text("<svg onload='alert(1)'/>")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret.png").write_text(SECRET)
    (outside / "step_000009.jsonl").write_text('{"step": 9, "group": 0, "text": "' + SECRET + '", "reward": 1}\n')
    (outside / "summary.json").write_text('{"recipe": "' + SECRET + '"}')
    (run / "link.png").symlink_to(outside / "secret.png")
    (run / "rollouts" / "step_000009.jsonl").symlink_to(outside / "step_000009.jsonl")
    (run / "held_out").symlink_to(outside)
    (run / "summary.json").symlink_to(outside / "summary.json")
    os.mkfifo(run / "pipe.png")
    os.mkfifo(run / "rollouts" / "step_000008.jsonl")
    (run / "rollouts" / "step_000007.jsonl").mkdir()
    with open(run / "huge.png", "wb") as file:
        file.truncate(300 << 20)
    with open(run / "rollouts" / "step_000006.jsonl", "wb") as file:
        file.truncate(300 << 20)
    return folder / "runs"


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVEY_CACHE", str(runs.parent / "cache"))
        with serving_here(Library([runs])) as made:
            yield made


def test_the_page_and_its_api_answer(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"covey" in page.body
    (run,) = client.get("/api/runs").json["runs"]
    assert run["last_step"] == 4
    assert client.get("/api/runs", host="localhost").status == 200
    assert client.get("/api/runs", host=f"[::1]:{client.port}").status == 200
    assert client.get("/api/runs", host="localhost:9999", origin="http://localhost:9999").status == 200  # an ssh tunnel


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "127.0.0.1:x", "10.0.0.1", "",
             "localhost:8808@evil.example", "[::1].evil", "0.0.0.0", "127.0.0.1:123456", "user@127.0.0.1"]
)  # fmt: skip
@pytest.mark.parametrize("target", ["/", "/api/runs", "/static/main.js", "/nothing"])
def test_another_host_is_refused(client: Client, host: str, target: str) -> None:
    """A site whose name leads to 127.0.0.1 (DNS rebinding) sends its own name."""
    answer = client.get(target, host=host)
    assert answer.status in (400, 403)
    assert b"runs" not in answer.body


def test_two_hosts_or_none_are_refused(client: Client) -> None:
    own = f"Host: 127.0.0.1:{client.port}\r\n"
    for hosts in ("", own + "Host: evil.example\r\n", "Host: evil.example\r\n" + own):
        request = f"GET /api/runs HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
        assert client.send(request.encode()).status in (400, 403)
    assert client.send(b"GET /api/runs HTTP/1.0\r\n\r\n").status == 403
    absolute = "GET http://evil.example/api/runs HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert client.send(absolute.encode()).status in (400, 403)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:{port}"},
        {"origin": "http://localhost:{port}"},  # this machine, but not the Host of the request
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document", "sec_fetch_mode": "navigate"},
    ],
)
def test_requests_of_other_sites_are_refused(client: Client, headers: dict[str, str]) -> None:
    given = {name: value.format(port=client.port) for name, value in headers.items()}
    answer = client.get("/api/runs", **given)
    assert (answer.status, answer.json["error"]["reason"]) == (403, "origin")


def test_a_link_of_another_site_opens_the_page_alone(client: Client) -> None:
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document", "sec_fetch_mode": "navigate"}
    assert client.get("/", **followed).status == 200
    assert client.get("/", **followed | {"sec_fetch_dest": "iframe"}).status == 403
    assert client.get("/static/main.js", **followed).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_other_methods_are_refused(client: Client, method: str) -> None:
    answer = client.get("/api/runs", method=method)
    assert answer.status in (400, 405)
    assert answer.status == 400 or answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("target", ["/", "/api/runs", "/static/main.js", "/api/events", "/nothing", "/api/runs/x"])
def test_every_answer_has_the_headers_that_protect(client: Client, target: str) -> None:
    answer = client.get(target, method="HEAD")
    assert answer.body == b""
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert not {"unsafe-inline", "unsafe-eval", "data:", "*", "http:", "https:"} & set(
        " ".join(policy.values()).split()
    )
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "server" not in answer.headers


SECRETS = [
    "../outside/secret.png", "..%2foutside%2fsecret.png", "%2e%2e/outside/secret.png", "..%5coutside%5csecret.png",
    "....//outside/secret.png", "%252e%252e%252foutside%252fsecret.png", "/etc/passwd", "%2fetc%2fpasswd",
    "..%c0%af..%c0%afetc/passwd", "link.png", "notes.txt", "config.toml", "page.svg", "curve.png%00.txt", "%00", "",
    ".", "..", "held_out/secret.png", "held_out%2fsecret.png", "pipe.png", "huge.png",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_no_path_leads_out_of_the_folder(client: Client, runs: Path, name: str) -> None:
    id = run_id((runs / "a").resolve())
    for target in (f"/api/runs/{id}/files/{name}", f"/static/{name}", f"/api/runs/{name}", f"/{name}",
                   f"/api/runs/{id}/steps/{name}/groups", f"/api/runs/{id}/steps/1/groups/{name}"):  # fmt: skip
        answer = client.get(target)
        if target in ("/", "/.", f"/api/runs/{id}/steps/1/groups/", "/api/runs/"):
            continue
        assert answer.status in (400, 403, 404, 405, 413, 307), target
        assert SECRET.encode() not in answer.body
        assert b"root:" not in answer.body
        assert answer.status != 307 or answer.headers["location"].startswith(f"http://127.0.0.1:{client.port}/")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("parameter", ["first", "last", "offset", "limit", "filter", "text", "max_new_tokens", "order",
                                       "kind", "names", "points", "after"])  # fmt: skip
@pytest.mark.parametrize("value", ["../../etc/passwd", "%00", "-1", "9" * 40, "1e9", "%F0%9F%98%80", "' OR 1=1 --",
                                   '"', "x" * 300, "\u0661"])  # fmt: skip
def test_hostile_parameters_do_no_harm(client: Client, runs: Path, parameter: str, value: str) -> None:
    given = value if "%" in value else quote(value)
    for path in ("metrics", "rollouts", "held_out", "steps/1/groups"):
        answer = client.of_run(runs / "a", f"/{path}?{parameter}={given}")
        assert answer.status in (200, 400, 403, 404), (path, answer.body)
        assert SECRET.encode() not in answer.body


@pytest.mark.slow
def test_links_pipes_folders_and_large_files_of_a_run_are_not_read(client: Client, runs: Path) -> None:
    run = runs / "a"
    assert client.of_run(run, "/files/curve.png").body == b"\x89PNG picture"
    assert client.of_run(run, "/files/link.png").status == 403
    assert client.of_run(run, "/files/pipe.png").status == 403
    assert client.of_run(run, "/files/huge.png").status == 413
    assert client.of_run(run, "/steps/9/groups").status == 403
    assert client.of_run(run, "/steps/9/groups/0").status == 403
    assert client.of_run(run, "/steps/8/groups").status == 403
    assert client.of_run(run, "/steps/7/groups").status == 403
    assert client.of_run(run, "/steps/6/groups").status == 413
    assert client.of_run(run, "/held_out").status == 404
    found = client.of_run(run).json
    assert found["summary"] is None
    assert found["held_out_steps"] == []
    assert found["steps_with_rollouts"] == [[1, 4], [6, 6]]
    assert [file["name"] for file in found["files"]] == ["curve.png"]


@pytest.mark.parametrize("text", [SECRET, "secret"])
def test_a_search_does_not_follow_links(client: Client, runs: Path, text: str) -> None:
    found = client.of_run(runs / "a", f"/rollouts?text={text.replace(' ', '%20')}").json
    assert found["rollouts"] == []


def test_large_requests_are_refused(client: Client) -> None:
    assert client.get("/api/runs?x=" + "y" * 5000).status == 414
    assert client.get("/api/runs", cookie="z" * 20_000).status == 431
    many = "".join(f"x-{number}: y\r\n" for number in range(5000))
    for headers in (f"Cookie: {'z' * 200_000}\r\n", many):
        request = f"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        with suppress(ConnectionError):  # the server may close the connection while the request is sent
            assert client.send(request.encode()).status in (400, 431)


def test_a_body_is_not_read(client: Client) -> None:
    request = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nContent-Length: 999999999999\r\n"
    assert client.send(f"{request}Connection: close\r\n\r\n".encode()).status == 200


def test_nothing_listens_beyond_loopback(client: Client) -> None:
    """On Linux every address of 127.0.0.0/8 is this machine's, and so is that of its name."""
    assert client.get("/").status == 200
    for address in ("127.0.0.2", *_other_addresses()):
        with pytest.raises(OSError), socket.create_connection((address, client.port), timeout=5):  # noqa: PT011
            pass


def _other_addresses() -> set[str]:
    """Addresses of this machine on its networks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return set()
        return {probe.getsockname()[0]} - {"127.0.0.1"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("localhost:80", True), ("[::1]", True), ("[::1]:8808", True), ("::1", False),
     ("localhost:", False), ("localhost.", False), ("127.0.0.1:8808:1", False), ("", False), (":80", False)],
)  # fmt: skip
def test_own_hosts(host: str, own: bool) -> None:
    assert is_own_host(host) is own


NAMES = (
    "config.toml", "origin.json", "metrics.jsonl", "summary.json", "stopped.json", "iterations.jsonl", "covey.lock",
    "covey.log", "curve.png", "rollouts", "rollouts/step_000002.jsonl", "held_out", "held_out/step_000000.jsonl",
    "held_out/step_000002.jsonl", "checkpoints", "checkpoints/step-00000002/manifest.json",
)  # fmt: skip


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # an address has about 100 bytes


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 42)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": huge,
    "loop": lambda path: path.symlink_to(path.name),
    "nested": lambda path: path.write_text("[" * 100_000 + "\n"),
    "zeros": lambda path: path.write_bytes(bytes(1 << 20)),
}


class NoIndexer:
    wanted = frozenset[Path]()

    def ask(self, run_dir: Path, *, texts: bool = False) -> None:
        """Start nothing."""


@contextmanager
def openings(root: Path) -> Iterator[list[Path]]:
    """Context manager with the pipes below a folder that were opened for reading; each reader then gets its end."""
    pipes, opened, ended = [path for path in root.rglob("*") if path.is_fifo()], [], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            for path in pipes:
                with suppress(OSError):  # nobody reads it
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    opened.append(path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield opened
    finally:
        ended.set()
        thread.join()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_run_stops_the_answers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "whole", 2, 4, words=3)
    for number, name in enumerate(NAMES):
        run = tmp_path / "runs" / f"run-{number}"
        shutil.copytree(tmp_path / "whole", run)
        (run / "covey.lock").touch()  # so that a run without metrics is one
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        KINDS[kind](path)
    library = Library([tmp_path / "runs"])
    indexer: Any = NoIndexer()
    answers = Answers(library, indexer)
    with openings(tmp_path) as opened:
        assert len(answers.runs()["runs"]) == len(NAMES)
        assert len(Events(library, indexer, lambda: False)._read()) == len(NAMES)
        for run in library.runs():
            list(update(run.folder, index_path(run.folder), texts=True))
            found = answers.run(run.id)
            assert found["last_step"] == (0 if run.folder == tmp_path / "runs" / "run-2" else 2)
            answers.metrics(run.id, None, 100, 0, None)
            answers.rollouts(run.id, Query("", "a", 0, 9, 0, 9))
            answers.diagnosis(run.id)
            for ask in (
                lambda run: answers.groups(run.id, 2),
                lambda run: answers.group(run.id, 2, 0),
                lambda run: answers.held_out(run.id, None, None, None, order="problem", kind="", wanted="", offset=0,
                                             limit=9),
                lambda run: open_recording(run.folder, "curve.png").opened.close(),
            ):  # fmt: skip
                with suppress(NotFound, Refused, TooLarge, OSError):
                    ask(run)
    assert not opened


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", 3, 3, words=2)
    known = run_reader.parse_metrics
    appended = []

    def append_one(line: bytes) -> dict[str, Any] | None:
        if len(appended) < 100:
            appended.append(line)
            with open(run / "metrics.jsonl", "ab") as file:
                file.write(b'{"step": %d}\n' % (3 + len(appended)))
        return known(line)

    monkeypatch.setattr(run_reader, "parse_metrics", append_one)
    table = MetricTable(run)
    table.update()
    assert (table.last_step, len(appended)) == (3, 3)
    table.update()
    assert table.last_step == 6
