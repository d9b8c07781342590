"""Attention over token sequences that share their prompt.

The rollouts of a group begin with the same prompt. Its tokens are fed once, in one row with the tokens of all
completions, without padding. All operations of the model except attention treat tokens independently. A layout defines
the attention mask.

transformers passes extra keyword arguments of a model's forward down to its attention function, so a layout is passed
as `model(..., layout=layout)` with the attention implementation "covey".

Shapes: N tokens, S prompts, P longest prompt, R rows (completions), L longest completion, H heads, K key-value heads,
D head width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from covey.llm.model.architecture import Heads

IMPLEMENTATION = "covey"

# Up to this number of attention scores per layer, plain matrix products are faster than fused attention; at most 32 MB.
SCORES_LIMIT = 8 << 20


# Whether attention with a window writes out all scores: in a trial of a model that kernels compute later.
_ALL_SCORES: ContextVar[bool] = ContextVar("all_scores", default=False)


@contextmanager
def all_scores(wanted: bool) -> Iterator[None]:
    """Context manager in which packed rows may have attention with a window, if `wanted`."""
    token = _ALL_SCORES.set(wanted)
    try:
        yield
    finally:
        _ALL_SCORES.reset(token)


class UnsupportedAttentionError(NotImplementedError):
    """The model's attention has a feature that shared prompts do not support."""


