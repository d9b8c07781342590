"""Memory of sampling with `GraphDecoder`, from the dimensions of a model: the number of rows is chosen by it, and
`covey plan` predicts it.

Keys and values get what is free between updates. A prefill, the weights that are joined for decoding and the graphs of
a step are in memory together with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from covey.llm.generation.decoder import PREFILL_TOKENS, copies_have_room, linear_layers, token_bytes, weights_of
from covey.llm.generation.graph_decoder import BLOCK, MOST_PARTS, PROGRAMS, rung
from covey.llm.model.architecture import Heads, LayerModules
from covey.llm.model.lora import factors_of

EXACT_BYTES = 4  # of a number of the residual stream, or of a partial result of attention


@dataclass(frozen=True)
class DecoderMemory:
    """The memory of a model's `GraphDecoder`, in bytes."""

    hidden: int
    intermediate: int
    vocabulary: int
    layers: int
    heads: Heads
    linear: int  # weights of all linear layers
    joined: int  # those of which the decoder has a copy, if there is room
    itemsize: int  # bytes of a weight and of an activation

    @classmethod
    def of(cls, module: PreTrainedModel) -> DecoderMemory:
        config, base = module.config.get_text_config(), module.base_model
        copied = [one for layer in base.layers for one in _copied(LayerModules.of(layer))]  # type: ignore[union-attr]
        return cls(
            config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers,
            Heads.of(module), weights_of(linear_layers(module)),
            weights_of(copied), module.dtype.itemsize,
        )  # fmt: skip

    def keys_and_values(self, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
        """Of all rows, of the slot for rows without effect, and of each prompt once."""
        own = (rows + 1) * (max_new_tokens + BLOCK)
        return self._token * (own + prompts * prompt_tokens)

    def prefill(self, prompts: int, prompt_tokens: int) -> int:
        """The activations of a layer at the prompts that are prefilled together, and their keys and values, which are
        then copied."""
        tokens = max(min(PREFILL_TOKENS["cuda"], prompts * prompt_tokens), prompt_tokens)
        heads = 2 * (self.heads.queries + self.heads.keys) * self.heads.width  # before and after the rotation
        numbers = 2 * self.hidden + heads + 3 * self.intermediate
        return tokens * (2 * self.hidden * EXACT_BYTES + numbers * self.itemsize + self._token)

    def step(self, rows: int) -> int:
        """What the graphs of a step hold. They share their memory, but a larger one that comes after a smaller one may
        find no place in what that has left, so that the largest counts twice."""
        graph = rung(rows)
        of_row = self.vocabulary * self.itemsize + self.hidden * (EXACT_BYTES + 2 * self.itemsize)
        of_row += 3 * self.intermediate * self.itemsize
        partial = MOST_PARTS * graph + max(PROGRAMS // self.heads.keys, graph)
        return 2 * graph * of_row + partial * self.heads.queries * (self.heads.width + 1) * EXACT_BYTES

    def copies(self, room: float) -> int:
        """Of the joined weights, if these have room (`copies_have_room`)."""
        return self.joined * self.itemsize if copies_have_room(self.linear * self.itemsize, room) else 0

    def fitting_rows(self, room: int, completions: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
        """Number of rows, in whole groups of `completions`, that fit into so many bytes; 0 if no group does.

        The joined weights have room too (`copies_have_room`).
        """
        linear = self.linear * self.itemsize
        room -= self.prefill(prompts, prompt_tokens) + (2 * linear if copies_have_room(linear, room) else 0)

        def fits(groups: int) -> bool:
            rows = groups * completions
            return self.keys_and_values(rows, max_new_tokens, groups, prompt_tokens) + self.step(rows) <= room

        least, most = 0, prompts
        while least < most:
            middle = -(-(least + most) // 2)
            least, most = (middle, most) if fits(middle) else (least, middle - 1)
        return least * completions

    @property
    def _token(self) -> int:
        return token_bytes(self.layers, self.heads, self.itemsize)


def _copied(layer: LayerModules) -> list[Any]:
    """The linear layers of a layer that are joined, or merged with their adapters, in a copy."""
    merged = [one for one in (layer.output, layer.down) if factors_of(one) is not None]
    return [*layer.qkv, *layer.gate_up, *merged]
