"""The API over a real socket: a run of today's code, one with the keys of an older one, and runs that change."""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.tracking.run_reader import conversation_turns
from covey.watch.library import Library, run_id, short_names
from helpers.conversation_records import conversation
from helpers.large_run import NEEDLE, write_run
from helpers.page_server import Client, serving_here

SECONDS = 120.0  # for what happens soon
TOKENS = {"ids": [5, 2], "texts": ["4", "</s>"], "logprobs": [-0.1, -0.2], "reference_logprobs": None,
          "advantages": [0.5, 0.5], "updated_logprobs": [-0.05, -0.2]}  # fmt: skip
CHAT = [{"role": "user", "content": "2+2="}]
HOSTILE = "<script>alert(1)</script>\u2028 😀 \ud800 &amp; \x00 ]]>"


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollout(group: int, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"step": 1, "group": group, "prompt": CHAT, "columns": {"answer": "4"}, "text": "4", "reward": reward,
            "reward_parts": {"numeric": reward}, "score": reward, "end": "stop", "decisions": 2,
            "version": 0} | more  # fmt: skip


def answer(problem: int, score: float | None, **more: Any) -> dict[str, Any]:
    return {"step": 0, "max_new_tokens": 14, "problem": problem, "prompt": CHAT, "columns": {"answer": "4"},
            "text": "4", "reward": score, "reward_parts": {}, "score": score, "tokens": 2, "truncated": False
            } | more  # fmt: skip


