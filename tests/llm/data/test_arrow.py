"""Parquet and Arrow files and folders of the package datasets as data of a task: the same rows as from JSONL."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet

from covey.config import ConfigError, DatasetConfig
from covey.config.inputs import input_checksums
from covey.config.recipe import config_from_dict
from covey.config.sft import SFTConfig
from covey.llm.data.rows import read_data, read_rows
from covey.llm.data.sft_examples import read_rows as read_sft_rows
from covey.llm.tasks import PromptDataset, Rows
from covey.trainers.base import read_prompts

CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
# As verl's documentation describes a row of its Parquet files.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the path's suffix; without a suffix in that of datasets' save_to_disk, in two files."""
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
    elif path.suffix in (".arrow", ".feather"):
        feather.write_feather(table, str(path))
    else:
        path.mkdir()
        files = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
        half = len(rows) // 2
        for file, part in zip(files, (table.slice(0, half), table.slice(half)), strict=True):
            with pyarrow.OSFile(str(path / file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(part)
        state = {"_data_files": [{"filename": file} for file in files], "_split": "train"}
        (path / "state.json").write_text(json.dumps(state))
        (path / "dataset_info.json").write_text("{}")
    return path


FORMS = ["data.parquet", "data.arrow", "data.feather", "data"]
ROWS = [{"prompt": [{"role": "user", "content": f"{n} + 1"}], "answer": str(n + 1), "steps": [n, 1]} for n in range(30)]


@pytest.mark.parametrize("form", FORMS)
def test_the_task_is_that_of_the_same_rows_in_jsonl(form: str, tmp_path: Path) -> None:
    one = PromptDataset(path=str(write(tmp_path / form, ROWS)))
    other = PromptDataset(path=str(write(tmp_path / "same.jsonl", ROWS)))
    assert one.draw(3, 1, 40) == other.draw(3, 1, 40)
    assert one.held_out(100) == other.held_out(100)
    assert len(one.held_out(100)) == 3


@pytest.mark.parametrize("form", FORMS)
def test_held_out_rows_and_overlaps_are_as_in_jsonl(form: str, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    path, held = write(tmp_path / form, ROWS), write(tmp_path / "held" / form, ROWS[25:])
    with pytest.raises(ConfigError, match=rf'{form} row 26: this prompt is also in .*{form} row 1, .*overlap = "drop"'):
        read_data(DatasetConfig(path=str(path), held_out_path=str(held)))
    data = read_data(DatasetConfig(path=str(path), held_out_path=str(held), overlap="drop"))
    assert (len(data.training), len(data.held_out), data.overlap) == (25, 5, 5)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.text(min_size=1).filter(str.strip), st.text(), st.floats(-9, 9), st.booleans()), min_size=1)
)
def test_every_text_and_number_is_read_as_it_was_written(tmp_path_factory: Any, rows: list[Any]) -> None:
    made = [{"prompt": p, "answer": a, "weight": w, "hard": h, "list": [a, p]} for p, a, w, h in rows]
    path = write(tmp_path_factory.mktemp("rows") / "data.parquet", made)
    assert [{"prompt": row.prompt} | row.columns for row in read_rows(str(path))] == made


@pytest.mark.parametrize("form", ["data.parquet", "data"])
def test_a_row_of_verl(form: str, tmp_path: Path) -> None:
    [row, _] = read_rows(str(write(tmp_path / form, [VERL, VERL])))
    assert row.prompt == CHAT
    assert row.columns["answer"] == "4"
    assert row.columns["reward_model"] == VERL["reward_model"]
    assert row.columns["extra_info"] == VERL["extra_info"]
    assert row.columns["data_source"] == "openai/gsm8k"


