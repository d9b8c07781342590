"""The interface of decoders, the prefill that most of them share, and layers with prepacked weights.

A decoder takes prompts, each shared by the rows of a group, and returns the logits of every row's next token. The
implementations are `NativeDecoder`, `GraphDecoder`, `SharedPrefixDecoder`, `CacheDecoder` and `FullForwardDecoder`;
`backend.py` selects one.

Decoding multiplies few rows by every weight, so reading the weights takes much of its time. A copy that oneDNN has
prepacked needs as much memory as the weights and takes about 0.1 s. Every decoder makes a new copy, so it always has
the current weights. The adapter of a layer is merged into its copy. With one token per row, the overhead of calling an
operation is as large as its computation, and transformers calls 1.5 times as many operations as `LlamaLayers`. The
residual stream is in fp32, as in the kernels.

Shapes: S prompts, P longest prompt, R rows, H heads, K key-value heads, D head width, W hidden width, V vocabulary.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.token_sampling import Drawing
from covey.llm.model.architecture import Heads, LayerModules
from covey.llm.model.lora import NF4Linear, adapted_layers, base_of, is_adapted, joined_weights, stored
from covey.llm.model.prefix_attention import Layout, PackedLayout, forward
from covey.runtime.device import device_kind, in_huge_pages, total_memory_bytes


class Decoder(Protocol):
    """Autoregressive decoding of a batch of rows."""

    compact_threshold: float  # ended rows are removed by `select` if they are more than this fraction of all rows
    can_fork: bool  # True if `select` may repeat a row
    block: int  # number of tokens that `draw` may draw at once; 1: the decoder has no `draw`

    def free_rows(self) -> int:
        """Number of rows that can be added now."""

    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
        """Append `group_size` rows for each prompt; returns logits_SV of the token after each prompt.

        `common` is the number of tokens that all prompts share and that are fed once, if the decoder can; None: chosen
        from the prompts.
        """

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; returns logits_RV of the next token."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 indices, ascending). If `can_fork`, an index that occurs twice copies the row."""


class DrawingDecoder(Decoder, Protocol):
    """A decoder that draws tokens itself: several between two synchronisations with a GPU."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Feed any number of tokens to every row, without the logits of the next ones."""

    def draw(
        self, tokens_R: Tensor, uniforms_RN: NDArray[np.float64], lengths_R: NDArray[np.int64], drawing: Drawing
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Feed a token to every row, and draw up to `block` tokens for it, N.

        Args:
            tokens_R: the tokens that are fed.
            uniforms_RN: the random number of every drawn token.
            lengths_R: number of tokens that the completion of a row has so far.
            drawing: how they are drawn.

        Yields:
            the tokens and their log-probabilities, not numbers for a row whose logits are not finite, of each of the N
            steps. `park` and `keep` mean the row before this token.
        """


def token_bytes(layers: int, heads: Heads, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers; each number has `itemsize` bytes."""
    return 2 * layers * heads.keys * heads.width * itemsize


# Tokens of a forward pass, of which a GPU holds the activations. On a CPU, the bits of a prompt depend on their number.
PREFILL_TOKENS = {"cpu": 1 << 62, "cuda": 16384}


def prefill_parts(
    module: PreTrainedModel, prompts: Sequence[Sequence[int]], common: int | None = None
) -> Iterator[tuple[Tensor, PrefillLayout]]:
    """hidden_SW of the last token of each prompt, and the layout with keys and values, of prompts that are fed at once:
    at most PREFILL_TOKENS together, or one longer prompt."""
    for part in parts_of(prompts, PREFILL_TOKENS[device_kind(module.device)]):
        layout = PrefillLayout(part, module.device, common)
        hidden_NW = forward(module.base_model, layout.tokens, layout.positions, layout)
        yield hidden_NW[layout.prompt_ends.to(module.device)], layout


def parts_of(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[Sequence[int]]]:
    """Consecutive prompts of at most `tokens` tokens together, or of one longer prompt."""
    parts: list[list[Sequence[int]]] = []
    room = 0
    for prompt in prompts:
        if len(prompt) > room:
            parts.append([])
            room = tokens
        parts[-1].append(prompt)
        room -= len(prompt)
    return parts


class PrefillLayout(PackedLayout):
    """Layout of prompts without completions, which stores their keys and values by layer."""

    stores_prompts = True

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device, common: int | None = None) -> None:
        super().__init__(prompts, device=device, common=common)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def store_prompt_kv(self, layer: int, key_KSPD: Tensor, value_KSPD: Tensor) -> None:
        assert layer == len(self.keys)
        self.keys.append(key_KSPD.contiguous())
        self.values.append(value_KSPD.contiguous())


