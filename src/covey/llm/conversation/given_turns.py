"""Tokens of given conversations, encoded as if the model had written the messages of the assistant.

Tools are described, calls written and read, and replies encoded as in a rollout with the same tools (`Style`).
"""

from __future__ import annotations

from collections.abc import Sequence

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder, ReplyNotEncodable
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tool_prompt import THOUGHTS, as_in_rollouts, words
from covey.llm.conversation.tools import ERROR, Tool
from covey.llm.model.chat import Message


class GivenTurns:
    """Encodes given conversations of a model that may call these tools.

    If there are no tools, calls are written in the model's format, and their names and arguments are not checked.
    """

    def __init__(self, encoder: ConversationEncoder, tools: Sequence[Tool] = ()) -> None:
        self.encoder, self.style = encoder, Style(encoder.chat, "tools", tools)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the messages before the first turn."""
        return self.style.encode(messages)

    def rest(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Token ids from the first turn to the end of the last one, and for each whether the model writes it.

        Args:
            messages: after the prompt; the first one is the assistant's.

        Raises:
            ConfigError: if a turn is not read as what is given, or the chat template cannot encode the messages.
        """
        written = as_in_rollouts(self.style.chat, messages, self.style.format)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        actions: list[int] = []
        decided: list[bool] = []
        for begin, end in zip(turns, [*turns[1:], None], strict=True):
            turn = self._turn(messages[begin], written[begin])
            actions += turn
            decided += [True] * len(turn)
            if end is None:
                break
            if end == begin + 1:
                raise ConfigError("a conversation has two messages of the role 'assistant' in a row: join them")
            try:
                between = self.encoder.after_turn(written[begin + 1 : end], ended=True)
            except ReplyNotEncodable as error:
                raise ConfigError(f"a conversation cannot be encoded: the model's chat template {error}") from None
            actions += between
            decided += [False] * len(between)
        return tuple(actions), tuple(decided)

    def _turn(self, given: Message, written: Message) -> tuple[int, ...]:
        """The tokens of a turn, which a rollout would read as the given message."""
        tokens = self.encoder.turn(written)
        text = words(str(self.style.chat.tokenizer.decode(list(tokens))))
        for key in THOUGHTS:
            if words(str(given.get(key) or "")) not in text:
                raise ConfigError(
                    f"the model's chat template leaves out the {key!r} of a message: write it into the 'content'"
                )
        if given.get("unread_calls"):
            raise ConfigError("a message has 'unread_calls', which are not calls: leave out the row")
        replies = self.style.read(tokens[:-1]).replies if self.style.tools else ()
        for reply in replies:
            if reply is not None:
                raise ConfigError(f"a call of a tool is wrong: {reply['content'].removeprefix(ERROR)}")
        return tokens
