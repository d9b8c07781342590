"""The fast ways of a language model against the plain one: the same numbers, from the model's own forward."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.config import ConfigError
from covey.data import EndReason, Group, Start, collate
from covey.llm.generation import local_generator
from covey.llm.generation.backend import Sampling, find_kernels
from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.hf_cache_decoder import CacheDecoder
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.native_decoder import NativeDecoder
from covey.llm.generation.shared_prefix_decoder import SharedPrefixDecoder
from covey.llm.generation.token_sampling import BLOCK, sample_tokens
from covey.llm.generation.trial import probe_batch
from covey.llm.model.chat import Chat, end_ids_of
from covey.llm.model.logprobs import token_logprobs
from covey.llm.model.plain_forward import PlainPasses
from covey.llm.model.prefix_attention import shared_prompt_prefix
from covey.llm.native.bindings import kernels_for
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from helpers.tiny_models import PLAIN, SHARED, tiny_model, tiny_tokenizer

KERNELS = find_kernels(torch.device("cpu"))
PROMPTS = ["12+34", "a quick brown fox", "7", "(1+2)"]
ALIKE = [f"what is {prompt}?" for prompt in PROMPTS]  # what they begin with is fed once


def make_sampler(kind: str, *, new_tokens: int = 12, end_ids: frozenset[int] = frozenset({1}), **policy_options):
    torch.set_num_threads(1)
    language_policy = LanguagePolicy(tiny_model(kind), **policy_options)
    chat = Chat(tiny_tokenizer(), end_ids)
    return LanguageSampler(
        LocalGenerator(language_policy),
        chat,
        seed=5,
        max_new_tokens=new_tokens,
        temperature=language_policy.temperature,
    )


def graded(groups: list[Group]) -> list[Group]:
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number)
    return groups


def full_forward(model, prompt, actions, temperature: float) -> torch.Tensor:
    """Log-probabilities of the actions from one ordinary forward over the whole sequence, in fp32."""
    tokens = torch.tensor([*prompt, *actions])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(1).gather(1, tokens[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("kind", SHARED)
def test_these_architectures_share_prompts(kind):
    assert LanguagePolicy(tiny_model(kind)).shares_prompts


@pytest.mark.parametrize("kind", PLAIN)
def test_what_shared_prompts_are_not_written_for_goes_the_plain_way(kind):
    assert not LanguagePolicy(tiny_model(kind)).shares_prompts


@pytest.mark.sampled(36)
@pytest.mark.parametrize("kind", SHARED + PLAIN)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prompts", [PROMPTS, ALIKE], ids=["unlike", "alike"])
def test_behavior_logprobs_are_those_of_a_full_forward(kind, temperature, prompts):
    # Every 5th token ends a completion, so that rows leave at different times and prompts lose all their rows.
    ends = frozenset(range(1, 85, 5))
    made = make_sampler(kind, temperature=temperature, end_ids=ends)
    groups = made.sample([Start(i, text) for i, text in enumerate(prompts)], 6, step=3)
    lengths = set()
    for group in groups:
        for rollout in group.rollouts:
            lengths.add(len(rollout.actions))
            expected = full_forward(made.generator.policy.module, rollout.context, rollout.actions, temperature)
            assert torch.tensor(rollout.behavior_logprobs) == pytest.approx(expected, abs=1e-4)
    assert len(lengths) > 3, "the rows should have left at different times"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHARED)
def test_both_decoders_sample_the_same_tokens(kind):
    made = make_sampler(kind, end_ids=frozenset(range(1, 85, 7)))
    starts = [Start(i, text) for i, text in enumerate(PROMPTS)]
    shared = made.sample(starts, 5, step=1)
    made.generator.policy.backend = replace(made.generator.policy.backend, sampling=Sampling.PADDED_CACHE)
    plain = made.sample(starts, 5, step=1)
    assert [[r.actions for r in g.rollouts] for g in shared] == [[r.actions for r in g.rollouts] for g in plain]


def test_the_decoders_agree_after_every_departure():
    model = tiny_model("llama")
    model.set_attn_implementation("covey")
    kernels = kernels_for(torch.float32, torch.device("cpu"))
    decoders = [
        SharedPrefixDecoder(model, 6),
        CacheDecoder(model, 6, pads=True),
        NativeDecoder(model, kernels, 6, 8),
    ]
    shared, *others = [decoder.prefill([[5, 6, 7], [8, 9]], 3) for decoder in decoders]
    for other in others:
        torch.testing.assert_close(other, shared, atol=1e-4, rtol=0)
    tokens = torch.tensor([3, 4, 5, 6, 7, 8])
    for keep in ([0, 1, 2, 3, 4, 5], [1, 2, 4], [1, 2], [0]):
        for decoder in decoders:
            decoder.select(torch.tensor(keep))
        tokens = tokens[torch.tensor(keep)]
        shared, *others = [decoder.step(tokens) for decoder in decoders]
        for other in others:
            torch.testing.assert_close(other, shared, atol=1e-4, rtol=0)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prompts", [PROMPTS, ALIKE], ids=["unlike", "alike"])
def test_packed_and_plain_evaluation_agree_with_their_gradients(kind, fused, prompts, monkeypatch):
    if fused:
        monkeypatch.setattr("covey.llm.model.prefix_attention.SCORES_LIMIT", 0)
    made = make_sampler(kind, end_ids=frozenset(range(1, 85, 6)), temperature=0.8)
    batch = collate(graded(made.sample([Start(i, text) for i, text in enumerate(prompts)], 4, step=1)))
    batch = batch.select(torch.tensor([0, 1, 2, 3, 4, 6, 9, 15]))  # groups of unequal size
    module = made.generator.policy.module
    results = []
    for evaluate in (made.generator.policy._evaluate_packed, made.generator.policy._evaluate_rows):
        module.zero_grad()
        evaluation = evaluate(batch)
        weights = torch.linspace(-1, 1, batch.mask_BT.numel()).view_as(evaluation.logprobs_BT)
        ((evaluation.logprobs_BT + 0.3 * evaluation.entropy_BT) * weights * batch.mask_BT).sum().backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
        results.append((evaluation, gradients))
    (packed, packed_gradients), (plain, plain_gradients) = results
    torch.testing.assert_close(packed.logprobs_BT, plain.logprobs_BT, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.entropy_BT, plain.entropy_BT, atol=1e-5, rtol=0)
    for name, expected in plain_gradients.items():
        assert (packed_gradients[name] - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-3), name


@pytest.mark.parametrize("kind", SHARED)
def test_what_all_prompts_begin_with_is_fed_once(kind, monkeypatch):
    made = make_sampler(kind)
    fed = []
    made.generator.policy.module.base_model.register_forward_pre_hook(
        lambda _, given, named: fed.append(named["input_ids"].numel()), with_kwargs=True
    )
    groups = made.sample([Start(i, text) for i, text in enumerate(ALIKE)], 2, step=1)
    beginning, lengths = len(made.chat.encode("what is ")), [len(group.rollouts[0].context) for group in groups]
    prompts = beginning + sum(length - beginning for length in lengths)
    assert fed[0] == prompts < sum(lengths)
    fed.clear()
    made.generator.policy.evaluate(collate(graded(groups)))
    assert fed == [prompts + sum(len(rollout.actions) - 1 for group in groups for rollout in group.rollouts)]


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        ([[*range(9), 5], [*range(9), 7, 8]], 9),
        ([[*range(9)], [*range(9)]], 8),  # each keeps a token of its own, from which it goes on
        ([[*range(9), 5], [*range(8), 7, 8]], 8),
        ([[*range(9), 5], [*range(7), 30, 8]], 0),  # not worth it
        ([[9], [9, 5]], 0),
        ([[*range(10)]], 0),  # nobody to share with
    ],
)
def test_the_common_beginning_ends_before_every_prompts_last_token(prompts, length):
    assert shared_prompt_prefix(prompts) == length


@pytest.mark.parametrize("kind", ["llama", "cohere"])
def test_evaluation_gives_back_the_behavior_logprobs(kind):
    made = make_sampler(kind)
    batch = collate(graded(made.sample([Start(i, text) for i, text in enumerate(PROMPTS)], 4, step=1)))
    with torch.no_grad():
        evaluation = made.generator.policy.evaluate(batch)
    gap = (evaluation.logprobs_BT - batch.behavior_logprobs_BT)[batch.mask_BT]
    assert gap.abs().max() < 1e-4


def test_undecided_columns_inside_a_row_are_fed_but_not_evaluated():
    made = make_sampler("llama")
    batch = collate(graded(made.sample([Start(0, "12+34")], 3, step=1)))
    whole = made.generator.policy.evaluate(batch).logprobs_BT
    batch.mask_BT[:, 1] = False  # as a tool's answer would be
    part = made.generator.policy.evaluate(batch).logprobs_BT
    assert (part[:, 1] == 0).all()
    torch.testing.assert_close(part[batch.mask_BT], whole[batch.mask_BT], atol=1e-5, rtol=0)


def test_microbatches_hold_every_row_once_and_their_limit():
    made = make_sampler("llama", end_ids=frozenset(range(1, 85, 4)), microbatch_tokens=40)
    batch = collate(graded(made.sample([Start(i, text) for i, text in enumerate(PROMPTS)], 8, step=1)))
    pieces = list(made.generator.policy.microbatches(batch))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(batch)))
    assert len(pieces) > 3
    for piece in pieces:
        prompts = {int(batch.group_B[i]): len(batch.context[i]) for i in piece}
        tokens = int(batch.mask_BT[piece].sum()) + sum(prompts.values())
        assert tokens <= 40 or len(piece) == 1


def test_an_empty_batch_has_no_microbatches():
    made = make_sampler("llama")
    batch = collate(graded(made.sample([Start(0, "1")], 2, step=1)))
    assert list(made.generator.policy.microbatches(batch.select(torch.tensor([], dtype=torch.int64)))) == []


# ---- what ends a completion ----


def test_trl_4970_every_declared_end_id_ends_and_pad_is_not_known_by_its_id():
    class Config:
        eos_token_id = 4

    class Generation:
        eos_token_id = (4, 9)

    class Tokenizer:
        eos_token_id = 1

    assert end_ids_of(Config(), Generation(), Tokenizer()) == {1, 4, 9}
    # Token 0 is the tokenizer's pad. When the policy samples it, it is a decision like any other.
    made = make_sampler("llama", new_tokens=40, end_ids=frozenset({1}))
    groups = made.sample([Start(0, "12+34"), Start(1, "7")], 16, step=1)
    sampled_pad = [r for g in groups for r in g.rollouts if 0 in r.actions]
    assert sampled_pad, "the test needs a completion with the pad token inside"
    batch = collate(graded(groups))
    assert int(batch.mask_BT.sum()) == sum(len(r.actions) for g in groups for r in g.rollouts)


def test_the_end_token_is_a_decision_and_the_rest_is_cut():
    ends = frozenset({1, 40})
    made = make_sampler("llama", new_tokens=30, end_ids=ends)
    rollouts = [r for g in made.sample([Start(i, p) for i, p in enumerate(PROMPTS)], 16, step=2) for r in g.rollouts]
    stopped = [r for r in rollouts if r.end is EndReason.STOP]
    assert {r.actions[-1] for r in stopped} == ends
    assert all(not ends & set(r.actions[:-1]) for r in rollouts)
    assert all(len(r.actions) == 30 and r.actions[-1] not in ends for r in rollouts if r.end is EndReason.LENGTH)
    assert {r.end for r in rollouts} == {EndReason.STOP, EndReason.LENGTH}


def test_the_embedding_of_the_padding_row_learns(tmp_path):
    from covey.llm.model.loading import load_model
    from helpers.tiny_models import tiny_folder

    loaded = load_model(str(tiny_folder(tmp_path / "model")), dtype=torch.float32, device=torch.device("cpu"))
    language_policy = LanguagePolicy(loaded.module)
    batch = probe_batch(list(range(60)), 16)
    batch.context = tuple((0, *context) for context in batch.context)  # the prompts hold the pad token
    language_policy.evaluate(batch).logprobs_BT.sum().backward()
    assert loaded.module.get_input_embeddings().weight.grad[0].abs().sum() > 0


# ---- trying a model when a policy is made ----


def count_passes(module) -> list[int]:
    """The number of tokens of every pass through the model's first layer from now on."""
    passes: list[int] = []
    module.base_model.layers[0].register_forward_hook(lambda _, args, __: passes.append(args[0].shape[1]))
    return passes