ROWS = 64  # number of rows for which oneDNN chooses the memory format; other numbers work too


def packs(weight: Tensor) -> bool:
    """True if oneDNN can prepack weights of this dtype and device on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Concatenated weights, merged with their adapters, and biases of linear layers with the same input."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return joined_weights(*layers), torch.cat(biases).detach() if biases else None


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """The layers whose weights decoding on a CPU copies, adapted ones as a whole."""
    adapted = adapted_layers(module)
    inside = {id(part) for layer in adapted.values() for part in layer.modules() if part is not layer}
    kinds = (nn.Linear, NF4Linear)
    linear = (part for part in module.modules() if type(base_of(part)) in kinds and id(part) not in inside)
    return list(linear)  # type: ignore[arg-type]


def weights_of(layers: Iterable[nn.Linear]) -> int:
    """Number of weights of the layers, which are not read: a layer in 4 bits computes them when they are."""
    return sum(layer.in_features * layer.out_features for layer in layers)


def is_quantized(layer: nn.Module) -> bool:
    """True for a layer in 4 bits, with an adapter or without."""
    return isinstance(base_of(layer), NF4Linear)


def copy_bytes(weights: int, itemsize: int, device: str) -> int:
    """Bytes of the prepacked copy of `weights` numbers of `itemsize` bytes; 0 if the device is not "cpu"."""
    return weights * itemsize if device == "cpu" else 0


class PackedLinear:
    """x -> x W' + b for one or several linear layers with the same input; their outputs are concatenated."""

    def __init__(self, *layers: nn.Linear) -> None:
        weight, self.bias = joined(*layers)
        self.packs = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packs else weight

    def __call__(self, x_RW: Tensor) -> Tensor:
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x_RW, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(x_RW, self.weight, self.bias)


class SeparateLinears:
    """As `PackedLinear`, by the layers themselves, without a copy of their weights."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers

    def __call__(self, x_RW: Tensor) -> Tensor:
        return torch.cat([layer(x_RW) for layer in self.layers], dim=1)


def copies_fit(module: PreTrainedModel) -> bool:
    """True if there is twice the memory that joined copies of the layers' weights need, merged with their adapters.

    Without copies, a layer has three more products, and two more for each adapter, and a quantized one computes its
    weights in every step. On a CPU it is False for models with quantized layers only, and depends on the memory of the
    machine, so that a run that is resumed has the same bits. On a GPU it stays as it was settled (`settle_copies`).
    """
    if (settled := _SETTLED.get(module)) is not None:
        return settled
    layers = linear_layers(module)
    if module.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(module.device)
        free += torch.cuda.memory_reserved(module.device) - torch.cuda.memory_allocated(module.device)
    elif any(map(is_quantized, layers)):
        free = total_memory_bytes(module.device) or sys.maxsize
    else:
        return True
    return 2 * weights_of(layers) * module.dtype.itemsize <= free


_SETTLED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def settle_copies(module: PreTrainedModel, room: int | None) -> None:
    """Decide for all decoders of a model on a GPU whether they have copies; the last bits of results depend on it.

    Args:
        room: bytes of the GPU that are free between updates; None: what is free at the first call decides.
    """
    if module.device.type == "cuda" and module not in _SETTLED:
        linear = weights_of(linear_layers(module)) * module.dtype.itemsize
        _SETTLED[module] = copies_fit(module) if room is None else copies_have_room(linear, room)


def copies_have_room(linear_bytes: int, room: float) -> bool:
    """Whether twice the linear layers take at most half of the room for sampling, the rest of which keys and values
    get."""
    return 4 * linear_bytes <= room


class PackedLinears:
    """Context manager in which the linear layers of a module use copies of their weights, if these fit: prepacked on a
    CPU; on a GPU those that are merged with an adapter or were quantized.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        layers = linear_layers(module) if copies_fit(module) else []
        on_gpu = module.device.type == "cuda"
        self.packed = {
            layer: PackedLinear(layer)
            for layer in layers
            if (is_adapted(layer) or is_quantized(layer) if on_gpu else packs(stored(base_of(layer))))
        }

    def __enter__(self) -> None:
        for layer, packed in self.packed.items():
            layer.forward = packed  # type: ignore[assignment]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for layer in self.packed:
            del layer.forward


