"""The environment `openenv`: an environment on an OpenEnv server.

action model of the server    what the model writes
one field                     its value: a text, or a number and the like in JSON
several fields                a JSON object
calls of MCP tools            calls of these tools; a turn without a call ends the conversation
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from covey.llm.conversation.adapter import Adapter, Response, WrongEnvironment, function_schema
from covey.llm.conversation.tools import ERROR, text_of
from covey_environments.openenv_client import (
    Address,
    Client,
    HttpClient,
    Json,
    RefusedAction,
    WebSocketClient,
)

CLIENTS: dict[str, type[WebSocketClient | HttpClient]] = {"websocket": WebSocketClient, "http": HttpClient}
_SEED_BITS = 31
_NOT_SHOWN = ("metadata", "reward", "done")  # fields of an observation that are not for the model
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?!\w)")


class OpenEnv(Adapter):
    """An environment on a server, with a session for each conversation.

    The column `seed` of a row is sent with the reset; without it, a seed that is equal in a group. An action that the
    server's schema refuses is answered with the reason. `observation` is the last observation, for rewards.

    Args:
        url: of the server, http://host:port.
        action: field of the action that is the text of the model; empty: the only one that is required, or the only one
            at all; if there are several, the model writes a JSON object.
        observation: field of the observation that the model reads; empty: all, as JSON if there are several.
        columns: columns of a row that are sent with the reset.
        transport: "websocket", or "http" for an environment whose steps need no earlier ones.
        token_variable: name of the environment variable with the access token of a private server; empty: none.
    """

    _schemas: ClassVar[dict[str, Json]] = {}  # url -> schemas, which the processes of conversations have from `prepare`
    _tools: ClassVar[dict[str, list[Json]]] = {}  # url -> MCP tools

    def __init__(
        self,
        url: str,
        action: str = "",
        observation: str = "",
        columns: Sequence[str] = (),
        transport: str = "websocket",
        token_variable: str = "",
    ) -> None:
        if transport not in CLIENTS:
            raise WrongEnvironment(f"the option transport is {transport!r}: choose {' or '.join(CLIENTS)}")
        self._url, self._address = url, Address(url, token_variable)
        self._columns, self._observation_field = tuple(columns), observation
        self._client: Client = CLIENTS[transport](self._address)
        schemas = self._schemas.get(url) or self._schemas.setdefault(url, self._address.schema())
        self._fields = _fields(schemas.get("action"))
        # Servers with MCP tools take calls of them, or actions of the base class, which has no field.
        self._calls_tools = self._fields.keys() >= {"tool_name", "arguments"} or (bool(schemas) and not self._fields)
        self._action_field = "" if self._calls_tools else _action_field(action, schemas.get("action"), self._fields)
        _check_observation(observation, schemas)
        self.observation: Json = {}

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Ask the server for its schemas and tools.

        Raises:
            WrongEnvironment: if it does not answer, or an option names a field that it does not have.
        """
        cls._schemas.pop(options["url"], None)
        cls._tools.pop(options["url"], None)
        with contextlib.closing(cls(**options)) as environment:
            environment.tool_schemas()

    def tool_schemas(self) -> list[dict[str, Any]]:
        if not self._calls_tools:
            return []
        if self._url not in self._tools:
            self._tools[self._url] = self._list_tools()
        return self._tools[self._url]

    def reset(self, seed: int | None = None, **columns: Any) -> str:
        """Begin an episode with the seed and the columns of the option `columns`."""
        number = random.getrandbits(_SEED_BITS) if seed is None else int(seed)
        missing = [name for name in self._columns if name not in columns and name != "seed"]
        if missing:
            raise WrongEnvironment(f"the option columns has {missing[0]!r}, but the data has no such column")
        chosen = {name: columns[name] for name in self._columns if name in columns}
        return self._text(self._client.reset({"seed": number, **chosen}))

    def respond(self, message: str, calls: Sequence[Mapping[str, Any]]) -> Response:
        """Take the action that the message is, or call tools."""
        if self._calls_tools:
            return self._call(calls)
        try:
            result = self._client.step(self._action(message))
        except RefusedAction as error:
            return Response(text=f"{ERROR}{error}")
        return Response(text=self._text(result), reward=result.get("reward") or 0.0, done=bool(result.get("done")))

    def close(self) -> None:
        self._client.close()

    def _list_tools(self) -> list[Json]:
        self._client.reset({"seed": 0})
        try:
            listed = self._client.step({"type": "list_tools"})["observation"].get("tools")
        except RefusedAction:
            listed = None
        if not isinstance(listed, list) or not listed:
            raise WrongEnvironment(
                f"the OpenEnv server at {self._address.http} has neither fields of actions nor tools"
            )
        return [
            function_schema(str(tool.get("name")), str(tool.get("description", "")), tool.get("input_schema") or {})
            for tool in listed
        ]

    def _call(self, calls: Sequence[Mapping[str, Any]]) -> Response:
        """Call tools in their order; those after the end of the episode are not called."""
        results: list[str] = []
        reward, done = 0.0, not calls
        for call in calls:
            if done:
                results.append(f"{ERROR}the episode is over")
                continue
            action = {"type": "call_tool", "tool_name": call["name"], "arguments": dict(call["arguments"])}
            try:
                result = self._client.step(action)
            except RefusedAction as error:
                results.append(f"{ERROR}{error}")
                continue
            self.observation = result["observation"]
            results.append(_tool_text(self.observation))
            reward += result.get("reward") or 0.0
            done = bool(result.get("done"))
        return Response(results=results, reward=reward, done=done)

    def _action(self, message: str) -> Json:
        """The action that a message is. Raises RefusedAction if it must be a JSON object, and is none."""
        text = message.strip()
        if self._action_field:
            return {self._action_field: _value(text, self._fields.get(self._action_field, {}))}
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
            if isinstance(found, dict):
                return found
        fields = ", ".join(f"{name} ({schema.get('type', 'any')})" for name, schema in self._fields.items())
        raise RefusedAction(f"reply with a JSON object that has the fields {fields}")

    def _text(self, result: Json) -> str:
        """The observation as text."""
        self.observation = result["observation"]
        shown = {key: value for key, value in self.observation.items() if key not in _NOT_SHOWN}
        if self._observation_field:
            if self._observation_field not in self.observation:
                raise WrongEnvironment(
                    f"the option observation is {self._observation_field!r}, but an observation of the server has only "
                    f"{', '.join(self.observation) or 'no fields'}"
                )
            return text_of(self.observation[self._observation_field])
        if not shown:
            return ""
        return text_of(next(iter(shown.values())) if len(shown) == 1 else shown)


