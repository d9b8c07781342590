"""Decoding on a GPU, where a step is recorded once and replayed as a whole.

A step is hundreds of small kernels, and to start them one by one from Python takes longer than what they do. A CUDA
graph starts them all at once, but whenever it is replayed it works on the same memory, in the same shapes. So groups
have slots: a row keeps its place while it is written, idles there when it has ended, and leaves with its group, whose
slot is then free for another. Only where rows need more room, or half of the slots stay empty, is memory laid out anew
and the step recorded again.

Shapes: S slots, G rows of a slot, R = S x G rows, P room for a prompt, T room for a row's own tokens, K key-value
heads, D head width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.attention import PromptSlots
from covey.llm.decoding import OwnForward, PrefillLayout, prefill

ROOM = 64  # tokens: prompts have a multiple of it, a row's own tokens this, twice this, four times this

Step = Callable[[], Tensor]  # reads and writes the same memory at every call

_log = logging.getLogger(__name__)


class GraphDecoder:
    """Rows that share their prompts' keys and values, each at its own place, stepped by replaying a recorded step.

    For any transformers decoder whose attention takes a layout (see `attention`).
    """

    patience = 0.0  # a departure costs nothing
    branches = False  # so nothing is copied; a GPU writes the rows of a group in the time of one

    def __init__(
        self, module: PreTrainedModel, rows: int, max_new_tokens: int, record: Callable[[Step], Step] | None = None
    ) -> None:
        """`record` is told a step and returns what replays it; None is `record_graph`, and on a CPU the step itself."""
        self.module = module
        self.rows = rows
        self.max_new_tokens = max_new_tokens
        self.network = OwnForward(module)
        self.record = record or ((lambda step: step) if module.device.type == "cpu" else record_graph)
        self.slots: Slots | None = None
        self.replay: Step | None = None  # None where memory was laid out anew since the last step
        self.places = np.empty(0, dtype=np.int64)  # among the R rows, of those that are written
        self.decoded = np.empty(0, dtype=np.int64)  # tokens of each

    def room(self) -> int:
        if self.slots is None:
            return self.rows
        return (self.rows // self.slots.group_size - len(self._taken())) * self.slots.group_size

    @torch.inference_mode()
    def add(self, prompts: list[list[int]], group_size: int) -> Tensor:
        hidden_SW, stored = prefill(self.module, prompts)
        if self.slots is None:
            self.slots = Slots(stored, group_size)
        taken = self._taken()
        count = len(taken) + len(prompts)
        if count > self.slots.count:  # twice as many: those that come later need no new layout
            count = min(max(count, 2 * self.slots.count), self.rows // group_size)
            self._lay_out(taken, count, self.slots.own_room)
        free = np.setdiff1d(np.arange(self.slots.count), self._taken())[: len(prompts)]
        if self.slots.take(stored, free):
            self.replay = None
        places = rows_of(free, group_size)
        self.places, self.decoded = np.append(self.places, places), np.append(self.decoded, np.zeros_like(places))
        self._place_rows()
        return self.network.head(hidden_SW)

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        assert self.slots is not None
        needed = int(self.decoded.max()) + 1
        if needed > self.slots.own_room:
            room = min(max(2 * self.slots.own_room, ROOM), roomy(self.max_new_tokens))
            self._lay_out(np.arange(self.slots.count), self.slots.count, room)
        self.slots.tokens_R.index_copy_(0, self.places_R, tokens_R)
        if self.replay is None:
            self.replay = self.record(self._step)
        logits_RV = self.replay().index_select(0, self.places_R)  # the next replay overwrites what this one returned
        self.slots.decoded_R.index_add_(0, self.places_R, torch.ones_like(self.places_R))
        self.decoded += 1
        return logits_RV

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        assert self.slots is not None
        staying = rows.cpu().numpy()
        self.slots.idle(np.delete(self.places, staying))
        self.places, self.decoded = self.places[staying], self.decoded[staying]
        taken = self._taken()
        if not len(taken):
            self.slots = self.replay = None
        elif len(taken) <= self.slots.count // 2:
            self._lay_out(taken, len(taken), self.slots.own_room)
        else:
            self._place_rows()

    def _taken(self) -> np.ndarray:
        """The slots in which rows are written, in order."""
        return np.empty(0, dtype=np.int64) if self.slots is None else np.unique(self.places // self.slots.group_size)

    def _lay_out(self, taken: np.ndarray, count: int, own_room: int) -> None:
        """Make so many slots, with room for so many tokens of a row; those that are `taken` become the first."""
        assert self.slots is not None
        self.replay = None  # before: a recorded step holds on to the memory that it works on
        self.slots.lay_out(taken, count, own_room)
        slots, within = np.divmod(self.places, self.slots.group_size)
        self.places = np.searchsorted(taken, slots) * self.slots.group_size + within
        self._place_rows()

    def _place_rows(self) -> None:
        self.places_R = torch.from_numpy(self.places).to(self.module.device)

    def _step(self) -> Tensor:
        """logits_RV of every row. Running it again, as recording does, changes nothing."""
        assert self.slots is not None
        return self.network(self.slots.tokens_R, self.slots.next_positions(), self.slots)


def record_graph(step: Step) -> Step:
    """A CUDA graph of `step`; where it cannot be recorded, which one line says, the step itself."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # Not by torch.cuda.graph, which first gives all unused memory back to the driver: slow, and of no use here.
        with torch.cuda.stream(_stream()):
            step()  # libraries make their workspaces at the first call, which must not be recorded
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                logits_RV = step()
            finally:
                graph.capture_end()
            torch.cuda.synchronize()
    except RuntimeError as error:
        _log.warning("decoding goes without CUDA graphs, slower, the same numbers: %s", str(error).splitlines()[0])
        return step

    def replay() -> Tensor:
        graph.replay()
        return logits_RV

    return replay


