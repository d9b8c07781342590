"""Reads the user's files safely: valid paths, plain files of bounded size, UTF-8, and TOML and JSON with bounded
nesting, integers of 64 bits and no duplicate key.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from covey.config.common import ConfigError
from covey.config.faults import path_error

LARGEST_DOCUMENT = 16 << 20  # bytes of a JSON document; real ones have a few kilobytes
LONGEST_MODEL_CONFIG = 1 << 20  # bytes of a config.json
LARGEST_RECIPE = 1 << 20  # bytes of a TOML file
DEEPEST = 64  # levels of lists and tables within each other
LONGEST_INTEGER = 1000  # digits in JSON
MOST_DOTS = 1000  # in a TOML key: the time to parse a dotted key is quadratic in them
SHOWN_CHARACTERS = 80  # of a value quoted in a message

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shortened(text: str) -> str:
    """The text in quotes for a message, truncated if it is long."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents with mode 700.

    Raises:
        OSError: if it cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # another process may create it first


def user_path(name: str | Path, where: str = "") -> Path:
    """Parse a path that the user wrote and expand `~`. The path is valid, but need not exist.

    Args:
        where: beginning of an error message, the field or option, such as "task.path: ".

    Raises:
        ConfigError: for a name that no file can have, such as one with a NUL character or over-long parts, an unknown
            user's home folder, or a loop of links.
        MachineError: if a folder on the way may not be entered, or another fault of the machine.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise path_error(error, f"{where}{shortened(str(name))} cannot be used as a path", path) from error
    except RuntimeError as error:
        raise ConfigError(f"{where}{shortened(str(name))}: the home folder of that user is not known") from error
    except ValueError as error:
        raise ConfigError(f"{where}{shortened(str(name))} holds characters that no path can have") from error
    return path


def unusual_kind(path: Path) -> str:
    """'a folder', 'a pipe', 'a socket' or 'a device'; '' for a plain file or a missing one."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "")
    except OSError:
        return ""


def read_file(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """The bytes of a plain file.

    Raises:
        ConfigError: if it is missing, no plain file, or larger than `most` bytes.
        MachineError: if it may not be read, or the disk has a fault.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}; name a file")
            if status.st_size > most:
                raise ConfigError(f"{path} has {status.st_size / 1e6:,.0f} MB; at most {most / 1e6:,.0f} MB are read")
            return file.read()
    except OSError as error:
        raise path_error(error, f"cannot read {path}", path) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a byte order mark at its beginning is skipped.

    Raises:
        ConfigError: if it cannot be read or is not valid TOML, for values nested too deeply and integers over 64 bits.
    """
    return parse_toml(read_file(path, LARGEST_RECIPE), path)


def parse_toml(content: bytes, path: Path | str) -> dict[str, Any]:
    """The tables in the content of the TOML file at `path`, which error messages name.

    Raises:
        ConfigError: as `read_toml`.
    """
    try:
        text = content.decode("utf-8-sig")
        for number, line in enumerate(text.splitlines(), start=1):
            if line.partition("=")[0].count(".") > MOST_DOTS:
                raise ValueError(f"nested too deeply (at line {number})")
        tables = tomllib.loads(text)
        check_nesting(tables)
        for where, value in walk(tables):
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise ValueError(f"{where} is an integer of more than 64 bits")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: it is not UTF-8 text ({error.reason})") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: nested too deeply") from error
    except ValueError as error:
        reason = "an integer has too many digits" if "integer string conversion" in str(error) else error
        raise ConfigError(f"{path} is not valid TOML: {reason}") from error
    return tables


def parse_json(text: bytes | str, *, strict: bool = True) -> Any:
    """Parse a JSON document.

    Args:
        strict: refuse NaN and infinities, which are not JSON; covey's own files may have them.

    Raises:
        ValueError: in one line, for invalid JSON or UTF-8, a duplicate key of an object, values nested too deeply, or
            an integer of more than 1,000 digits.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        constants: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if strict else {}
        document = json.loads(decoded, object_pairs_hook=_unique, parse_int=_integer, **constants)
        if decoded.count("[") + decoded.count("{") > DEEPEST:  # else it cannot be nested deeper
            check_nesting(document)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} character {error.colno}" if error.lineno > 1 else f"character {error.colno}"
        raise ValueError(f"not valid JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return document


def read_json(path: Path, most: int = LARGEST_DOCUMENT, *, strict: bool = True) -> Any:
    """Read a JSON file with `parse_json`.

    Raises:
        ConfigError: if it cannot be read or is not valid.
    """
    try:
        return parse_json(read_file(path, most), strict=strict)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def check_nesting(document: Any) -> None:
    """Refuse lists and dicts that are nested more than `DEEPEST` levels.

    Raises:
        ValueError: for such a document.
    """
    level = [document]
    for _ in range(DEEPEST + 1):
        level = [inner for value in level for inner in _items(value)]
        if not level:
            return
    raise ValueError("nested too deeply")


def walk(document: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over every value below a document that `check_nesting` accepts: (dotted name, value)."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document, start=1)
    for key, value in pairs:
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, (dict, list)):
            yield from walk(value, name)
        else:
            yield name, value


def _items(value: Any) -> list[Any]:
    """The lists and dicts directly below a value."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in below if isinstance(item, (dict, list))]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shortened(again)} is there twice")
    return document


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits):,} digits, more than {LONGEST_INTEGER:,}")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write null or a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {shortened(digits)} is too large")
    return number


def sync(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_assignments(entries: Sequence[str], where: str, *, example: str, taken: Sequence[str]) -> dict[str, Any]:
    """Name -> value of the entries.

    Args:
        entries: one assignment each.
        where: name of the field, for messages.
        example: two entries in Python syntax, for messages.
        taken: names that covey sets itself.

    Raises:
        ConfigError: for an entry that is not a TOML assignment, and for a name that is taken or there twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        fault = ""
        try:
            pairs = parse_toml(entry.encode(), "it")
        except ConfigError as error:
            pairs, fault = {}, f" ({error})"
        if len(pairs) != 1 or "\n" in entry or any(isinstance(value, dict) for value in pairs.values()):
            raise ConfigError(
                f"{where} has {shortened(entry)}: an option is a name and its value in TOML, {example}{fault}"
            )
        [(name, value)] = pairs.items()
        if name in taken:
            raise ConfigError(f"{where} has {name}, which covey sets itself: remove it")
        if name in found:
            raise ConfigError(f"{where} has {name} twice")
        found[name] = value
    return found
