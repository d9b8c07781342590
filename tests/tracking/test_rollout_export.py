"""Exported tables hold every rollout with readable values, in all formats, whatever the records contain."""

import csv
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from covey.config import ConfigError
from covey.tracking import rollout_export
from covey.tracking.rollout_export import check_export, export_records
from helpers.conversation_records import conversation
from helpers.run_folders import answer, language_run, rollout

SUFFIXES = (".parquet", ".jsonl", ".csv")


def read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(file).to_pylist()
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def exported(run: Path, suffix: str, **options: Any) -> list[dict[str, Any]]:
    file = run.parent / f"table{suffix}"
    export_records(run, file, **options)
    return read(file)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_row_is_a_rollout_in_every_format(suffix: str, tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", steps=3)
    rows = exported(run, suffix)
    assert len(rows) == 3 * 3 * 4
    assert [str(rows[7][name]) for name in ("step", "group", "rollout")] == ["1", "1", "3"]
    assert float(rows[7]["reward"]) == 1.0
    assert float(rows[7]["advantage"]) == 0.5
    assert str(rows[7]["columns.answer"]) == "2"
    assert float(rows[7]["reward_parts.format"]) == 0.0
    assert list(rows[0])[:4] == ["step", "group", "rollout", "prompt"]


def test_types_of_the_columns(tmp_path: Path) -> None:
    lines = [
        rollout(
            1, 0, 1.0, columns={"int": 1, "mixed": 1, "half": 1, "flag": True, "gap": None, "big": 2**70, "nan": 1.0}
        ),
        rollout(
            1, 0, None, columns={"int": 2, "mixed": "1", "half": 0.5, "flag": False, "big": 3, "nan": float("nan")}
        ),
        rollout(
            1, 0, 0.0, columns={"nested": {"a": [1, None]}, "mixed": None}, prompt=[{"role": "user", "content": "x"}]
        ),
    ]
    run = language_run(tmp_path / "run", steps=1, rollouts=lines)
    for suffix in (".parquet", ".jsonl"):
        first, second, third = exported(run, suffix)
        assert [row["columns.int"] for row in (first, second, third)] == [1, 2, None]
        assert [row["columns.mixed"] for row in (first, second, third)] == ["1", '"1"', None]
        assert [row["columns.half"] for row in (first, second, third)] == [1.0, 0.5, None]
        assert (first["columns.flag"], second["columns.flag"]) == (True, False)
        assert (first["columns.gap"], second["columns.nan"], second["reward"]) == (None, None, None)
        assert (first["columns.big"], second["columns.big"]) == (str(2**70), "3")
        assert third["columns.nested"] == '{"a": [1, null]}'
        assert json.loads(third["prompt"]) == [{"role": "user", "content": "x"}]
        assert json.loads(first["prompt"]) == "What is 0 + 1?"  # JSON as well, because another prompt is a chat
        (tmp_path / f"table{suffix}").unlink()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_hostile_texts_stay_readable(suffix: str, tmp_path: Path) -> None:
    texts = ["a\ud83d!", "\x00\x1b[2J", 'quote " comma , line\nend\r\n', "=1+1", "\u202e<script>", "x" * 100_000]
    lines = [rollout(1, 0, 1.0, text=text, columns={"na\ud800me": text, "": "empty name"}) for text in texts]
    rows = exported(language_run(tmp_path / "run", steps=1, rollouts=lines), suffix)
    expected = [texts[0].replace("\ud83d", "\\ud83d"), *texts[1:]]
    assert [row["text"] for row in rows] == expected
    assert [row["columns.na\\ud800me"] for row in rows] == expected
    assert rows[0]["columns."] == "empty name"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_turns_of_conversations(suffix: str, tmp_path: Path) -> None:
    given = conversation(said="</b>\x00", replied="\ud800")
    rows = exported(language_run(tmp_path / "run", steps=1, rollouts=[rollout(1, 0, 1.0, **given)]), suffix)
    messages = json.loads(rows[0]["messages"].replace("\\ud800", "?"))
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert messages[0]["content"] == "</b>\x00"
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"expression": "12 +\n3"}
    assert json.loads(rows[0]["turn_rewards"]) == [0.25, 0.5]
    assert rows[0]["observation"] == "Begin."


