"""Reads the rows of Parquet and Arrow files, and of folders that the package `datasets` saved with `save_to_disk`.

The package pyarrow is an extra, and it is loaded only for such files.
"""

import datetime
import decimal
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.config.common import ConfigError
from covey.config.files import shortened
from covey.config.named_modules import data_files

MOST_ROWS = 5_000_000
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)  # datetime is a date


def read_arrow(path: Path, name: str, most_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a path with their numbers from 1, not yet in the types of JSON (`plain_record`).

    Raises:
        ConfigError: if a file cannot be read, or is larger than `most_bytes`.
    """
    import pyarrow

    try:
        number, size, files = 0, 0, data_files(path, name)
        check_count(sum(map(_row_count, files)), name)
        for file in files:
            for batch in _batches(file, name, most_bytes):
                size += batch.nbytes  # of equal values many times what they have in the file
                _check_size(size, name, most_bytes)
                names = batch.schema.names
                if again := next((column for column in names if names.count(column) > 1), None):
                    raise ConfigError(f"{name}: the column {shortened(again)} is there twice")
                columns = [_values(batch, column, name) for column in names]
                for row in zip(*columns, strict=True):
                    number += 1
                    yield number, dict(zip(names, row, strict=True))
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name} cannot be read: {reason:.150}") from error


def check_count(rows: int, name: str) -> None:
    """Refuse more rows than are read. Raises ConfigError."""
    if rows > MOST_ROWS:
        raise ConfigError(f"{name} has {rows:,} rows; at most {MOST_ROWS:,} are read: take a part of them")


def _row_count(file: Path) -> int:
    from pyarrow import parquet

    if file.suffix.lower() == ".parquet":
        return int(parquet.read_metadata(file).num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(file))


def _values(batch: Any, column: str, name: str) -> list[Any]:
    """The values of a column as Python's. Raises ConfigError for a value that Python cannot hold."""
    try:
        array = batch.column(column)
        values: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError) as error:
        # nanoseconds, a year above 9999, a text that is not UTF-8, a map with a key twice
        raise ConfigError(
            f"{name}: the column {shortened(column)} has a value that Python cannot hold ({error!s:.60}): write it as "
            "another text, or remove the column"
        ) from error
    return [without_invented(value, array.type) for value in values] if array.type.num_fields else values


def _batches(file: Path, name: str, most_bytes: int) -> Iterator[Any]:
    """The record batches of one file."""
    from pyarrow import parquet

    if file.suffix.lower() == ".parquet":
        with parquet.ParquetFile(file) as source:
            groups = range(source.metadata.num_row_groups)
            _check_size(sum(source.metadata.row_group(group).total_byte_size for group in groups), name, most_bytes)
            yield from source.iter_batches(1024)
        return
    _check_size(file.stat().st_size, name, most_bytes)
    yield from _arrow_batches(file)


def _arrow_batches(file: Path) -> Iterator[Any]:
    """The record batches of a file that is not Parquet."""
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(file)) as stream:
        start = stream.read(6)
        stream.seek(0)
        if start == b"ARROW1":
            reader = ipc.open_file(stream)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:  # the package datasets writes streams
            yield from ipc.open_stream(stream)


def _check_size(size: int, name: str, most_bytes: int) -> None:
    if size > most_bytes:
        raise ConfigError(f"{name} has {size / 1e6:,.0f} MB of data; at most {most_bytes / 1e6:,.0f} MB are read")


def rows_as_written(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows of a data set of the package datasets without the nulls that Arrow invented; other rows as they are."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)
    for row in rows:
        if schema is None or not isinstance(row, Mapping):
            yield row
        else:
            kinds = dict(zip(schema.names, schema.types, strict=True))
            yield {name: without_invented(value, kinds[name]) for name, value in row.items()}


def without_invented(value: Any, kind: Any) -> Any:
    """A value of an Arrow type without the keys of its structs that are null, at every depth.

    A struct has the keys of all rows, so a null there was invented by the file type if the row has no such key. A null
    of a map or a list was written.
    """
    from pyarrow import null, types

    if not types.is_nested(kind):
        return value
    if isinstance(value, dict) and types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {key: without_invented(item, fields.get(key, null())) for key, item in value.items() if item is not None}
    if isinstance(value, dict) and types.is_map(kind):
        return {key: without_invented(item, kind.item_type) for key, item in value.items()}
    if isinstance(value, list) and types.is_nested(getattr(kind, "value_type", null())):
        return [without_invented(item, kind.value_type) for item in value]
    return value


def plain_record(record: dict[str, Any]) -> dict[str, Any]:
    """A row in the types of JSON. Dates and decimal numbers become texts, NaN becomes null.

    Raises:
        ValueError: naming the column of a value that cannot be converted.
    """
    return {column: _plain(value, column) for column, value in record.items()}


def _plain(value: Any, column: str) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        if math.isnan(value):  # pandas' missing value
            return None
        if math.isinf(value):
            raise ValueError(f"the column {shortened(column)} has {value}, which is not JSON: write null or a number")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, column) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, column) for key, item in value.items()}
    if isinstance(value, _AS_TEXT):
        return str(value)
    kind = "bytes" if isinstance(value, bytes) else f"values of type {type(value).__name__}"
    raise ValueError(f"the column {shortened(column)} has {kind}, which rewards cannot be given: remove the column")
