"""How a turn of the model becomes a request to its environment, and the reply the messages that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


class Style:
    """Turns and replies of one kind of environments, as of `environment.style_of`.

    step      the text of every turn goes to the environment
    tools     the calls of a turn do; a turn without a call ends the conversation
    respond   the text does, and the calls that the tools allow, unless all of them are wrong
    """

    def __init__(self, chat: Chat, kind: str, tools: Sequence[Tool] = ()) -> None:
        self.chat, self.kind, self.tools = chat, kind, tools
        self.format = call_format(chat, tools)
        self._reads_calls = kind == "tools" or bool(tools)
        of_calls = [str(reply_message(chat, ToolCall("t", {}), "")["role"])] if self._reads_calls else []
        roles = of_calls if kind == "tools" else ["user", *of_calls]
        self.reply_roles = tuple(dict.fromkeys(roles))

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.chat.encode(*with_tools(self.chat, messages, self.tools, self.format))

    def read(self, tokens: Sequence[int]) -> Turn:
        """Read a turn, without its end token."""
        if not self._reads_calls:
            text = self.chat.decode(tokens)
            return Turn({"role": "assistant", "content": text}, self._request(text, []))
        parsed = read_calls(str(self.chat.tokenizer.decode(list(tokens))), self.format)
        replies: list[dict[str, Any] | None] = []
        checked: list[ToolCall] = []
        for call in parsed.calls:
            try:
                checked.append(check_call(self.tools, call))
                replies.append(None)
            except ToolError as error:
                replies.append(reply_message(self.chat, call, f"{ERROR}{error}"))
        replies += [reply_message(self.chat, ToolCall("error", {}), text) for text in parsed.errors]
        calls = [{"name": call.name, "arguments": call.arguments} for call in checked]
        asked = calls or (self.kind == "respond" and not replies)
        request = self._request(parsed.content, calls) if asked else None
        return Turn(parsed.message(), request, tuple(replies), tuple(checked))

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        """Read the environment's reply to the request of a turn; {} if it was not asked."""
        results = zip(turn.calls, reply.get("texts", ()), strict=True)
        replies = [reply_message(self.chat, *next(results)) if known is None else known for known in turn.replies]
        text, done = reply.get("text"), reply.get("done", False)
        # The last reply is kept, although the model does not read it.
        if text or (text is not None and not done):
            replies.append({"role": "user", "content": text})
        return Answer(replies, reply.get("reward", 0.0), done)

    def _request(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.kind == "tools":
            return {"do": "call", "calls": calls}
        return {"do": self.kind, "message": text, "calls": calls}
