"""Token ids of examples. Only what the assistant wrote is trained, with the end token of each turn.

prompt, completion        the prompt as `covey train` feeds it, the tokens of the completion, an end token
messages                  the prompt, then turns of the assistant; the chat template's text and replies are masked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config import ConfigError
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.styles import GivenTurns
from covey.llm.conversation.tools import Tool
from covey.llm.data.sft_examples import Example, Messages
from covey.llm.model.architecture import longest_row
from covey.llm.model.chat import Chat


@dataclass(frozen=True)
class EncodedExample:
    """An example as tokens; `decided` marks the actions that are trained."""

    prompt: tuple[int, ...]
    actions: tuple[int, ...]
    decided: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.actions)

    @property
    def trained(self) -> int:
        """The number of tokens that are trained."""
        return sum(self.decided)


class ExampleEncoder:
    """Encodes examples for one model, as rollouts of the same recipe would be."""

    def __init__(self, chat: Chat, tools: Sequence[Tool] | None = None) -> None:
        """
        Args:
            tools: of the recipe's conversations, for rows without tools; None: the recipe has no conversations.

        Raises:
            ConfigError: if the model declares no end token.
        """
        if not chat.end_ids:
            raise ConfigError("the model declares no end token (eos_token_id), so no completion can end: set it")
        self.chat = chat
        self.tools = tools
        self._encoder = ConversationEncoder(chat)

    def encode(self, example: Example) -> EncodedExample:
        """The tokens of an example.

        Raises:
            ConfigError: with its place, if the chat template cannot encode it, or a rollout would not read it so.
        """
        try:
            return self._encode(example)
        except ConfigError as error:
            raise ConfigError(f"{example.place}: {error}") from None

    def _encode(self, example: Example) -> EncodedExample:
        prompt, completion = example.prompt, example.completion
        if isinstance(prompt, str) and self.tools is None:
            actions = self._with_end(self.chat.encode_text(str(completion)))
            return EncodedExample(self.chat.encode(prompt), actions, (True,) * len(actions))
        own = [Tool(schema["function"]["name"], dict(schema)) for schema in example.tools]
        turns = GivenTurns(self._encoder, own or self.tools or ())
        # The tokens after a prompt do not depend on it, and messages of the assistant in it are not trained.
        return EncodedExample(turns.prompt(_messages(prompt, "user")), *turns.rest(_messages(completion, "assistant")))

    def _with_end(self, actions: Sequence[int]) -> tuple[int, ...]:
        if actions and actions[-1] in self.chat.end_ids:
            return tuple(actions)
        return (*actions, self.chat.end_id)


def _messages(given: str | Messages, role: str) -> Messages:
    """Messages; a text is one of this role, as in a conversation."""
    return ({"role": role, "content": given},) if isinstance(given, str) else given


def longest_example(model_config: Any, max_tokens: int) -> int | None:
    """The longest prompt with its completion, in tokens; `max_tokens` 0: the model's limit. None: there is no limit."""
    limits = (max_tokens or None, longest_row(model_config))
    return min((limit for limit in limits if limit is not None), default=None)


def encode_examples(
    examples: Sequence[Example], encoder: ExampleEncoder, longest: int | None, *, drop: bool
) -> list[EncodedExample]:
    """The tokens of examples. Those longer than `longest` are dropped or, without `drop`, refused.

    Raises:
        ConfigError: for the first example that is refused or cannot be encoded; if none is left.
    """
    found = []
    for example in examples:
        encoded = encoder.encode(example)
        if longest is None or encoded.tokens <= longest:
            found.append(encoded)
        elif not drop:
            raise ConfigError(
                f"{example.place}: prompt and completion have {encoded.tokens:,} tokens, and at most {longest:,} are "
                'trained: shorten it, raise sft.max_tokens up to the model\'s limit, or set sft.long_examples = "drop"'
            )
    if examples and not found:
        raise ConfigError(f"every example has more than {longest:,} tokens: shorten them, or raise sft.max_tokens")
    return found


def batch_of(examples: Sequence[EncodedExample]) -> Batch:
    """The examples as a batch; those with the same prompt are a group, so that it is computed once."""
    groups: dict[tuple[int, ...], Group] = {}
    for example in examples:
        group = groups.setdefault(example.prompt, Group(Start(len(groups), example.prompt), []))
        zeros = [0.0] * len(example.actions)
        group.rollouts.append(
            Rollout(example.prompt, list(example.actions), zeros, EndReason.STOP, decided=list(example.decided))
        )
    return collate(list(groups.values()))
