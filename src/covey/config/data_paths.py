"""Names of data files: Parquet, Arrow, or a folder of the package `datasets`. Their rows are read in `llm/data`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.fields import did_you_mean, missing_file
from covey.config.files import read_json, user_path

SUFFIXES = (".parquet", ".arrow", ".feather")
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"  # of the package datasets


def check_data(name: str, where: str, others: Sequence[str] = ()) -> None:
    """Refuse a data file that is missing or cannot be read on this machine.

    Args:
        where: the field that names it, for messages.
        others: what the field may name besides files.

    Raises:
        ConfigError: in one line, with the fix.
    """
    path = user_path(name, f"{where}: ")
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{where}: {missing_file(path, name)}{did_you_mean(name, list(others))}")
    if is_arrow(path):
        data_files(path, f"{where}: {name}")
        if find_spec("pyarrow") is None:
            raise ConfigError(f'{where}: {name} is read with pyarrow: pip install "covey[arrow]"')


def is_arrow(file: Path) -> bool:
    """True for a folder, and for a file with the suffix of Parquet or Arrow."""
    return file.suffix.lower() in SUFFIXES or file.is_dir()


def data_files(path: Path, name: str) -> list[Path]:
    """The data files of a path: the file itself, or those of a folder of the package datasets.

    Raises:
        ConfigError: if a folder holds no data set, or several.
    """
    if not path.is_dir():
        return [path]
    if (path / SPLITS_FILE).is_file():
        splits = read_json(path / SPLITS_FILE)
        names = splits.get("splits") if isinstance(splits, dict) else None
        inside = ", ".join(f"{name.rstrip('/')}/{split}" for split in names) if isinstance(names, list) else ""
        raise ConfigError(f"{name} has several data sets; name one of them{': ' if inside else ''}{inside}")
    if not (path / STATE_FILE).is_file():
        raise ConfigError(
            f"{name} is a folder without {STATE_FILE}, so it is not a data set that datasets saved with save_to_disk; "
            "name a file, or such a folder"
        )
    state = read_json(path / STATE_FILE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    try:
        files = [Path(entry["filename"]) for entry in listed or ()]
    except (TypeError, KeyError):
        files = []
    if not files or any(len(file.parts) != 1 or file.parts[0] == ".." for file in files):
        raise ConfigError(f"{name}: {STATE_FILE} lists no data files; save the data set again")
    if missing := next((file for file in files if not (path / file).is_file()), None):
        raise ConfigError(f"{name}: the file {missing}, which {STATE_FILE} lists, is missing; save the data set again")
    return [path / file for file in files]
