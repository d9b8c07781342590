"""The environment `verifiers`: an environment of the package verifiers, with its prompts and its rewards.

The package runs its own rollout and scores it. It does so on an event loop that runs while covey waits for it, with a
client of a model that hands the messages of each request to covey, and waits for the turn.

    until version 0.3   SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses, by `load_environment`: in this file
    from version 0.4    tasksets and their environments: `verifiers_tasksets.py`
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from covey.llm.conversation.adapter import Adapter, Response, WrongEnvironment, function_schema
from covey.runtime.worker.child import one_line, one_printable_line

MODEL = "covey"  # the name of the model that the package's environments see
Message = Any  # a message of verifiers
Tool = Any  # a tool of verifiers
Turn = tuple[str, list[dict[str, Any]]]  # text and calls, each with an `id`, a `name` and `arguments` in JSON
Ask = Callable[[Sequence[Message], Sequence[Tool] | None], Awaitable[Turn | None]]  # None: the conversation is cut off


@dataclass(frozen=True)
class Played:
    """A conversation that the package has ended and scored."""

    messages: Sequence[Message]
    reward: float
    metrics: Mapping[str, float | None]


class Source(Protocol):
    """What conversations are played from; loaded once."""

    tools: list[dict[str, Any]] | None  # None: those of the first request
    training: Any  # a sequence of items
    held_out: Any

    def row(self, item: Any) -> dict[str, Any]:
        """The row of an item of `training` or `held_out`; with `prompt`."""

    def prompt(self, item: Any) -> Sequence[Message]:
        """The messages with which its conversation begins."""

    async def play(self, item: Any, ask: Ask) -> Played:
        """Play its conversation and score it."""


class Verifiers(Adapter):
    """An environment of verifiers.

    The prompts are those of the task `environment`. A reward function that raises fails the conversation, also where
    the package counts it as 0. `metrics` has the value of each reward and metric, for rewards.

    Args:
        id: of an installed environment or taskset, or of a module of the working folder with one.
        arguments: of `load_environment`; from version 0.4 on, fields of the taskset's config and of its environment's,
            and `take`, the number of tasks, of which the first are used.
    """

    _loaded: ClassVar[dict[str, Source]] = {}  # id and arguments -> source, from `prepare`

    def __init__(self, id: str, **arguments: Any) -> None:
        key = json.dumps([id, arguments], sort_keys=True, default=str)
        if key not in self._loaded:
            self._loaded[key] = _load(id, arguments)
        self._source = self._loaded[key]
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._play: asyncio.Task[Played] | None = None
        self._turn: asyncio.Future[Turn | None] | None = None  # that the package waits for
        self._said: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Load the environment and its prompts, and begin a conversation if only that shows the tools.

        Raises:
            WrongEnvironment: if it cannot be loaded, or cannot be driven by turns.
        """
        environment = cls(**options)
        environment.rows()
        if environment._source.tools is None:
            environment.reset({"side": "training", "row": 0})
        environment.close()

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._source.tools or []

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the environment's data; the column `verifiers` has the place of a row."""
        return {side: [self._row(side, place) for place in range(len(items))] for side, items in self._sides().items()}

    def reset(self, verifiers: Mapping[str, Any] | None = None, **columns: Any) -> str | None:
        """Begin with a row of the environment's data; what a user says who opens the conversation."""
        if verifiers is None:
            raise WrongEnvironment('the data has no column verifiers: set name = "environment" in [task]')
        item = self._sides()[verifiers["side"]][int(verifiers["row"])]
        self._said = [shown(message) for message in self._source.prompt(item)]
        asked = self._said[-1]["role"] != "system"
        self._play = self._loop.create_task(self._source.play(item, self._ask))
        opening = self._advance()
        if opening and asked:
            raise WrongEnvironment("its environment adds messages to the prompt of its data, which covey does not show")
        return "\n\n".join(message["content"] for message in opening) or None

    def respond(self, message: str, calls: Sequence[Mapping[str, Any]]) -> Response:
        made = [
            {"id": f"call-{len(self._said)}-{place}", "name": call["name"], "arguments": json.dumps(call["arguments"])}
            for place, call in enumerate(calls)
        ]
        self._said.append(shown({"role": "assistant", "content": message, "tool_calls": made}))
        self._answer((message, made))
        new = self._advance()
        tools = {reply["tool_call_id"]: reply["content"] for reply in new if reply["role"] == "tool"}
        texts = [reply["content"] for reply in new if reply["role"] != "tool"]
        results = [tools.get(call["id"], "") for call in made]
        assert self._play is not None
        return Response(results, "\n\n".join(texts) if texts else None, done=self._play.done())

    def score(self) -> float:
        """The reward of the package. A conversation that it goes on with is cut off, as at its limit of turns."""
        assert self._play is not None
        while not self._play.done():
            self._answer(None)
            self._run(self._next())
        played = self._play.result()
        self.metrics = {name: float(value) for name, value in played.metrics.items() if value is not None}
        return played.reward

    def close(self) -> None:
        if self._play is not None and not self._play.done():
            self._play.cancel()
            self._loop.run_until_complete(asyncio.wait({self._play}))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _sides(self) -> dict[str, Sequence[Any]]:
        return {"training": self._source.training, "held_out": self._source.held_out}

    def _row(self, side: str, place: int) -> dict[str, Any]:
        """A row of the task `environment`; columns that JSON does not have are left out."""
        kept: dict[str, Any] = {}
        for name, value in self._source.row(self._sides()[side][place]).items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                continue
            if value is not None:
                kept[name] = value
        return kept | {"verifiers": {"side": side, "row": place}}

    async def _ask(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Turn | None:
        """What the package's client calls: a turn of the model."""
        turn: asyncio.Future[Turn | None] = self._loop.create_future()
        await self._requests.put((messages, tools, turn))
        return await turn

    def _answer(self, turn: Turn | None) -> None:
        assert self._turn is not None
        self._turn.set_result(turn)

    def _advance(self) -> list[dict[str, Any]]:
        """Let the package run until it asks for a turn, or has ended; the messages that it adds."""
        said = [shown(message) for message in self._run(self._next())]
        new = said[len(self._said) :]
        if said[: len(self._said)] != self._said:
            raise WrongEnvironment(
                "its environment changes earlier messages of the conversation, or begins another one, which covey "
                "cannot train on"
            )
        for message in new:
            if not isinstance(message["content"], str):
                raise WrongEnvironment("its environment answered with an image: covey's conversations are text")
            if message["role"] not in ("user", "tool", "text"):
                raise WrongEnvironment(f"its environment adds a message of the role {message['role']}")
        self._said = said
        return new

    async def _next(self) -> Sequence[Message]:
        """The messages of the package's next request, or those of the whole conversation."""
        assert self._play is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({self._play, request}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return self._play.result().messages
        messages, tools, self._turn = request.result()
        schemas = [function_schema(tool.name, tool.description, tool.parameters) for tool in tools or ()]
        if self._source.tools is None:
            self._source.tools = schemas
        if schemas != self._source.tools:
            raise WrongEnvironment("its environment does not offer the same tools in all turns of all conversations")
        return list(messages)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._loop.run_until_complete(work)
        except WrongEnvironment:
            raise
        except Exception as error:
            raise WrongEnvironment(one_line(error)) from None


def shown(message: Message) -> dict[str, Any]:
    """What the model sees of a message, in which a text may be a list of parts."""
    fields = message if isinstance(message, dict) else message.model_dump()
    content = fields.get("content") or ""
    if not isinstance(content, str):
        texts = [part.get("text") for part in content]
        content = content if None in texts else "\n".join(texts)
    calls = [(call["id"], call["name"], call["arguments"]) for call in fields.get("tool_calls") or ()]
    return {"role": fields["role"], "content": content, "calls": calls, "tool_call_id": fields.get("tool_call_id")}


def _load(id: str, arguments: Mapping[str, Any]) -> Source:
    """Load an environment.

    Raises:
        WrongEnvironment: if it cannot be loaded or used.
    """
    try:
        import verifiers

        if hasattr(verifiers, "load_environment"):
            return _Environment(id, arguments)
        from covey_environments.verifiers_tasksets import TasksetSource

        return TasksetSource(id, arguments)
    except WrongEnvironment:
        raise
    except Exception as error:
        faults = error.errors() if hasattr(error, "errors") else ()  # of pydantic
        said = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults) or str(error)
        text, cause = one_printable_line(said), one_printable_line(str(error.__cause__ or ""))
        reason = text if cause in text else f"{text} ({cause})"
        raise WrongEnvironment(f"verifiers cannot load {id!r}: {reason}") from None


class _Environment:
    """An environment of versions until 0.3."""

    def __init__(self, id: str, arguments: Mapping[str, Any]) -> None:
        import verifiers

        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        environment: Any = verifiers.load_environment(id, **arguments)
        if not isinstance(environment, verifiers.MultiTurnEnv):
            raise WrongEnvironment(
                f"{id!r} is a {type(environment).__name__}: covey drives MultiTurnEnv of verifiers and its subclasses"
            )
        if environment.rubric.has_group_rewards:
            raise WrongEnvironment(f"the rubric of {id!r} has rewards of whole groups, which covey does not support")
        has_training, has_evaluation = (
            getattr(environment, name, None) is not None for name in ("dataset_source", "eval_dataset_source")
        )
        self._environment = environment
        self.tools: list[dict[str, Any]] | None = [
            function_schema(tool.name, tool.description, tool.parameters) for tool in environment.tool_defs or []
        ]
        self.training = environment.get_dataset() if has_training else environment.get_eval_dataset()
        self.held_out = environment.get_eval_dataset() if has_training and has_evaluation else []

    def row(self, item: Mapping[str, Any]) -> dict[str, Any]:
        prompt = item["prompt"]
        if not isinstance(prompt, str):  # a data set has a null for each key that another message has
            prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        return {**item, "prompt": prompt}

    def prompt(self, item: Mapping[str, Any]) -> list[Message]:
        return _normalized(self.row(item)["prompt"])

    async def play(self, item: Mapping[str, Any], ask: Ask) -> Played:
        environment = self._environment
        state = await environment.rollout(dict(item), _client(ask), MODEL, None)
        if state.get("error") is not None:
            raise state["error"]
        faults = _Faults()
        logger = logging.getLogger("verifiers")
        logger.addHandler(faults)
        try:
            await environment.rubric.score_rollout(state)
        finally:
            logger.removeHandler(faults)
        await environment.rubric.cleanup(state)
        if faults.first:
            raise WrongEnvironment(f"a reward function of its rubric failed: {faults.first}")
        messages = state["prompt"]
        for last in state["trajectory"][-1:]:
            messages = [*last["prompt"], *last["completion"], *_normalized(state.get("final_env_response") or [])]
        return Played(messages, float(state["reward"]), state["metrics"] or {})


class _Faults(logging.Handler):
    """Keeps the first error that the package logs: it counts a reward function that raises as 0."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()


def _client(ask: Ask) -> Any:
    """A client whose model is covey's."""
    import verifiers
    from verifiers.types import Response as ModelResponse
    from verifiers.types import ResponseMessage, ToolCall

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        turn = await ask(_normalized(prompt), tools)
        if turn is None:
            raise verifiers.OverlongPromptError("the conversation is cut off")
        text, calls = turn
        content = ResponseMessage(
            content=text,
            tool_calls=[ToolCall(**call) for call in calls] or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return ModelResponse(id="turn", created=0, model=MODEL, message=content)

    methods = dict.fromkeys(verifiers.Client.__abstractmethods__)  # which `get_response` calls there
    return type("Client", (verifiers.Client,), methods | {"get_response": get_response})(None)


def _normalized(messages: Any) -> list[Message]:
    from verifiers.utils.message_utils import maybe_normalize_messages

    return list(maybe_normalize_messages(messages, field_name="env_response"))