def test_a_policy_is_tried_in_few_passes():
    passes = count_passes(module := tiny_model("llama"))
    assert LanguagePolicy(module).backend.sampling is Sampling.NATIVE
    assert len(passes) <= 11, passes


def test_plain_passes_serve_what_they_begin_with():
    passes = count_passes(module := tiny_model("llama"))
    plain = PlainPasses(module)
    with torch.no_grad():
        begun, whole, other = plain.after([[5, 6], [5, 6, 7, 8], [5, 9]])
        (again,) = plain.after([[5, 6, 7]])
        assert passes == [4, 2]
        for tokens, logits_LV in (([5, 6], begun), ([5, 6, 7, 8], whole), ([5, 9], other), ([5, 6, 7], again)):
            expected_LV = module(input_ids=torch.tensor([tokens])).logits[0]
            assert torch.allclose(logits_LV, expected_LV, atol=1e-5)


def test_a_model_whose_passes_differ_is_refused():
    module = tiny_model("llama")
    noise = torch.Generator().manual_seed(0)
    module.base_model.layers[0].register_forward_hook(
        lambda _, __, output: output + 0.1 * torch.randn(output.shape, generator=noise)
    )
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be trained: two forward passes .* differ"):
        LanguagePolicy(module)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [(torch.float32, "choose another"), (torch.bfloat16, "try --precision fp32, or choose another")],
)
def test_a_model_that_no_gradient_passes_through_is_refused(dtype, advice):
    module = tiny_model("llama", dtype=dtype)
    module.base_model.layers[1].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    module.lm_head.weight.requires_grad_(False)
    module.base_model.norm.weight.requires_grad_(False)
    module.base_model.layers[1].requires_grad_(False)
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM cannot be trained: .* no gradient .*; {advice}"):
        LanguagePolicy(module)