class Layout(Protocol):
    """The attention mask of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of [H, N, D] queries; returns [N, H, D]."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if window and not cap and _ALL_SCORES.get() and isinstance(layout, PackedLayout):
        return layout.attend_by_scores(module.layer_idx, query[0], key[0], value[0], scale, window)[None], None  # type: ignore[arg-type]
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(name)
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.numel() != 1):
        raise UnsupportedAttentionError("a mask that the model adds to, perhaps what it learns")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return layout.attend(layer, query[0], key[0], value[0], scale)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def forward(base: nn.Module, tokens_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
    """hidden_NW of one row of tokens with the layout as mask; `base` is a decoder without its output layer."""
    # transformers passes a mask of four dimensions on unchanged, and does not build one that is never read.
    no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=tokens_N.device)
    output = base(
        input_ids=tokens_N[None],
        position_ids=positions_N[None],
        attention_mask=no_mask,
        use_cache=False,
        layout=layout,
    )
    hidden_NW: Tensor = output.last_hidden_state[0]
    return hidden_NW


def attends_by_products(heads: int, rows: int, length: int, prompt_tokens: int) -> bool:
    """Whether completions of up to `length` tokens attend by plain products, see `SCORES_LIMIT`."""
    return heads * rows * length * (prompt_tokens + length) <= SCORES_LIMIT


class PackedLayout:
    """Prompts, each followed by the completions of its group: one row of tokens, without padding.

    The common prefix of all prompts (a system prompt, a template, examples) is fed once. The order of the tokens: the
    common prefix, the suffix of every prompt, then the nodes of the prefix trees of the completions, parents before
    children.
    """

    stores_prompts = False  # True if `store_prompt_kv` stores keys and values

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Tensor] = (),
        prompt_of_row: Sequence[int] = (),
        device: torch.device | None = None,
        common: int | None = None,
    ) -> None:
        """Completions are ordered by prompt.

        Args:
            common: tokens of the common prefix that are fed once; None: chosen from the prompts. The last bits of a
                prompt's numbers depend on it.
        """
        self.prompt_lengths, self.prompt_of_row = [len(prompt) for prompt in prompts], list(prompt_of_row)
        self.device = device
        self.common = shared_prompt_prefix(prompts) if common is None else common
        suffixes = [torch.tensor(prompt[self.common :]) for prompt in prompts]
        parts = [torch.tensor(prompts[0][: self.common], dtype=torch.int64), *suffixes]
        self.prompt_ends = torch.tensor([len(part) for part in parts]).cumsum(0)[1:] - 1  # the last token of each
        self.nodes = build_prefix_tree(completions, prompt_of_row)
        written = [completions[node.rows[0]][node.begin : node.end] for node in self.nodes]
        self.tokens = torch.cat([*parts, *written]).to(device)
        begins = [0, *[self.common for _ in prompts]]
        begins += [self.prompt_lengths[node.prompt] + node.begin for node in self.nodes]
        positions = [torch.arange(b, b + len(part)) for b, part in zip(begins, (*parts, *written), strict=True)]
        self.positions = torch.cat(positions).to(device)
        self.mask: Tensor | None = None  # of the fused path, created when first needed

    @cached_property
    def sequences(self) -> Tensor:
        """[sequences, 3] int32: first token, length, and index of the parent sequence or -1; parents come first."""
        lengths = [self.common, *(length - self.common for length in self.prompt_lengths)]
        firsts = [0, *accumulate(lengths)]
        of_prompts: list[list[int]] = [[] for _ in self.prompt_lengths]
        for number, node in enumerate(self.nodes):
            of_prompts[node.prompt].append(number)
        sequences = [(0, self.common, -1)] if self.common else []
        common_sequence = len(sequences) - 1
        sequence_of_node: dict[int, int] = {}  # node -> index of its sequence
        for prompt, nodes in enumerate(of_prompts):
            sequences.append((firsts[1 + prompt], lengths[1 + prompt], common_sequence))
            of_prompt = len(sequences) - 1
            for number in nodes:
                sequence_of_node[number] = len(sequences)
                parent = sequence_of_node.get(self.nodes[number].parent, of_prompt)
                sequences.append((self.node_starts[number], self.nodes[number].length, parent))
        return torch.tensor(sequences, dtype=torch.int32)

    @cached_property
    def node_starts(self) -> list[int]:
        """Index of the first token of every node."""
        return list(accumulate((node.length for node in self.nodes), initial=int(self.prompt_ends[-1]) + 1))[:-1]

    @cached_property
    def token_index(self) -> list[Tensor]:
        """Indices of the tokens of every completion in the packed row, [L] each."""
        found: list[list[Tensor]] = [[] for _ in self.prompt_of_row]
        for first, node in zip(self.node_starts, self.nodes, strict=True):
            span = torch.arange(first, first + node.length)
            for row in node.rows:
                found[row].append(span)
        return [torch.cat(spans) if spans else torch.arange(0) for spans in found]

    @cached_property
    def prompt_suffixes(self) -> RaggedPadding:
        """Padding of the prompts' suffixes after their common prefix."""
        ends = list(accumulate(length - self.common for length in self.prompt_lengths))
        return RaggedPadding([torch.arange(*span) for span in pairwise([0, *ends])], self.device)

    @cached_property
    def leaf_rows(self) -> list[int]:
        """Rows of the completions that are not a prefix of another completion; together they have all tokens."""
        continued = {node.parent for node in self.nodes}
        return sorted(node.rows[0] for number, node in enumerate(self.nodes) if number not in continued)

    @cached_property
    def completions(self) -> RaggedPadding:
        """Padding of the leaf completions; shared prefixes are repeated in each row."""
        split = int(self.prompt_ends[-1]) + 1
        return RaggedPadding([self.token_index[row] - split for row in self.leaf_rows], self.device)

    @cached_property
    def prompt_of_leaf(self) -> Tensor:
        prompts = [self.prompt_of_row[row] for row in self.leaf_rows]
        return torch.tensor(prompts, dtype=torch.int64, device=self.device)

    @cached_property
    def slots(self) -> SharedPrefixAttention:
        return SharedPrefixAttention(torch.tensor(self.prompt_lengths, device=self.device), self.prompt_of_leaf)

    def store_prompt_kv(self, layer: int, key_KSPD: Tensor, value_KSPD: Tensor) -> None:
        """Called with the rotated keys and the values of the prompts in every layer; overridden by the prefill."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        split = self.common + self.prompt_suffixes.tokens
        key_KSPD, value_KSPD = self.pad_prompts(key[:, :split]), self.pad_prompts(value[:, :split])
        self.store_prompt_kv(layer, key_KSPD, value_KSPD)
        out = self._attend_to_prompts(query[:, :split], key_KSPD, value_KSPD, scaling)
        if not self.completions.width:
            return torch.cat(out)
        query_HRLD = self.completions.pad(query[:, split:])
        own_KRLD = self.completions.pad(key[:, split:]), self.completions.pad(value[:, split:])
        heads, rows, length = query_HRLD.shape[:3]
        by_products = attends_by_products(heads, rows, length, key_KSPD.shape[2])
        attend = self._attend_by_products if by_products else self._attend_fused
        out.append(self.completions.unpad(attend(query_HRLD, key_KSPD, value_KSPD, *own_KRLD, scaling)))
        return torch.cat(out)

    @cached_property
    def seen_NN(self) -> Tensor:
        """True where a token attends to another one, if there is no window."""
        rows = self.sequences.tolist()
        seen_NN = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for first, length, parent in rows:
            own = slice(first, first + length)
            seen_NN[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
            while parent >= 0:
                begin, others, grandparent = rows[parent]
                seen_NN[own, begin : begin + others] = True
                parent = grandparent
        return seen_NN.to(self.device)

    def attend_by_scores(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
    ) -> Tensor:
        """As `attend`, of few tokens, each of which attends to the last `window` tokens."""
        split = self.common + self.prompt_suffixes.tokens
        self.store_prompt_kv(layer, self.pad_prompts(key[:, :split]), self.pad_prompts(value[:, :split]))
        key, value = (_repeat(part, len(query)) for part in (key, value))
        scores_HNN = (query @ key.transpose(1, 2) * scaling).to(torch.promote_types(query.dtype, torch.float32))
        near_NN = self.positions[:, None] - self.positions < window
        weights_HNN = scores_HNN.masked_fill(~(self.seen_NN & near_NN), -torch.inf).softmax(dim=2)
        return (weights_HNN.to(value.dtype) @ value).transpose(0, 1)

    def pad_prompts(self, flat: Tensor) -> Tensor:
        """[K, common prefix and suffixes, D] -> [K, S, P, D], 0 at padding."""
        prompt_suffixes = self.prompt_suffixes.pad(flat[:, self.common :])
        if not self.common:
            return prompt_suffixes
        return torch.cat(
            [flat[:, None, : self.common].expand(-1, prompt_suffixes.shape[1], -1, -1), prompt_suffixes], dim=2
        )

    def _attend_to_prompts(self, query: Tensor, key_KSPD: Tensor, value_KSPD: Tensor, scaling: float) -> list[Tensor]:
        """Attention of the prompts' tokens: [tokens, H, D] of the common prefix, then of the suffixes."""
        heads, common = query.shape[0], self.common
        key, value = _repeat(key_KSPD, heads), _repeat(value_KSPD, heads)
        if not common:
            out = F.scaled_dot_product_attention(
                self.prompt_suffixes.pad(query), key, value, is_causal=True, scale=scaling
            )
            return [self.prompt_suffixes.unpad(out)]
        common_sequence = F.scaled_dot_product_attention(
            query[:, None, :common], key[:, :1, :common], value[:, :1, :common], is_causal=True, scale=scaling
        )
        seen = torch.ones(self.prompt_suffixes.width, key.shape[2], dtype=torch.bool, device=key.device).tril(common)
        prompt_suffixes = F.scaled_dot_product_attention(
            self.prompt_suffixes.pad(query[:, common:]), key, value, attn_mask=seen, scale=scaling
        )
        return [common_sequence[:, 0].transpose(0, 1), self.prompt_suffixes.unpad(prompt_suffixes)]

    def _attend_by_products(
        self, query_HRLD: Tensor, key_KSPD: Tensor, value_KSPD: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention of short completions by plain matrix products; the rows of a group share their prompt's keys."""
        heads, length, kv_heads = query_HRLD.shape[0], query_HRLD.shape[2], key.shape[0]
        groups = kv_heads, heads // kv_heads
        query_KRMD = (query_HRLD * scaling).unflatten(0, groups).transpose(1, 2).flatten(2, 3).contiguous()
        own_LL = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
        own_mask = own_LL.repeat(groups[1], 1)
        out = self.slots.attend(query_KRMD, key_KSPD, value_KSPD, key, value, own_mask)
        return out.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)

    def _attend_fused(
        self, query_HRLD: Tensor, key_KSPD: Tensor, value_KSPD: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention of long completions by torch's fused attention: stores no scores, but copies the prompt's keys."""
        heads, length = query_HRLD.shape[0], query_HRLD.shape[2]
        key = torch.cat([key_KSPD[:, self.prompt_of_leaf], key], dim=2)
        value = torch.cat([value_KSPD[:, self.prompt_of_leaf], value], dim=2)
        if self.mask is None:
            causal_LL = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
            prompt_RP = ~self.slots.padding_SP[self.prompt_of_leaf]
            rows = (len(prompt_RP), length, -1)
            self.mask = torch.cat([prompt_RP[:, None].expand(rows), causal_LL.expand(rows)], dim=2)[None]
        return F.scaled_dot_product_attention(
            query_HRLD, _repeat(key, heads), _repeat(value, heads), attn_mask=self.mask, scale=scaling
        )


class SharedPrefixAttention:
    """Attention to shared prompts by batched matrix products: one product for all rows of a prompt.

    Rows are ordered by prompt. Each has a slot in a [S, maximal number of rows per prompt] rectangle.
    """

    def __init__(self, prompt_lengths_S: Tensor, prompt_of_row: Tensor) -> None:
        counts_S = torch.bincount(prompt_of_row, minlength=len(prompt_lengths_S))
        self.prompts, self.width = len(prompt_lengths_S), int(counts_S.max())
        before_S = counts_S.cumsum(0) - counts_S
        within_R = torch.arange(len(prompt_of_row), device=prompt_of_row.device) - before_S[prompt_of_row]
        self.slot_R = prompt_of_row * self.width + within_R
        self.even = bool((counts_S == self.width).all())
        longest = int(prompt_lengths_S.max())
        self.padding_SP = torch.arange(longest, device=prompt_of_row.device) >= prompt_lengths_S[:, None]
        self.padded = bool(self.padding_SP.any())

    def attend(
        self,
        query_KRMD: Tensor,
        prompt_key_KSPD: Tensor,
        prompt_value_KSPD: Tensor,
        own_key_KRTD: Tensor,
        own_value_KRTD: Tensor,
        own_mask_MT: Tensor | None = None,
    ) -> Tensor:
        """Attention of M queries per key-value head (already scaled) to the row's prompt and to its own T tokens.

        `own_mask_MT` is True at keys that a query must not attend to. One softmax in fp32 covers both parts.
        """
        kv_heads, rows = query_KRMD.shape[:2]
        prompt_scores = self._group_by_prompt(query_KRMD) @ prompt_key_KSPD.flatten(0, 1).transpose(1, 2)
        if self.padded:
            by_head = prompt_scores.unflatten(0, (-1, self.prompts))
            prompt_scores = by_head.masked_fill(self.padding_SP[:, None], -torch.inf).flatten(0, 1)
        own_scores = query_KRMD.flatten(0, 1) @ own_key_KRTD.flatten(0, 1).transpose(1, 2)
        if own_mask_MT is not None:
            own_scores = own_scores.masked_fill_(own_mask_MT, -torch.inf)
        scores = torch.cat([self._ungroup(prompt_scores, kv_heads), own_scores], dim=2)
        sizes = prompt_scores.shape[2], own_scores.shape[2]
        prompt_weights, own_weights = scores.softmax(dim=2).split(sizes, dim=2)
        of_prompts = self._group_by_prompt(prompt_weights.unflatten(0, (kv_heads, rows))) @ prompt_value_KSPD.flatten(
            0, 1
        )
        of_prompts = self._ungroup(of_prompts, kv_heads)
        return torch.baddbmm(of_prompts, own_weights, own_value_KRTD.flatten(0, 1)).unflatten(0, (kv_heads, rows))

    def _group_by_prompt(self, rows_KRMX: Tensor) -> Tensor:
        """[K, R, M, X] -> [K x S, slots x M, X], with the rows of a prompt adjacent."""
        rows = rows_KRMX
        if not self.even:
            rows = ScatterColumns.apply(rows, self.slot_R, self.prompts * self.width)
        return rows.reshape(-1, self.width * rows.shape[2], rows.shape[3])

    def _ungroup(self, together: Tensor, kv_heads: int) -> Tensor:
        """[K x S, slots x M, X] -> [K x R, M, X]."""
        rows = together.reshape(kv_heads, self.prompts * self.width, -1, together.shape[2])
        return (rows if self.even else GatherColumns.apply(rows, self.slot_R)).flatten(0, 1)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """[K, rows, T, D] -> [H, rows, T, D]: H / K query heads share each key-value head."""
    kv_heads = tensor.shape[0]
    return tensor if kv_heads == heads else tensor.repeat_interleave(heads // kv_heads, dim=0)


def kept_bytes(heads: Heads, prompts: int, rows: int, prompt_tokens: int, fed: int, itemsize: int) -> int:
    """Bytes of one layer's `PackedLayout.attend`, without queries and result, which the layer around it keeps.

    Args:
        heads: H, K and D.
        prompts, rows: S prompts and R completions; the prompts have no common prefix.
        prompt_tokens, fed: tokens of each prompt and of each completion.
        itemsize: bytes of an activation.
    """
    query, key_value = heads.queries * heads.width, heads.keys * heads.width
    of_prompts, of_completions = prompts * prompt_tokens, rows * fed
    tokens = of_prompts + of_completions
    prompt_part = of_prompts * (query * itemsize + heads.queries * 4)
    if heads.keys == heads.queries:
        prompt_part += 2 * tokens * key_value * itemsize
    else:
        prompt_part += 2 * of_prompts * query * itemsize  # keys and values, repeated for every head
    seen = prompt_tokens + fed
    if attends_by_products(heads.queries, rows, fed, prompt_tokens):
        scores = of_completions * heads.queries * seen
        keys_and_values = 2 * tokens * key_value * itemsize
        return prompt_part + (scores + of_completions * query) * itemsize + keys_and_values
    keys_and_values = 2 * rows * seen * query * itemsize
    mask = of_completions * seen * itemsize
    return prompt_part + keys_and_values + mask + of_completions * (heads.queries * 4 + query * itemsize)


# A shorter common prefix of prompts is not shared, because fused attention is faster without the mask of the suffixes.
MIN_COMMON_PREFIX = 8


@dataclass(frozen=True)
class PrefixNode:
    """A node: tokens `begin` to `end` of the completions `rows`, whose tokens before `end` are equal."""

    rows: list[int]  # indices of the completions
    begin: int
    end: int
    prompt: int  # index of their prompt
    parent: int  # index of the parent node; -1: the prompt

    @property
    def length(self) -> int:
        return self.end - self.begin


def build_prefix_tree(completions: Sequence[Tensor], prompt_of_row: Sequence[int]) -> list[PrefixNode]:
    """Build the prefix tree of each prompt's completions: every shared run of tokens is one node.

    Args:
        completions: token ids of each row.
        prompt_of_row: index of each row's prompt.

    Returns:
        the nodes, parents before children.
    """
    tokens = [completion.tolist() for completion in completions]
    nodes: list[PrefixNode] = []
    pending: list[tuple[list[int], int, int]] = []  # (rows with the same next token, its position, parent)

    def branch(rows: list[int], begin: int, parent: int) -> None:
        children: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if len(tokens[row]) > begin:
                children.setdefault((prompt_of_row[row], tokens[row][begin]), []).append(row)
        pending.extend((child, begin, parent) for child in reversed(children.values()))

    branch(list(range(len(tokens))), 0, -1)
    while pending:
        rows, begin, parent = pending.pop()
        end = begin + common_prefix_length(*(tokens[row][begin:] for row in rows))
        nodes.append(PrefixNode(rows, begin, end, prompt_of_row[rows[0]], parent))
        if len(rows) > 1:
            branch(rows, end, len(nodes) - 1)
    return nodes


def shared_prompt_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of the prompts without their last tokens; 0 if it is below MIN_COMMON_PREFIX."""
    common = common_prefix_length(*(prompt[:-1] for prompt in prompts))
    return common if common >= MIN_COMMON_PREFIX and len(prompts) > 1 else 0


def common_prefix_length(*sequences: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))