def write_language_run(run: Path) -> None:
    """Three steps with the keys of today's records, and held-out answers of steps 0 and 2."""
    write_lines(run / "metrics.jsonl", [
        {"step": step, "score/mean": step / 4, "entropy": 1.0, "reward/numeric": 0.5, "a/metric/of/its/own": 1}
        for step in (1, 2, 3)
    ])  # fmt: skip
    (run / "config.toml").write_text('steps = 60\nseed = 7\n[[rewards]]\nname = "numeric"\n')
    (run / "origin.json").write_text('{"launch": {"recipe": "arithmetic_grpo"}}')
    (run / "curve.png").write_bytes(b"\x89PNG")
    new = {"advantage": 0.5, "baseline": 0.5, "tokens": TOKENS}
    write_lines(run / "rollouts" / "step_000001.jsonl", [rollout(0, 1.0), rollout(0, None, end="length")])
    write_lines(run / "rollouts" / "step_000003.jsonl", [
        rollout(0, 1.0, **new), rollout(1, 1.0, **new | {"advantage": None}, dropped=True),
        rollout(0, 0.0, **new | {"advantage": -0.5}),
        rollout(1, 1.0, text=HOSTILE, steps=[["a", 1.0]], undecided=[[1, 2]], extra={"note": "x"}),
    ])  # fmt: skip
    before = [answer(0, 0.0), answer(1, 1.0), answer(2, 0.0), answer(3, None), answer(0, 0.0, max_new_tokens=96)]
    after = [answer(0, 1.0, text="Four"), answer(1, 0.0, truncated=True), answer(2, 0.0), answer(3, 1.0)]
    write_lines(run / "held_out" / "step_000000.jsonl", before)
    write_lines(run / "held_out" / "step_000002.jsonl", after)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    write_language_run(folder / "runs" / "now")
    write_run(folder / "runs" / "large", 40, 400, words=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVEY_CACHE", str(folder / "cache"))
        with serving_here(Library([folder / "runs"])) as made:
            yield made


def soon(check: Callable[[], Any]) -> Any:
    """The first true value of a check that becomes true soon."""
    deadline = time.monotonic() + SECONDS
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_run(client: Client, folder: Path) -> None:
    found = client.of_run(folder / "runs" / "now").json
    assert {name: found[name] for name in ("name", "domain", "score_kind", "recipe", "seed", "last_step", "steps",
                                           "generation", "score", "held_out_steps", "token_limits", "records_tokens",
                                           "steps_with_rollouts", "iterations", "summary")} == {
        "name": "now", "domain": "language", "score_kind": "accuracy", "recipe": "arithmetic_grpo", "seed": 7,
        "last_step": 3, "steps": 60, "generation": 0, "score": 0.75, "held_out_steps": [0, 2], "token_limits": [14, 96],
        "records_tokens": True, "steps_with_rollouts": [[1, 1], [3, 3]], "iterations": [], "summary": None,
    }  # fmt: skip
    assert found["state"] == "crashed"
    assert [metric["name"] for metric in found["metrics"]] == [
        "reward/numeric", "score/mean", "entropy", "a/metric/of/its/own"
    ]  # fmt: skip
    assert found["metrics"][2]["unit"] == "nats per decision"
    assert found["wording"]["score_name"] == "accuracy"
    before, after = (found["evaluations"][0][when] for when in ("before", "after"))
    assert (before["score"], before["count"]) == (pytest.approx(1 / 3), 3)
    assert (after["score"], after["count"]) == (0.5, 4)
    assert found["evaluations"][0]["kinds"] == []
    assert found["evaluations"][1]["max_new_tokens"] == 96
    assert found["evaluations"][1]["after"] is None
    assert found["result"] == {"before": before, "after": after}
    assert found["files"] == [{"name": "curve.png", "bytes": 4, "kind": "image", "type": "image/png"}]


def test_the_list_of_runs(client: Client) -> None:
    found = client.get("/api/runs").json
    assert sorted(run["name"] for run in found["runs"]) == ["large", "now"]
    assert found["root"].endswith("runs")
    assert all(run["id"].startswith(f"{run['name']}.") for run in found["runs"])


def test_metrics(client: Client, folder: Path) -> None:
    found = client.of_run(folder / "runs" / "now", "/metrics?names=score/mean,unknown").json
    assert found["series"] == {"score/mean": {"mean": [0.25, 0.5, 0.75]}}
    found = client.of_run(folder / "runs" / "large", "/metrics?points=10&after=20&last=39").json
    assert (found["steps"][-1], found["first_steps"][0], len(found["steps"]), found["downsampled"]) == (
        39,
        21,
        10,
        True,
    )
    assert len(found["series"]) == 61


@pytest.mark.parametrize("query", ["points=1", "points=x", "after=-1", "last=1e3", "names=" + ",".join("a" * 201)])
def test_wrong_parameters_of_metrics(client: Client, folder: Path, query: str) -> None:
    found = client.of_run(folder / "runs" / "now", f"/metrics?{query}")
    assert (found.status, found.json["error"]["reason"]) == (400, "parameter")


def test_groups_of_a_step(client: Client, folder: Path) -> None:
    run = folder / "runs" / "now"
    found = client.of_run(run, "/steps/3/groups").json
    assert found["damaged"] == 0
    assert found["groups"] == [
        {"group": 0, "size": 2, "reward_mean": 0.5, "reward_low": 0.0, "reward_high": 1.0, "reward_std": 0.5,
         "score_mean": 0.5, "baseline": 0.5, "signal": True, "truncated": 0, "failed": 0, "dropped": False,
         "decisions_mean": 2.0, "prompt": "2+2="},
        {"group": 1, "size": 2, "reward_mean": 1.0, "reward_low": 1.0, "reward_high": 1.0, "reward_std": 0.0,
         "score_mean": 1.0, "baseline": None, "signal": False, "truncated": 0, "failed": 0, "dropped": True,
         "decisions_mean": 2.0, "prompt": "2+2="},
    ]  # fmt: skip
    (first,) = client.of_run(run, "/steps/1/groups").json["groups"]
    assert (first["truncated"], first["failed"], first["signal"], first["reward_mean"]) == (1, 1, False, 1.0)


def test_a_group_with_the_keys_of_today_and_of_an_older_run(client: Client, folder: Path) -> None:
    run = folder / "runs" / "now"
    found = client.of_run(run, "/steps/3/groups/0").json
    assert (found["prompt"], found["columns"], found["baseline"]) == (CHAT, {"answer": "4"}, 0.5)
    assert [one["advantage"] for one in found["rollouts"]] == [0.5, -0.5]
    assert found["rollouts"][0]["tokens"] == TOKENS
    hostile = client.of_run(run, "/steps/3/groups/1").json["rollouts"][1]
    assert (hostile["text"], hostile["steps"], hostile["undecided"]) == (HOSTILE, [["a", 1.0]], [[1, 2]])
    assert (hostile["turns"], hostile["failure"]) == (None, None)
    (_, old) = client.of_run(run, "/steps/1/groups/0").json["rollouts"]
    assert {name for name, value in old.items() if value is None} == {
        "reward", "score", "advantage", "baseline", "extra", "undecided", "steps", "turns", "failure", "tokens"
    }  # fmt: skip
    assert (old["failed"], old["truncated"], old["version"]) == (True, True, 0)


@pytest.mark.slow
def test_a_conversation(client: Client, folder: Path) -> None:
    given = conversation(said=HOSTILE, argument=HOSTILE) | {"failure": "its environment failed: x"}
    run = folder / "runs" / "turns"
    write_lines(run / "metrics.jsonl", [{"step": 1, "score/mean": 0.5}])
    write_lines(run / "rollouts" / "step_000001.jsonl", [rollout(0, None, **given)])
    (run / "config.toml").write_text("steps = 1")
    for step in (0, 1):
        write_lines(run / "held_out" / f"step_{step:06d}.jsonl", [answer(0, 0.0, **given)])
    expected = json.loads(json.dumps(conversation_turns(given)))
    (shown,) = soon(lambda: client.of_run(run, "/steps/1/groups/0").json.get("rollouts"))
    assert (shown["turns"], shown["failure"]) == (expected, "its environment failed: x")
    assert shown["turns"][1]["calls"][0]["arguments"] == [["expression", HOSTILE]]
    (row,) = client.of_run(run, "/held_out?text=begin.").json["answers"]
    assert row["first"] == row["last"]
    assert (row["last"]["turns"], row["last"]["failure"]) == (expected, "its environment failed: x")
    assert client.of_run(run, "/held_out?text=ends").json["answers"] == []


def test_hostile_texts_are_json_and_nothing_else(client: Client, folder: Path) -> None:
    found = client.of_run(folder / "runs" / "now", "/steps/3/groups/1")
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/steps/2/groups", "/steps/2/groups/0", "/steps/3/groups/7", "/files/other.png", "/held_out?first=1",
             "/held_out?max_new_tokens=15", "/nothing", "/steps/3"]
)  # fmt: skip
def test_what_is_not_there(client: Client, folder: Path, path: str) -> None:
    found = client.of_run(folder / "runs" / "now", path)
    assert (found.status, found.json["error"]["reason"]) == (404, "not_found")
    assert client.get(f"/api/runs/another{path}").status == 404


