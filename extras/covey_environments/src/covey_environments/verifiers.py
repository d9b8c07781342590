"""The environment `verifiers`: an environment of the package verifiers, with its prompts and its rubric.

The classes SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses; the package's last version that has them is 0.3.
covey samples the model, and calls what the package's own rollout calls, in the same order:

    reset      init_state, setup_state
    respond    add_model_response, is_completed, get_prompt_messages (which calls env_response)
    score      cleanup, rubric.score_rollout, rubric.cleanup
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from covey.llm.conversation.adapter import Adapter, Response, WrongEnvironment, function_schema
from covey.runtime.worker.child import one_line, one_printable_line

MODEL = "covey"  # the name of the model that the package's environments see
Message = Any  # a message of verifiers


class Verifiers(Adapter):
    """An environment that `verifiers.load_environment` loads.

    The prompts are those of the task `environment`. A reward function that raises, which the package counts as 0, fails
    the conversation. `metrics` has the value of each reward function, for rewards.

    Args:
        id: of an installed environment, or a module of the working folder with a function `load_environment`.
        arguments: of `load_environment`.
    """

    _loaded: ClassVar[dict[str, Any]] = {}  # id and arguments -> environment, from `prepare`

    def __init__(self, id: str, **arguments: Any) -> None:
        key = json.dumps([id, arguments], sort_keys=True, default=str)
        if key not in self._loaded:
            self._loaded[key] = _load(id, arguments)
        self._environment = self._loaded[key]
        self._loop = asyncio.new_event_loop()
        self._state: Any = None
        self._prompt: list[Message] = []
        self._faults = _Faults()
        self.metrics: dict[str, float] = {}

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Load the environment and its prompts.

        Raises:
            WrongEnvironment: if it cannot be loaded, or cannot be driven by turns.
        """
        environment = cls(**options)
        environment.rows()
        environment.close()

    def tool_schemas(self) -> list[dict[str, Any]]:
        tools = self._environment.tool_defs or []
        return [function_schema(tool.name, tool.description, tool.parameters) for tool in tools]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the environment's data sets; the column `verifiers` has the place of a row."""
        environment = self._environment
        has_training, has_evaluation = (
            getattr(environment, name, None) is not None for name in ("dataset_source", "eval_dataset_source")
        )
        training = environment.get_dataset() if has_training else environment.get_eval_dataset()
        held_out = environment.get_eval_dataset() if has_training and has_evaluation else []
        return {
            "training": [_row(row, "training", place) for place, row in enumerate(training)],
            "held_out": [_row(row, "held_out", place) for place, row in enumerate(held_out)],
        }

    def reset(self, verifiers: Mapping[str, Any] | None = None, **columns: Any) -> None:
        """Begin with a row of the environment's data."""
        if verifiers is None:
            raise WrongEnvironment('the data has no column verifiers: set name = "environment" in [task]')
        self._state = self._run(self._begin(self._input(verifiers)))
        self._prompt = list(self._state["prompt"])

    def respond(self, message: str, calls: Sequence[Mapping[str, Any]]) -> Response:
        before = len(self._prompt)
        self._run(self._answer(message, calls))
        new = self._prompt[before + 1 :]
        tools = {reply.tool_call_id: _text(reply) for reply in new if reply.role == "tool"}
        results = [tools.get(_call_id(before, place), "") for place in range(len(calls))]
        texts = [_text(reply) for reply in new if reply.role != "tool"]
        return Response(results, "\n\n".join(texts) if texts else None, done=bool(self._state["is_completed"]))

    def score(self) -> float:
        """The reward of the rubric."""
        self._run(self._score())
        if self._faults.first:
            raise WrongEnvironment(f"a reward function of its rubric failed: {self._faults.first}")
        self.metrics = {name: float(value) for name, value in (self._state["metrics"] or {}).items()}
        return float(self._state["reward"])

    def close(self) -> None:
        self._loop.close()

    def _input(self, place: Mapping[str, Any]) -> dict[str, Any]:
        """The row of a place; the package's environments take it whole."""
        environment = self._environment
        held_out = place["side"] == "held_out" or getattr(environment, "dataset_source", None) is None
        rows = environment.get_eval_dataset() if held_out else environment.get_dataset()
        return dict(rows[int(place["row"])])

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._loop.run_until_complete(work)
        except WrongEnvironment:
            raise
        except Exception as error:
            raise WrongEnvironment(one_line(error)) from None

    async def _begin(self, row: dict[str, Any]) -> Any:
        state = await self._environment.init_state(row, _no_model(), MODEL, None)
        changed = await self._environment.setup_state(state)
        return state if changed is None else changed

    async def _answer(self, message: str, calls: Sequence[Mapping[str, Any]]) -> None:
        """Add a turn, and extend `_prompt` by it and the replies."""
        environment, state = self._environment, self._state
        await environment.add_model_response(state, self._prompt, _response(message, calls, len(self._prompt)))
        turn = state["trajectory"][-1]["completion"]
        said = [*self._prompt, *turn]
        if not await environment.is_completed(state):
            before = [message.model_dump() for message in said]
            prompt = await environment.get_prompt_messages(state)
            if state.get("final_env_response") is None:
                following = _normalized(prompt)
                if [message.model_dump() for message in following[: len(said)]] != before:
                    raise WrongEnvironment(
                        "its environment changes earlier messages of the conversation, which covey cannot train on"
                    )
                said = following
            else:
                said += _normalized(state["final_env_response"])
            await environment.is_completed(state)
        if state.get("error") is not None:
            raise state["error"]
        self._prompt = said

    async def _score(self) -> None:
        environment, state = self._environment, self._state
        await environment.cleanup(state)
        logger = logging.getLogger("verifiers")
        logger.addHandler(self._faults)
        try:
            await environment.rubric.score_rollout(state)
        finally:
            logger.removeHandler(self._faults)
        await environment.rubric.cleanup(state)


