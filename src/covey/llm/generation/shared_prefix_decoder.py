"""Decoder that computes and stores the keys and values of a prompt once for all rows of its group.

It uses torch only and runs on any device. `native_decoder.py` has a faster one for Llama-like models on CPUs.

Shapes: S prompts, P longest prompt, R rows, T tokens decoded so far, H heads, K key-value heads, D head width,
M queries of a key-value head, V vocabulary.

On a GPU a step is a CUDA graph (`GraphedStep`), which the processor launches as a whole: a step of a language model is
a thousand small kernels, and the processor takes several times as long to launch them one by one as the GPU to compute
them. A graph has fixed addresses, so it is captured again if an input is another tensor.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config.files import raise_fault
from covey.llm.generation.decoder import LlamaLayers, PackedLinears, PrefillLayout, prefill_parts
from covey.llm.model.architecture import is_llama_like
from covey.llm.model.prefix_attention import Layout, SharedPrefixAttention, forward
from covey.llm.native.bindings import PAD
from covey.runtime.device import device_kind


class GraphedStep:
    """Calls a function, the same every time, as a CUDA graph if possible. It finds its inputs in place.

    The function is given with every call, because a decoder that its own step refers to would keep its memory until
    Python's garbage collector finds the cycle.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        """`pool`: memory that is shared with other graphs, none of which may run at the same time; None: its own."""
        self._device, self._pool = device, pool
        # Not known before the first call, which also loads the kernels.
        self.can_be_captured: bool | None = None if device.type == "cuda" else False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None
        self._is_current = False

    def reset(self) -> None:
        """Have the graph captured again, because tensors were replaced."""
        self._is_current = False

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """The function's result. The next call may overwrite it."""
        if self.can_be_captured is None:
            output, self.can_be_captured = _computed_without_waiting(compute)
            return output
        if not self.can_be_captured or not (self._is_current or self._capture(compute)):
            return compute()
        assert self._graph is not None
        assert self._output is not None
        self._graph.replay()
        return self._output

    def _capture(self, compute: Callable[[], Tensor]) -> bool:
        """Capture a graph; False, now and later, if that fails."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream), _without_garbage_collection():
                # Other threads of the process, such as that of a reward, may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = compute()
                finally:
                    graph.capture_end()
        except Exception as error:  # whatever the model's code raises, or CUDA for what a graph cannot have
            raise_fault(error)
            self.can_be_captured = False
            return False
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # The graph before lives until now, because memory goes from one to the next while one of them has the pool.
        self._graph, self._output, self._is_current = graph, output, True
        return True


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures, because the memory that a graph leaves in its pool is for the same stream alone."""
    return torch.cuda.Stream(device)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context manager for a capture, which may fail if the collector destroys another graph meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _computed_without_waiting(compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """A result, and whether the processor did not wait for the GPU meanwhile, as it cannot within a graph.

    It is not tried out, because a capture that CUDA breaks off may leave torch's state on the GPU unusable.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            output = compute()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return output, not any("called a synchronizing CUDA operation" in str(wait.message) for wait in waits)


# Tokens for which rows are given room together: on a CPU as in the kernels, on a GPU more, because a step is captured
# as a graph whenever they are given room. Ended rows are removed by copying the keys and values of the others.
GROWTH = {"cpu": PAD, "cuda": 128}
COMPACT_THRESHOLD = {"cpu": 0.125, "cuda": 0.25}


def capacity(tokens: int, device: str) -> int:
    """Number of own tokens that a row has room for while it has `tokens` of them."""
    growth = GROWTH[device]
    return -(-tokens // growth) * growth


def cache_bytes(token_bytes: int, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int, device: str) -> int:
    """Largest number of bytes of the keys and values of all rows and of their prompts.

    `select` copies the keys of the remaining rows, then the values. Without forks, these are at most the fraction
    1 - `compact_threshold` of the rows.

    Args:
        token_bytes: of one token, see `decoder.token_bytes`.
        rows: R.
        max_new_tokens: limit of a row.
        prompts, prompt_tokens: S and P.
        device: "cpu" or "cuda".
    """
    own = token_bytes * rows * capacity(max_new_tokens, device)
    copied = int(own / 2 * (1 - COMPACT_THRESHOLD[device]))
    return own + copied + token_bytes * prompts * prompt_tokens


class SharedPrefixDecoder:
    """Decoder for models of transformers whose attention takes a layout (see `prefix_attention`); implements `Decoder`.

    All rows are at the same position of their completions, so new rows are admitted only after all others have ended.
    On a GPU a step is a CUDA graph. Rows do not fork there, because every fork replaces the tensors of the graph.
    """

    can_fork = True
    block = 1

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        self.device = device_kind(module.device)
        self.compact_threshold = COMPACT_THRESHOLD[self.device]
        if self.device == "cuda":
            self.can_fork = False
        # Not on a GPU, because `LlamaLayers` needs a second copy of the weights.
        fused = module.device.type == "cpu" and is_llama_like(module)
        self.network = LlamaLayers(module) if fused else OwnForward(module)
        self.layout: _DecodingLayout | None = None
        self.graphed_step = GraphedStep(module.device)

    def free_rows(self) -> int:
        return self.rows if self.layout is None else 0

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
        hidden, parts = zip(*prefill_parts(self.module, prompts, common), strict=True)
        prompt_of_row = torch.arange(len(prompts), device=self.module.device).repeat_interleave(group_size)
        self.layout = _DecodingLayout(parts, prompt_of_row, self.device)
        self.graphed_step.reset()
        return self.network.head(torch.cat(hidden))

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        assert self.layout is not None
        if self.layout.feed(tokens_R):
            self.graphed_step.reset()
        return self.graphed_step(self._compute)

    def _compute(self) -> Tensor:
        assert self.layout is not None
        return self.network(self.layout.fed_R, self.layout.positions_R, self.layout)

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        assert self.layout is not None
        self.graphed_step.reset()
        if len(rows):
            self.layout.select(rows)
        else:
            self.layout = None


class OwnForward:
    """The model's own forward pass."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base, self.head = module.base_model, cast(nn.Module, module.get_output_embeddings())
        self.packed = PackedLinears(module)

    def __call__(self, tokens_R: Tensor, positions_R: Tensor, layout: Layout) -> Tensor:
        with self.packed:
            return self.head(forward(self.base, tokens_R, positions_R, layout))


class _DecodingLayout:
    """Layout for one new token per row, which attends to its prompt and to the tokens that its row has decoded.

    The KV cache of the completions has up to GROWTH unused positions, which are masked. It grows in blocks, because
    a matrix product with a slice of a larger tensor would copy the slice for every token. A step reads the tensors
    `fed_R`, `positions_R`, `unwritten_1T` and `column_1`, which `feed` changes in place.
    """

    def __init__(self, parts: Sequence[PrefillLayout], prompt_of_row: Tensor, device: str) -> None:
        self.device = device
        self.keys_KSPD = _joined([part.keys for part in parts])
        self.values_KSPD = _joined([part.values for part in parts])
        lengths = [length for part in parts for length in part.prompt_lengths]
        self.lengths_S = torch.tensor(lengths, device=prompt_of_row.device)
        rows = len(prompt_of_row)
        self.own_keys, self.own_values = (
            [prompt_KSPD.new_empty(prompt_KSPD.shape[0], rows, 0, prompt_KSPD.shape[3]) for prompt_KSPD in tensors]
            for tensors in (self.keys_KSPD, self.values_KSPD)
        )
        self.decoded = 0
        self.column_1 = torch.zeros(1, dtype=torch.int64, device=prompt_of_row.device)
        self._set_rows(prompt_of_row)

    def _set_rows(self, prompt_of_row: Tensor) -> None:
        self.prompt_of_row = prompt_of_row
        self.slots = SharedPrefixAttention(self.lengths_S, prompt_of_row)
        self.prompt_lengths_R = self.lengths_S[prompt_of_row]
        self.positions_R, self.fed_R = torch.empty_like(self.prompt_lengths_R), torch.empty_like(prompt_of_row)

    def feed(self, tokens_R: Tensor) -> bool:
        """Take the tokens of the next step, and make room for them; returns whether tensors were replaced."""
        missing = capacity(self.decoded + 1, self.device) - self.own_keys[0].shape[2]
        if missing:
            for tensors in (self.own_keys, self.own_values):
                for layer, tensor in enumerate(tensors):  # one by one: never all of them twice
                    tensors[layer] = F.pad(tensor, (0, 0, 0, missing))
            positions = torch.arange(self.own_keys[0].shape[2], device=self.prompt_of_row.device)
            self.unwritten_1T = (positions >= self.decoded)[None]
        self.fed_R.copy_(tokens_R)
        self.column_1.fill_(self.decoded)
        self.unwritten_1T[:, self.decoded] = False
        torch.add(self.prompt_lengths_R, self.decoded, out=self.positions_R)
        self.decoded += 1
        return missing > 0

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, and the prompts that they need. Rows stay ordered by prompt."""
        self.own_keys = [key[:, rows] for key in self.own_keys]
        self.own_values = [value[:, rows] for value in self.own_values]
        prompts, prompt_of_row = self.prompt_of_row[rows].unique(return_inverse=True)
        if len(prompts) < len(self.lengths_S):
            self.lengths_S = self.lengths_S[prompts]
            longest = int(self.lengths_S.max())  # remove columns that are padding in all prompts
            self.keys_KSPD = [key[:, prompts, :longest] for key in self.keys_KSPD]
            self.values_KSPD = [value[:, prompts, :longest] for value in self.values_KSPD]
        self._set_rows(prompt_of_row)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        heads, rows, _ = query.shape
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        self._write(own_keys, key)
        self._write(own_values, value)

        by_key_head = query.unflatten(0, (len(key), -1)).transpose(1, 2)
        query_KRMD = torch.mul(by_key_head, scaling, out=query.new_empty(by_key_head.shape))
        out = self.slots.attend(
            query_KRMD,
            self.keys_KSPD[layer],
            self.values_KSPD[layer],
            own_keys,
            own_values,
            self.unwritten_1T,
        )
        return out.transpose(0, 1).reshape(rows, heads, -1)  # values may be narrower than keys

    def _write(self, own_KRTD: Tensor, new_KRD: Tensor) -> None:
        """Write the keys or values of the fed tokens. A CUDA graph needs the column as a tensor."""
        if self.device == "cuda":
            own_KRTD.index_copy_(2, self.column_1, new_KRD[:, :, None])
        else:
            own_KRTD[:, :, self.decoded - 1] = new_KRD


def _joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """By layer, the keys or values of the prompts of all parts, padded to the longest. Empties the lists: a layer at a
    time is in memory twice."""
    longest, joined = max(layers[0].shape[2] for layers in parts), list[Tensor]()
    while parts[0]:
        of_parts = [layers.pop(0) for layers in parts]
        if len(of_parts) > 1:
            of_parts = [torch.cat([F.pad(one, (0, 0, 0, longest - one.shape[2])) for one in of_parts], dim=1)]
        joined += of_parts
    return joined