# Rows whose objects have different keys, as tool calls, schemas and the columns of rewards have. A Parquet or Arrow
# file stores all keys in all rows.
def call(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


DIFFERENT_KEYS: list[dict[str, Any]] = [
    {"prompt": [*CHAT, call(a="3")], "tools": [schema(a={"type": "string"})], "info": {"deep": [[{"x": 1}]]}},
    {"prompt": [*CHAT, call(q="y")], "tools": [schema(q={"enum": ["y"]})], "info": {"deep": [[{"y": {"z": 2}}], []]}},
    {"prompt": [*CHAT, call()], "tools": [schema(), {"type": "other"}], "info": {"other": "3", "list": ["a", None]}},
    {"prompt": [{"role": "user", "content": "x", "name": "Ann"}], "tools": [], "info": {"deep": []}},
]


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_only_other_rows_have_are_left_out_at_every_depth(form: str, tmp_path: Path) -> None:
    read = read_rows(str(write(tmp_path / form, DIFFERENT_KEYS)))
    assert [{"prompt": row.prompt} | row.columns for row in read] == DIFFERENT_KEYS
    table = pyarrow.Table.from_pylist(DIFFERENT_KEYS)
    invented = table.to_pylist()
    assert invented != DIFFERENT_KEYS

    class Features:
        arrow_schema = table.schema

    class DataSet(list[dict[str, Any]]):
        """Behaves as a data set of the package `datasets`, which keeps its rows in Arrow."""

        features = Features()

    taken = [{"prompt": row.prompt} | row.columns for row in Rows(DataSet(invented)).rows]
    assert sorted(taken, key=str) == sorted(DIFFERENT_KEYS, key=str)
    assert [{"prompt": start.prompt} | dict(start.columns) for start in read_prompts(DataSet(invented))] == (
        DIFFERENT_KEYS
    )


def test_examples_of_sft_have_no_invented_keys(tmp_path: Path) -> None:
    rows = [{"messages": row["prompt"] + [call(b="1")], "tools": row["tools"][:1]} for row in DIFFERENT_KEYS]
    ours, same = (read_sft_rows(SFTConfig(), str(write(tmp_path / name, rows))) for name in ("a.parquet", "a.jsonl"))
    assert [(one.prompt, one.completion, one.tools) for one in ours] == [
        (one.prompt, one.completion, one.tools) for one in same
    ]


def test_nulls_that_were_written_remain(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.int64()), ("y", pyarrow.int64())]))
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "map": pyarrow.array([{"k": {"x": 1}, "none": None}, {}], kind),
            "column": [None, "text"],
            "list": [[None, 1], None],
        }
    )
    parquet.write_table(table, tmp_path / "d.parquet")
    assert [row.columns for row in read_rows(str(tmp_path / "d.parquet"))] == [
        {"map": {"k": {"x": 1}, "none": None}, "column": None, "list": [None, 1]},
        {"map": {}, "column": "text", "list": None},
    ]
    twice = pyarrow.array([[("k", {"x": 1}), ("k", {"x": 2})]], kind)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "map": twice}), tmp_path / "e.parquet")
    with pytest.raises(ConfigError, match="the column 'map' has a value that Python cannot hold"):
        read_rows(str(tmp_path / "e.parquet"))


def test_dates_and_decimals_become_texts(tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "day": datetime.date(2026, 1, 2),
        "at": datetime.datetime(2026, 1, 2, 3),
        "sum": decimal.Decimal("1.50"),
    }
    [read] = read_rows(str(write(tmp_path / "d.parquet", [row])))
    assert read.columns == {"day": "2026-01-02", "at": "2026-01-02 03:00:00", "sum": "1.50"}


