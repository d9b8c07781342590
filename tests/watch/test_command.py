"""The command `covey watch`: what it shows, which port it takes, and how it ends."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.runtime.web_server import listen
from covey.watch import command
from covey.watch.command import bind, find_library
from helpers.large_run import write_run
from helpers.page_server import Client, children_of
from helpers.run_helpers import LIMIT_SECONDS, covey, is_running, start


def address_of(running: object) -> int:
    """The port of a server that is starting."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/\n\Z", running.output())):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_quietly_while_a_page_listens(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests were started so that they ignore this signal, as by nohup")
    write_run(tmp_path / "runs" / "a", 3, 9, words=3)
    running = start("watch", "--port", "0", cwd=tmp_path, COVEY_CACHE=str(tmp_path / "cache"))
    port = address_of(running)
    assert [run["name"] for run in Client(port).get("/api/runs").json["runs"]] == ["a"]
    assert Client(port).of_run(tmp_path / "runs" / "a").status == 200  # starts the indexer
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as page:
        page.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"event-stream" in page.recv(1 << 16)
        children = children_of(running.pid)
        assert len(children) == 1
        running.send_signal(number)
        code, output = running.ended()
    assert code == 0
    assert output.splitlines()[-1] == f"http://127.0.0.1:{port}/"
    assert not [child for child in children if is_running(child)]


def test_without_runs_it_waits_for_them(tmp_path: Path) -> None:
    running = start("watch", "--port", "0", cwd=tmp_path, COVEY_CACHE=str(tmp_path / "cache"))
    try:
        port = address_of(running)
        assert "no runs" in running.output()
        assert Client(port).get("/api/runs").json["runs"] == []
    finally:
        running.send_signal(signal.SIGINT)
        running.ended()


def test_runs_are_named_by_folder_or_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/a", "runs/compare/x-0", "runs/compare/x-1", "elsewhere/b"):
        write_run(tmp_path / name, 1, 5, words=2)
    monkeypatch.chdir(tmp_path)
    assert sorted(run.name for run in find_library([]).runs()) == ["a", "x-0", "x-1"]
    assert [run.name for run in find_library(["a"]).runs()] == ["a"]
    assert sorted(run.name for run in find_library(["runs/compare", "elsewhere/b", "a"]).runs()) == [
        "a", "b", "x-0", "x-1"
    ]  # fmt: skip
    assert [run.name for run in find_library(["a", str(tmp_path / "runs" / "a")]).runs()] == ["a"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("runs/aa", r"there is no run runs/aa \(did you mean 'runs/a'\?\); without a name, all runs below runs/"),
        ("ab", r"there is no run ab \(did you mean 'runs/a'\?\)"),
        ("file", "file is a file; name the folder of a run"),
        ("empty", "empty is neither a run folder nor a folder with runs below it"),
        ("a\0b", "holds characters that no path can have"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str) -> None:
    write_run(tmp_path / "runs" / "a", 1, 5, words=2)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_library([word])


def test_a_taken_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named port must be free; without a name the next free one is taken."""
    with listen("127.0.0.1", 0) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {taken} is taken by other programs: name another one by --port"):
            bind(taken)
        monkeypatch.setattr(command, "PORT", taken)
        monkeypatch.setattr(command, "PORTS", 1)
        with pytest.raises(ConfigError, match="are taken by other programs"):
            bind(None)
        monkeypatch.setattr(command, "PORTS", 50)
        with bind(None) as listening:
            assert taken < listening.getsockname()[1] < taken + 50
        code, output = covey("watch", "--port", taken, cwd=tmp_path)
    assert code == 2
    assert re.search(rf"^error: port {taken} is taken", output, re.MULTILINE)
    with bind(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_no_option_listens_elsewhere(tmp_path: Path) -> None:
    code, output = covey("watch", "--host", "0.0.0.0", cwd=tmp_path)
    assert code == 2
    assert "--host" in output