class PackedLayer:
    """The modules of a layer, and its linear layers, by default with prepacked weights."""

    def __init__(self, layer: Any, linear: type[PackedLinear | SeparateLinears] = PackedLinear) -> None:
        self.modules = modules = LayerModules.of(layer)
        self.qkv = linear(*modules.qkv)
        self.output = linear(modules.output)
        self.gate_up = linear(*modules.gate_up)
        self.down = linear(modules.down)


def packed_layers(module: PreTrainedModel) -> list[PackedLayer]:
    """The layers of a Llama-like model, with copies of their weights if these fit."""
    linear = PackedLinear if copies_fit(module) else SeparateLinears
    return [PackedLayer(layer, linear) for layer in cast(Any, module.base_model).layers]


class LlamaLayers:
    """All layers and the output layer. The layout computes attention and stores keys and values."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.layers = packed_layers(module)
        self.norm = self.base.norm.weight.detach()
        self.head = PackedLinear(module.get_output_embeddings())  # type: ignore[arg-type]
        self.heads = Heads.of(module)
        self.exact = torch.promote_types(module.dtype, torch.float32)
        self.epsilon = torch.tensor(module.config.get_text_config().rms_norm_eps, dtype=self.exact)

    def __call__(self, tokens_R: Tensor, positions_R: Tensor, layout: Layout) -> Tensor:
        """logits_RV of the next tokens."""
        residual_RW = self.base.embed_tokens(tokens_R).to(self.exact)
        angles = self._angles(residual_RW, positions_R)
        for number, layer in enumerate(self.layers):
            normed_RW = self._normalise(residual_RW, layer.modules.input_norm)
            query, key, value = self._queries_keys_values(layer, normed_RW, *angles)
            attended_RHD = layout.attend(number, query, key, value, self.heads.width**-0.5)
            residual_RW += layer.output(attended_RHD.flatten(1))
            gate, up = layer.gate_up(self._normalise(residual_RW, layer.modules.inner_norm)).chunk(2, dim=1)
            residual_RW += layer.down(F.silu(gate).mul_(up))
        return self.head(self._normalise(residual_RW, self.norm))

    def _angles(self, residual_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, 2, D / 2] of the rotary embeddings (arXiv 2104.09864, eq. 34) for both halves of a
        head. The sines of the first half are negated."""
        angles = self.base.rotary_emb(residual_RW, positions_R[None])
        cosine, sine = (part[0].to(self.norm.dtype).unflatten(1, (1, 2, -1)) for part in angles)
        return cosine, torch.cat([-sine[:, :, :1], sine[:, :, 1:]], dim=2)

    def _queries_keys_values(
        self, layer: PackedLayer, normed_RW: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries [H, R, D], keys [K, R, D] and values [K, R, D], with rotary embeddings on queries and keys."""
        heads = self.heads
        parts_RHD = layer.qkv(normed_RW).unflatten(1, (-1, heads.width))
        rotary, value = parts_RHD.split([heads.queries + heads.keys, heads.keys], dim=1)
        if layer.modules.query_norm is not None and layer.modules.key_norm is not None:
            query, key = rotary.split([heads.queries, heads.keys], dim=1)
            norms = self._normalise(query, layer.modules.query_norm), self._normalise(key, layer.modules.key_norm)
            rotary = torch.cat(norms, dim=1)
        halves = rotary.unflatten(2, (2, -1))
        rotated = torch.addcmul(halves * cosine, halves.roll(1, dims=2), sine).flatten(2)
        query, key = rotated.split([heads.queries, heads.keys], dim=1)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (arXiv 1910.07467, eq. 4): weight * x / rms(x), rounded once to the dtype of the weight."""
        x = x.to(self.exact)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(weight.dtype)


# ---- rows with slots ----

# Of decoders with covey's kernels. A row has a slot in the KV cache of completions and a pointer to the KV cache of its
# prompt. Rows may be at different positions. A row can be removed without copies, and its slot is free for a new
# row, so a long completion does not block the rest of the batch. A parked row has its slot, but takes no part in steps
# until it is brought back. Because tokens are only appended, it may share the slot with rows that go on.
#
# Shapes: S prompts, P prompt tokens, R rows, N tokens of all rows, K key-value heads, D head width, V vocabulary.


@dataclass(frozen=True)
class SharedPrompt:
    """Keys and values of a prompt in the layout of the kernels."""

    keys: Tensor  # [layers, K, padded P * padded D]
    values: Tensor  # [layers, K, padded P * padded D]
    length: int


@dataclass(frozen=True, eq=False)
class ParkedRow:
    """A row outside of the batch, with its keys and values."""

    prompt: SharedPrompt
    slot: int
    decoded: int  # number of own tokens


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A copy of a row's keys and values, which stays when the decoder is gone."""

    prompt: SharedPrompt
    keys: Tensor  # of its own tokens, [layers, K, padded tokens * padded D]
    values: Tensor
    decoded: int  # number of own tokens

    @property
    def own_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt, which other rows may share."""
        return self.prompt.keys.nbytes + self.prompt.values.nbytes


class SlotDecoder(ABC):
    """Decoder whose rows share their prompts' keys and values; implements `Decoder`.

    Decoders of conversations are of this class: they can `extend` rows by the tokens of replies, and park them.
    """

    compact_threshold = 0.0  # the removal of a row needs no copy
    can_fork = True
    block = 1
    padding: int  # the kernels pad D and the tokens of a row to multiples of it

    def __init__(
        self, module: PreTrainedModel, kernels: Any, rows: int, max_new_tokens: int, chunk: int, further_slots: int = 0
    ) -> None:
        """
        Args:
            module, kernels: a Llama-like model and the kernels for its dtype.
            rows: R, parked ones included.
            max_new_tokens: number of own tokens that rows have room for at first.
            chunk: maximal number of tokens that are fed at once, at least R.
            further_slots: number of slots that no row gets.
        """
        self.module, self.kernels, self.chunk = module, kernels, chunk
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.heads = Heads.of(module)
        self.epsilon: float = module.config.get_text_config().rms_norm_eps
        self.capacity = self._padded(max_new_tokens)
        own = len(self.base.layers), rows + further_slots, self.heads.keys, self._numbers(max_new_tokens)
        self.own_keys, self.own_values = (
            in_huge_pages(torch.empty(own, dtype=module.dtype, device=module.device)) for _ in range(2)
        )
        self.free = list(range(rows))[::-1]
        self.prompts: list[SharedPrompt] = []  # of every row
        self.slots_R = torch.empty(0, dtype=torch.int32)
        self.decoded_R = torch.empty(0, dtype=torch.int32)
        self.parked = Counter[int]()  # number of parked rows in each slot
        self._update_prompt_pointers()

    def free_rows(self) -> int:
        return len(self.free)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
        logits: list[Tensor] = []
        for hidden_SW, layout in prefill_parts(self.module, prompts, common):
            for prompt, length in enumerate(layout.prompt_lengths):
                keys, values = hidden_SW.new_empty(2, len(layout.keys), self.heads.keys, self._numbers(length))
                shared = SharedPrompt(keys, values, length)
                for layer, (key_KSPD, value_KSPD) in enumerate(zip(layout.keys, layout.values, strict=True)):
                    key, value = (part[:, prompt, :length].contiguous() for part in (key_KSPD, value_KSPD))
                    self.kernels.store_prompt_kv(key, value, shared.keys[layer], shared.values[layer])
                self._append([shared] * group_size, [self.free.pop() for _ in range(group_size)], 0)
            logits.append(self.head(hidden_SW))
        return torch.cat(logits)

    @abstractmethod
    def head(self, hidden_RW: Tensor) -> Tensor:
        """logits_RV from the output of the last norm."""

    @abstractmethod
    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; returns logits_RV of the next token."""

    @abstractmethod
    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feed one or more tokens to every row; returns logits_RV of the token after the last."""

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        chosen, slots = rows.tolist(), self.slots_R[rows].tolist()
        self.free += sorted(set(self.slots_R.tolist()) - set(slots) - self.parked.keys(), reverse=True)
        self.prompts = [self.prompts[row] for row in chosen]
        self.decoded_R = self.decoded_R[rows]
        for row in range(1, len(chosen)):
            if chosen[row] == chosen[row - 1]:
                slots[row] = self.free.pop()
                self._copy(slots[row - 1], slots[row], int(self.decoded_R[row]))
        self.slots_R = torch.tensor(slots, dtype=torch.int32)
        self._update_prompt_pointers()

    def park(self, row: int) -> ParkedRow:
        """Keep the keys and values of a row, also if `select` removes it from the batch; repeated calls are counted."""
        slot = int(self.slots_R[row])
        self.parked[slot] += 1
        return ParkedRow(self.prompts[row], slot, int(self.decoded_R[row]))

    def release(self, row: ParkedRow) -> None:
        """Forget a parked row; its slot is free if no other row has it."""
        if not self._unpark(row):
            self.free.append(row.slot)

    @torch.inference_mode()
    def bring_back(self, row: ParkedRow) -> None:
        """Append a parked row to the batch. It is copied if another row has its slot."""
        slot = row.slot
        if self._unpark(row):
            slot = self.free.pop()
            self._copy(row.slot, slot, row.decoded)
        self._append([row.prompt], [slot], row.decoded)

    @torch.inference_mode()
    def keep(self, row: int) -> KeptRow:
        """A copy of a row."""
        slot, decoded = int(self.slots_R[row]), int(self.decoded_R[row])
        keys, values = (own[:, slot, :, : self._numbers(decoded)].clone() for own in (self.own_keys, self.own_values))
        return KeptRow(self.prompts[row], keys, values, decoded)

    @torch.inference_mode()
    def restore(self, row: KeptRow) -> None:
        """Append a kept row, also one from another decoder, to the batch."""
        slot = self.free.pop()
        self.make_room(row.decoded)
        for own, kept in ((self.own_keys, row.keys), (self.own_values, row.values)):
            own[:, slot, :, : kept.shape[-1]] = kept
        self._append([row.prompt], [slot], row.decoded)

    def make_room(self, tokens: int) -> bool:
        """Give every row room for at least so many own tokens; returns whether tensors were replaced."""
        if tokens <= self.capacity:
            return False
        written = self.own_keys.shape[-1]
        self.capacity = self._padded(max(tokens, 2 * self.capacity))
        for name in ("own_keys", "own_values"):
            old = getattr(self, name)
            new = in_huge_pages(old.new_empty(*old.shape[:-1], self._numbers(self.capacity)))
            new[..., :written] = old
            setattr(self, name, new)
        return True

    def _append(self, prompts: list[SharedPrompt], slots: list[int], decoded: int) -> None:
        """Append rows, each with `decoded` own keys and values in its slot, to the batch."""
        self.prompts += prompts
        self.slots_R = torch.cat([self.slots_R, torch.tensor(slots, dtype=torch.int32)])
        self.decoded_R = torch.cat([self.decoded_R, torch.full((len(slots),), decoded, dtype=torch.int32)])
        self._update_prompt_pointers()

    def _chunks(self, tokens: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Tokens that are fed at once, their rows, the own tokens before each, and where the last ones of rows are.

        Rows may have no token. The tokens are counted as decoded when all chunks have been fed.
        """
        counts_R = torch.tensor([len(of_row) for of_row in tokens])
        self.make_room(int((self.decoded_R + counts_R).max()))
        tokens_N = torch.tensor([token for of_row in tokens for token in of_row], dtype=torch.int64)
        rows_N = torch.arange(len(tokens)).repeat_interleave(counts_R)
        ends_R = counts_R.cumsum(0)
        offsets_N = torch.arange(len(tokens_N)) - (ends_R - counts_R)[rows_N]
        decoded_N = (self.decoded_R[rows_N] + offsets_N).int()
        for begin in range(0, len(tokens_N), self.chunk):
            part = slice(begin, begin + self.chunk)
            last = ends_R[(ends_R > begin) & (ends_R <= begin + self.chunk)] - 1 - begin
            yield tokens_N[part], rows_N[part], decoded_N[part], last
        self.decoded_R += counts_R.int()

    def _unpark(self, row: ParkedRow) -> bool:
        """True if another row has the slot of this parked row, which is none any more."""
        self.parked[row.slot] -= 1
        if self.parked[row.slot]:
            return True
        del self.parked[row.slot]
        return row.slot in self.slots_R.tolist()

    def _copy(self, slot: int, into: int, tokens: int) -> None:
        written = self._numbers(tokens)
        for own in (self.own_keys, self.own_values):
            own[:, into, :, :written] = own[:, slot, :, :written]

    def _padded(self, count: int) -> int:
        return -(-count // self.padding) * self.padding

    def _numbers(self, tokens: int) -> int:
        """Numbers of the keys of so many tokens of a head."""
        return self._padded(tokens) * self._padded(self.heads.width)

    def _update_prompt_pointers(self) -> None:
        """Update the pointers to every row's prompt, and its length, for the kernel."""
        self.keys_R = torch.tensor([shared.keys.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.values_R = torch.tensor([shared.values.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.lengths_R = torch.tensor([shared.length for shared in self.prompts], dtype=torch.int32)