def test_held_out_answers_beside_each_other(client: Client, folder: Path) -> None:
    run = folder / "runs" / "now"
    found = client.of_run(run, "/held_out").json
    assert (found["first"], found["last"], found["max_new_tokens"], found["count"]) == (0, 2, 14, 4)
    assert found["changes"] == {"better": 1, "worse": 1, "same": 1, "unknown": 1}
    assert [row["change"] for row in found["answers"]] == [1.0, -1.0, 0.0, None]
    assert (found["answers"][0]["first"]["text"], found["answers"][0]["last"]["text"]) == ("4", "Four")

    def problems(query: str) -> list[int]:
        return [row["problem"] for row in client.of_run(run, f"/held_out?{query}").json["answers"]]

    assert problems("order=better") == [0, 2, 1, 3]
    assert problems("order=worse") == [1, 2, 0, 3]
    assert problems("kind=better") == [0]
    assert problems("kind=truncated") == [1]
    assert problems("text=FOUR") == [0]
    assert problems("order=worse&offset=1&limit=2") == [2, 0]
    assert problems("max_new_tokens=96") == [0]
    page = client.of_run(run, "/held_out?limit=3&kind=same").json
    assert (page["total"], page["next_offset"]) == (1, None)
    assert client.of_run(run, "/held_out?limit=3").json["next_offset"] == 3