@cache
def _stream() -> torch.cuda.Stream:
    """Graphs cannot be recorded on the default one. Always the same: memory that is free on another is of no use."""
    return torch.cuda.Stream()


class Slots:
    """Keys and values of some groups' prompts and of their rows, and what a step is told, in memory that stays."""

    def __init__(self, stored: PrefillLayout, group_size: int) -> None:
        first = stored.keys[0]
        self.group_size = group_size
        nothing = [
            [part.new_empty(part.shape[0], 0, 0, part.shape[3]) for part in parts]
            for parts in (stored.keys, stored.values)
        ]
        self.prompt_keys, self.prompt_values = (list(parts) for parts in nothing)  # [K, S, P, D]
        self.own_keys, self.own_values = (list(parts) for parts in nothing)  # [K, R, T, D]
        self.count = self.prompt_room = self.own_room = 0
        self.lengths_S, self.decoded_R, self.tokens_R = (
            torch.empty(0, dtype=torch.int64, device=first.device) for _ in range(3)
        )

    def lay_out(self, taken: np.ndarray, count: int, own_room: int) -> None:
        """Make so many slots with so much room; those that are `taken` become the first, the others are blank."""
        slots_S, rows_R = self._indices(taken), self._indices(rows_of(taken, self.group_size))
        size = count * self.group_size
        for tensors in (self.prompt_keys, self.prompt_values):
            for layer, tensor in enumerate(tensors):  # one by one: never all of them twice
                tensors[layer] = _moved(tensor, slots_S, count, self.prompt_room)
        for tensors in (self.own_keys, self.own_values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = _moved(tensor, rows_R, size, own_room)
        self.decoded_R, self.tokens_R = (
            torch.cat([told[rows_R], told.new_zeros(size - len(rows_R))]) for told in (self.decoded_R, self.tokens_R)
        )
        # A blank slot has a token to look at: a softmax over nothing is no number.
        self.lengths_S = torch.cat([self.lengths_S[slots_S], self.lengths_S.new_ones(count - len(taken))])
        self.count, self.own_room = count, own_room
        self._see_prompts()

    def take(self, stored: PrefillLayout, slots: np.ndarray) -> bool:
        """Give free slots these prompts; whether memory was laid out anew for them."""
        longest = max(stored.prompt_lengths)
        grows = longest > self.prompt_room
        if grows:
            self.prompt_room = roomy(longest)
            self.lay_out(np.arange(self.count), self.count, self.own_room)
        slots_S = self._indices(slots)
        for tensors, new in ((self.prompt_keys, stored.keys), (self.prompt_values, stored.values)):
            for tensor_KSPD, new_KSPD in zip(tensors, new, strict=True):
                tensor_KSPD[:, :, : new_KSPD.shape[2]].index_copy_(1, slots_S, new_KSPD)
        self.lengths_S[slots_S] = torch.tensor(stored.prompt_lengths, device=self.lengths_S.device)
        self.shared.padding_SP.copy_(self._padding())
        return grows

    def idle(self, rows: np.ndarray) -> None:
        """These are written no more. A step goes on to write there what nobody reads, for which there must be room, and
        whoever takes their slot begins at 0."""
        self.decoded_R[self._indices(rows)] = 0

    def next_positions(self) -> Tensor:
        """Positions of the tokens that are fed; what each may see of its own row is found out with them."""
        unwritten_RT = torch.arange(self.own_room, device=self.decoded_R.device) > self.decoded_R[:, None]
        self.unwritten = unwritten_RT[:, None].repeat(len(self.own_keys[0]), 1, 1)
        return self.lengths_S[:, None].expand(-1, self.group_size).flatten() + self.decoded_R

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """As `Layout` tells."""
        heads, rows, _ = query.shape
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        own_keys[:, self.rows_R, self.decoded_R] = key
        own_values[:, self.rows_R, self.decoded_R] = value
        query_KRMD = (query * scaling).unflatten(0, (len(key), -1)).transpose(1, 2).contiguous()
        prompt = self.prompt_keys[layer], self.prompt_values[layer]
        out = self.shared.attend(query_KRMD, *prompt, own_keys, own_values, self.unwritten)
        return out.transpose(0, 1).reshape(rows, heads, -1)

    def _indices(self, places: np.ndarray) -> Tensor:
        return torch.from_numpy(places).to(self.lengths_S.device)

    def _see_prompts(self) -> None:
        """The rows of every slot look at its prompt."""
        self.rows_R = torch.arange(self.count * self.group_size, device=self.lengths_S.device)
        self.shared = PromptSlots(self.lengths_S, self.rows_R // self.group_size)
        self.shared.padding_SP, self.shared.padded = self._padding(), True  # room is filled later

    def _padding(self) -> Tensor:
        return torch.arange(self.prompt_room, device=self.lengths_S.device) >= self.lengths_S[:, None]


def roomy(tokens: int) -> int:
    """The room that so many tokens are given at most."""
    return -(-tokens // ROOM) * ROOM


def rows_of(slots: np.ndarray, group_size: int) -> np.ndarray:
    """The places of the rows of these slots."""
    return (slots[:, None] * group_size + np.arange(group_size)).flatten()


def _moved(tensor_KSXD: Tensor, taken: Tensor, count: int, room: int) -> Tensor:
    """[K, count, room, D]: the `taken` first, zeros elsewhere, since what is masked must still be finite."""
    heads, _, length, width = tensor_KSXD.shape
    moved = tensor_KSXD.new_zeros(heads, count, room, width)
    moved[:, : len(taken), :length] = tensor_KSXD.index_select(1, taken)
    return moved
