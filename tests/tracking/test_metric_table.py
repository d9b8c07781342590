"""The columns of metrics.jsonl while a run writes it, resumes, or is made again."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.tracking import run_reader
from covey.tracking.run_reader import MetricTable


def line(step: int, **metrics: Any) -> bytes:
    return json.dumps({"step": step, **metrics}).encode() + b"\n"


def append(folder: Path, content: bytes) -> None:
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(content)


def values(table: MetricTable) -> dict[int, dict[str, float | None]]:
    """The table as step -> metrics."""
    return {int(row.pop("step") or 0): row for row in map(dict, table.rows())}


def test_it_grows_with_the_file(tmp_path: Path) -> None:
    table = MetricTable(tmp_path)
    assert not table.update()
    assert table.last_step == 0
    append(tmp_path, line(1, a=0.5) + line(2, a=1, b=2.5)[:9])
    assert table.update()
    assert values(table) == {1: {"a": 0.5}}
    append(tmp_path, line(2, a=1, b=2.5)[9:] + line(3, b=None))
    assert table.update()
    assert values(table) == {1: {"a": 0.5}, 2: {"a": 1.0, "b": 2.5}, 3: {}}
    assert not table.update()
    assert (table.generation, table.damaged) == (0, 0)


@pytest.mark.parametrize(
    "damaged",
    [b"{", b"[]", b"null", b'{"a": 1}', b'{"step": "1"}', b'{"step": 0}', b'{"step": true}', b'{"step": 2, "a": "x"}',
     b'{"step": 2, "a": true}', b'{"step": 2, "a": [1]}', b"\xff\xfe", b"[" * 100_000, b'{"step": 1e400}', b"\0" * 50,
     b'{"step": 2, "a": 1' + b"0" * 5000 + b"}", b'{"step": 99999999999999999999}', b""],
)  # fmt: skip
def test_damaged_lines_are_skipped(tmp_path: Path, damaged: bytes) -> None:
    append(tmp_path, line(1, a=1) + damaged + b"\n" + line(3, a=3))
    table = MetricTable(tmp_path)
    table.update()
    assert values(table) == {1: {"a": 1.0}, 3: {"a": 3.0}}
    assert table.damaged == 1


def test_an_over_long_line_is_skipped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "LONGEST_ROW", 100)
    monkeypatch.setattr(run_reader, "_CHUNK", 64)
    table = MetricTable(tmp_path)
    append(tmp_path, line(1, a=1) + b"x" * 300)
    table.update()
    append(tmp_path, b"y" * 300)
    table.update()
    append(tmp_path, b"\n" + line(2, a=2))
    table.update()
    assert values(table) == {1: {"a": 1.0}, 2: {"a": 2.0}}
    assert table.damaged == 1


def test_numbers_that_are_not_finite_are_kept_apart(tmp_path: Path) -> None:
    append(tmp_path, b'{"step": 1, "a": NaN, "b": Infinity, "c": -0.0, "d": 1e-320}\n')
    table = MetricTable(tmp_path)
    table.update()
    assert values(table) == {1: {"b": math.inf, "c": 0.0, "d": 1e-320}}


def test_steps_that_fall_take_back_those_after_them(tmp_path: Path) -> None:
    append(tmp_path, line(1, a=1) + line(2, a=2) + line(3, a=3))
    table = MetricTable(tmp_path)
    table.update()
    append(tmp_path, line(2, a=20))
    assert table.update()
    assert values(table) == {1: {"a": 1.0}, 2: {"a": 20.0}}
    assert table.generation == 1


def test_a_resume_replaces_the_file(tmp_path: Path) -> None:
    append(tmp_path, line(1, a=1) + line(2, a=2))
    table = MetricTable(tmp_path)
    table.update()
    (tmp_path / "new").write_bytes(line(1, a=1))
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    assert table.update()
    assert (values(table), table.generation) == ({1: {"a": 1.0}}, 1)


@pytest.mark.parametrize("content", [line(1, a=7), line(1, a=7) + line(2, a=8) + line(3, a=9), b""])
def test_a_file_that_was_changed_in_place_is_read_anew(tmp_path: Path, content: bytes) -> None:
    append(tmp_path, line(1, a=1) + line(2, a=2))
    table = MetricTable(tmp_path)
    table.update()
    with open(tmp_path / "metrics.jsonl", "r+b") as file:
        file.truncate()
        file.write(content)
    assert table.update()
    expected = {record["step"]: {"a": record["a"]} for record in map(json.loads, content.splitlines())}
    assert (values(table), table.generation) == (expected, 1)


def test_a_folder_that_is_deleted_and_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    append(run, line(1, a=1) + line(2, a=2))
    table = MetricTable(run)
    table.update()
    shutil.rmtree(run)
    assert table.update()
    assert table.last_step == 0
    run.mkdir()
    append(run, line(1, c=5))
    assert table.update()
    assert values(table) == {1: {"c": 5.0}}
    assert table.generation >= 1


def test_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(line(1, a=1))
    (tmp_path / "metrics.jsonl").symlink_to("other")
    table = MetricTable(tmp_path)
    assert not table.update()


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "MOST_VALUES", 64)
    monkeypatch.setattr(run_reader, "MOST_COLUMNS", 2)
    append(tmp_path, b"".join(line(step, a=step, b=-step, c=1) for step in range(1, 1001)))
    table = MetricTable(tmp_path)
    table.update()
    assert set(table.columns) == {"a", "b"}
    assert len(table.steps) <= 33
    assert table.last_step == 1000
    assert list(table.columns["a"]) == list(table.steps)


@settings(max_examples=60)
@example(cuts=[5, 30, 31], content=line(1, a=1) + line(2, b=2) + b"{}\n" + line(2, a=3) + line(5, a=1)[:-1])
@given(
    cuts=st.lists(st.integers(0, 200), max_size=8),
    content=st.lists(
        st.one_of(st.builds(line, st.integers(-1, 9), a=st.integers(0, 9)), st.sampled_from([b"\n", b"x\n", b"{}\n"]))
    ).map(b"".join),
)
def test_parts_of_the_file_give_the_same_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], content: bytes
) -> None:
    """However the writes and the reads fall together, the table is that of the file."""
    folder = tmp_path_factory.mktemp("run")
    growing, begin = MetricTable(folder), 0
    for cut in sorted({min(cut, len(content)) for cut in [*cuts, len(content)]}):
        append(folder, content[begin:cut])
        growing.update()
        begin = cut
    whole = MetricTable(folder)
    whole.update()
    assert (values(growing), growing.damaged) == (values(whole), whole.damaged)
    steps = list(growing.steps)
    assert steps == sorted(set(steps))
