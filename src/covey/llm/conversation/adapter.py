"""Base of adapters: environments that stand for one of another library (`extras/covey_environments`).

An adapter gets whole turns of the model, with their calls of tools, because its library decides which tools there are,
and when a conversation is over. This file imports the standard library only, as the process of an environment does.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Keywords of JSON Schema that the check of a call knows; others are left out, so that any value passes them.
_KNOWN = ("type", "description", "enum", "nullable")


class WrongEnvironment(Exception):
    """A class or an object that is not an environment, or returned something unusable; one line with the reason."""


@dataclass(frozen=True)
class Response:
    """The reply to a turn of the model."""

    results: Sequence[str] = ()  # of the calls of the turn, in their order
    text: str | None = None  # a message of the role user after them
    reward: float = 0.0
    done: bool = False  # the conversation is over


class Adapter(ABC):
    """An environment of another library. The keyword arguments of the class are the options of the recipe."""

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Load what all conversations share, once, in the process that forks for each; make an environment.

        Raises:
            WrongEnvironment: if none can be made.
        """
        cls(**options).close()

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools of the model, as `function_schema` makes them."""
        return []

    def rows(self) -> dict[str, list[dict[str, Any]]] | None:
        """Prompts of the library's own: rows with a prompt and columns, as "training" and "held_out", which may be [].

        None: there are none, and rows have a seed.
        """
        return None

    @abstractmethod
    def reset(self, **columns: Any) -> str | None:
        """Begin a conversation with the columns of a row; the first observation."""

    @abstractmethod
    def respond(self, message: str, calls: Sequence[Mapping[str, Any]]) -> Response:
        """Answer a turn. A call has a `name` and `arguments`, which have the types of its schema."""

    def score(self) -> float | None:
        """Reward that is paid at the end, once."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the environment."""


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates show it; `parameters` is the JSON Schema of its arguments."""
    schema = {"type": "object", **_object(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: _plain(entry) for key, entry in dict(schema.get("properties") or {}).items()}
    return {"properties": properties, "required": [key for key in schema.get("required") or () if key in properties]}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema with the keywords that the check of a call knows."""
    if not isinstance(schema, Mapping) or "$ref" in schema:
        return {}
    plain: dict[str, Any] = {key: schema[key] for key in _KNOWN if key in schema}
    if "const" in schema:
        plain["enum"] = [schema["const"]]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        plain["anyOf"] = [_plain(option) for option in options]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            plain[key] = _plain(schema[key])
    if isinstance(schema.get("properties"), Mapping):
        plain |= _object(schema)
    return plain
