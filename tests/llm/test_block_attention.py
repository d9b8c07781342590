"""Attention of training in blocks: where tokens lie, and the same numbers and gradients as row by row."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm import blocks as blocks_module
from covey.llm.blocks import Blocks
from covey.llm.native import fused
from covey.llm.native.attention import BlockAttention
from covey.llm.native.library import kernels_for
from covey.llm.policy import LanguagePolicy
from helpers.tiny import tiny_model

CPU = torch.device("cpu")
FAST = ("llama", "qwen2", "qwen3")


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=5)), min_size=1, max_size=5),
    st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.sampled_from([1, 200, 1 << 21]),
    st.integers(0, 8),
)
def test_every_head_of_every_token_has_a_place_of_its_own(groups, heads, limit, common):
    prompts = [prompt for prompt, _ in groups]
    common = min(common, min(prompts) - 1)
    lengths = [length for _, completions in groups for length in completions]
    prompt_of_row = [i for i, (_, completions) in enumerate(groups) for _ in completions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "SCORES", limit)
        made = Blocks(prompts, lengths, prompt_of_row, *heads, common)
    places = made.begins_N[:, None] + torch.arange(heads[1]) * made.pitches_N[:, None]
    rests = [prompt - common for prompt in prompts]
    assert len(places) == common + sum(rests) + sum(lengths)
    assert len(places.unique()) == places.numel(), "two heads lie in one place"
    assert int(places.min()) >= 0
    assert int(places.max()) < made.size * heads[1]
    assert made.padded == (made.size > len(places) + common * len(prompts))
    *beginning, sequences = places.split([common, len(places) - common] if common else [len(places)])
    sequences = sequences.split([length for length in [*rests, *lengths] if length])
    for sequence in [*beginning, *sequences]:
        assert (sequence.diff(dim=0) == 1).all(), "the tokens of a sequence lie side by side"
    for block in made.all:
        several = block.groups * block.rows > 1
        assert (
            not several or block.groups * block.rows * heads[0] * block.length * (block.shared + block.length) <= limit
        )
    for row, prompt in enumerate(prompt_of_row):
        if lengths[row]:
            begin = int(sequences[len(prompts) + [r for r in range(row + 1) if lengths[r]].index(row)][0, 0])
            block = next(b for b in made.all if b.base * heads[1] <= begin < b.end * heads[1])
            group = (begin - block.base * heads[1]) // (block.rows * block.length)
            at = block.prompts.base * heads[1] + group * block.prompts.length
            assert (at + common, block.prompt_lengths_G[group]) == (int(sequences[prompt][0, 0]), prompts[prompt])


def rollouts(lengths: dict[int, list[int]], beginning: int = 0):
    """Groups by the length of their prompt, behind what all begin with, with completions of these lengths."""
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
    told = policy._evaluate_packed(batch) if packed else policy._evaluate_rows(batch)
    weights_BT = torch.sin(torch.arange(batch.mask_BT.numel())).view_as(batch.mask_BT) * batch.mask_BT
    policy.module.zero_grad()
    (told.logprobs_BT.float() * weights_BT).sum().backward()
    return {name: p.grad.clone().float() for name, p in policy.module.named_parameters()}


def gap(some, others) -> float:
    return sum(float((some[name] - others[name]).square().sum()) for name in some) ** 0.5


UNEVEN = {5: [1, 9, 40, 3], 23: [12, 1, 70, 30], 2: [2], 7: [3, 9, 9, 4, 8], 8: [1, 1]}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("scores", "queries"), [(1 << 21, 64), (2000, 7), (1, 1)], ids=["whole", "cut", "one by one"])
@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("beginning", [0, 11])
def test_the_gradients_are_those_of_plain_attention(kind, scores, queries, threads, beginning, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr(blocks_module, "SCORES", scores)
    monkeypatch.setattr(blocks_module, "QUERIES", queries)
    used = []
    plain_forward = BlockAttention.forward
    monkeypatch.setattr(
        BlockAttention, "forward", staticmethod(lambda ctx, *given: used.append(1) or plain_forward(ctx, *given))
    )
    policy, batch = LanguagePolicy(tiny_model(kind)), rollouts(UNEVEN, beginning)
    used.clear()
    got = gradients_of(policy, batch, packed=True)
    assert len(used) == 2, "one for each layer"
    monkeypatch.setattr(fused, "kernels_for", lambda *_: None)
    expected = gradients_of(LanguagePolicy(tiny_model(kind)), batch, packed=False)
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


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


def test_of_a_layer_only_queries_keys_and_values_are_kept():
    kernels = kernels_for(torch.float32, CPU)
    blocks = Blocks([30], [200] * 8, [0] * 8, 4, 2)
    tokens = 30 + 8 * 200
    given = [torch.randn(tokens, heads * 8, requires_grad=True) for heads in (4, 2, 2)]
    angles = torch.randn(tokens, 8), torch.randn(tokens, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        BlockAttention.apply(*given, *angles, blocks, 0.3, kernels)
    assert sum(kept) == sum(tensor.numel() for tensor in given)


def test_large_scores_are_not_rounded_to_bf16():
    torch.manual_seed(0)
    prompt, length, rows, width = 20, 30, 2, 16
    tokens = prompt + rows * length
    given = [torch.randn(tokens, heads * width) * size for heads, size in ((2, 4.0), (1, 4.0), (1, 1.0))]
    query, key, value = (tensor.bfloat16() for tensor in given)
    angles = torch.ones(tokens, width).bfloat16(), torch.zeros(tokens, width).bfloat16()
    kernels = kernels_for(torch.bfloat16, CPU)
    out = BlockAttention.apply(
        query, key, value, *angles, Blocks([prompt], [length] * rows, [0, 0], 2, 1), 1.0, kernels
    )
    for row in range(rows):
        seen = [*range(prompt), *range(prompt + row * length, prompt + (row + 1) * length)]
        scores = torch.einsum("nhd,md->hnm", query[seen].double().unflatten(1, (2, width)), key[seen].double())
        causal = torch.ones(len(seen), len(seen), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(causal, -torch.inf).softmax(2)
        expected = torch.einsum("hnm,md->nhd", weights, value[seen].double()).flatten(1)
        worst = (out[seen].double() - expected).abs().max()
        assert worst < 0.03, "what remains is the rounding of weights and results"
