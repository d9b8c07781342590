"""Decoder of Llama-like models on a GPU: several steps, with the drawing of their tokens, between two synchronisations.

A step is one CUDA graph: all layers, the output layer and the draw, which writes the tokens that the next step feeds.
The processor launches it BLOCK times and then reads the tokens of all rows at once. A row that ends within a block is
computed until its end, and what it draws is discarded: the row is parked with the tokens before its end, and the next
ones take the places of those after it.

`SlotDecoder` describes the rows. A graph is for a number of rows of LADDER; further rows of it are without effect.
Tokens of replies are fed as if each were a row: tokens of a row have one slot, where all are appended before any of
them attends to those before it. The last one is fed by the next step.

Shapes: R rows, C rows of a graph, N steps or tokens of all rows, W hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import (
    PREFILL_TOKENS,
    PackedLayer,
    SeparateLinears,
    SharedPrompt,
    SlotDecoder,
    packed_layers,
)
from covey.llm.generation.shared_prefix_decoder import GraphedStep
from covey.llm.generation.token_sampling import Drawing, sample_tokens
from covey.llm.model.architecture import FAMILIES, Heads, LayerModules, embedding_scale, logit_scale, norm_scale
from covey.llm.native.bindings import KernelSet

if TYPE_CHECKING:  # a plan for a GPU is made without Triton too
    from covey.llm.native.triton_kernels import DecodedRows, TritonKernels

BLOCK = 8  # steps between two synchronisations
LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
QUERIES_IN_TILE = 64  # of one key-value head and one prompt
FEED, LOGITS = "feed", "logits"  # what a graph is for, besides drawing
Use = Drawing | str
PROGRAMS, MOST_PARTS = 512, 16  # of a layer's attention, at least, so that few rows occupy the whole device


def rows_of_tile(heads: Heads) -> int:
    """Number of rows that read the keys of their prompt together: they have QUERIES_IN_TILE queries of a key."""
    return max(QUERIES_IN_TILE * heads.keys // heads.queries, 1)


class GraphDecoder(SlotDecoder):
    """`SlotDecoder` on a GPU; implements `DrawingDecoder`."""

    block = BLOCK
    padding = 1

    def __init__(self, module: PreTrainedModel, kernels: TritonKernels, rows: int, max_new_tokens: int) -> None:
        # One slot more, for the rows of a graph that are without effect, and room for what a block draws past the end.
        chunk = max(rows, PREFILL_TOKENS["cuda"])
        super().__init__(module, kernels, rows, max_new_tokens + BLOCK, chunk, further_slots=1)
        self.device = module.device
        self.layers = packed_layers(module)
        self.norm = norm_scale(self.base.norm, FAMILIES[module.config.get_text_config().model_type].offset).detach()
        self.embedding_scale, self.logit_scale = embedding_scale(module), logit_scale(module)
        self.linear_head = SeparateLinears(cast(nn.Linear, module.get_output_embeddings()))
        self.graphs: dict[tuple[int, int, Use], _Graph] = {}
        self.pool = self._new_pool()

    def head(self, hidden_RW: Tensor) -> Tensor:
        logits_RV = self.linear_head(hidden_RW)
        return logits_RV if self.logit_scale == 1.0 else logits_RV / self.logit_scale

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        graph = self._ready(tokens_R, 1, LOGITS)
        logits_CV = graph.step(lambda: self._logits(graph))
        self.decoded_R += 1
        return logits_CV[: len(tokens_R)]

    @torch.inference_mode()
    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        for tokens_N, rows_N, before_N, _ in self._chunks(tokens):
            graph = self._graph_of(tokens_N, rows_N, before_N, FEED)
            graph.step(partial(self._hidden, graph.state, graph.fed_C))

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self.feed([of_row[:-1] for of_row in tokens])
        return self.step(torch.tensor([of_row[-1] for of_row in tokens]))

    @torch.inference_mode()
    def draw(
        self, tokens_R: Tensor, uniforms_RN: NDArray[np.float64], lengths_R: NDArray[np.int64], drawing: Drawing
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        rows, steps = uniforms_RN.shape
        graph = self._ready(tokens_R, steps, drawing)
        graph.column_1.zero_()
        graph.lengths_C[:rows] = torch.from_numpy(lengths_R)
        graph.uniforms_CN[:rows, :steps] = torch.from_numpy(uniforms_RN)
        for _ in range(steps):
            graph.step(lambda: self._draw(graph, drawing))
        found = torch.stack([graph.tokens_CN.double(), graph.logprobs_CN.double()])  # read at once; both are exact
        tokens_NR, logprobs_NR = found[:, :rows, :steps].cpu().numpy().swapaxes(1, 2)
        for tokens_of_step, logprobs_of_step in zip(tokens_NR.astype(np.int64), logprobs_NR, strict=True):
            self.decoded_R += 1
            yield tokens_of_step, logprobs_of_step

    def make_room(self, tokens: int) -> bool:
        if replaced := super().make_room(tokens):
            self.graphs.clear()  # they have the addresses of the tensors before
            self.pool = self._new_pool()  # one without a graph may not be used again
        return replaced

    def _new_pool(self) -> Any:
        """Memory of all graphs: they run one after another, and what they leave is in tensors outside of it, but for
        logits, which are read before the next one runs."""
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _ready(self, tokens_R: Tensor, steps: int, use: Use) -> _Graph:
        """The graph for the present rows, with their state and room for so many steps."""
        self.make_room(int(self.decoded_R.max()) + steps)
        return self._graph_of(tokens_R, torch.arange(len(self.prompts)), self.decoded_R, use)

    def _graph_of(self, tokens_N: Tensor, rows_N: Tensor, before_N: Tensor, use: Use) -> _Graph:
        """The graph that feeds tokens of these rows, each with so many own tokens before it.

        More than LADDER holds are fed once, because a graph for every number of them would seldom run again.
        """
        tiles = self._tiles([self.prompts[row] for row in rows_N.tolist()])
        key = rung(len(tokens_N)), rung(len(tiles)), use
        graph = self.graphs.get(key)
        if graph is None:
            graph = self._new_graph(*key, len(tiles[0]))
            if use != FEED or len(tokens_N) <= LADDER[-1]:
                self.graphs[key] = graph
        graph.fed_C[: len(tokens_N)] = tokens_N
        self._fill(graph.state, rows_N, before_N, tiles)
        return graph

    def _tiles(self, prompts: list[SharedPrompt]) -> list[list[int]]:
        """Rows of each tile: those that share a prompt."""
        of_prompt: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            of_prompt.setdefault(id(prompt), []).append(row)
        rows = rows_of_tile(self.heads)
        return [
            [*members[begin : begin + rows], *[-1] * (rows - len(members[begin : begin + rows]))]
            for members in of_prompt.values()
            for begin in range(0, len(members), rows)
        ]

    def _fill(self, state: DecodedRows, rows_N: Tensor, decoded_N: Tensor, tiles: list[list[int]]) -> None:
        """Write the state of rows with so many own tokens; further rows have a slot of their own and no prompt."""
        missing = len(state.slots) - len(decoded_N)
        for target, values_N, filling in (
            (state.prompt_keys, self.keys_R[rows_N], 0),
            (state.prompt_values, self.values_R[rows_N], 0),
            (state.prompt_lengths, self.lengths_R[rows_N], 0),
            (state.slots, self.slots_R[rows_N], self.own_keys.shape[1] - 1),
            (state.decoded, decoded_N, 0),
        ):
            target.copy_(F.pad(values_N, (0, missing), value=filling))
        state.tiles.copy_(torch.tensor(tiles + [[-1] * len(tiles[0])] * (len(state.tiles) - len(tiles))))

    def _numbers_of(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _new_state(self, rows: int, tiles: int, tile_rows: int) -> DecodedRows:
        from covey.llm.native.triton_kernels import DecodedRows

        heads, numbers = self.heads, self._numbers_of
        parts = [min(max(PROGRAMS // (count * heads.keys), 1), MOST_PARTS) for count in (tiles, rows)]
        return DecodedRows(
            shape=(heads.queries, heads.keys, heads.width), own_keys=self.own_keys, own_values=self.own_values,
            prompt_keys=numbers(rows, dtype=torch.int64), prompt_values=numbers(rows, dtype=torch.int64),
            prompt_lengths=numbers(rows), slots=numbers(rows), decoded=numbers(rows), tiles=numbers(tiles, tile_rows),
            cosine=self.own_keys, sine=self.own_keys, parts=(parts[0], parts[1]), capacity=self.capacity,
            epsilon=self.epsilon,
        )  # fmt: skip

    def _new_graph(self, rows: int, tiles: int, use: Use, tile_rows: int) -> _Graph:
        numbers, end_ids = self._numbers_of, use.end_ids if isinstance(use, Drawing) else ()
        return _Graph(
            self._new_state(rows, tiles, tile_rows), fed_C=numbers(rows, dtype=torch.int64),
            column_1=numbers(1, dtype=torch.int64), lengths_C=numbers(rows, dtype=torch.int64),
            end_ids=torch.tensor(end_ids, dtype=torch.int64, device=self.device),
            uniforms_CN=numbers(rows, BLOCK, dtype=torch.float64), tokens_CN=numbers(rows, BLOCK, dtype=torch.int64),
            logprobs_CN=numbers(rows, BLOCK, dtype=torch.float32), step=GraphedStep(self.device, self.pool),
        )  # fmt: skip

    def _hidden(self, state: DecodedRows, fed_C: Tensor) -> Tensor:
        """The output of the last norm after the fed tokens, whose keys and values are appended."""
        kernels = self.kernels
        embedded_CW = self.base.embed_tokens(fed_C)
        hidden_CW = (embedded_CW if self.embedding_scale == 1.0 else embedded_CW * self.embedding_scale).float()
        angles = self._angles(hidden_CW, state.prompt_lengths + state.decoded)
        normed_CW = torch.empty_like(hidden_CW, dtype=kernels.dtype)
        added_CW: Tensor | None = None
        for number, layer in enumerate(self.layers):
            parts = layer.modules
            self._add_and_normalise(hidden_CW, added_CW, parts.input_norm, normed_CW)
            state.cosine, state.sine = angles[parts.rule.rotates, parts.rule.angles]
            attended_CX = kernels.decode_attention(state, number, parts.rule, *self._normed_heads(layer, normed_CW))
            added_CW = self._added(layer.output(attended_CX), parts.attention_norm, parts)
            self._add_and_normalise(hidden_CW, added_CW, parts.inner_norm, normed_CW)
            gate, up = layer.gate_up(normed_CW).chunk(2, dim=1)
            gated = torch.empty_like(gate, memory_format=torch.contiguous_format)
            (kernels.geglu if parts.is_gelu else kernels.swiglu)(gate, up, gated)
            added_CW = self._added(layer.down(gated), parts.mlp_norm, parts)
        self._add_and_normalise(hidden_CW, added_CW, self.norm, normed_CW)
        return normed_CW

    def _angles(self, hidden_CW: Tensor, positions_C: Tensor) -> dict[tuple[bool, str], tuple[Tensor, Tensor]]:
        """Cosines and sines [C, D] of each kind of layer: whether it rotates, and by which rotary embeddings."""
        kinds, several = {layer.modules.rule for layer in self.layers}, hasattr(self.base.rotary_emb, "layer_types")
        found = {}
        for rotates, kind in {(rule.rotates, rule.angles) for rule in kinds}:
            angles = self.base.rotary_emb(hidden_CW, positions_C[None].long(), *([kind] if several else []))
            cosine, sine = (part[0].to(self.kernels.dtype).contiguous() for part in angles)
            found[rotates, kind] = (cosine, sine) if rotates else (torch.ones_like(cosine), torch.zeros_like(sine))
        return found

    def _add_and_normalise(self, hidden: Tensor, added: Tensor | None, norm: Tensor | None, normed: Tensor) -> None:
        """hidden += added; normed = the norm of it, or its rounded numbers without one."""
        if norm is not None:
            self.kernels.add_rmsnorm(hidden, added, norm, self.epsilon, hidden, normed)
            return
        if added is not None:
            hidden += added
        normed.copy_(hidden)

    def _added(self, x: Tensor, norm: Tensor | None, parts: LayerModules) -> Tensor:
        """What a layer adds to the residual stream."""
        x = x if norm is None else self.kernels.rmsnorm(x, norm, self.epsilon)[0]
        return x if parts.residual_scale == 1.0 else x * parts.residual_scale

    def _normed_heads(
        self, layer: PackedLayer, normed_CW: Tensor
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Queries, keys and values, after norms over all heads, and the norms of each head that are left."""
        heads, qkv, norms = self.heads, layer.qkv(normed_CW), (layer.modules.query_norm, layer.modules.key_norm)
        if norms[0] is None or norms[1] is None or len(norms[0]) == heads.width:
            return qkv, norms
        query, key, value = qkv.split([count * heads.width for count in (heads.queries, heads.keys, heads.keys)], dim=1)
        both = zip((query, key), norms, strict=True)
        normed = [self.kernels.rmsnorm(x.contiguous(), norm, self.epsilon)[0] for x, norm in both]
        return torch.cat([*normed, value], dim=1), (None, None)

    def _logits(self, graph: _Graph) -> Tensor:
        """logits_CV of the token after the fed ones."""
        normed_CW = self._hidden(graph.state, graph.fed_C)
        graph.state.decoded += 1
        return self.head(normed_CW)

    def _draw(self, graph: _Graph, drawing: Drawing) -> Tensor:
        """Draw the next tokens into the present column, and have them fed."""
        logits_CV, truncation = self._logits(graph), drawing.truncation
        if truncation.restricts(0):
            logits_CV = truncation.apply(logits_CV, graph.lengths_C, graph.end_ids, drawing.temperature)
        uniforms_C = graph.uniforms_CN.index_select(1, graph.column_1)[:, 0]
        kernels = KernelSet({self.kernels.dtype: self.kernels}, self.device.type)
        tokens_C, logprobs_C = sample_tokens(logits_CV, uniforms_C, drawing.temperature, kernels)
        graph.fed_C.copy_(tokens_C)
        graph.tokens_CN.index_copy_(1, graph.column_1, tokens_C[:, None])
        graph.logprobs_CN.index_copy_(1, graph.column_1, logprobs_C[:, None])
        graph.column_1 += 1
        graph.lengths_C += 1
        return graph.fed_C


@dataclass
class _Graph:
    """The tensors of a step with C rows, which its CUDA graph finds in place."""

    state: DecodedRows
    fed_C: Tensor  # the last token of each row
    column_1: Tensor  # of the next drawn token
    lengths_C: Tensor  # tokens of the completion of each row
    end_ids: Tensor  # token ids that end a completion
    uniforms_CN: Tensor
    tokens_CN: Tensor
    logprobs_CN: Tensor
    step: GraphedStep


def rung(count: int) -> int:
    """The number of LADDER that holds so many; beyond it, a multiple of its last one."""
    return next((size for size in LADDER if size >= count), -(-count // LADDER[-1]) * LADDER[-1])
