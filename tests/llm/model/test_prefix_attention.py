"""Attention of training over shared prompts: the same numbers and gradients as row by row, on every processor."""

import copy
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm.generation import backend
from covey.llm.model.architecture import AttentionRule
from covey.llm.model.fused_layers import Attention
from covey.llm.model.prefix_attention import PackedLayout
from covey.llm.native.bindings import Kernels, kernels_for
from covey.llm.native.build import FLAGS, find_compiler, load_library
from covey.llm.policy import LanguagePolicy
from covey.runtime.device import cpu_info
from helpers.tiny_models import tiny_model

CPU = torch.device("cpu")
FAST = ("llama", "qwen2", "qwen3")


def layout_of(prompts: Sequence[int], completions: Sequence[Sequence[int]], common: int = 0) -> PackedLayout:
    """A layout of prompts with these numbers of tokens, after `common` shared ones, and of their completions."""
    numbers = iter(range(3, 1 << 20))

    def tokens(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    first = tokens(common)
    rows = [torch.tensor(tokens(length), dtype=torch.int64) for lengths in completions for length in lengths]
    prompt_of_row = [prompt for prompt, lengths in enumerate(completions) for _ in lengths]
    return PackedLayout([first + tokens(length) for length in prompts], rows, prompt_of_row)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=5)), min_size=1, max_size=5),
    st.sampled_from([0, 8]),
)
def test_a_sequence_and_all_that_it_continues_are_a_prompt_and_its_completion(groups, common):
    layout = layout_of([prompt for prompt, _ in groups], [rows for _, rows in groups], common)
    prompts = layout.tokens.split([layout.common, len(layout.tokens) - layout.common])[1]
    lengths = [len(places) for places in layout.token_index]
    rests = prompts.split([length - layout.common for length in layout.prompt_lengths] + lengths)
    wholes = [layout.tokens[: layout.common].tolist() + rest.tolist() for rest in rests[: len(groups)]]
    expected = [*wholes, *([layout.tokens[: layout.common].tolist()] if layout.common else [])]
    for row, prompt in enumerate(layout.prompt_of_row):
        if lengths[row]:
            expected.append(wholes[prompt] + rests[len(groups) + row].tolist())
    tokens_of: list[list[int]] = []
    for number, (first, length, parent) in enumerate(layout.sequences.tolist()):
        assert parent < number
        assert number == 0 or parent == number - 1 or layout.sequences[number - 1, 2] >= parent, "not one by one"
        before = tokens_of[parent] if parent >= 0 else []
        tokens_of.append(before + layout.tokens[first : first + length].tolist())
    assert sorted(tokens_of) == sorted(expected)


def rollouts(lengths: dict[int, list[int]], beginning: int = 0):
    """A batch of groups, by the length of their prompt after a common prefix, with completions of these lengths."""
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 80, (count,), generator=random).tolist())

    groups, first = [], tokens(beginning)
    for number, (prompt, completions) in enumerate(lengths.items()):
        context, rows = first + tokens(prompt), []
        for length in completions:
            actions = tokens(length)
            rows.append(Rollout(context, actions, (0.0,) * length, EndReason.STOP, reward=0.0))
        groups.append(Group(Start(number, ""), rows))
    return collate(groups)


def gradients_of(policy: LanguagePolicy, batch, *, packed: bool) -> dict[str, torch.Tensor]:
    output = policy._evaluate_packed(batch) if packed else policy._evaluate_rows(batch)
    loss_weights_BT = torch.sin(torch.arange(batch.mask_BT.numel())).view_as(batch.mask_BT) * batch.mask_BT
    policy.module.zero_grad()
    (output.logprobs_BT.float() * loss_weights_BT).sum().backward()
    return {name: p.grad.clone().float() for name, p in policy.module.named_parameters()}


def gap(some, others) -> float:
    return sum(float((some[name] - others[name]).square().sum()) for name in some) ** 0.5


UNEVEN = {5: [1, 9, 40, 3], 23: [12, 1, 70, 30], 2: [2], 7: [3, 9, 9, 4, 8], 8: [1, 1]}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("beginning", [0, 11])
def test_the_gradients_are_those_of_plain_attention(kind, threads, beginning, monkeypatch):
    torch.set_num_threads(threads)
    used = []
    plain_forward = Attention.forward
    monkeypatch.setattr(
        Attention, "forward", staticmethod(lambda ctx, *given: used.append(1) or plain_forward(ctx, *given))
    )
    policy, batch = LanguagePolicy(tiny_model(kind)), rollouts(UNEVEN, beginning)
    used.clear()
    got = gradients_of(policy, batch, packed=True)
    assert len(used) == 2, "one for each layer"
    monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    expected = gradients_of(LanguagePolicy(tiny_model(kind)), batch, packed=False)
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("beginning", [0, 11])
def test_in_bf16_they_are_as_near_to_fp32_as_those_of_transformers_and_always_the_same(beginning):
    batch, gaps = rollouts(UNEVEN, beginning), {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        low = LanguagePolicy(tiny_model("llama", seed=seed, dtype=torch.bfloat16))
        exact = gradients_of(LanguagePolicy(copy.deepcopy(low.module).float()), batch, packed=False)
        ours, again = (gradients_of(low, batch, packed=True) for _ in range(2))
        assert all(torch.equal(ours[name], again[name]) for name in ours)
        gaps["ours"] += gap(ours, exact)
        gaps["theirs"] += gap(gradients_of(low, batch, packed=False), exact)
    assert gaps["ours"] < 1.2 * gaps["theirs"]


def plain(
    query_NX: Tensor, key_NY: Tensor, value_NY: Tensor, angles_ND, layout: PackedLayout, scaling: float
) -> Tensor:
    """Attention of all tokens to all, with a mask."""
    cosine_N1D, sine_N1D = (part[:, None] for part in angles_ND)
    width = cosine_N1D.shape[2]
    query, key, value = (part.unflatten(1, (-1, width)) for part in (query_NX, key_NY, value_NY))

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=2)
        return x * cosine_N1D + torch.cat([-high, low], dim=2) * sine_N1D

    share = query.shape[1] // key.shape[1]
    key, value = rotated(key).repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    seen = torch.zeros(len(query), len(query), dtype=torch.bool)
    lines: list[list[int]] = []
    for first, length, parent in layout.sequences.tolist():
        before = lines[parent] if parent >= 0 else []
        lines.append([*before, *range(first, first + length)])
        for token in range(first, first + length):
            seen[token, [*before, *range(first, token + 1)]] = True
    scores = torch.einsum("nhd,mhd->hnm", rotated(query), key) * scaling
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(2), value).flatten(1)


