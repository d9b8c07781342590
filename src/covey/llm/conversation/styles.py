"""How a turn of the model becomes a request to its environment, and the reply the messages that follow.

`StepStyle` is for environments with `step`, `ToolStyle` for those with tools, `RespondStyle` for adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from covey.llm.conversation.tool_calls import ToolCall, read_calls
from covey.llm.conversation.tool_prompt import call_format, reply_message, with_tools
from covey.llm.conversation.tools import ERROR, Tool, ToolError, check_call
from covey.llm.model.chat import Chat, Message


@dataclass(frozen=True)
class Turn:
    """A turn of the model as it was read."""

    message: dict[str, Any]  # of the role assistant
    request: dict[str, Any] | None  # for the environment; None: it is not asked
    replies: tuple[dict[str, Any] | None, ...] = ()  # messages that follow; None: one that the environment writes
    calls: tuple[ToolCall, ...] = ()  # whose results the environment writes, in their order


@dataclass(frozen=True)
class Answer:
    """What follows a turn."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False  # the conversation is over


class Style(Protocol):
    """Turns and replies of one style of environments."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""

    @property
    def reply_roles(self) -> tuple[str, ...]:
        """The roles of replies."""

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt."""

    def read(self, tokens: Sequence[int]) -> Turn:
        """Read a turn, without its end token."""

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        """Read the environment's reply to the request of a turn; {} if it was not asked."""


@dataclass(frozen=True)
class StepStyle:
    """The text of every turn goes to `step`; the reply is a message of the role user."""

    chat: Chat

    tools: ClassVar[Sequence[Tool]] = ()
    reply_roles = ("user",)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.chat.encode(messages)

    def read(self, tokens: Sequence[int]) -> Turn:
        text = self.chat.decode(tokens)
        return Turn({"role": "assistant", "content": text}, {"do": "step", "message": text})

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        # The last reply is kept, although the model does not read it.
        replies = [{"role": "user", "content": reply["text"]}] if reply["text"] or not reply["done"] else []
        return Answer(replies, reply["reward"], reply["done"])


class ToolStyle:
    """Calls of tools in a turn go to the environment. A turn without a call ends the conversation."""

    def __init__(self, chat: Chat, tools: Sequence[Tool]) -> None:
        self.chat, self.tools = chat, tools
        self.format = call_format(chat, tools)
        self.reply_roles: tuple[str, ...] = (str(reply_message(chat, ToolCall("t", {}), "")["role"]),)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.chat.encode(*with_tools(self.chat, messages, self.tools, self.format))

    def read(self, tokens: Sequence[int]) -> Turn:
        parsed = read_calls(str(self.chat.tokenizer.decode(list(tokens))), self.format)
        replies: list[dict[str, Any] | None] = []
        checked: list[ToolCall] = []
        for call in parsed.calls:
            try:
                checked.append(check_call(self.tools, call))
                replies.append(None)
            except ToolError as error:
                replies.append(self._reply(call, f"{ERROR}{error}"))
        replies += [self._reply(ToolCall("error", {}), text) for text in parsed.errors]
        calls = [{"name": call.name, "arguments": call.arguments} for call in checked]
        request = {"do": "call", "calls": calls} if calls else None
        return Turn(parsed.message(), request, tuple(replies), tuple(checked))

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        results = iter(self._reply(call, text) for call, text in zip(turn.calls, reply.get("texts", ()), strict=True))
        return Answer([next(results) if known is None else known for known in turn.replies])

    def _reply(self, call: ToolCall, text: str) -> dict[str, Any]:
        return reply_message(self.chat, call, text)


class RespondStyle(ToolStyle):
    """Whole turns go to the adapter, with the calls that its tools allow; it decides when the conversation is over.

    A turn whose calls are all wrong is answered without the adapter, as in `ToolStyle`.
    """

    def __init__(self, chat: Chat, tools: Sequence[Tool]) -> None:
        super().__init__(chat, tools)
        self.reply_roles = tuple(dict.fromkeys(("user", *self.reply_roles))) if tools else ("user",)

    def read(self, tokens: Sequence[int]) -> Turn:
        if not self.tools:
            text = self.chat.decode(tokens)
            return Turn({"role": "assistant", "content": text}, {"do": "respond", "message": text, "calls": []})
        turn = super().read(tokens)
        if turn.replies and not turn.calls:
            return turn
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        return replace(turn, request={"do": "respond", "message": turn.message["content"], "calls": calls})

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        answer = super().take(turn, reply)
        text = reply.get("text")
        replies = answer.replies if text is None else [*answer.replies, {"role": "user", "content": text}]
        return Answer(replies, reply.get("reward", 0.0), reply.get("done", False))