# ---- randomness ----


def test_company_and_order_change_no_choice():
    made = make_sampler("llama", end_ids=frozenset(range(1, 85, 9)))
    starts = [Start(i, text) for i, text in enumerate(PROMPTS)]
    together = {g.start.index: [r.actions for r in g.rollouts] for g in made.sample(starts, 4, step=2)}
    made.rows_at_once = 4
    apart = {g.start.index: [r.actions for r in g.rollouts] for g in made.sample(starts[::-1], 4, step=2)}
    assert together == apart
    larger = {g.start.index: [r.actions for r in g.rollouts][:4] for g in made.sample(starts, 7, step=2)}
    assert together == larger
    other = {g.start.index: [r.actions for r in g.rollouts] for g in made.sample(starts, 4, step=3)}
    assert together != other


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_eight_rollouts_are_four_and_four_more(kind):
    made = make_sampler(kind, end_ids=frozenset(range(1, 85, 9)))
    starts = [Start(i, text) for i, text in enumerate(PROMPTS)]
    whole = {g.start.index: [r.actions for r in g.rollouts] for g in made.sample(starts, 8, step=2)}
    halves = [made.sample(starts, 4, 2), made.sample(starts[:0:-2], 4, 2, 4)]  # the second for two prompts only
    first, further = ({g.start.index: [r.actions for r in g.rollouts] for g in groups} for groups in halves)
    assert sorted(further) == [1, 3]
    assert first == {index: rows[:4] for index, rows in whole.items()}
    assert further == {index: whole[index][4:] for index in further}