def test_very_many_keys_become_one_column(tmp_path: Path) -> None:
    lines = [rollout(step, 0, 1.0, columns={f"key {step} {i}": i for i in range(300)}) for step in (1, 2, 3)]
    rows = exported(language_run(tmp_path / "run", steps=3, rollouts=lines), ".parquet")
    assert not any(name.startswith("columns.") for name in rows[0])
    assert json.loads(rows[2]["columns"])["key 3 299"] == 299


def test_held_out_answers(tmp_path: Path) -> None:
    answers = [answer(step, problem, float(step > 0)) for step in (0, 4) for problem in range(3)]
    rows = exported(language_run(tmp_path / "run", answers=answers), ".jsonl", held_out=True)
    assert [(row["step"], row["problem"], row["score"]) for row in rows[2:4]] == [(0, 2, 0.0), (4, 0, 1.0)]
    assert rows[0]["truncated"] is False


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", steps=2)
    with open(run / "rollouts" / "step_000001.jsonl", "ab") as file:
        file.write(b'{"step": 1, "group"\n[1]\n{"step": 1, "group": 1, "text": "being writ')
    result = export_records(run, tmp_path / "t.jsonl")
    assert (result.rows, result.steps, result.damaged) == (24, 2, 2)


def test_records_of_other_files_and_links_are_left_out(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", steps=1)
    (run / "rollouts" / "notes.txt").write_text("x")
    (run / "rollouts" / "step_000002.jsonl").symlink_to(run / "rollouts" / "step_000001.jsonl")
    assert export_records(run, tmp_path / "t.csv").rows == 12


def test_nothing_to_export_is_one_line(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="has no held-out answers to export"):
        export_records(run, tmp_path / "t.csv", held_out=True)
    assert list(tmp_path.iterdir()) == [run]


def test_a_failed_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run is resumed while it is exported, and writes other records."""
    original = rollout_export._Columns.types

    def change(columns: Any) -> dict[str, str]:
        line = json.dumps(rollout(2, 0, 1.0, columns={"answer": "text now"}))
        (run / "rollouts" / "step_000002.jsonl").write_text(line + "\n")
        return original(columns)

    monkeypatch.setattr(rollout_export._Columns, "types", change)
    for suffix in SUFFIXES:
        run = language_run(tmp_path / suffix, steps=2)
        with pytest.raises(ConfigError, match="changed while it was exported"):
            export_records(run, run / f"t{suffix}")
        assert not [path.name for path in run.iterdir() if path.name.startswith(("t.", ".t."))]


def test_the_formats_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.parquet, \.jsonl or \.csv"):
        check_export(tmp_path / "t.xlsx")
    monkeypatch.setattr(rollout_export, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .covey\[arrow\]"):
        check_export(tmp_path / "t.PARQUET")
    check_export(tmp_path / "t.csv")


@pytest.mark.slow
def test_memory_is_that_of_a_few_steps(tmp_path: Path) -> None:
    """The records have 4 MB, a step has 0.2 MB."""
    run = language_run(tmp_path / "run", steps=1, rollouts=())
    (run / "rollouts").mkdir()
    line = json.dumps(rollout(1, 0, 1.0, text="x" * 4000)) + "\n"
    for step in range(1, 21):
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(line.replace('"step": 1', f'"step": {step}') * 50)
    for suffix in (".jsonl", ".csv"):
        tracemalloc.start()
        try:
            assert export_records(run, tmp_path / f"t{suffix}").rows == 1000
            assert tracemalloc.get_traced_memory()[1] < 1.5e6
        finally:
            tracemalloc.stop()
        assert os.path.getsize(tmp_path / f"t{suffix}") > 4e6