def test_a_nan_is_a_missing_value(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [{"prompt": "p", "x": 1.0, "parts": [{"y": nan}]}, {"prompt": "q", "x": nan, "parts": []}]
    first, second = read_rows(str(write(tmp_path / "d.parquet", rows)))
    assert (first.columns["x"], second.columns["x"], first.columns["parts"]) == (1.0, None, [{"y": None}])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"text": "x", "y": 1}], r"row 1: there is no 'prompt' and no 'question' \(columns: 'text', 'y'\)"),
        ([{"prompt": "p"}, {"prompt": " "}], "row 2: 'prompt' is empty"),
        ([{"prompt": "p"}, {"prompt": None}], "row 2: 'prompt' must be a string .*, this is null"),
        ([{"prompt": 5}], "row 1: 'prompt' must be a string or a list of chat messages, this is a number"),
        ([{"prompt": [{"role": "user"}]}], "row 1: message 1 of 'prompt' needs a 'content' that is a string"),
        ([{"prompt": "p", "completions": "x"}], "row 1: the column name 'completions' is reserved"),
        (
            [{"prompt": "p", "i": None}, {"prompt": "p", "i": b"\x89PNG"}],
            "row 2: the column 'i' has bytes, which rewar",
        ),
        ([{"prompt": "p", "x": 1.0}, {"prompt": "p", "x": float("inf")}], "row 2: the column 'x' has inf, which is no"),
    ],
)
def test_an_unusable_row_is_one_line_that_names_it(rows: list[dict[str, Any]], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read_rows(str(write(tmp_path / "d.parquet", rows)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "times",
    [
        pyarrow.array([None, 1], pyarrow.timestamp("ns")),
        pyarrow.array([[], [1]], pyarrow.list_(pyarrow.duration("ns"))),
        pyarrow.array([0, 10**18], pyarrow.timestamp("s", tz="UTC")),
        pyarrow.StringArray.from_buffers(
            2, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")
        ),
    ],
)
def test_a_value_that_python_does_not_have_is_one_line(times: Any, tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "when": times})
    feather.write_feather(table, str(tmp_path / "data.arrow"))
    with pytest.raises(ConfigError, match="the column 'when' has a value that Python cannot hold") as caught:
        read_rows(str(tmp_path / "data.arrow"))
    assert "\n" not in str(caught.value)
    table = pyarrow.table({"prompt": ["a", "b"], "when": times.slice(0, 1).take([0, 0])})
    feather.write_feather(table, str(tmp_path / "good.arrow"))
    assert len(read_rows(str(tmp_path / "good.arrow"))) == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", ROWS)
    content = path.read_bytes()
    for damaged in (b"", b"PAR1", content[:-20], content[:50] + b"\0" * 50 + content[100:], b"{}\n"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"d\.parquet") as caught:
            read_rows(str(path))
        assert "\n" not in str(caught.value)
    empty = write(tmp_path / "e.parquet", ROWS[:1])
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), empty)
    with pytest.raises(ConfigError, match=r"e\.parquet is empty: it needs rows with a 'prompt'"):
        read_rows(str(empty))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["p"])] * 2, names=["prompt", "prompt"])
    parquet.write_table(twice, empty)
    with pytest.raises(ConfigError, match="the column 'prompt' is there twice"):
        read_rows(str(empty))


def test_a_truncated_stream_of_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ROWS)
    file = folder / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"data cannot be read: "):
        read_rows(str(folder))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "is a folder without state.json"),
        ({"dataset_dict.json": '{"splits": ["train", "test"]}'}, r"name one of them: .*folder/train, .*folder/test"),
        ({"dataset_dict.json": "[]"}, "has several data sets; name one of them$"),
        ({"dataset_dict.json": "{"}, "is damaged"),
        ({"state.json": "{}"}, "lists no data files"),
        ({"state.json": '{"_data_files": [{"filename": "../secret.arrow"}]}'}, "lists no data files"),
        ({"state.json": '{"_data_files": [{"filename": ".."}]}'}, "lists no data files"),
        ({"state.json": '{"_data_files": [5]}'}, "lists no data files"),
        (
            {"state.json": '{"_data_files": [{"filename": "a.arrow"}]}'},
            "the file a.arrow, which state.json lists, is mi",
        ),
    ],
)
def test_a_folder_that_is_no_data_set(files: dict[str, str], why: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        DatasetConfig(path=str(folder)).check()
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.parquet", ROWS)
    monkeypatch.setattr("covey.config.named_modules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'is read with pyarrow: pip install "covey\[arrow\]"'):
        DatasetConfig(path=str(path)).check()


def test_a_changed_file_of_a_folder_is_noticed_on_resume(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ROWS)
    config = config_from_dict({"task": {"name": "dataset", "path": str(folder)}})
    before = input_checksums(config, own_task=False, own_rewards=False)
    assert len(before) == 2
    rows = read_rows(str(folder))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    write(folder, [*ROWS[:-1], {"prompt": CHAT, "answer": "other", "steps": [0]}])
    assert input_checksums(config, own_task=False, own_rewards=False) != before
    assert read_rows(str(folder)) != rows
