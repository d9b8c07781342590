"""Decoder of Llama-like models on a CPU with covey's kernels. `SlotDecoder` has its rows.

All layers and the output layer have weights prepacked for products with few rows. `PackedStack` uses oneDNN's matrix
products and covey's kernels between them, on every processor. `TiledStack` makes one call for the whole step, on
processors with AVX512-BF16 or AMX. Both compute the same up to rounding.

Shapes: S prompts, P prompt tokens, R rows, N tokens of all rows, W hidden width, H heads, K key-value heads,
D head width, V vocabulary; of a linear layer: M outputs, N inputs.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PackedLinear, SlotDecoder, copies_fit, joined, packed_layers
from covey.llm.model.architecture import LayerModules
from covey.llm.native.bindings import PAD, AttentionArgs, DecodeStepArgs, Kernels, Layer, Linear, address_of, padded


class Stack(Protocol):
    """The layers and the output layer, for one new token per row; rows may be at different positions."""

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        """One decoding step.

        Args:
            hidden_RW: embeddings of the tokens, fp32; overwritten.
            args: every kernel argument except the pointers of this step and of its layers.
            own_keys, own_values: KV cache of the completions, [layers, ...].

        Returns:
            logits_RV of the next tokens.
        """

    def head(self, hidden_RW: Tensor) -> Tensor:
        """logits_RV from the output of the last norm."""


def make_stack(module: PreTrainedModel, kernels: Kernels, rows: int, least_rows: int = 1) -> Stack:
    """The fastest layers for this processor, for at most `rows` rows.

    If the number of rows changes their bits, fewer than `least_rows` are padded.
    """
    if kernels.has_avx512_bf16 and copies_fit(module):
        return TiledStack(module, kernels, rows)
    return PackedStack(module, kernels, least_rows)


class PackedStack:
    """Layers with oneDNN's matrix products and covey's kernels; implements `Stack`."""

    def __init__(self, module: PreTrainedModel, kernels: Kernels, least_rows: int = 1) -> None:
        base = cast(Any, module.base_model)
        self.kernels, self.least_rows = kernels, least_rows
        self.layers = packed_layers(module)
        self.norm = base.norm.weight.detach()
        self.linear_head = PackedLinear(module.get_output_embeddings())  # type: ignore[arg-type]

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        kernels, epsilon = self.kernels, args.epsilon
        hidden_RW = self._padded(hidden_RW)
        normed_RW = torch.empty_like(hidden_RW, dtype=kernels.dtype)
        attended = normed_RW.new_zeros(len(hidden_RW), args.heads * args.head_dim)
        args.out, args.out_row_stride = attended.data_ptr(), attended.shape[1]
        added_RW: Tensor | None = None
        for number, layer in enumerate(self.layers):
            parts = layer.modules
            kernels.add_rmsnorm(hidden_RW, added_RW, parts.input_norm, epsilon, hidden_RW, normed_RW)
            qkv = layer.qkv(normed_RW)
            args.layer, args.qkv, args.qkv_row_stride = number, qkv.data_ptr(), qkv.shape[1]
            args.query_norm, args.key_norm = address_of(parts.query_norm), address_of(parts.key_norm)
            args.own_keys, args.own_values = own_keys[number].data_ptr(), own_values[number].data_ptr()
            kernels.decode_attention(args)
            attended_RW = layer.output(attended)
            kernels.add_rmsnorm(hidden_RW, attended_RW, parts.inner_norm, epsilon, hidden_RW, normed_RW)
            gate, up = layer.gate_up(normed_RW).chunk(2, dim=1)
            gated = gate.new_empty(gate.shape)
            kernels.swiglu(gate, up, gated)
            added_RW = layer.down(gated)
        kernels.add_rmsnorm(hidden_RW, added_RW, self.norm, epsilon, hidden_RW, normed_RW)
        return self.linear_head(normed_RW)[: args.rows]

    def head(self, hidden_RW: Tensor) -> Tensor:
        return self.linear_head(self._padded(hidden_RW))[: len(hidden_RW)]

    def _padded(self, hidden_RW: Tensor) -> Tensor:
        return nn.functional.pad(hidden_RW, (0, 0, 0, max(self.least_rows - len(hidden_RW), 0)))


class TiledStack:
    """All layers in one kernel call, with prepacked weights; implements `Stack`."""

    def __init__(self, module: PreTrainedModel, kernels: Kernels, rows: int) -> None:
        base = cast(Any, module.base_model)
        self.kernels = kernels
        self.referenced: list[Tensor] = []  # tensors whose addresses the kernels use; keeps them in memory
        self.layers = (Layer * len(base.layers))(*(self._layer(LayerModules.of(layer)) for layer in base.layers))
        self.linear_head = self._linear(*joined(module.get_output_embeddings()))  # type: ignore[arg-type]
        first = self.layers[0]
        sizes = [first.qkv.inputs, first.qkv.outputs, first.output.inputs, first.down.inputs]
        self.buffers = [torch.zeros(-(-rows // 16) * 16, padded(size), dtype=kernels.dtype) for size in sizes]
        self.norm = base.norm.weight.detach()

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        logits_RV = hidden_RW.new_empty(len(hidden_RW), self.linear_head.outputs, dtype=self.kernels.dtype)
        normed, qkv, attended, gated = self.buffers
        args.qkv, args.qkv_row_stride = qkv.data_ptr(), qkv.shape[1]
        args.out, args.out_row_stride = attended.data_ptr(), attended.shape[1]
        args.own_keys, args.own_values = own_keys.data_ptr(), own_values.data_ptr()
        self.kernels.decode_step(
            DecodeStepArgs(
                layers=self.layers, layer_count=len(self.layers), norm=self.norm.data_ptr(), head=self.linear_head,
                attention=args, own_layer_stride=own_keys.stride(0), hidden=hidden_RW.data_ptr(),
                normed=normed.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr(), gated=gated.data_ptr(),
                logits=logits_RV.data_ptr(),
            )
        )  # fmt: skip
        return logits_RV

    def head(self, hidden_RW: Tensor) -> Tensor:
        rows, width = hidden_RW.shape
        padding = (0, padded(width) - width, 0, padded(rows) - rows)
        return self.kernels.linear(nn.functional.pad(hidden_RW, padding), self.linear_head)[:rows]

    def _layer(self, parts: LayerModules) -> Layer:
        norms = {name: getattr(parts, name) for name in ("input_norm", "query_norm", "key_norm", "inner_norm")}
        self.referenced += [norm for norm in norms.values() if norm is not None]
        weight, bias = joined(*parts.gate_up)
        return Layer(
            **{name: address_of(norm) for name, norm in norms.items()},
            qkv=self._linear(*joined(*parts.qkv)),
            output=self._linear(*joined(parts.output)),
            gate_up=self._linear(_interleave(weight), None if bias is None else _interleave(bias)),
            down=self._linear(*joined(parts.down)),
        )

    def _linear(self, weight_MN: Tensor, bias_M: Tensor | None) -> Linear:
        outputs, inputs = weight_MN.shape
        tiles = self.kernels.prepack_weight(weight_MN.contiguous())
        self.referenced.append(tiles)
        if bias_M is not None:
            bias_M = nn.functional.pad(bias_M, (0, padded(outputs) - outputs))
            self.referenced.append(bias_M)
        return Linear(weight=tiles.data_ptr(), bias=address_of(bias_M), outputs=outputs, inputs=inputs)


def _interleave(joined_halves: Tensor) -> Tensor:
    """Interleave the two halves of the first dimension in blocks of PAD / 2; both are padded with zeros."""
    parts = joined_halves.unflatten(0, (2, -1))
    missing = -parts.shape[1] % (PAD // 2)
    parts = nn.functional.pad(parts, (*(0, 0) * (parts.dim() - 2), 0, missing))
    return parts.unflatten(1, (-1, PAD // 2)).transpose(0, 1).flatten(0, 2)


# Matrix products of fewer rows are computed in another order.
LEAST_ROWS = 8


def capacity(max_new_tokens: int) -> int:
    """Number of own tokens that a row has room for."""
    return padded(max_new_tokens)


def cache_bytes(token_bytes: int, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
    """Bytes of the keys and values of all rows and of their prompts.

    The padding of heads and prompts is not counted, so the number is exact if D and `prompt_tokens` are multiples of
    `PAD`.

    Args:
        token_bytes: of one token, see `decoder.token_bytes`.
        rows: R.
        max_new_tokens: limit of a row.
        prompts, prompt_tokens: S and P.
    """
    return token_bytes * (rows * capacity(max_new_tokens) + prompts * prompt_tokens)


class NativeDecoder(SlotDecoder):
    """`SlotDecoder` on a CPU."""

    padding = PAD

    def __init__(
        self, module: PreTrainedModel, kernels: Kernels, rows: int, max_new_tokens: int, chunk: int | None = None
    ) -> None:
        """As of `SlotDecoder`.

        With a `chunk` larger than `rows`, the bits of a row do not depend on the number of other rows. None: `extend`
        is not used.
        """
        super().__init__(module, kernels, rows, max_new_tokens, max(rows, chunk or 0))
        self.stack = make_stack(module, kernels, self.chunk, LEAST_ROWS if chunk else 1)

    def head(self, hidden_RW: Tensor) -> Tensor:
        return self.stack.head(hidden_RW)

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        self.make_room(int(self.decoded_R.max()) + 1)
        logits_RV = self._feed(tokens_R, slice(None), self.decoded_R)
        self.decoded_R += 1
        return logits_RV

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        chunks = self._chunks(tokens)
        return torch.cat([self._feed(tokens_N, rows_N, before_N)[last] for tokens_N, rows_N, before_N, last in chunks])

    def _feed(self, tokens_N: Tensor, rows_N: Tensor | slice, decoded_N: Tensor) -> Tensor:
        """logits_NV after tokens of these rows, each of which has `decoded_N` own tokens before it."""
        lengths, slots = self.lengths_R[rows_N], self.slots_R[rows_N]
        keys, values = self.keys_R[rows_N], self.values_R[rows_N]
        hidden_RW = self.base.embed_tokens(tokens_N).float()
        angles = self.base.rotary_emb(hidden_RW, (lengths + decoded_N)[None].long())
        cosine, sine = (part.to(self.kernels.dtype).contiguous() for part in angles)
        args = AttentionArgs(
            cosine=cosine.data_ptr(), sine=sine.data_ptr(), prompt_keys=keys.data_ptr(),
            prompt_values=values.data_ptr(), prompt_lengths=lengths.data_ptr(),
            slots=slots.data_ptr(), decoded=decoded_N.data_ptr(),
            rows=len(tokens_N), heads=self.heads.queries, kv_heads=self.heads.keys, head_dim=self.heads.width,
            capacity=self.capacity, threads=torch.get_num_threads(), scaling=self.heads.width**-0.5,
            epsilon=self.epsilon,
        )  # fmt: skip
        return self.stack.step(hidden_RW, args, self.own_keys, self.own_values)
