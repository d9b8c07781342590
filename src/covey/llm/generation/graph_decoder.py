"""Decoder of Llama-like models on a GPU: several steps, with the drawing of their tokens, between two synchronisations.

A step is one CUDA graph: all layers, the output layer and the draw, which writes the tokens that the next step feeds.
The processor launches it BLOCK times and then reads the tokens of all rows at once. A row that ends within a block is
computed until its end, and what it draws is discarded.

Rows have slots for their own keys and values and the address of their prompt's, so they are at different positions,
end without copies, and new ones are admitted while others go on. A graph is for a number of rows of LADDER; further
rows of it are without effect.

Shapes: S prompts, P prompt tokens, R rows, C rows of a graph, N steps, H heads, K key-value heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PackedLayer, PackedLinear, SeparateLinears, linear_layers, prefill
from covey.llm.generation.shared_prefix_decoder import GraphedStep
from covey.llm.model.architecture import Heads

if TYPE_CHECKING:  # a plan for a GPU is made without Triton too
    from covey.llm.native.triton_kernels import DecodedRows, TritonKernels

BLOCK = 8  # steps between two synchronisations
LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
QUERIES_IN_TILE = 64  # of one key-value head and one prompt
PREFILL_TOKENS = 16384  # prompt tokens of a forward pass
PROGRAMS, MOST_PARTS = 512, 16  # of a layer's attention, at least, so that few rows occupy the whole device


@dataclass(frozen=True)
class _Prompt:
    """Keys and values of a prompt, [layers, K, P, D]."""

    keys: Tensor
    values: Tensor
    length: int


class GraphDecoder:
    """Decoder whose rows share their prompts' keys and values; implements `Decoder`."""

    compact_threshold = 0.0  # the removal of a row needs no copy
    can_fork = False
    block = BLOCK

    def __init__(self, module: PreTrainedModel, kernels: TritonKernels, rows: int, max_new_tokens: int) -> None:
        self.module, self.kernels, self.device = module, kernels, module.device
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.heads = Heads.of(module)
        self.epsilon: float = module.config.get_text_config().rms_norm_eps
        # One slot more, for the rows of a graph that are without effect, and room for what a block draws past the end.
        own = len(self.base.layers), rows + 1, self.heads.keys, max_new_tokens + BLOCK, self.heads.width
        self.own_keys, self.own_values = (torch.zeros(own, dtype=module.dtype, device=self.device) for _ in range(2))
        linear = PackedLinear if copies_fit(module) else SeparateLinears
        self.layers = [PackedLayer(layer, linear) for layer in self.base.layers]
        self.head = SeparateLinears(cast(nn.Linear, module.get_output_embeddings()))
        self.free = list(range(rows))[::-1]
        self.prompts: list[_Prompt] = []  # of every row
        self.slots: list[int] = []
        self.decoded: list[int] = []
        self.graphs: dict[tuple[int, int], _Graph] = {}

    def free_rows(self) -> int:
        return len(self.free)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int, common: int | None = None) -> Tensor:
        logits = []
        for part in _parts_of(prompts, PREFILL_TOKENS):
            hidden_SW, layout = prefill(self.module, part, common)
            for prompt, length in enumerate(layout.prompt_lengths):
                of_layers = (layout.keys, layout.values)
                keys, values = (torch.stack([one[:, prompt, :length] for one in each]) for each in of_layers)
                self.append(keys, values, group_size)
            logits.append(self.head(hidden_SW))
        return torch.cat(logits)

    def append(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """Append rows that share the keys and values of a prompt, [layers, K, P, D], to the batch."""
        self.prompts += [_Prompt(keys, values, keys.shape[2])] * rows
        self.slots += [self.free.pop() for _ in range(rows)]
        self.decoded += [0] * rows

    def select(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self.free += sorted(set(self.slots) - {self.slots[row] for row in kept}, reverse=True)
        self.prompts, self.slots, self.decoded = (
            [values[row] for row in kept] for values in (self.prompts, self.slots, self.decoded)
        )

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        graph = self._ready(tokens_R)
        logits_CV = graph.step(lambda: self._logits(graph))
        self.decoded = [tokens + 1 for tokens in self.decoded]
        return logits_CV[: len(self.slots)]

    @torch.inference_mode()
    def draw(
        self, tokens_R: Tensor, uniforms_RN: NDArray[np.float64], temperature: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Feed the tokens, and draw N tokens for every row; returns them and their log-probabilities, [R, N].

        A row whose logits are not finite has log-probabilities that are not a number.
        """
        graph, (rows, steps) = self._ready(tokens_R), uniforms_RN.shape
        graph.uniforms_CN[:rows, :steps] = torch.from_numpy(uniforms_RN).to(self.device)
        for _ in range(steps):
            graph.drawing_step(lambda: self._draw(graph, temperature))
        self.decoded = [tokens + steps for tokens in self.decoded]
        found = torch.stack([graph.tokens_CN.double(), graph.logprobs_CN.double()])  # read at once; both are exact
        tokens_RN, logprobs_RN = found[:, :rows, :steps].cpu().numpy()
        return tokens_RN.astype(np.int64), logprobs_RN

    def _ready(self, tokens_R: Tensor) -> _Graph:
        """The graph for the present rows, with their state; the others have a slot of their own and no prompt."""
        tiles = _tiles(self.prompts, max(QUERIES_IN_TILE * self.heads.keys // self.heads.queries, 1))
        rows, most_tiles = rung(len(self.slots)), rung(len(tiles))
        if (rows, most_tiles) not in self.graphs:
            self.graphs[rows, most_tiles] = self._new_graph(rows, most_tiles, len(tiles[0]))
        graph, missing = self.graphs[rows, most_tiles], rows - len(self.slots)
        graph.fed_C[: len(tokens_R)] = tokens_R
        graph.column_1.zero_()
        state = graph.state
        for target, values, filling in (
            (state.prompt_keys, [prompt.keys.data_ptr() for prompt in self.prompts], 0),
            (state.prompt_values, [prompt.values.data_ptr() for prompt in self.prompts], 0),
            (state.prompt_lengths, [prompt.length for prompt in self.prompts], 0),
            (state.slots, self.slots, self.own_keys.shape[1] - 1),
            (state.decoded, self.decoded, 0),
        ):
            target.copy_(torch.tensor([*values, *[filling] * missing]))
        state.tiles.copy_(torch.tensor(tiles + [[-1] * len(tiles[0])] * (most_tiles - len(tiles))))
        return graph

    def _new_graph(self, rows: int, tiles: int, tile_rows: int) -> _Graph:
        from covey.llm.native.triton_kernels import DecodedRows

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        heads, fed_C = self.heads, numbers(rows, dtype=torch.int64)
        parts = [min(max(PROGRAMS // (count * heads.keys), 1), MOST_PARTS) for count in (tiles, rows)]
        state = DecodedRows(
            shape=(heads.queries, heads.keys, heads.width), own_keys=self.own_keys, own_values=self.own_values,
            prompt_keys=numbers(rows, dtype=torch.int64), prompt_values=numbers(rows, dtype=torch.int64),
            prompt_lengths=numbers(rows), slots=numbers(rows), decoded=numbers(rows), tiles=numbers(tiles, tile_rows),
            cosine=fed_C, sine=fed_C, parts=(parts[0], parts[1]), scaling=heads.width**-0.5, epsilon=self.epsilon,
        )  # fmt: skip
        return _Graph(
            state, fed_C, column_1=numbers(1, dtype=torch.int64),
            uniforms_CN=numbers(rows, BLOCK, dtype=torch.float64), tokens_CN=numbers(rows, BLOCK, dtype=torch.int64),
            logprobs_CN=numbers(rows, BLOCK, dtype=torch.float32),
            step=GraphedStep(self.device), drawing_step=GraphedStep(self.device),
        )  # fmt: skip

    def _logits(self, graph: _Graph) -> Tensor:
        """logits_CV of the token after the fed ones, whose keys and values are appended."""
        state, kernels = graph.state, self.kernels
        hidden_CW = self.base.embed_tokens(graph.fed_C).float()
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
        state.decoded += 1
        return self.head(normed_CW)

    def _draw(self, graph: _Graph, temperature: float) -> Tensor:
        """Draw the next tokens into the present column, and have them fed."""
        logits_CV = self._logits(graph)
        logprobs_C = graph.logprobs_CN.new_empty(len(logits_CV))
        uniforms_C = graph.uniforms_CN.index_select(1, graph.column_1)[:, 0]
        self.kernels.draw(logits_CV, uniforms_C, temperature, graph.fed_C, logprobs_C)
        graph.tokens_CN.index_copy_(1, graph.column_1, graph.fed_C[:, None])
        graph.logprobs_CN.index_copy_(1, graph.column_1, logprobs_C[:, None])
        graph.column_1 += 1
        return graph.fed_C


@dataclass
class _Graph:
    """The tensors of a step with C rows, which its CUDA graphs find in place."""

    state: DecodedRows
    fed_C: Tensor  # the last token of each row
    column_1: Tensor  # of the next drawn token
    uniforms_CN: Tensor
    tokens_CN: Tensor
    logprobs_CN: Tensor
    step: GraphedStep
    drawing_step: GraphedStep


def copies_fit(module: PreTrainedModel) -> bool:
    """True if the GPU has twice the memory that joined copies of the layers' weights need, merged with their adapters.

    Without copies, a layer has three more products, and two more for each adapter.
    """
    if module.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(module.device)
    free += torch.cuda.memory_reserved(module.device) - torch.cuda.memory_allocated(module.device)
    return 2 * sum(layer.weight.nbytes for layer in linear_layers(module)) <= free


def rung(count: int) -> int:
    """The number of LADDER that holds so many; beyond it, a multiple of its last one."""
    return next((size for size in LADDER if size >= count), -(-count // LADDER[-1]) * LADDER[-1])


def _parts_of(prompts: list[list[int]], tokens: int) -> list[list[list[int]]]:
    """Consecutive prompts of at most `tokens` tokens together, or of one longer prompt."""
    parts: list[list[list[int]]] = []
    room = 0
    for prompt in prompts:
        if len(prompt) > room:
            parts.append([])
            room = tokens
        parts[-1].append(prompt)
        room -= len(prompt)
    return parts


def _tiles(prompts: list[_Prompt], rows: int) -> list[list[int]]:
    """Rows of each tile: up to `rows` that share a prompt."""
    of_prompt: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        of_prompt.setdefault(id(prompt), []).append(row)
    return [
        [*members[begin : begin + rows], *[-1] * (rows - len(members[begin : begin + rows]))]
        for members in of_prompt.values()
        for begin in range(0, len(members), rows)
    ]
