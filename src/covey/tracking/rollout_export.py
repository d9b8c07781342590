"""Exports the rollouts or the held-out answers of a run as one table: Parquet, JSONL or CSV.

A row is a rollout. Its columns are the keys of its record (`rollout_record`, `answer_record`) with these changes:

- `rollout` counts the rollouts of a group from 0.
- `columns` and `reward_parts` are divided: `columns.answer`, `reward_parts.numeric`.
- A column of numbers, truth values or texts alone has that type. One with mixed or nested values, such as a chat prompt
  beside a plain one, holds each value as JSON text.
- A lone surrogate is written as its escape, "\\ud83d". NaN and infinities are null.

The files are read twice, first for the columns and their types. One step is in memory at a time.
"""

import csv
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.fields import or_list
from covey.config.files import faults_of
from covey.tracking.run_reader import RunReader, table

SUFFIXES = (".parquet", ".jsonl", ".csv")
FIRST_COLUMNS = (
    "step", "group", "rollout", "max_new_tokens", "problem", "prompt", "text", "reward", "score", "advantage",
    "baseline", "end", "truncated", "decisions", "version", "dropped", "observation", "messages", "turn_rewards",
    "failure",
)  # fmt: skip
DIVIDED = ("columns", "reward_parts")  # tables with a column for each key
MOST_DIVIDED = 500  # keys; with more of them the table is one column of JSON texts
ROWS_AT_ONCE = 4096  # rows of a Parquet row group, at least
INT64 = 2**63
Row = dict[str, Any]


@dataclass
class Exported:
    """An exported table."""

    rows: int = 0
    steps: int = 0
    columns: int = 0
    damaged: int = 0  # lines that could not be read


@dataclass
class _Columns:
    """The columns of the table with the kinds of their values: bool, int, float, str or json."""

    kinds: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # of DIVIDED, those that are one column

    def add(self, row: Row) -> None:
        for name, value in row.items():
            self.kinds.setdefault(name, set()).add(_kind(value))

    def undivide(self) -> None:
        """Make one column of a table with too many keys."""
        for prefix in DIVIDED:
            names = [name for name in self.kinds if name.startswith(f"{prefix}.")]
            if len(names) > MOST_DIVIDED:
                self.whole.add(prefix)
                for name in names:
                    del self.kinds[name]
                self.kinds[prefix] = {"json"}

    def types(self) -> dict[str, str]:
        """The type of each column, in the order of the table."""
        names = [name for name in FIRST_COLUMNS if name in self.kinds]
        names += sorted(self.kinds.keys() - set(names))
        return {name: _type(self.kinds[name]) for name in names}


def check_export(file: Path) -> None:
    """Refuse a file whose suffix names no format, and Parquet without pyarrow.

    Raises:
        ConfigError: naming the fix.
    """
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{file}: name a file that ends with {or_list(SUFFIXES)}")
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError('Parquet is written with pyarrow: pip install "covey[arrow]", or name a .jsonl or .csv file')


def export_records(run_dir: Path, file: Path, *, held_out: bool = False) -> Exported:
    """Write the rollouts of a run, or its held-out answers, to a new file.

    A run may go on meanwhile: the steps that were complete at the beginning are exported.

    Raises:
        ConfigError: if there is nothing to export, or records change while they are read.
        MachineError: if the file cannot be written.
    """
    reader, result = RunReader(run_dir), Exported()
    steps = reader.held_out_steps() if held_out else reader.rollout_steps()
    read = _answers if held_out else _rollouts
    columns = _Columns()
    for step in steps:
        for row in read(reader, step, result):
            columns.add(_flat(row, columns.whole))
            result.rows += 1
        columns.undivide()
    if not result.rows:
        what = "held-out answers" if held_out else "rollouts"
        raise ConfigError(f"the run in {run_dir} has no {what} to export")
    types, counted = columns.types(), Exported()
    result.steps, result.columns = len(steps), len(types)
    with faults_of(file), _new_file(file) as draft, _WRITERS[file.suffix.lower()](draft, types) as write:
        for step in steps:
            rows = [_fitted(_flat(row, columns.whole), types) for row in read(reader, step, counted)]
            counted.rows += len(rows)
            write(rows)
        if counted.rows != result.rows:
            raise ConfigError(f"the records in {run_dir} changed while they were exported: start again")
    return result