@pytest.mark.slow
def test_tokens_are_drawn_from_the_distribution():
    torch.manual_seed(0)
    vocabulary, draws = 3 * BLOCK + 17, 60_000
    logits = torch.randn(1, vocabulary) * 2
    uniforms = torch.from_numpy((np.arange(draws) + 0.5) / draws)  # evenly spread: the counts must be exact
    tokens, logprobs = sample_tokens(logits.expand(draws, -1), uniforms, 0.5, KERNELS)
    probabilities = (logits[0].double() / 0.5).softmax(0)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert (counts - probabilities * draws).abs().max() < 1.5
    torch.testing.assert_close(logprobs, probabilities.log()[tokens].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_chosen(uniform):
    logits = torch.full((2, 2 * BLOCK + 5), -torch.inf)
    logits[0, [3, 270]] = 1.0
    logits[1, 511] = -2.0
    tokens, logprobs = sample_tokens(logits, torch.full((2,), uniform, dtype=torch.float64), 1.0, KERNELS)
    assert tokens[0] == (270 if uniform >= 0.5 else 3)
    assert tokens[1] == 511
    assert logprobs == pytest.approx([math.log(0.5), 0.0])


def test_greedy_takes_the_likeliest_and_tells_its_logprob():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.99], dtype=torch.float64), 0.0, KERNELS)
    assert tokens.tolist() == [1]
    assert logprobs == pytest.approx([2 - math.log(1 + math.e + math.e**2)])