def _fields(schema: Any) -> dict[str, Json]:
    """Name -> schema of the fields of an action."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {name: field for name, field in properties.items() if name != "metadata" and isinstance(field, dict)}


def _action_field(given: str, schema: Any, fields: Mapping[str, Json]) -> str:
    """The field that is the model's text; "" if an action is a JSON object.

    Raises:
        WrongEnvironment: if the server has no such field, or does not tell its fields.
    """
    if not isinstance(schema, dict):
        if given:
            return given
        raise WrongEnvironment(
            "the server has no /schema: correct the option url, or name the field of its actions in the option action"
        )
    if given and given not in fields:
        raise WrongEnvironment(f"the option action is {given!r}, but the server's actions have {', '.join(fields)}")
    required = [name for name in schema.get("required", ()) if name in fields]
    only = required if len(required) == 1 else list(fields) if len(fields) == 1 else []
    return given or (only[0] if only else "")


def _check_observation(given: str, schemas: Json) -> None:
    known: dict[str, Json] = {}
    for name in ("observation", "reset_observation"):
        known |= {field: kind for field, kind in _fields(schemas.get(name)).items() if field not in _NOT_SHOWN}
    if given and known and given not in known:
        raise WrongEnvironment(
            f"the option observation is {given!r}, but the server's observations have {', '.join(known)}"
        )


def _value(text: str, schema: Json) -> Any:
    """The value of a field that a text is: JSON if the field is not text; the last number of the text for numbers.

    A text that cannot be read so is sent as it is, and the server says what it needs.
    """
    options = schema.get("anyOf") or [schema]
    kinds = {option.get("type") for option in options if isinstance(option, dict)} - {"null"}
    if not kinds or "string" in kinds or None in kinds:
        return text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    found = _NUMBER.findall(text) if kinds & {"integer", "number"} else []
    if not found:
        return text
    return int(found[-1]) if re.fullmatch(r"-?[0-9]+", found[-1]) else float(found[-1])


def _tool_text(observation: Json) -> str:
    """The result of an MCP tool: a value, or a list of contents of which those of text are read."""
    error = observation.get("error")
    if error:
        return f"{ERROR}{error.get('message', '') if isinstance(error, dict) else error}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [str(part["text"]) for part in result["content"] if isinstance(part, dict) and "text" in part]
        text = "\n".join(texts) if texts else text_of(result.get("data"))
        return f"{ERROR}{text}" if result.get("is_error") else text
    return text_of(result)
