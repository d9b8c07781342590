"""Reads the examples of supervised fine-tuning, checked row by row.

| columns                    | example                                                                                 |
|----------------------------|-----------------------------------------------------------------------------------------|
| prompt, completion         | texts; or a prompt of chat messages, with a completion that is a text or messages       |
| question, completion       | a message of the user, and the text that answers it                                     |
| messages, optionally tools | a conversation with assistant messages, and the JSON schemas of the tools               |

The names of the columns are fields of the [sft] table.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.files import shortened
from covey.config.sft import SFTConfig
from covey.llm.data.images import COLUMNS
from covey.llm.data.rows import (
    Messages,
    Split,
    check_messages,
    check_prompt,
    divide,
    faults_at,
    kind_name,
    read_records,
    with_prompt,
)

SHAREGPT = {"human": "user", "gpt": "assistant"}  # its roles, and the usual ones


@dataclass(frozen=True)
class Example:
    """One row, checked. The messages after the prompt are trained if the assistant wrote them."""

    place: str  # "examples.jsonl line 7", for messages
    prompt: str | Messages
    completion: str | Messages  # a text only if the prompt is one
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts."""
        return json.dumps([self.prompt, self.tools] if self.tools else self.prompt, sort_keys=True, default=str)


def read_rows(config: SFTConfig, path: str) -> list[Example]:
    """All examples of one file.

    Raises:
        ConfigError: "examples.jsonl line 7: ..." for the first unusable row; for an empty file.
    """
    needed = f"rows with '{config.prompt_column}' and '{config.completion_column}', or with '{config.messages_column}'"
    return check_rows(config, read_records(path, needed))


def check_rows(config: SFTConfig, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Example]:
    """The examples of rows, each with its place.

    Raises:
        ConfigError: for the first unusable row.
    """
    found = []
    for place, row in rows:
        with faults_at(place):
            found.append(_example(config, place, row))
    return found


def split_examples(config: SFTConfig, examples: list[Example]) -> Split[Example]:
    """Divide examples into those for training and held-out ones.

    Raises:
        ConfigError: if no example is left for one of them.
    """
    return divide(
        examples,
        read_rows(config, config.held_out_path) if config.held_out_path else [],
        config.held_out_fraction,
        paths=(config.data, config.held_out_path),
        drop=config.overlap == "drop",
        remedy='; set sft.overlap = "drop"',
        one_prompt=f"{config.data} has only one prompt, so none is left to hold out: add prompts, or set "
        "sft.held_out_fraction = 0",
    )


def _example(config: SFTConfig, place: str, row: Mapping[str, Any]) -> Example:
    """Check one row. Raises ValueError with its fault."""
    if images := next((name for name in COLUMNS if row.get(name) is not None), ""):
        raise ValueError(f"it has the column {images!r}, and covey sft reads no images: remove the column")
    row = with_prompt(row, config.prompt_column)
    prompt, completion, messages = (
        name if row.get(name) is not None else ""
        for name in (config.prompt_column, config.completion_column, config.messages_column)
    )
    if completion and messages:
        raise ValueError(
            f"it has both {completion!r} and {messages!r}: keep one, or name another column with "
            "sft.completion_column or sft.messages_column"
        )
    if messages:
        return _conversation(place, row[messages], messages, _tools(row, config.tools_column))
    if not (prompt and completion):
        missing = config.completion_column if prompt else config.prompt_column
        columns = ", ".join(map(shortened, list(row)[:8])) or "none"
        raise ValueError(
            f"there is no {missing!r}: give {config.prompt_column!r} (or 'question') and "
            f"{config.completion_column!r}, or {config.messages_column!r}, or name your columns with "
            f"sft.prompt_column, sft.completion_column and sft.messages_column (columns: {columns})"
        )
    return _pair(place, row[prompt], row[completion], prompt, completion, _tools(row, config.tools_column))


def _conversation(place: str, value: Any, name: str, tools: tuple[Mapping[str, Any], ...]) -> Example:
    messages = _messages(value, name)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"{name!r} has no message of the role 'assistant', so there is nothing to train on")
    if not turns[0]:
        raise ValueError(f"{name!r} begins with the role 'assistant': a prompt must come before it")
    return Example(place, messages[: turns[0]], messages[turns[0] :], tools)


def _pair(
    place: str, prompt: Any, completion: Any, prompt_name: str, name: str, tools: tuple[Mapping[str, Any], ...]
) -> Example:
    if isinstance(prompt, str):
        check_prompt(prompt, prompt_name)
        if not isinstance(completion, str):
            raise ValueError(
                f"{prompt_name!r} is a text and {name!r} is {kind_name(completion)}: a text is completed by a text; "
                "give both as chat messages"
            )
        if tools:
            raise ValueError(f"{prompt_name!r} is a text, and tools are for chat messages: leave the tools out")
        check_prompt(completion, name)
        return Example(place, prompt, completion)
    messages = _messages(prompt, prompt_name)
    if isinstance(completion, str):
        check_prompt(completion, name)
        return Example(place, messages, ({"role": "assistant", "content": completion},), tools)
    rest = _messages(completion, name)
    if rest[0]["role"] != "assistant":
        raise ValueError(f"{name!r} begins with the role {rest[0]['role']!r}: it must be 'assistant'")
    return Example(place, messages, rest, tools)


def _messages(value: Any, name: str) -> Messages:
    """Check chat messages, of which those of the assistant may have tool calls in place of a content."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{name!r} must be a list of chat messages, this is {kind_name(value)}")
    if not value:
        raise ValueError(f"{name!r} is empty")
    messages = check_messages([_with_role(message) for message in value], name, calls=True)
    for position, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise ValueError(
                f"message {position} of {name!r} is an empty answer: it has neither 'content' nor 'tool_calls'"
            )
    return messages


def _with_role(message: Any) -> Any:
    """A message of the form of ShareGPT, `from` and `value`, with `role` and `content`; others as they are."""
    if not isinstance(message, Mapping) or "role" in message or not isinstance(role := message.get("from"), str):
        return message
    return {"role": SHAREGPT.get(role, role), "content": message.get("value")}


def _tools(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    """The schemas of a row, as a list or as its JSON text."""
    value = row.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{name!r} is a text that is not JSON: give a list of JSON schemas") from None
    if not value:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name!r} must be a list of JSON schemas (objects), this is {kind_name(value)}")
    return tuple(_schema(tool, f"entry {number} of {name!r}") for number, tool in enumerate(value, start=1))


def _schema(tool: Any, where: str) -> dict[str, Any]:
    """The schema of a function as chat templates read it; the function alone is accepted too."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise ValueError(f"{where} is not a JSON schema of a function: it needs a 'name'")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    properties = parameters.get("properties") or {} if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or not all(isinstance(schema, Mapping) for schema in properties.values()):
        raise ValueError(f"{where} needs 'parameters' that are a JSON schema with 'properties'")
    if not isinstance(parameters.get("required") or [], list):
        raise ValueError(f"{where} has 'required', which must be a list of names")
    known = {key: value for key, value in parameters.items() if value is not None}
    return {"type": "function", "function": {**function, "parameters": {**known, "properties": dict(properties)}}}