# ---- log-probabilities in chunks ----


@pytest.mark.sampled(3)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    "vocabulary", [11, 2]
)  # with 2, a chunk of 5 decisions has fewer logits than there are decisions
def test_token_logprobs_and_their_gradients_do_not_depend_on_chunks(monkeypatch, with_bias, with_entropy, vocabulary):
    monkeypatch.setattr("covey.llm.model.logprobs.CHUNK", 5)
    torch.manual_seed(0)
    double = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(13, 7, **double), torch.randn(vocabulary, 7, **double)
    bias = torch.randn(vocabulary, **double) if with_bias else None
    tokens = torch.randint(vocabulary, (13,))
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / 0.7
    expected = logits.log_softmax(1)
    logprobs, entropy = token_logprobs(hidden, weight, bias, tokens, 0.7, KERNELS)
    torch.testing.assert_close(logprobs, expected.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(1))

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        results = token_logprobs(inputs[0], inputs[1], inputs[2] if with_bias else None, tokens, 0.7, KERNELS)
        return results[0] + results[1] ** 2 if with_entropy else results[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias) if with_bias else (hidden, weight))


def test_bf16_is_no_further_from_fp32_than_transformers_own_bf16():
    made = make_sampler("llama")
    groups = graded(made.sample([Start(i, text) for i, text in enumerate(PROMPTS)], 8, step=1))
    batch = collate(groups)
    exact, low = made.generator.policy, LanguagePolicy(tiny_model("llama", dtype=torch.bfloat16))
    with torch.no_grad():
        truth = exact._evaluate_rows(batch).logprobs_BT
        ours = (low._evaluate_packed(batch).logprobs_BT - truth)[batch.mask_BT].abs().mean()
        theirs = (low._evaluate_rows(batch).logprobs_BT - truth)[batch.mask_BT].abs().mean()
    assert ours <= 1.2 * theirs


def test_rows_at_once_is_chosen_by_memory(monkeypatch):
    made = make_sampler("llama")
    settings = GenerationSettings(max_new_tokens=12, temperature=1.0, end_ids=frozenset(), version=0)
    requests = [GenerationRequest(tuple(range(5)), 1, RandomKey(0, 1, 0), settings)] * 10
    assert local_generator.rows_in_memory(made.generator.policy, requests, 12, None) > 40
    monkeypatch.setattr(local_generator, "CACHE_BYTES", 2 * 2 * 2 * 8 * 4 * 12 * 8)  # 8 rows of 12 tokens
    assert local_generator.rows_in_memory(made.generator.policy, requests, 12, None) == 8


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_beyond_the_models_positions_is_refused(kind):
    made = make_sampler(kind, new_tokens=20)
    made.sample([Start(0, "1" * 236)], 2, step=1)  # 256 in all
    with pytest.raises(ConfigError, match="exceed the model's 256 positions"):
        made.sample([Start(0, "1" * 237)], 2, step=1)