class RaggedPadding:
    """Converts between packed tokens and rows padded to one width. Rows may share tokens."""

    def __init__(self, token_indices: list[Tensor], device: torch.device | None) -> None:
        """`token_indices`: packed indices of each row's tokens. Each token is in at least one row."""
        self.rows, self.width = len(token_indices), max(map(len, token_indices), default=0)
        inside = (
            torch.arange(self.width) < torch.tensor([len(row) for row in token_indices], dtype=torch.int64)[:, None]
        )
        cells = inside.flatten().nonzero()[:, 0]
        flat = torch.cat(token_indices) if token_indices else torch.arange(0)
        identity = torch.equal(flat, torch.arange(len(flat)))
        self.copies = None if identity else _Repeats(flat, device)
        self.even = identity and len(flat) == self.rows * self.width
        self.tokens = len(flat) if self.copies is None else self.copies.tokens
        self.cells = cells.to(device)
        self.first = self.cells if self.copies is None else self.cells[self.copies.first]  # cell of each token

    def pad(self, flat: Tensor) -> Tensor:
        """[heads, tokens, D] -> [heads, rows, width, D], 0 at padding."""
        if self.copies is not None:
            flat = _Copy.apply(flat, self.copies)
        if not self.even:
            flat = ScatterColumns.apply(flat, self.cells, self.rows * self.width)
        return flat.unflatten(1, (self.rows, self.width))

    def unpad(self, padded: Tensor) -> Tensor:
        """[heads, rows, width, D] -> [tokens, heads, D]."""
        flat = padded.flatten(1, 2)
        return (flat if self.even else GatherColumns.apply(flat, self.first)).transpose(0, 1)