def test_rollouts_by_filter_and_text_once_they_are_indexed(client: Client, folder: Path) -> None:
    run = folder / "runs" / "large"

    def rows(query: str) -> Any:
        found = client.of_run(run, f"/rollouts?{query}").json
        return found if found["index"]["state"] == "ready" else None

    found = soon(lambda: rows("filter=truncated&limit=200"))
    assert found["total"] == len(found["rollouts"]) > 10
    assert all(row["truncated"] for row in found["rollouts"])
    best = soon(lambda: rows("filter=best&limit=3"))
    assert [row["reward"] for row in best["rollouts"]] == [1.0, 1.0, 1.0]
    assert best["total"] == 400
    assert best["next_offset"] == 3
    assert soon(lambda: rows(f"text={NEEDLE.replace(' ', '%20')}"))["rollouts"] == []
    assert soon(lambda: client.of_run(run, "/rollouts?text=question").json["index"]["texts"] == 40)
    assert len(rows("text=QUESTION%2033-1")["rollouts"]) == 5


def test_the_diagnosis(client: Client, folder: Path) -> None:
    found = client.of_run(folder / "runs" / "now", "/diagnosis").json
    assert (found["step"], found["available"]) == (3, True)
    assert isinstance(found["findings"], list)


class Listener:
    """Reads server-sent events."""

    def __init__(self, client: Client) -> None:
        self._connection = socket.create_connection(("127.0.0.1", client.port), timeout=SECONDS)
        self._connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._received = b""

    def next(self, wanted: str, check: Callable[[Any], bool]) -> Any:
        """The data of the next event of this name for which `check` is true."""
        while True:
            event, separator, rest = self._received.partition(b"\n\n")
            if not separator:
                more = self._connection.recv(1 << 16)
                assert more, "the stream has ended"
                self._received += more.replace(b"\r\n", b"\n")
                continue
            self._received = rest
            lines = dict(line.split(": ", 1) for line in event.decode().split("\n") if ": " in line[1:])
            if lines.get("event") == wanted and check(json.loads(lines["data"])):
                return json.loads(lines["data"])

    def close(self) -> None:
        self._connection.close()


@pytest.mark.slow
def test_events_of_a_run_that_appears_grows_is_taken_back_and_goes(client: Client, folder: Path) -> None:
    run = folder / "runs" / "later"
    listener = Listener(client)
    try:
        listener.next("run", lambda data: data["id"] == run_id((folder / "runs" / "now").resolve()))
        write_run(run, 3, 9, words=3)
        id = run_id(run.resolve())
        assert listener.next("run", lambda data: data["id"] == id and data["last_step"] == 3)["state"] == "crashed"
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "score/mean": 1}\n')
        seen = listener.next("run", lambda data: data["id"] == id and data["last_step"] == 4)
        shutil.copy(run / "metrics.jsonl", run / "copy")
        (run / "copy").write_text((run / "metrics.jsonl").read_text().partition("\n")[0] + "\n")
        (run / "copy").rename(run / "metrics.jsonl")
        taken_back = listener.next("run", lambda data: data["id"] == id and data["last_step"] == 1)
        assert taken_back["generation"] > seen["generation"]
        assert client.of_run(run, "/metrics?names=score/mean").json["steps"] == [1]
        client.of_run(run)
        listener.next("index", lambda data: data["id"] == id and data["index"]["state"] == "ready")
        shutil.rmtree(run)
        listener.next("gone", lambda data: data["id"] == id)
        assert client.get(f"/api/runs/{id}").status == 404
    finally:
        listener.close()


@pytest.mark.slow
def test_short_names_are_unique() -> None:
    folders = [Path("/a/runs/x"), Path("/b/runs/x"), Path("/b/runs/y")]
    assert short_names(folders) == ["a/runs/x", "b/runs/x", "y"]
    assert short_names([Path("/runs/c/1"), Path("/runs/d/1")]) == ["c/1", "d/1"]
