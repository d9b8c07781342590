"""Data that is small on disk and large in memory, or that no model could read, is refused at once."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from covey.config import ConfigError
from covey.config.sft import SFTConfig
from covey.llm.data import arrow
from covey.llm.data import rows as data_rows
from covey.llm.data.arrow import MOST_ROWS
from covey.llm.data.reward_examples import read_examples
from covey.llm.data.rows import LONGEST_PROMPT, read_rows
from covey.llm.data.sft_examples import read_rows as read_sft_rows

LONG = "a" * (LONGEST_PROMPT + 1)
HALF = "a" * (LONGEST_PROMPT // 2 + 1)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]


def sft(path: str) -> Any:
    return read_sft_rows(SFTConfig(), path)


@pytest.mark.parametrize("form", ["d.parquet", "d.arrow", "d.jsonl"])
def test_more_rows_than_are_read_are_refused_before_any_is(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows need little of a Parquet file: 20 million of them 109 kB."""
    rows, path = MOST_ROWS + 1, tmp_path / form
    if form == "d.jsonl":
        path.write_bytes(b'{"prompt":1}\n' * rows)
    else:
        table = pyarrow.table({"prompt": pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(0, rows), ["What is it?"])})
        write = parquet.write_table if form == "d.parquet" else feather.write_feather
        write(table, str(path))
    assert form == "d.jsonl" or path.stat().st_size < 1_000_000
    for name in ("_values", "plain_record"):
        monkeypatch.setattr(arrow, name, None)
    monkeypatch.setattr(data_rows, "_record", None)
    with pytest.raises(ConfigError, match=r"d\.\w+ has 5,000,001 rows; at most 5,000,000 are read: take a part"):
        read_rows(str(path))


@pytest.mark.parametrize("form", ["d.parquet", "d.arrow"])
def test_values_that_need_more_memory_than_is_read_are_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = pyarrow.DictionaryArray.from_arrays(pyarrow.repeat(0, 5000), ["a" * 10_000]).cast(pyarrow.string())
    path = tmp_path / form
    write = parquet.write_table if form == "d.parquet" else feather.write_feather
    write(pyarrow.table({"prompt": values}), str(path))
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(data_rows, "memory_bytes", lambda: 8 * 20_000_000)
    with pytest.raises(ConfigError, match=r"has \d\d MB of data; at most 20 MB are read"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("read", "row", "column"),
    [
        (read_rows, {"prompt": LONG}, "prompt"),
        (read_rows, {"prompt": chat(HALF)}, "prompt"),
        (sft, {"prompt": LONG, "completion": "b"}, "prompt"),
        (sft, {"prompt": "b", "completion": LONG}, "completion"),
        (sft, {"messages": chat(HALF)}, "messages"),
        (read_examples, {"prompt": "b", "chosen": LONG, "rejected": "b"}, "chosen"),
        (read_examples, {"chosen": chat("a"), "rejected": [chat("a")[0], chat(LONG)[1]]}, "rejected"),
        (read_examples, {"prompt": "b", "completion": LONG, "grade": 1}, "completion"),
    ],
)
def test_a_text_longer_than_any_model_reads_is_refused_with_its_line(
    read: Any, row: dict[str, Any], column: str, tmp_path: Path
) -> None:
    """Its tokens would take minutes: those of 50 MB about half a minute for each pass."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=rf"line 1: '{column}' has 4,194,30\d characters; at most 4,194,304 are read"):
        read(str(path))


def test_other_columns_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "a", "tests": LONG}) + "\n")
    assert len(read_rows(str(path))) == 1
