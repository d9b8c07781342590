"""Reads the rows of a user's JSONL, Parquet or Arrow file, checked row by row.

This module loads no torch, so that a mistake in the data is reported at once.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from covey.config import ConfigError, DatasetConfig
from covey.config.fields import plural
from covey.config.files import parse_json, path_error, read_file, shortened, user_path
from covey.config.hub import HubData
from covey.config.machine import memory_bytes
from covey.config.named_modules import data_files, is_arrow
from covey.llm.data.arrow import check_count, plain_record, read_arrow
from covey.llm.data.images import COLUMNS, ImagePrompt, has_parts, take_pictures, with_pictures

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
LONGEST_ROLE = 64  # characters
MEMORY_PER_BYTE = 8  # peak memory while a file is read, relative to its size
BOM = b"\xef\xbb\xbf"  # byte order mark, which some editors write at the beginning of a file
LONGEST_LINE = 64 << 20  # bytes
LONGEST_PROMPT = 4 << 20  # characters; no model takes so many tokens, which would take seconds to encode
ONE_PROMPT = (
    "{path} has only one prompt, so none is left for evaluation: add prompts, or name a file of held-out prompts with "
    "task.held_out_path"
)
HALF_A_PAIR = "half of a surrogate pair (\\ud800 to \\udfff), which is not text"


Messages = tuple[Mapping[str, Any], ...]


class Prompted(Protocol):
    """A row or an example: it has a prompt, and a place for messages."""

    @property
    def place(self) -> str: ...

    @property
    def content(self) -> str: ...


Item = TypeVar("Item", bound=Prompted)


class Options(NamedTuple):
    """How a message names the settings of long examples."""

    max_tokens: str
    drop: str


@dataclass(frozen=True)
class Row:
    """One prompt with its columns, checked."""

    place: str  # "data.jsonl line 7" or "data.parquet row 7", for messages
    prompt: Any  # a string or chat messages
    columns: dict[str, Any]

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts."""
        images = self.prompt.digest if isinstance(self.prompt, ImagePrompt) else ""
        return json.dumps(self.prompt, sort_keys=True) + images


@dataclass(frozen=True)
class Split(Generic[Item]):
    """Training and held-out rows or examples."""

    training: list[Item]
    held_out: list[Item]
    overlap: int = 0  # training items that were dropped because their prompts are held out


def read_data(config: DatasetConfig) -> Split[Row]:
    """Read the rows of a [task] table with the name dataset. An unchanged file is read once.

    Raises:
        ConfigError: if a file is missing, empty or too large, or has an unusable line; if no row is left to train on or
            to hold out.
    """
    training, held_out = config.sources
    return divide(
        read_rows(training, config.columns),
        read_rows(held_out, config.columns) if held_out else [],
        config.held_out_fraction,
        paths=(training, held_out),
        drop=config.overlap == "drop",
        remedy='; set task.overlap = "drop"',
        one_prompt=ONE_PROMPT.format(path=config.path),
    )


def read_rows(path: str, columns: tuple[str, ...] = ()) -> list[Row]:
    """All rows of a JSONL file, whose blank lines are skipped, of a Parquet or Arrow file, of a folder that the package
    datasets saved, or of a data set of the hub; with some columns renamed (`DatasetConfig.columns`).

    Raises:
        ConfigError: "data.jsonl line 7: ..." for the first line that is unusable.
    """
    file = user_path(path)
    try:
        statuses = [one.stat() for one in data_files(file, path)]
    except OSError as error:
        raise path_error(error, f"{path}: cannot be read", file) from error
    version = tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses)
    return _read_rows(path, file.absolute(), version, columns)


def image_checksums(config: DatasetConfig) -> dict[str, str]:
    """Checksum of the images that the rows of a [task] table name, as `covey.config.inputs` has those of its files.

    Raises:
        ConfigError: as `read_rows`.
    """
    found = {}
    for path in filter(None, config.sources):
        prompts = (row.prompt for row in read_rows(path, config.columns))
        if digests := [prompt.digest for prompt in prompts if isinstance(prompt, ImagePrompt)]:
            found[f"an image of {path}"] = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return found


# Suffix -> the pandas function that reads such files. A .json file may hold JSON lines, so it is read as JSONL.
OTHER_FORMATS = {
    ".csv": "read_csv",
    ".tsv": "read_table",
    ".xlsx": "read_excel",
}


