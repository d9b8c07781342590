"""Token ids of prompts with completions, and the tokens at which a reward model's scores are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config import ConfigError
from covey.config.sft import DEFAULT_SEPARATOR
from covey.llm.model.chat import Chat, Message


@dataclass(frozen=True)
class ScoredRow:
    """One sequence for a reward model."""

    tokens: tuple[int, ...]
    reads: tuple[int, ...]  # positions of the tokens whose scores are read, ascending
    group: Any = None  # rows with an equal group, such as their prompt, share their common prefix


@dataclass(frozen=True)
class RewardEncoder:
    """Encodes prompts with completions for one reward model.

    A whole chat is encoded by the model's chat template. A string prompt is followed by the completion and the
    tokenizer's end token, as in TRL.
    """

    chat: Chat
    pad_id: int | None  # of the model's config: transformers reads the score at the last token that is another one
    separator: str = DEFAULT_SEPARATOR  # after each step
    reads_end: bool = False  # the score of a completion's last step is read at an end token after it

    def outcome(self, prompt: str | Sequence[Message], completion: str | Sequence[Message]) -> ScoredRow:
        """The sequence of a prompt and a completion, whose score is read at its last token that is not padding.

        Raises:
            ConfigError: if there is no token, or the chat template cannot render the messages.
        """
        if isinstance(prompt, str):
            assert isinstance(completion, str)
            tokens = self._begin(prompt) + self.chat.encode_text(completion) + self._end()
        else:
            tokens = self.chat.encode_whole([*prompt, *_as_messages(completion)])
        last = max((place for place, token in enumerate(tokens) if token != self.pad_id), default=-1)
        if last < 0:
            raise ConfigError("a prompt with its completion has no token: give texts that are not empty")
        return ScoredRow(tokens, (last,), _group(prompt))

    def process(self, prompt: str | Sequence[Message], steps: Sequence[str]) -> ScoredRow:
        """The sequence of a prompt and the steps of a completion, whose scores are read at the last token of each.

        White space around a step is removed and the separator put after it. So a step has the same tokens wherever the
        text of a completion is cut, and the scores of its steps do not depend on what follows. With `reads_end`, the
        score of the last step is read at the tokenizer's end token, which follows it, so that it depends on whether
        the completion ends there: otherwise a policy that stops after a right first step would have the best scores.

        Raises:
            ConfigError: if the prompt cannot be encoded, or a step has no token.
        """
        tokens = list(self._begin(prompt))
        reads = []
        for step in steps:
            added = self.chat.encode_text(step.strip()) + self.chat.encode_text(self.separator)
            if not added:
                raise ConfigError(
                    f"a step has no token, because it is empty and the tokenizer makes none of {self.separator!r}: "
                    "leave empty steps out, or choose another --step-separator"
                )
            tokens += added
            reads.append(len(tokens) - 1)
        if self.reads_end and steps:
            tokens += self._end()
            reads[-1] = len(tokens) - 1
        return ScoredRow(tuple(tokens), tuple(reads), _group(prompt))

    def _begin(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        if prompt == "":
            first = self.chat.tokenizer.bos_token_id
            return () if first is None else (int(first),)
        return self.chat.encode(prompt)

    def _end(self) -> tuple[int, ...]:
        tokenizer = self.chat.tokenizer
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        return () if end is None else (int(end),)


def _as_messages(completion: str | Sequence[Message]) -> list[Message]:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)


def _group(prompt: str | Sequence[Message]) -> Any:
    """A hashable key that is equal for equal prompts."""
    if isinstance(prompt, str):
        return prompt
    return tuple(tuple(sorted(message.items())) for message in prompt)
