"""Between text and token ids: chat templates, end tokens, completions as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from covey.config import ConfigError

Message = dict[str, str]


class Chat:
    """Renders prompts for one model and reads its completions."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt: a string is taken as it stands, messages go through the model's chat template.

        Raises:
            ConfigError: where messages meet a model without a chat template, or the prompt is empty.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            if not self.tokenizer.chat_template:
                raise ConfigError(
                    "the prompts are chat messages but the model has no chat template: "
                    "use an instruction-tuned model, or prompts that are plain strings"
                )
            ids = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
        if not ids:
            raise ConfigError("a prompt is empty: a model needs at least one token to continue from")
        return tuple(ids)

    def decode(self, actions: Sequence[int]) -> str:
        """The text of a completion, without the end token and other special tokens."""
        return str(self.tokenizer.decode(list(actions), skip_special_tokens=True))


def end_ids_of(config: PretrainedConfig, generation: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a completion: those that the model, its generation config or its tokenizer declare."""
    found: set[int] = set()
    for declared in (config.eos_token_id, getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if declared is not None:
            found.update([declared] if isinstance(declared, int) else declared)
    return frozenset(found)
