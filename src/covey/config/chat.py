"""The [chat] table: what is added to prompts that are chat messages, and its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.assignments import read_assignments
from covey.config.common import ConfigError, Table, config_field

OF_COVEY = (
    "messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token", "unk_token",
)  # fmt: skip


@dataclass(frozen=True)
class ChatConfig(Table):
    system_prompt: str = config_field(
        "", "system message before every prompt that is chat messages and has none of its own; empty: none"
    )
    examples: tuple[str, ...] = config_field(
        (), "few-shot examples before every prompt: a user message, its answer, the next user message, its answer, ..."
    )
    template_options: tuple[str, ...] = config_field(
        (),
        'switches of the model\'s chat template, each as in a TOML file: ["enable_thinking = false"]',
        advanced=True,
    )

    def added_to(self, prompt: Sequence[Any]) -> list[Any]:
        """The prompt's messages after the system message and the examples; its own system message comes first."""
        own = 1 if prompt and prompt[0].get("role") == "system" else 0
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt and not own else []
        roles = ("user", "assistant") * (len(self.examples) // 2)
        examples = [{"role": role, "content": text} for role, text in zip(roles, self.examples, strict=True)]
        return [*system, *prompt[:own], *examples, *prompt[own:]]


def template_options(chat: ChatConfig) -> dict[str, Any]:
    """Name -> value of the switches.

    Raises:
        ConfigError: for an entry that is no TOML assignment.
    """
    example = '"enable_thinking = false" or \'reasoning_effort = "low"\''
    return read_assignments(chat.template_options, "chat.template_options", example=example, taken=OF_COVEY)


def check_chat(chat: ChatConfig) -> None:
    """Refuse half a pair of examples, and switches that cannot be read.

    Raises:
        ConfigError: naming the field and the fix.
    """
    if len(chat.examples) % 2:
        raise ConfigError(
            f"chat.examples has {len(chat.examples)} texts: it needs an answer after every user message, so an even "
            "number"
        )
    for text in chat.examples:
        if not text.strip():
            raise ConfigError("chat.examples has an empty text: a user message and an answer have some text each")
    template_options(chat)


def check_stop(stop: Sequence[str]) -> None:
    """Refuse stop strings that end every completion, or that no text contains.

    Raises:
        ConfigError: naming the fix.
    """
    for text in stop:
        if not text:
            raise ConfigError("sampling.stop has an empty string, which every text contains: take it out")
        if "\N{REPLACEMENT CHARACTER}" in text:
            raise ConfigError("sampling.stop has U+FFFD, which stands for bytes that are no character: take it out")
    if len(set(stop)) != len(stop):
        raise ConfigError("sampling.stop has a string twice: take one out")
