"""Siblings that write the same are one row until they part, while sampling and in the update; the numbers stay."""

import copy
import gc
import weakref
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.critic import LanguageCritic
from covey.llm.generation import backend
from covey.llm.generation.backend import Backend
from covey.llm.generation.hf_cache_decoder import CacheDecoder
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.native_decoder import NativeDecoder
from covey.llm.generation.shared_prefix_decoder import SharedPrefixDecoder
from covey.llm.model import prefix_attention
from covey.llm.model.chat import Chat
from covey.llm.model.logprobs import hidden_states_for_actions
from covey.llm.model.prefix_attention import PackedLayout
from covey.llm.native.bindings import kernels_for
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from helpers.tiny_models import SHARED, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
FAST = ("llama", "qwen2", "qwen3")
COLD = 0.08  # a temperature at which siblings agree for a while


# ---- sampling ----


def make_sampler(rows_at_once: int) -> LanguageSampler:
    chat = Chat(tiny_tokenizer(), frozenset(range(1, 85, 11)))
    policy = LanguagePolicy(tiny_model("llama"), temperature=COLD)
    return LanguageSampler(
        LocalGenerator(policy), chat, seed=5, max_new_tokens=20, temperature=COLD, rows_at_once=rows_at_once
    )


def full_forward(model, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities of the actions from one ordinary forward over the whole sequence."""
    tokens = torch.tensor([*rollout.context, *rollout.actions])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(rollout.context) - 1 : -1] / COLD
    return logits.log_softmax(1).gather(1, tokens[len(rollout.context) :, None])[:, 0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", [NativeDecoder, SharedPrefixDecoder, CacheDecoder])
@pytest.mark.parametrize("rows_at_once", [0, 8])
def test_branches_change_no_choice_and_spare_rows(way, rows_at_once, monkeypatch):
    """Some end early, also while others of their branch go on."""
    made = make_sampler(rows_at_once)
    if way is not NativeDecoder:
        options = {"pads": True} if way is CacheDecoder else {}
        monkeypatch.setattr(Backend, "decoder", lambda self, module, rows, tokens: way(module, rows, **options))
    fed, plain_step = [], way.step
    monkeypatch.setattr(way, "step", lambda self, tokens: fed.append(len(tokens)) or plain_step(self, tokens))
    starts = [Start(i, text) for i, text in enumerate(["12+34", "a quick brown fox", "7", "(1+2)"])]
    found = []
    for branches in (False, True):
        monkeypatch.setattr(way, "can_fork", branches)
        fed.clear()
        found.append(([rollout for group in made.sample(starts, 8, step=2) for rollout in group.rollouts], sum(fed)))
    (apart, rows), (together, fewer_rows) = found
    assert fewer_rows < 0.7 * rows
    for rollout, again in zip(apart, together, strict=True):
        assert rollout.actions == again.actions
        assert rollout.behavior_logprobs == pytest.approx(again.behavior_logprobs, abs=1e-3)
        expected = full_forward(made.generator.policy.module, again)
        assert torch.tensor(again.behavior_logprobs) == pytest.approx(expected, abs=1e-3)
    assert len({len(rollout.actions) for rollout in together}) > 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHARED)
def test_a_row_that_is_named_twice_becomes_two(kind):
    model = tiny_model(kind)
    kernels = kernels_for(torch.float32, CPU)
    cache = copy.deepcopy(model)
    model.set_attn_implementation("covey")
    decoders = [SharedPrefixDecoder(model, 6), CacheDecoder(cache, 6, pads=True)]
    if kind in FAST:
        decoders.append(NativeDecoder(model, kernels, 6, 40))
    for decoder in decoders:
        decoder.prefill([[5, 6, 7], [8, 9]], 1)
        rows = [[5, 6, 7], [8, 9]]
        for place in range(38):
            if chosen := {0: [0, 0, 1], 1: [0, 1, 1, 2, 2], 33: [0, 2, 2, 2, 4], 36: [1, 3]}.get(place):
                decoder.select(torch.tensor(chosen))
                rows = [list(rows[row]) for row in chosen]
            tokens = torch.tensor([(11 * place + 7 * row) % 80 + 3 for row in range(len(rows))])
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.append(token)
            logits = decoder.step(tokens)
            if place in (0, 1, 20, 33, 37):
                for row, ours in zip(rows, logits, strict=True):
                    with torch.no_grad():
                        expected = cache(input_ids=torch.tensor([row])).logits[0, -1]
                    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


# ---- the update ----

FEW = st.lists(st.lists(st.sampled_from([3, 4]), max_size=6), max_size=6)  # of two tokens: many begin alike
TWICE = [[[3, 4, 3], [3, 4, 4, 3], [3, 3], [3, 4, 3], [], [3, 4]], [[3, 4], [4, 4, 3], [4, 4]], [], [[4]]]


@example(TWICE)
@given(st.lists(FEW, min_size=1, max_size=4))
def test_every_beginning_is_fed_once(completions):
    prompts = [[10 + number, 50] for number in range(len(completions))]
    rows = [torch.tensor(row, dtype=torch.int64) for group in completions for row in group]
    prompt_of_row = [number for number, group in enumerate(completions) for _ in group]
    layout = PackedLayout(prompts, rows, prompt_of_row)
    beginnings = [
        {tuple(row[:end]) for row in group for end in range(1, len(row) + 1)} for group in completions
    ]  # fmt: skip
    assert len(layout.tokens) == sum(map(len, prompts)) + sum(map(len, beginnings))
    for row, places in zip(rows, layout.token_index, strict=True):
        assert torch.equal(layout.tokens[places], row)
        assert torch.equal(layout.positions[places], 2 + torch.arange(len(row)))
    seen: list[list[int]] = []
    for number, (first, length, parent) in enumerate(layout.sequences.tolist()):
        assert parent < number
        assert length
        seen.append((seen[parent] if parent >= 0 else []) + list(range(first, first + length)))
    for prompt, places in zip(prompt_of_row, layout.token_index, strict=True):
        whole = [2 * prompt, 2 * prompt + 1, *places.tolist()]
        assert any(line[: len(whole)] == whole for line in seen)


@pytest.mark.slow
@example(TWICE)
@given(st.lists(FEW, min_size=1, max_size=4))
def test_every_token_has_a_place_in_the_rectangle_of_leaves(completions):
    prompts = [[10 + number, 50] for number in range(len(completions))]
    rows = [torch.tensor(row, dtype=torch.int64) for group in completions for row in group]
    prompt_of_row = [number for number, group in enumerate(completions) for _ in group]
    layout = PackedLayout(prompts, rows, prompt_of_row)
    written = layout.tokens[2 * len(prompts) :]
    flat = torch.stack([written.double(), torch.arange(len(written))])[:, :, None].requires_grad_()
    padded = layout.completions.pad(flat)
    assert layout.completions.tokens == len(written)
    wholes = [(layout.prompt_of_row[row], rows[row].tolist()) for row in layout.leaf_rows]
    for cells, (_, tokens) in zip(padded[0, :, :, 0], wholes, strict=True):
        assert cells.tolist() == [*tokens, *[0] * (layout.completions.width - len(tokens))]
    assert not any(
        one[0] == other[0] and one[1] == other[1][: len(one[1])]
        for i, one in enumerate(wholes)
        for j, other in enumerate(wholes)
        if i != j
    ), "a leaf is part of another"
    assert torch.equal(layout.completions.unpad(padded), flat.transpose(0, 1))
    weights = torch.rand(padded.shape, dtype=torch.float64)
    (padded * weights).sum().backward()
    expected = torch.zeros_like(flat)
    for cells, row in zip(weights.unbind(1), layout.leaf_rows, strict=True):
        for cell, place in zip(cells.unbind(1), (layout.token_index[row] - 2 * len(prompts)).tolist(), strict=False):
            expected[:, place] += cell
    torch.testing.assert_close(flat.grad, expected)


def batch_of(groups: Sequence[Sequence[Sequence[int]]], beginning: Sequence[int] = ()) -> Batch:
    """Groups of rollouts with these actions."""
    made = []
    for number, actions in enumerate(groups):
        context = (*beginning, 20 + number, 33)
        rows = [Rollout(context, tuple(row), (0.0,) * len(row), EndReason.STOP, reward=0.0) for row in actions]
        made.append(Group(Start(number, ""), rows))
    return collate(made)


def alike_batch(seed: int, beginning: Sequence[int] = ()) -> Batch:
    """Long and short ones, equal ones, and ones that others continue."""
    random = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 80, (count,), generator=random).tolist()

    stem, other, long = tokens(9), tokens(4), tokens(70)
    return batch_of(
        [
            [stem + tokens(3), stem + other + tokens(5), stem + other + tokens(1), stem[:4], stem[:4], stem],
            [[5], [5], [6], [6, 7], tokens(40)],
            [long + tokens(2), long[:35] + tokens(40), long + tokens(9), long],
            [tokens(7), tokens(7)],
        ],
        beginning,
    )


def gradients_of(policy: LanguagePolicy, batch: Batch, *, packed: bool) -> dict[str, torch.Tensor]:
    told = policy._evaluate_packed(batch) if packed else policy._evaluate_rows(batch)
    loss_weights_BT = torch.sin(torch.arange(batch.mask_BT.numel())).view_as(batch.mask_BT) * batch.mask_BT
    policy.module.zero_grad()
    ((told.logprobs_BT + 0.3 * told.entropy_BT).float() * loss_weights_BT).sum().backward()
    return {name: p.grad.clone().float() for name, p in policy.module.named_parameters()}


def attend_by_torch(monkeypatch, scores_limit: int) -> None:
    """Without kernels: up to so many scores by products, beyond by fused attention."""
    monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    monkeypatch.setattr(prefix_attention, "SCORES_LIMIT", scores_limit)


WAYS = [*((kind, "kernels") for kind in FAST), *((kind, way) for kind in SHARED for way in ("products", "fused"))]


@pytest.mark.sampled(27)
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("beginning", [0, 11])
def test_numbers_and_gradients_are_those_of_whole_rows(kind, way, threads, beginning, monkeypatch):
    torch.set_num_threads(threads)
    if way != "kernels":
        attend_by_torch(monkeypatch, {"products": 1 << 40, "fused": 0}[way])
    batch = alike_batch(1, range(40, 40 + beginning))
    policy = LanguagePolicy(tiny_model(kind))
    assert policy.shares_prompts
    ours, plain = (evaluate(batch) for evaluate in (policy._evaluate_packed, policy._evaluate_rows))
    for name in ("logprobs_BT", "entropy_BT"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), atol=2e-5, rtol=0)
    got, expected = (gradients_of(policy, batch, packed=packed) for packed in (True, False))
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kernels", "products", "fused"])
def test_in_bf16_they_are_as_near_to_fp32_as_those_of_transformers_and_always_the_same(way, monkeypatch):
    if way != "kernels":
        attend_by_torch(monkeypatch, {"products": 1 << 40, "fused": 0}[way])
    gaps = {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        batch = alike_batch(seed)
        low = LanguagePolicy(tiny_model("llama", seed=seed, dtype=torch.bfloat16))
        exact = gradients_of(LanguagePolicy(copy.deepcopy(low.module).float()), batch, packed=False)
        ours, again = (gradients_of(low, batch, packed=True) for _ in range(2))
        assert all(torch.equal(ours[name], again[name]) for name in ours)
        for name, found in (("ours", ours), ("theirs", gradients_of(low, batch, packed=False))):
            gaps[name] += sum(float((found[key] - exact[key]).square().sum()) for key in exact) ** 0.5
    assert gaps["ours"] < 1.2 * gaps["theirs"]


def fed(policy: LanguagePolicy, batch: Batch) -> int:
    """How many tokens an evaluation feeds."""
    counts: list[int] = []
    hook = policy.module.get_input_embeddings().register_forward_hook(lambda _, given, out: counts.append(out.shape[1]))
    policy._evaluate_packed(batch)
    hook.remove()
    return sum(counts)


@pytest.mark.parametrize("kind", SHARED)
def test_an_update_reads_each_token_that_siblings_share_once(kind):
    groups = [[[3, 4, 5, 6], [3, 4, 5, 7], [3, 4, 8], [9]]]
    policy = LanguagePolicy(tiny_model(kind))
    assert fed(policy, batch_of(groups)) == 2 + 3  # the prompt, and 3 4 5: last tokens are never fed
    decided = hidden_states_for_actions(policy.module.base_model, batch_of(groups), packed=True)
    assert len(decided.hidden_NW) == 7  # 3 or 9, 4, 5 or 8, 6 or 7
    assert len(decided.index_D) == 12


def test_a_critic_values_what_siblings_share_alike():
    batch = alike_batch(2)
    critic = LanguageCritic(LanguagePolicy(tiny_model("llama")), own_trunk=True)
    with torch.no_grad():
        critic.head.linear.weight.normal_()
        values_BT = critic.values(batch)
        critic.packed = False
        torch.testing.assert_close(values_BT, critic.values(batch), atol=1e-4, rtol=0)


@pytest.mark.parametrize("limit", [1, 60, 110, 400])
def test_microbatches_count_what_is_fed_once_once(limit):
    policy, batch = LanguagePolicy(tiny_model("llama"), microbatch_tokens=limit), alike_batch(3)

    def tokens(rows: torch.Tensor) -> int:
        """Of prompts and completions, whose last ones are counted too."""
        whole = [(batch.context[row], batch.actions_BT[row][batch.mask_BT[row]].tolist()) for row in rows.tolist()]
        written = {(context, tuple(row[:end])) for context, row in whole for end in range(1, len(row) + 1)}
        return len(written) + sum(map(len, {context for context, _ in whole}))

    pieces = list(policy.microbatches(batch))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(batch)))
    assert all(tokens(piece) <= limit or len(piece) == 1 for piece in pieces)
    for piece, following in pairwise(pieces):  # and no two of them would fit
        assert tokens(torch.cat([piece, following])) > limit


def test_a_decoder_is_freed_with_its_last_reference() -> None:
    """Its keys and values are gigabytes, which must not wait for the garbage collector."""
    module = tiny_model()
    LanguagePolicy(module)  # sets the attention that takes a layout
    gc.disable()
    try:
        decoder = SharedPrefixDecoder(module, 4)
        decoder.prefill([[5, 6, 7]], 2)
        decoder.step(torch.tensor([3, 4]))
        kept = weakref.ref(decoder)
        del decoder
        assert kept() is None
    finally:
        gc.enable()
