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
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PREFILL_TOKENS, SeparateLinears, packed_layers
from covey.llm.generation.shared_prefix_decoder import GraphedStep
from covey.llm.generation.slots import SharedPrompt, SlotDecoder
from covey.llm.generation.token_sampling import Drawing, sample_tokens
from covey.llm.model.architecture import Heads
from covey.llm.native.bindings import KernelSet

if TYPE_CHECKING:  # a plan for a GPU is made without Triton too
    from covey.llm.native.triton_kernels import DecodedRows, TritonKernels

BLOCK = 8  # steps between two synchronisations
LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
QUERIES_IN_TILE = 64  # of one key-value head and one prompt
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
        self.head = SeparateLinears(cast(nn.Linear, module.get_output_embeddings()))
        self.graphs: dict[tuple[int, int, Drawing | None], _Graph] = {}

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        graph = self._ready(tokens_R, 1, None)
        logits_CV = graph.step(lambda: self._logits(graph))
        self.decoded_R += 1
        return logits_CV[: len(tokens_R)]

    @torch.inference_mode()
    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        for tokens_N, rows_N, before_N, _ in self._chunks(tokens):
            tiles = self._tiles([self.prompts[row] for row in rows_N.tolist()])
            state = self._new_state(len(tokens_N), len(tiles), len(tiles[0]))
            self._fill(state, rows_N, before_N, tiles)
            self._hidden(state, tokens_N.to(self.device))

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
        return replaced

    def _ready(self, tokens_R: Tensor, steps: int, drawing: Drawing | None) -> _Graph:
        """The graph for the present rows, with their state and room for so many steps."""
        self.make_room(int(self.decoded_R.max()) + steps)
        tiles = self._tiles(self.prompts)
        key = rung(len(self.prompts)), rung(len(tiles)), drawing
        if key not in self.graphs:
            self.graphs[key] = self._new_graph(*key, len(tiles[0]))
        graph = self.graphs[key]
        graph.fed_C[: len(tokens_R)] = tokens_R
        self._fill(graph.state, slice(None), self.decoded_R, tiles)
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

    def _fill(self, state: DecodedRows, rows_N: Tensor | slice, decoded_N: Tensor, tiles: list[list[int]]) -> None:
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
            scaling=heads.width**-0.5, epsilon=self.epsilon,
        )  # fmt: skip

    def _new_graph(self, rows: int, tiles: int, drawing: Drawing | None, tile_rows: int) -> _Graph:
        numbers, end_ids = self._numbers_of, () if drawing is None else drawing.end_ids
        return _Graph(
            self._new_state(rows, tiles, tile_rows), fed_C=numbers(rows, dtype=torch.int64),
            column_1=numbers(1, dtype=torch.int64), lengths_C=numbers(rows, dtype=torch.int64),
            end_ids=torch.tensor(end_ids, dtype=torch.int64, device=self.device),
            uniforms_CN=numbers(rows, BLOCK, dtype=torch.float64), tokens_CN=numbers(rows, BLOCK, dtype=torch.int64),
            logprobs_CN=numbers(rows, BLOCK, dtype=torch.float32), step=GraphedStep(self.device),
        )  # fmt: skip

    def _hidden(self, state: DecodedRows, fed_C: Tensor) -> Tensor:
        """The output of the last norm after the fed tokens, whose keys and values are appended."""
        kernels = self.kernels
        hidden_CW = self.base.embed_tokens(fed_C).float()
        angles = self.base.rotary_emb(hidden_CW, (state.prompt_lengths + state.decoded)[None].long())
        state.cosine, state.sine = (part[0].to(kernels.dtype).contiguous() for part in angles)
        normed_CW = torch.empty_like(hidden_CW, dtype=kernels.dtype)
        added_CW: Tensor | None = None
        for number, layer in enumerate(self.layers):
            parts = layer.modules
            kernels.add_rmsnorm(hidden_CW, added_CW, parts.input_norm, state.epsilon, hidden_CW, normed_CW)
            norms = parts.query_norm, parts.key_norm
            attended_CW = layer.output(kernels.decode_attention(state, number, layer.qkv(normed_CW), norms))
            kernels.add_rmsnorm(hidden_CW, attended_CW, parts.inner_norm, state.epsilon, hidden_CW, normed_CW)
            gate, up = layer.gate_up(normed_CW).chunk(2, dim=1)
            gated = torch.empty_like(gate, memory_format=torch.contiguous_format)
            kernels.swiglu(gate, up, gated)
            added_CW = layer.down(gated)
        norm = self.base.norm.weight.detach()
        kernels.add_rmsnorm(hidden_CW, added_CW, norm, state.epsilon, hidden_CW, normed_CW)
        return normed_CW

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