class _Faults(logging.Handler):
    """Keeps the first error that the package logs: it counts a reward function that raises as 0."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()


def _load(id: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment.

    Raises:
        WrongEnvironment: if it cannot be loaded or used.
    """
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import verifiers

        load, base = verifiers.load_environment, verifiers.MultiTurnEnv
    except (ImportError, AttributeError):
        raise WrongEnvironment(
            "the installed version of verifiers has no MultiTurnEnv, as versions from 0.4 on: "
            'pip install "covey[verifiers]"'
        ) from None
    try:
        environment = load(id, **arguments)
    except Exception as error:
        text, cause = one_printable_line(str(error)), one_printable_line(str(error.__cause__ or ""))
        reason = text if cause in text else f"{text} ({cause})"
        raise WrongEnvironment(f"verifiers cannot load {id!r}: {reason}") from None
    if not isinstance(environment, base):
        raise WrongEnvironment(
            f"{id!r} is a {type(environment).__name__}: covey drives MultiTurnEnv of verifiers and its subclasses"
        )
    if environment.rubric.has_group_rewards:
        raise WrongEnvironment(f"the rubric of {id!r} has rewards of whole groups, which covey does not support")
    return environment


def _no_model() -> Any:
    """A client of no model: covey samples the conversation, and an environment that asks it fails."""
    import verifiers

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise WrongEnvironment("its environment asks the trained model itself, which covey does not support")

    methods = dict.fromkeys(verifiers.Client.__abstractmethods__, refuse)
    return type("NoModel", (verifiers.Client,), methods)(None)


def _response(message: str, calls: Sequence[Mapping[str, Any]], before: int) -> Any:
    """A turn of the model as the package's type."""
    from verifiers.types import Response as ModelResponse
    from verifiers.types import ResponseMessage, ToolCall

    made = [
        ToolCall(id=_call_id(before, place), name=call["name"], arguments=json.dumps(call["arguments"]))
        for place, call in enumerate(calls)
    ]
    content = ResponseMessage(
        content=message,
        tool_calls=made or None,
        finish_reason="tool_calls" if made else "stop",
        is_truncated=False,
    )
    return ModelResponse(id=f"turn-{before}", created=0, model=MODEL, message=content)


def _call_id(before: int, place: int) -> str:
    return f"call-{before}-{place}"


def _normalized(messages: Any) -> list[Message]:
    from verifiers.utils.message_utils import maybe_normalize_messages

    return list(maybe_normalize_messages(messages, field_name="env_response"))


def _text(message: Message) -> str:
    """The text of a message.

    Raises:
        WrongEnvironment: if it has parts that are not text.
    """
    content = message.content
    if isinstance(content, str):
        return content
    texts = [getattr(part, "text", None) for part in content or ()]
    if any(text is None for text in texts):
        raise WrongEnvironment("its environment answered with an image or sound: covey's conversations are text")
    return "\n".join(str(text) for text in texts)


def _row(row: Mapping[str, Any], side: str, place: int) -> dict[str, Any]:
    """A row of the task `environment`; columns that JSON does not have are left out."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        if value is not None:
            kept[name] = value
    prompt = row["prompt"]
    if not isinstance(prompt, str):  # a data set has a null for each key that another message has
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return kept | {"prompt": prompt, "verifiers": {"side": side, "row": place}}
