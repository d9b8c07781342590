"""Calls a user's function in a process of its own, and reads the rows that it returns.

python -P -m covey.llm.sft.function_rows file.py:function FILE
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from covey.config import ConfigError
from covey.config.files import parse_json
from covey.config.named_modules import search_path
from covey.llm.data.arrow import rows_as_written
from covey.runtime.worker.child import load_function


def read_function(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows that the function `file.py:function` returns, with their places.

    Raises:
        ConfigError: if it raises an exception, or returns anything but rows that JSON can represent.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        process = subprocess.run(
            [sys.executable, "-P", "-m", "covey.llm.sft.function_rows", name, str(path)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode:
            said = process.stderr.strip().splitlines() or [f"its process ended with {process.returncode}"]
            raise ConfigError(f"sft.data: {name} failed: {said[-1]}")
        lines = path.read_bytes().splitlines()
    if not lines:
        raise ConfigError(f"sft.data: {name} returned no rows")
    return [(f"row {number} of {name}", parse_json(line)) for number, line in enumerate(lines, start=1)]


def write_rows(name: str, path: Path) -> None:
    """Call a function and write its rows as JSONL.

    Raises:
        TypeError: if a row is not a dict of JSON's types.
    """
    with open(path, "w", encoding="utf-8") as file:
        sys.path[:] = search_path(name)
        for number, row in enumerate(rows_as_written(load_function(name)()), start=1):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {number} is of type {type(row).__name__}, and a dict is needed")
            file.write(json.dumps(dict(row)) + "\n")


if __name__ == "__main__":
    write_rows(sys.argv[1], Path(sys.argv[2]))