def _rollouts(reader: RunReader, step: int, result: Exported) -> Iterator[Row]:
    with suppress(OSError):
        groups, damaged = reader.groups(step)
        result.damaged += damaged
        for group in groups:
            for index, line in enumerate(group.rollouts):
                yield {**line, "rollout": index}


def _answers(reader: RunReader, step: int, result: Exported) -> Iterator[Row]:
    with suppress(OSError):
        records = reader.held_out(step)
        result.damaged += records.damaged
        yield from records.lines


def _flat(row: Row, whole: set[str]) -> Row:
    """A record with a key for each entry of its tables."""
    flat = {key: value for key, value in row.items() if key not in DIVIDED or key in whole}
    for prefix in DIVIDED:
        if prefix in row and prefix not in whole:
            flat |= {f"{prefix}.{key}": value for key, value in table(row[prefix]).items()}
    return {_readable(name): value for name, value in flat.items()}


def _kind(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null"
    if isinstance(value, int) and not isinstance(value, bool) and not -INT64 <= value < INT64:
        return "json"
    return type(value).__name__ if isinstance(value, (bool, int, float, str)) else "json"


def _type(kinds: set[str]) -> str:
    """The type of a column: the kind of all its values, float for integers and floats, else json."""
    known = kinds - {"null"}
    if known <= {"int", "float"} and "float" in known:
        return "float"
    return known.pop() if len(known) == 1 else "json" if known else "str"


def _fitted(row: Row, types: dict[str, str]) -> Row:
    """A row with a value of its type in every column.

    Raises:
        ConfigError: if the row has values that were not there when the columns were determined.
    """
    fitted: Row = {}
    for name, kind in types.items():
        value = row.get(name)
        if _kind(value) == "null":
            fitted[name] = None
        elif kind == "json":
            fitted[name] = json.dumps(value, ensure_ascii=False)
        elif kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
            fitted[name] = float(value)
        elif _kind(value) == kind:
            fitted[name] = value
        else:
            raise ConfigError(f"{name} of step {row.get('step')} changed while it was exported: start again")
        if isinstance(fitted[name], str):
            fitted[name] = _readable(fitted[name])
    return fitted


@contextmanager
def _new_file(file: Path) -> Iterator[Path]:
    """Context manager: a draft that gets the name of the file at the end, and is removed after an error."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield draft
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)


Write = Callable[[list[Row]], None]


@contextmanager
def _parquet(file: Path, types: dict[str, str]) -> Iterator[Write]:
    import pyarrow
    from pyarrow import parquet

    arrow = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    schema = pyarrow.schema([(name, arrow.get(kind, pyarrow.string())) for name, kind in types.items()])
    waiting: list[Row] = []
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            lists = [[row[name] for row in waiting] for name in types]
            arrays = [pyarrow.array(values, at.type) for values, at in zip(lists, schema, strict=True)]
            writer.write_table(pyarrow.table(arrays, schema=schema))
            waiting.clear()

        def write(rows: list[Row]) -> None:
            waiting.extend(rows)
            if len(waiting) >= ROWS_AT_ONCE:
                flush()

        yield write
        if waiting:
            flush()


@contextmanager
def _jsonl(file: Path, types: dict[str, str]) -> Iterator[Write]:
    with open(file, "x", encoding="utf-8", errors="backslashreplace") as opened:

        def write(rows: list[Row]) -> None:
            opened.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

        yield write


@contextmanager
def _csv(file: Path, types: dict[str, str]) -> Iterator[Write]:
    with open(file, "x", encoding="utf-8", errors="backslashreplace", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(types)
        yield lambda rows: writer.writerows([row[name] for name in types] for row in rows)


def _readable(words: str) -> str:
    """The text with lone surrogates as their escapes, because UTF-8 has none."""
    return words.encode("utf-8", "backslashreplace").decode()


_WRITERS = {".parquet": _parquet, ".jsonl": _jsonl, ".csv": _csv}