def gradients_through(attend, d: Tensor, given: Sequence[Tensor], *how) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [part.detach().requires_grad_() for part in given]
    out = attend(*leaves, *how)
    out.backward(d)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


# Compiler flags that select the matrix products of each kind of processor, and the processor flag that they need.
INSTRUCTION_SETS = {
    "native": (("-march=native",), ""),
    "no AMX": (("-march=native", "-mno-amx-tile", "-mno-amx-bf16"), "amx_tile"),
    "AVX-512": (("-march=skylake-avx512",), "avx512vl"),
    "AVX2": (("-march=haswell",), "avx2"),
}


@cache
def kernels_of(instruction_set: str, dtype: torch.dtype) -> Kernels:
    machine, needed = INSTRUCTION_SETS[instruction_set]
    if needed and needed not in cpu_info("flags").split():
        pytest.skip(f"this processor has no {needed}")
    # In its place, so that the native ones are those of the cache.
    flags = [one for flag in FLAGS for one in (machine if flag == "-march=native" else (flag,))]
    return Kernels(load_library(find_compiler(), flags), dtype)


PROMPTS, COMPLETIONS = [5, 23, 2, 7, 8], [[1, 9, 40, 3], [12, 1, 70, 30], [2], [3, 9, 9, 4, 8], []]


@pytest.mark.slow  # each set of flags is compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_numbers_and_gradients_of_plain_attention(instruction_set, dtype):
    kernels, tolerance = kernels_of(instruction_set, dtype), {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for (heads, kv_heads, width), common, threads in (
        ((4, 2, 8), 0, 1),
        ((9, 3, 64), 11, 2),
        ((2, 2, 40), 40, 3),
        ((4, 1, 96), 0, 2),
        ((6, 3, 16), 11, 1),
    ):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        layout = layout_of(PROMPTS, COMPLETIONS, common)
        tokens = len(layout.tokens)
        d, *given = (torch.randn(tokens, n * width).to(dtype) for n in (heads, heads, kv_heads, kv_heads))
        turns = torch.randn(tokens, width // 2).repeat(1, 2)
        angles = turns.cos().to(dtype), turns.sin().to(dtype)
        ours = gradients_through(Attention.apply, d, given, angles, layout.sequences, AttentionRule(0.3), kernels)
        doubled = ([part.double() for part in parts] for parts in (given, angles))
        exact = gradients_through(plain, d.double(), *doubled, layout, 0.3)
        for name, got, right in zip(("out", "query", "key", "value"), ours, exact, strict=True):
            assert (got - right).norm() < tolerance * right.norm(), f"{name} of {heads}, {kv_heads}, {width}"


def test_of_a_layer_only_queries_keys_values_and_the_result_are_kept():
    layout = layout_of([30], [[200] * 8])
    tokens = len(layout.tokens)
    given = [torch.randn(tokens, heads * 8, requires_grad=True) for heads in (4, 2, 2)]
    angles = torch.randn(tokens, 8), torch.randn(tokens, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = Attention.apply(*given, angles, layout.sequences, AttentionRule(0.3), kernels_for(torch.float32, CPU))
    assert sum(kept) == sum(tensor.numel() for tensor in (*given, out)) + tokens * 4, "and a number of each query"


def test_large_scores_are_not_rounded_to_bf16():
    torch.manual_seed(0)
    layout, width = layout_of([20], [[30, 30]]), 16
    tokens = len(layout.tokens)
    given = [torch.randn(tokens, heads * width) * size for heads, size in ((2, 4.0), (1, 4.0), (1, 1.0))]
    query, key, value = (tensor.bfloat16() for tensor in given)
    angles = torch.ones(tokens, width).bfloat16(), torch.zeros(tokens, width).bfloat16()
    out = Attention.apply(
        query, key, value, angles, layout.sequences, AttentionRule(1.0), kernels_for(torch.bfloat16, CPU)
    )
    exact = plain(query.double(), key.double(), value.double(), [a.double() for a in angles], layout, 1.0)
    assert (out - exact).abs().max() < 0.03, "what remains is the rounding of weights and results"