class _Repeats:
    """Index tensors of repeated columns: the column of each copy, and the first, second, ... copy of each column."""

    def __init__(self, of: Tensor, device: torch.device | None) -> None:
        order = of.argsort(stable=True)
        counts = of.bincount()
        number = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of[order]]  # index among the copies of its column
        self.tokens = len(counts)
        self.of = of.to(device)
        self.first = order[number == 0].to(device)
        turns = [order[number == turn] for turn in range(1, int(counts.max()))]
        self.more = [(of[copies].to(device), copies.to(device)) for copies in turns]


class _Copy(torch.autograd.Function):
    """Repeat columns. The backward pass adds the gradients of a column's copies in fp32 and in a fixed order, unlike
    an `index_add` on a GPU."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, copies: _Repeats) -> Tensor:
        ctx.copies = copies
        return columns.index_select(1, copies.of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.index_select(1, ctx.copies.first).to(exact)
        for columns, copies in ctx.copies.more:
            total.index_copy_(1, columns, total.index_select(1, columns) + gradient.index_select(1, copies))
        return total.to(gradient.dtype), None


class ScatterColumns(torch.autograd.Function):
    """Scatter columns to distinct indices of a larger tensor. The gradient is a gather, without accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return columns.new_zeros(columns.shape[0], size, *columns.shape[2:]).index_copy_(1, index, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.index_select(1, index), None, None


class GatherColumns(torch.autograd.Function):
    """Gather columns from distinct indices of a larger tensor. The gradient is a scatter, without accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = columns.shape[1]
        return columns.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        size = gradient.shape[0], ctx.size, *gradient.shape[2:]
        return gradient.new_zeros(size).index_copy_(1, index, gradient), None


@dataclass(frozen=True)
class Row:
    """A row of a batch and the number of its tokens."""

    number: int  # index in the batch
    group: int
    tokens: int  # of its prompt and its actions up to the last decision
    shared: int  # length of the common prefix with the row before, if that is of the same group: it is fed once


def order_rows(groups: Sequence[int], prompt_lengths: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Row]:
    """Order the rows of a batch so that neighbours have long common prefixes.

    Groups are ordered by their longest completion, because rows of similar lengths need little padding. The rows of a
    group are in lexicographic order of their tokens: then the longest common prefix of a row is with its neighbour.

    Args:
        groups: group of each row.
        prompt_lengths: in tokens, of each row.
        completions: token ids of each row, up to its last decision.
    """
    longest: dict[int, int] = {}
    for group, actions in zip(groups, completions, strict=True):
        longest[group] = max(len(actions), longest.get(group, 0))
    numbers = sorted(range(len(groups)), key=lambda row: (longest[groups[row]], groups[row], completions[row], row))
    rows: list[Row] = []
    for number in numbers:
        shared = 0
        if rows and rows[-1].group == groups[number]:
            shared = prompt_lengths[number] + common_prefix_length(completions[rows[-1].number], completions[number])
        rows.append(Row(number, groups[number], prompt_lengths[number] + len(completions[number]), shared))
    return rows


def split_rows(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """Split ordered rows into microbatches of at most `limit` tokens, or of one row if it is longer.

    The number of microbatches is minimal. Then the largest is as small as possible, because it determines the memory.
    Groups stay whole if this needs no more microbatches, because the prompt of a split group is fed twice.
    """
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
    by_groups, by_rows = (len(_fill(groups, limit, whole_groups)) for whole_groups in (True, False))
    whole_groups = by_groups <= by_rows
    fitting = [size for size in map(_new_tokens, groups) if whole_groups and size <= limit]
    smallest = bisect_left(
        range(limit),
        True,
        lo=max(fitting, default=0),
        key=lambda size: len(_fill(groups, size, whole_groups)) <= min(by_groups, by_rows),
    )
    return _fill(groups, smallest, whole_groups)


def _new_tokens(group: Sequence[Row]) -> int:
    return sum(row.tokens - row.shared for row in group)


def _fill(groups: Sequence[Sequence[Row]], limit: int, whole_groups: bool) -> list[list[Row]]:
    """Fill microbatches greedily. With `whole_groups`, a group that fits into one microbatch is not split."""
    microbatches: list[list[Row]] = []
    tokens = 0
    for group in groups:
        new_piece = whole_groups and tokens + _new_tokens(group) > limit >= _new_tokens(group)
        for row in group:
            new = row.tokens - row.shared
            if not microbatches or new_piece or tokens + new > limit:
                microbatches.append([])
                tokens, new, new_piece = 0, row.tokens, False
            microbatches[-1].append(row)
            tokens += new
    return microbatches
