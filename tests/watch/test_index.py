"""The index of rollouts: built in parts, kept up to date, damaged, deleted, and searched."""

import json
import os
import shutil
import sqlite3
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from covey.watch import index
from covey.watch.index import Query, index_path, progress, select, update
from helpers.conversation_records import conversation

Found = list[tuple[int, int, int]]


def rollout(group: int, reward: float | None, text: str, **more: Any) -> dict[str, Any]:
    line = {"group": group, "prompt": f"Prompt {group}", "text": text, "reward": reward, "end": "stop", "decisions": 3}
    return line | more


def write_step(run: Path, step: int, *lines: dict[str, Any]) -> None:
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"step": step, **line}, ensure_ascii=False) + "\n" for line in lines)
    (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(content)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps, of two groups each."""
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    write_step(folder, 1, rollout(0, 1.0, "An Apple a day"), rollout(0, 0.0, "nothing", end="length"),
               rollout(1, 0.5, "x"), rollout(1, 0.5, "y"))  # fmt: skip
    write_step(folder, 2, rollout(0, 3.0, 'say "apple\\" \n now'), rollout(0, None, "broken"))
    write_step(folder, 3, rollout(0, -1.0, "Überraschung 😀 pineapple"), rollout(0, 2.0, "", prompt=[
        {"role": "user", "content": "Name a fruit"}]))  # fmt: skip
    return folder


def built(run: Path, *, texts: bool = True) -> Path:
    for _ in update(run, index_path(run), texts=texts):
        pass
    return index_path(run)


def places(run: Path, **query: Any) -> Found:
    found = select(run, index_path(run), Query(**query))["rollouts"]
    return [(row["step"], row["group"], row["index"]) for row in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", [(3, 0, 0), (3, 0, 1), (2, 0, 0), (2, 0, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]),
        ("best", [(2, 0, 0), (3, 0, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1), (3, 0, 0)]),
        ("worst", [(3, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 0, 0), (3, 0, 1), (2, 0, 0)]),
        ("truncated", [(1, 0, 1)]),
        ("failed", [(2, 0, 1)]),
        ("no_signal", [(2, 0, 0), (1, 1, 0), (1, 1, 1)]),
    ],
)
def test_filters(run: Path, name: str, expected: Found) -> None:
    built(run)
    assert places(run, filter=name) == expected
    found = select(run, index_path(run), Query(filter=name, offset=1, limit=2))
    assert (found["total"], len(found["rollouts"])) == (len(expected), min(2, len(expected) - 1))
    assert found["next_offset"] == (3 if len(expected) > 3 else None)
    assert places(run, filter=name, first=2, last=2) == [place for place in expected if place[0] == 2]


@pytest.mark.parametrize("name", ["best", "worst"])
def test_an_index_has_the_order_of_rewards(run: Path, name: str) -> None:
    """Sorting all rollouts of a large run takes longer than the answer may."""
    with index.connection(built(run)) as database:
        condition, values = index._condition(database, Query(filter=name))
        ordered = f"SELECT * FROM rollouts WHERE {condition} ORDER BY {index.FILTERS[name].order}"
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {ordered}", values)]
    assert len(plan) == 1, plan  # a second line would be a sort


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apple", [(3, 0, 0), (2, 0, 0), (1, 0, 0)]),
        ("AN APPLE", [(1, 0, 0)]),
        ("apples", []),
        ("ap", [(3, 0, 0), (2, 0, 0), (1, 0, 0)]),
        ('"apple\\" \n', [(2, 0, 0)]),
        ("überr", [(3, 0, 0)]),
        ("😀", [(3, 0, 0)]),
        ("😀 p", [(3, 0, 0)]),
        ("fruit", [(3, 0, 1)]),  # of its prompt, which differs from that of the group's first
        ("prompt 1", [(1, 1, 0), (1, 1, 1)]),
        ("broken", [(2, 0, 1)]),
        ("%", []),
        ("a%e", []),
        ("a.ple", []),
        ("numeric OR apple", []),
        ("reward", []),  # a key of the line
        ("nothing", [(1, 0, 1)]),
    ],
)
def test_texts(run: Path, texts: bool, text: str, expected: Found) -> None:
    built(run, texts=texts)
    if texts and text == "fruit":
        expected = []  # prompts are indexed once for each group
    assert places(run, text=text) == expected


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("text", ["I COMPUTE. again", "[tool] 15", "12 +\n3", "Begin.", "calculate("])
def test_turns_replies_and_arguments_are_found(run: Path, texts: bool, text: str) -> None:
    write_step(run, 4, rollout(0, 1.0, "no conversation"), rollout(0, 1.0, "") | conversation())
    built(run, texts=texts)
    assert places(run, text=text) == [(4, 0, 1)]


def test_without_trigrams_a_search_finds_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "TRIGRAMS", "CREATE VIRTUAL TABLE texts USING no_such_module(text)")
    built(run)
    assert places(run, text="apple") == [(3, 0, 0), (2, 0, 0), (1, 0, 0)]
    assert progress(run, index_path(run))["texts"] == 0


def test_the_match_is_counted_as_javascript_counts(run: Path) -> None:
    built(run)
    (row,) = select(run, index_path(run), Query(text="pineapple"))["rollouts"]
    assert (row["match"], row["text_from"]) == ([16, 25], 0)
    long = "😀" * 1000 + "needle" + "z" * 1000
    write_step(run, 4, rollout(0, 1.0, long))
    built(run)
    (row,) = select(run, index_path(run), Query(text="needle"))["rollouts"]
    begin, end = row["match"]
    assert row["text"].encode("utf-16-le")[2 * begin : 2 * end].decode("utf-16-le") == "needle"
    assert row["text_from"] + begin == 2000
    assert len(row["text"]) == 400


def test_it_follows_the_files(run: Path) -> None:
    path = built(run)
    assert progress(run, path) == {"state": "ready", "files": 3, "indexed": 3, "texts": 3}
    write_step(run, 4, rollout(0, 9.0, "later"))
    assert progress(run, path)["state"] == "building"
    built(run)
    assert places(run, text="later") == [(4, 0, 0)]
    for step in (3, 4):  # a resume takes steps back
        (run / "rollouts" / f"step_{step:06d}.jsonl").unlink()
    write_step(run, 3, rollout(0, 1.0, "again"))
    assert places(run, text="pineapple") == []  # the changed file is not read at the old places
    built(run)
    assert places(run, text="again") == [(3, 0, 0)]
    assert places(run, text="later") == []
    assert progress(run, path) == {"state": "ready", "files": 3, "indexed": 3, "texts": 3}


def test_a_changed_file_is_not_read_at_its_old_places(run: Path) -> None:
    built(run)
    with open(run / "rollouts" / "step_000003.jsonl", "a") as file:
        file.write("more\n")
    assert places(run, text="apple") == [(2, 0, 0), (1, 0, 0)]
    built(run)
    assert places(run, text="apple") == [(3, 0, 0), (2, 0, 0), (1, 0, 0)]


def test_a_file_of_the_same_size_is_read_again(run: Path) -> None:
    built(run)
    path = run / "rollouts" / "step_000003.jsonl"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content.replace(b"pineapple", b"crabapple"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    built(run)
    assert places(run, text="crabapple") == [(3, 0, 0)]


def test_a_folder_that_is_made_again(run: Path) -> None:
    built(run)
    shutil.rmtree(run)
    assert progress(run, index_path(run))["files"] == 0
    write_step(run, 1, rollout(0, 1.0, "another run"))
    built(run)
    assert places(run) == [(1, 0, 0)]


def test_it_is_built_in_parts_that_can_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BATCH_SECONDS", -1.0)  # a transaction for each step
    path = index_path(run)
    parts = update(run, path, texts=True)
    assert progress(run, path) == {"state": "absent", "files": 3, "indexed": 0, "texts": 0}
    next(parts)
    assert progress(run, path) == {"state": "building", "files": 3, "indexed": 1, "texts": 0}
    assert [place[0] for place in places(run)] == [3, 3]  # the newest step first
    next(islice(parts, 2, 3))
    assert progress(run, path) == {"state": "ready", "files": 3, "indexed": 3, "texts": 1}
    assert places(run, text="apple") == [(3, 0, 0), (2, 0, 0), (1, 0, 0)]  # with and without trigrams
    parts.close()
    built(run)
    assert progress(run, path)["texts"] == 3


def test_a_second_writer_does_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BATCH_SECONDS", -1.0)
    path = index_path(run)
    first = update(run, path)
    next(first)
    assert list(update(run, path)) == []
    assert len(list(first)) == 2
    assert progress(run, path)["state"] == "ready"


@pytest.mark.parametrize("content", [b"", b"no database at all", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_index_is_made_anew(run: Path, content: bytes) -> None:
    path = built(run)
    for file in path.parent.iterdir():
        file.write_bytes(content if file == path else b"")
    assert progress(run, path)["indexed"] == 0
    with pytest.raises(sqlite3.Error):
        select(run, path, Query())
    built(run)
    assert len(places(run)) == 8


def test_an_index_of_another_version_is_made_anew(run: Path) -> None:
    path = built(run)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    assert progress(run, path)["indexed"] == 0
    built(run)
    assert len(places(run)) == 8


def test_an_index_is_deleted_without_harm(run: Path) -> None:
    path = built(run)
    shutil.rmtree(path.parent)
    assert progress(run, path)["state"] == "absent"
    built(run)
    assert len(places(run)) == 8


def test_old_indexes_are_deleted(run: Path) -> None:
    path = built(run)
    index.delete_unused(path.parent)
    assert path.exists()
    os.utime(path, (0, 0))
    with index._writing(path) as is_alone:  # its new rows are in its journal, so the file itself may be old
        assert is_alone
        index.delete_unused(path.parent)
        assert path.exists()
    index.delete_unused(path.parent)
    assert list(path.parent.iterdir()) == []


def test_a_search_ends_in_time_and_goes_on_where_it_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SECONDS", -1.0)
    built(run)
    found: Found = []
    for offset, following in zip(range(8), [*range(1, 8), None], strict=True):  # a candidate each time
        answer = select(run, index_path(run), Query(text="a", offset=offset))
        found += [(row["step"], row["group"], row["index"]) for row in answer["rollouts"]]
        assert answer["next_offset"] == following
    monkeypatch.setattr(index, "SECONDS", 60.0)
    assert found == places(run, text="a")


def test_values_that_no_run_writes(run: Path) -> None:
    write_step(run, 5, rollout(0, 1.0, "ok"), {"group": 0}, {"group": 1, "text": 5, "reward": "high"},
               {"group": 2, "text": "nul \0 apple", "reward": 10**20, "end": []})  # fmt: skip
    (run / "rollouts" / "step_000006.jsonl").write_text('{"step": 6, "group": 0, "text": "lone \\ud800 surrogate"}\n')
    built(run)
    assert places(run, text="lone") == [(6, 0, 0)]
    assert (5, 2, 0) in places(run, text="apple")
    assert {(5, 0, 1), (5, 1, 0), (6, 0, 0)} <= set(places(run, filter="failed"))