@lru_cache(maxsize=2)  # `covey check` and `covey train` read the data before torch is loaded, the task after it
def _read_rows(
    path: str, file: Path, _version: tuple[tuple[int, ...], ...], columns: tuple[str, ...] = ()
) -> list[Row]:
    names = DatasetConfig(columns=columns).renamed
    images = {names.get(name, name) for name in COLUMNS}
    rows = [
        row_of(place, _with_names(record, names, place), file if file.is_dir() else file.parent)
        for place, record in _records(path, file, images)
    ]
    if not rows:
        raise ConfigError(f"{path} is empty: it needs rows with a 'prompt', in JSONL one JSON object on each line")
    return rows


def _with_names(record: dict[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    """A row with some columns under new names. Raises ConfigError if one is not there."""
    if missing := next((old for old in names.values() if old not in record), None):
        found = ", ".join(map(shortened, list(record)[:8])) or "none"
        raise ConfigError(
            f"{place}: task.columns names the column {shortened(missing)}, which is missing (columns: {found})"
        )
    kept = {name: value for name, value in record.items() if name not in names.values()}
    return kept | {new: record[old] for new, old in names.items()}


def read_records(path: str, needed: str) -> list[tuple[str, dict[str, Any]]]:
    """All objects of a JSONL, Parquet or Arrow file with their places, such as "data.jsonl line 7".

    Args:
        needed: description of the objects, for the message about an empty file.

    Raises:
        ConfigError: for the first row that is not a JSON object, for an empty file, and for a data set of the hub.
    """
    if of_hub := HubData.read(path):
        raise ConfigError(
            f"{path}: only [task] reads data sets of the hub: hf download {of_hub.repository} --repo-type dataset "
            "--local-dir FOLDER, then name a file of it"
        )
    records = list(_records(path, user_path(path)))
    if not records:
        raise ConfigError(f"{path} is empty: it needs {needed}, one JSON object on each line")
    return records


def _records(path: str, file: Path, images: Collection[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of every row; blank lines are skipped. Columns of `images` may have bytes."""
    most = (memory_bytes() or 2**40) // MEMORY_PER_BYTE
    if HubData.read(path) or is_arrow(file):
        for number, row in read_arrow(file, path, most):
            place = f"{path} row {number}"
            with faults_at(place):
                plain = plain_record({name: value for name, value in row.items() if name not in images})
            yield place, plain | {name: row[name] for name in images if name in row}
        return
    if reader := OTHER_FORMATS.get(file.suffix.lower()):
        raise ConfigError(
            f"{path} is not a JSONL file; convert it: "
            f"pandas.{reader}({path!r}).to_json({f'{file.stem}.jsonl'!r}, orient='records', lines=True)"
        )
    content = read_file(file, most)
    check_count(content.count(b"\n"), path)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            place = f"{path} line {number}"
            with faults_at(place):
                record = _record(number, line)
            yield place, record


def _record(number: int, line: bytes) -> dict[str, Any]:
    """Parse one line. Raises ValueError with the fault of the line."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line has {len(line) / 1e6:,.0f} MB; at most {LONGEST_LINE / 1e6:,.0f} MB are read")
    line = line.removeprefix(BOM) if number == 1 else line
    if line.strip() in (b"[", b"{"):
        raise ValueError("the line ends within a JSON value; write each object on a line of its own")
    record = parse_json(line)
    if b"\\u" in line and _has_surrogate(record):  # UTF-8 cannot encode one, so only an escape can produce it
        raise ValueError(HALF_A_PAIR)
    if not isinstance(record, dict):
        fix = "; write each of its objects on a line of its own" if isinstance(record, list) else ""
        raise ValueError(f"a JSON object is needed, this is {kind_name(record)}{fix}")
    return record


@contextmanager
def faults_at(place: str) -> Iterator[None]:
    """Context manager that turns a ValueError into a ConfigError that names the place."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def row_of(place: str, record: Mapping[str, Any], folder: Path = Path()) -> Row:
    """Check one row of a data set.

    Args:
        place: names the row in messages, such as "train.jsonl line 3".
        folder: that names of image files begin at.

    Raises:
        ConfigError: with the place and the fault of the row.
    """
    with faults_at(place):
        return Row(place, *_parts_of(record, folder))


def _parts_of(record: Mapping[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The prompt of a row and its other columns. Raises ValueError with the fault of the row."""
    columns = with_prompt(record)
    if "prompt" in columns:
        prompt = columns.pop("prompt")
    elif "question" in columns:
        raise ValueError(f"'question' must be a string, this is {kind_name(columns['question'])}")
    else:
        found = ", ".join(map(shortened, list(columns)[:8])) or "none"
        raise ValueError(
            f"there is no 'prompt' and no 'question' (columns: {found}); rename the column that holds it, or set "
            'task.columns = ["question = ITS NAME"], of chat messages ["prompt = ITS NAME"]'
        )
    if isinstance(prompt, tuple) or hasattr(prompt, "tolist"):  # from Python: an array of NumPy, such as pandas reads
        prompt = list(prompt) if isinstance(prompt, tuple) else prompt.tolist()
    pictures = take_pictures(columns, folder)
    if pictures and isinstance(prompt, str):
        raise ValueError(
            "it has images, and its 'prompt' is a plain string: give chat messages, or name the column 'question'"
        )
    if isinstance(prompt, list) and (pictures or has_parts(prompt)):
        placed = with_pictures(prompt, pictures)
        prompt = placed if pictures else list(placed)
    check_prompt(prompt)
    verl = columns.get("reward_model")
    if "answer" not in columns and isinstance(verl, dict) and "ground_truth" in verl:
        columns["answer"] = verl["ground_truth"]
    for name in RESERVED:
        if name in columns:
            raise ValueError(f"the column name {name!r} is reserved; rename the column")
    return prompt, columns | ({COLUMNS[0]: [picture.label for picture in pictures]} if pictures else {})


def with_prompt(record: Mapping[str, Any], name: str = "prompt") -> dict[str, Any]:
    """A row whose `question` is its prompt, as a message of the user, if it has no other: reasoning-gym, GSM8K.

    Args:
        name: the column of prompts.
    """
    columns = dict(record)
    if columns.get(name) is None and isinstance(columns.get("question"), str):
        columns[name] = [{"role": "user", "content": columns.pop("question")}]
    return columns


def check_prompt(prompt: Any, name: str = "prompt") -> None:
    """Refuse what is neither a text nor chat messages; `name` is its column. Raises ValueError with the fault."""
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"{name!r} must be a string or a list of chat messages, this is {kind_name(prompt)}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{name!r} is empty")
    if isinstance(prompt, str):
        check_text(prompt, name)
    elif not any(message["content"].strip() for message in check_messages(prompt, name)):
        raise ValueError(f"{name!r} is empty: no message has any content")


def check_messages(messages: Sequence[Any], name: str, *, calls: bool = False) -> Messages:
    """Chat messages, each with a role and a content. Raises ValueError with the fault.

    Args:
        name: their column.
        calls: True if messages of the assistant may have tool calls in place of a content.
    """
    checked: list[dict[str, Any]] = []
    for position, message in enumerate(messages, start=1):
        where = f"message {position} of {name!r}"
        if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
            raise ValueError(f"{where} needs a 'role' that is a string")
        if not (role.strip() and role.isprintable() and len(role) <= LONGEST_ROLE):  # the template decides on the name
            raise ValueError(
                f"{where} has the role {shortened(role)}: a role is a printable name of at most {LONGEST_ROLE} "
                "characters, such as 'user'"
            )
        content, called = message.get("content"), message.get("tool_calls") if calls else None
        if called and (role != "assistant" or not isinstance(called, (list, tuple))):
            raise ValueError(f"{where} has 'tool_calls', which must be a list, and of the role 'assistant'")
        if called and content is None:
            content = ""
        if not isinstance(content, str):
            raise ValueError(f"{where} needs a 'content' that is a string")
        checked.append({**message, "content": content})
    check_text("".join(message["content"] for message in checked), name)
    return tuple(checked)


def check_text(text: str, name: str) -> None:
    """Refuse a text that no model takes; `name` is its column. Raises ValueError with the fault."""
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"{name!r} has {len(text):,} characters; at most {LONGEST_PROMPT:,} are read: shorten it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} has {HALF_A_PAIR}") from None


def _has_surrogate(record: Any) -> bool:
    """True if a string of the record has half of a surrogate pair."""
    text = json.dumps(record, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode() != text


def kind_name(value: Any) -> str:
    """The JSON type of a value in words; of a value from Python that is none, its type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")


def divide(
    items: list[Item],
    held_out: list[Item],
    fraction: float,
    *,
    paths: tuple[str, str],
    drop: bool,
    one_prompt: str,
    remedy: str = "",
) -> Split[Item]:
    """Training and held-out items: the given held-out ones, or a fraction of the items as in `hold_out`.

    Args:
        items: rows or examples of the first path.
        held_out: those of the second; empty if a fraction is held out.
        fraction: of the different prompts; 0: none.
        paths: of both, for messages.
        drop: leave items whose prompts are in `held_out` out of training; False: they are an error.
        one_prompt: message of the error if all items have the same prompt.
        remedy: end of the error about a prompt in both, which names the setting that drops them.

    Raises:
        ConfigError: for a prompt in both files without `drop`; if no item is left for training or to hold out.
    """
    if not held_out:
        return hold_out(items, fraction, one_prompt=one_prompt) if fraction else Split(items, [])
    places = {item.content: item.place for item in reversed(held_out)}
    shared = [item for item in items if item.content in places]
    if shared and not drop:
        more = f" ({len(shared):,} such lines)" if len(shared) > 1 else ""
        raise ConfigError(
            f"{shared[0].place}: this prompt is also in {places[shared[0].content]}, so training would see a held-out "
            f"prompt{more}{remedy} to leave such lines out of training, or remove them"
        )
    if len(shared) == len(items):
        raise ConfigError(f"every prompt of {paths[0]} is also in {paths[1]}, so none is left for training")
    return Split([item for item in items if item.content not in places], held_out, overlap=len(shared))


def hold_out(items: Sequence[Item], fraction: float, *, one_prompt: str) -> Split[Item]:
    """Training and held-out items; those of one prompt stay together.

    The choice depends on the prompts alone, so that it is the same for every order and every run.

    Args:
        items: rows or examples.
        fraction: of the different prompts; at least one is held out, and at least one is for training.
        one_prompt: message of the error if all items have the same prompt.

    Raises:
        ConfigError: if there is one prompt only.
    """
    contents = sorted({item.content for item in items}, key=prompt_hash)
    if len(contents) < 2:
        raise ConfigError(one_prompt)
    count = min(max(1, round(fraction * len(contents))), len(contents) - 1)
    held_out = set(contents[:count])
    training = [item for item in items if item.content not in held_out]
    return Split(training, [item for item in items if item.content in held_out])


class Sized(Protocol):
    """An encoded example."""

    @property
    def tokens(self) -> int:
        """Its length."""


Encoded = TypeVar("Encoded", bound=Sized)


def encode_fitting(
    items: Sequence[Item], encode: Callable[[Item], Encoded], longest: int | None, *, drop: bool, options: Options
) -> list[Encoded]:
    """Encode items. Items with more than `longest` tokens (None: any length) are dropped or, without `drop`, refused.

    Raises:
        ConfigError: for the first item that is refused or cannot be encoded; if none is left.
    """
    found = []
    for item in items:
        with faults_at(item.place):
            encoded = encode(item)
        if longest is None or encoded.tokens <= longest:
            found.append(encoded)
        elif not drop:
            raise ConfigError(
                f"{item.place}: prompt and completion have {encoded.tokens:,} tokens, and at most {longest:,} are "
                f"trained: shorten it, raise {options.max_tokens} up to the model's limit, or {options.drop}"
            )
    if items and not found:
        raise ConfigError(
            f"every example has more than {longest:,} tokens: shorten them, or raise {options.max_tokens}"
        )
    return found


def encode_split(
    split: Split[Item],
    encode: Callable[[Item], Encoded],
    longest: int | None,
    *,
    drop: bool,
    options: Options,
    notes: list[str],
) -> tuple[list[Encoded], list[Encoded]]:
    """The training and the held-out items, each as `encode_fitting`; what was left out becomes a note for the user."""
    training, held_out = (
        encode_fitting(some, encode, longest, drop=drop, options=options) for some in (split.training, split.held_out)
    )
    dropped = len(split.training) + len(split.held_out) - len(training) - len(held_out)
    if dropped:
        notes.append(f"{plural(dropped, 'example')} of more than {longest:,} tokens left out")
    if split.overlap:
        notes.append(f"{plural(split.overlap, 'example')} left out of training because their prompts are held out")
    return training, held_out


def prompt_hash(content: str) -> int:
    """Sort key of prompts that decides which are held out."""
    return stable_hash("prompt", content)


def stable_hash(*parts: Any) -> int:
    """64-bit hash that depends on the parts alone; Python's own hash() differs between processes."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


# ---- texts with places that the columns of a row fill ----

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def places(template: str) -> list[str]:
    """The names of the columns that a template has places for."""
    return _PLACE.findall(template)


def filled(template: str, columns: Mapping[str, Any]) -> str:
    """The template with the columns in their places. What is filled in is not searched for places again."""
    return _PLACE.sub(lambda match: as_text(columns[match[1]]), template)


def as_text(value: Any) -> str:
    """A value as text: chat messages by their contents and calls of tools, with the roles if there are several."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        texts = [_message_text(message) for message in value]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(f"{one.get('role', '')}: {text}" for one, text in zip(value, texts, strict=True))
    return json.dumps(value, ensure_ascii=False, default=str)


def _message_text(message: Mapping[str, Any]) -> str:
    """The content of a message, and a line for each of its calls, read or not."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    written = [json.dumps(call, ensure_ascii=False, default=str) for call in calls]
    return "\n".join(filter(None, [str(message["content"] or ""), *written, *message.get("unread_calls", ())]))
