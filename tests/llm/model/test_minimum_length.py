"""A minimum length: sampler and update exclude the end tokens at the same decisions, and renormalise alike; a recipe's
reaches everything that is made of it.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from covey.config import ArithmeticConfig, LoRAConfig, RunConfig, SamplingConfig
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.experiment.models import adapt, load_policy
from covey.llm.conversation.sampler import ConversationSampler
from covey.llm.conversation.styles import Style
from covey.llm.generation.backend import find_kernels
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import Truncation
from covey.llm.grader import build_grader
from covey.llm.model import logprobs as heads
from covey.llm.model.chat import Chat
from covey.llm.model.logprobs import NO_MINIMUM, Excluded, MinimumLength, token_logprobs
from covey.llm.native.bindings import TORCH_ALONE, KernelSet
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.llm.sampler import LanguageSampler, greedy
from covey.runtime.device import build_machine
from helpers.chat_models import tiny_chat
from helpers.guessing import Guess
from helpers.in_threads import EnvironmentThreads
from helpers.tiny_models import tiny_folder, tiny_model, tiny_tokenizer

MINIMUM = 4
ENDS = frozenset(range(1, 85, 3))  # a third of the vocabulary, so that turns end early
TEMPERATURE = 0.8
KERNELS = find_kernels(torch.device("cpu"))


def policy_of(kind: str, tokens: int = MINIMUM, seed: int = 0, ends: frozenset[int] = ENDS) -> LanguagePolicy:
    """A policy; its end tokens are made likely."""
    module = tiny_model(kind, seed=seed)
    with torch.no_grad():
        module.get_output_embeddings().weight[sorted(ends)] += 0.1
    return LanguagePolicy(module, temperature=TEMPERATURE, minimum=MinimumLength(tokens, ends))


def completions(policy: LanguagePolicy, count: int = 4) -> list[Group]:
    chat = Chat(tiny_tokenizer(), ENDS, 84)
    sampler = LanguageSampler(
        LocalGenerator(policy), chat, 3, 9, TEMPERATURE, truncation=Truncation(min_new_tokens=policy.minimum.tokens)
    )
    return sampler.sample([Start(index, text) for index, text in enumerate(["12+3=", "ab", "12*"])], count, 1)


def conversations(policy: LanguagePolicy, ends: frozenset[int]) -> list[Group]:
    chat = Chat(tiny_chat().tokenizer, ends)
    sampler = ConversationSampler(
        LocalGenerator(policy), chat, 5, 7, TEMPERATURE, turns=3, total_tokens=60, style=Style(chat, "step"),
        environments=EnvironmentThreads(Guess), truncation=Truncation(min_new_tokens=policy.minimum.tokens),
    )  # fmt: skip
    return sampler.sample([Start(0, [{"role": "user", "content": "1+2"}], {"answer": "3"})], 6, step=1)


def turns_of(rollout: Rollout) -> list[list[int]]:
    """The places of the decisions of each turn."""
    decided = [True] * len(rollout.actions) if rollout.decided is None else list(rollout.decided)
    turns: list[list[int]] = []
    for place, own in enumerate(decided):
        if own and (place == 0 or not decided[place - 1]):
            turns.append([])
        if own:
            turns[-1].append(place)
    return turns


def masked_logp(policy: LanguagePolicy, rollout: Rollout) -> Tensor:
    """logp_TV of one plain forward pass over the whole rollout, with -infinity for the tokens that are excluded."""
    tokens_L = torch.tensor([*rollout.context, *rollout.actions])
    logits_TV = policy.module(tokens_L[None]).logits[0, len(rollout.context) - 1 : -1] / TEMPERATURE
    early = [place for turn in turns_of(rollout) for place in turn[: policy.minimum.tokens]]
    mask_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
    for place in early:
        mask_TV[place, sorted(policy.minimum.end_ids)] = True
    return logits_TV.masked_fill(mask_TV, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_sampler_and_update_have_the_log_probabilities_of_masked_logits(kind: str) -> None:
    policy = policy_of(kind)
    groups = completions(policy)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        assert len(rollout.actions) > MINIMUM
        assert not ENDS & set(rollout.actions[:MINIMUM])
    assert sum(len(rollout.actions) == MINIMUM + 1 for rollout in rollouts) > 2, "some end as early as they may"
    check_log_probabilities(policy, groups)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_every_turn_of_a_conversation_has_the_minimum(kind: str) -> None:
    ends = frozenset({1, *range(48, 74)})  # and capital letters, which no reply has
    policy = policy_of(kind, ends=ends)
    groups = conversations(policy, ends)
    build_grader(["environment"], ()).grade(groups)
    turns = [[rollout.actions[place] for place in turn] for rollout in groups[0].rollouts for turn in turns_of(rollout)]
    assert len(turns) > 6
    assert all(not ends & set(turn[:MINIMUM]) for turn in turns)
    assert any(len(turn) == MINIMUM + 1 for turn in turns)
    check_log_probabilities(policy, groups)


def check_log_probabilities(policy: LanguagePolicy, groups: list[Group]) -> None:
    batch = collate(groups)
    with torch.no_grad():
        found = policy.evaluate(batch)
        for row, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
            decided_T = batch.mask_BT[row, : len(rollout.actions)]
            logp_TV = masked_logp(policy, rollout)[decided_T]
            tokens_T = torch.tensor(rollout.actions)[decided_T]
            expected = {
                "sampler": (batch.behavior_logprobs_BT, logp_TV.gather(1, tokens_T[:, None])[:, 0]),
                "update": (found.logprobs_BT, logp_TV.gather(1, tokens_T[:, None])[:, 0]),
                "entropy": (found.entropy_BT, -torch.special.entr(logp_TV.exp()).neg().sum(1)),
            }
            for name, (ours_BT, truth_T) in expected.items():
                ours_T = ours_BT[row, : len(rollout.actions)][decided_T]
                torch.testing.assert_close(ours_T, truth_T, atol=3e-5, rtol=0, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_gradients_and_exact_kl_are_those_of_masked_softmaxes(kind: str) -> None:
    policy, reference = policy_of(kind), policy_of(kind, seed=1)
    both = policy.with_outputs(KLToReference(reference))
    groups = completions(policy, 3)
    batch = collate(groups)
    weights_BT = torch.linspace(-1, 2, batch.mask_BT.numel()).view_as(batch.mask_BT) * batch.mask_BT
    found = both.evaluate(batch)
    assert found.kl_BT is not None
    loss = (weights_BT * (found.logprobs_BT + 0.3 * found.entropy_BT + 0.2 * found.kl_BT)).sum()
    expected = torch.zeros(())
    for row, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        logp_TV = masked_logp(policy, rollout)
        other_TV = masked_logp(reference, rollout).detach()
        kept_TV = logp_TV > -torch.inf
        finite_TV, other_TV = (logp.masked_fill(~kept_TV, 0.0) for logp in (logp_TV, other_TV))
        p_TV = finite_TV.exp() * kept_TV
        per_token_T = finite_TV.gather(1, torch.tensor(rollout.actions)[:, None])[:, 0]
        per_token_T = per_token_T - 0.3 * (p_TV * finite_TV).sum(1) + 0.2 * (p_TV * (finite_TV - other_TV)).sum(1)
        expected = expected + (weights_BT[row, : len(rollout.actions)] * per_token_T).sum()
    torch.testing.assert_close(loss, expected, atol=2e-4, rtol=1e-5)
    parameters = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    for ours, truth in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, truth, atol=2e-4 * float(truth.abs().max()) + 1e-6, rtol=1e-4)


@pytest.mark.parametrize("kernels", [KERNELS, TORCH_ALONE], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_distribution_of_almost_only_end_tokens_is_renormalised_soundly(
    kernels: KernelSet, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 - p(end) is below the precision of the numbers, and the temperature as low as it may be."""
    monkeypatch.setattr(heads, "CHUNK", 3)
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, dtype=dtype), torch.randn(400, 16, dtype=dtype) * 0.2
    bias = torch.zeros(400, dtype=dtype)
    ends = [0, 17, 399]
    bias[ends] = 40.0
    tokens = torch.tensor([5, 6, 7, 8, 9, 0, 17, 399])
    rows = torch.arange(8) < 5
    for temperature in (1.0, 1e-2):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight, bias)]
        found = token_logprobs(*inputs, tokens, temperature, kernels, Excluded(rows, torch.tensor(ends)))
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        products = (exact[0] @ exact[1].T + exact[2]).to(torch.float64)
        rounded = products + (products.to(dtype).double() - products).detach()  # as the output layer rounds it
        out_NV = torch.zeros(8, 400, dtype=torch.bool)
        out_NV[:5, ends] = True
        logp = (rounded / temperature).masked_fill(out_NV, -1e300).log_softmax(1)
        truth = logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp.masked_fill(out_NV, 0.0)).sum(1)
        for ours, theirs in zip(found, truth, strict=True):
            assert bool(ours.isfinite().all())
            torch.testing.assert_close(ours.double(), theirs, atol=1e-3 if dtype is torch.bfloat16 else 2e-4, rtol=2e-3)
        ours = torch.autograd.grad((found[0] + 0.1 * found[1]).sum(), inputs)
        theirs = torch.autograd.grad((truth[0] + 0.1 * truth[1]).sum(), exact)
        for one, other in zip(ours, theirs, strict=True):
            assert bool(one.isfinite().all())
            allowed = (3e-2 if dtype is torch.bfloat16 else 1e-3) * float(other.abs().max())
            torch.testing.assert_close(one.double(), other, atol=allowed, rtol=0)


def test_early_decisions_are_the_first_of_every_turn() -> None:
    mask_BT = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1, 0]]).bool()
    early_BT = MinimumLength(2, ENDS).early(mask_BT)
    assert early_BT is not None
    assert early_BT.int().tolist() == [[1, 1, 0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0, 1, 0]]
    assert NO_MINIMUM.early(mask_BT) is None


def test_equal_decisions_at_different_places_of_a_turn_are_not_one() -> None:
    """One sibling wrote what the other read, so the same token is early in one of them alone."""
    policy = policy_of("llama", tokens=2)
    context, actions = (5, 6), [8, 9, 11, 12]
    read = Rollout(context, actions, [0.0] * 4, EndReason.STOP, reward=0.0, decided=[True, False, True, True])
    wrote = Rollout(context, actions, [0.0] * 4, EndReason.STOP, reward=1.0)
    batch: Batch = collate([Group(Start(0, ""), [read, wrote])])
    with torch.no_grad():
        found_BT = policy.evaluate(batch).logprobs_BT
        for row, rollout in enumerate((read, wrote)):
            truth_T = masked_logp(policy, rollout).gather(1, torch.tensor(actions)[:, None])[:, 0]
            mask_T = batch.mask_BT[row]
            torch.testing.assert_close(found_BT[row][mask_T], truth_T[mask_T], atol=3e-5, rtol=0)
    assert float((found_BT[0] - found_BT[1])[2:].abs().min()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_without_a_minimum_nothing_changes(kind: str) -> None:
    plain = policy_of(kind, 0)
    bare = LanguagePolicy(plain.module, temperature=TEMPERATURE)
    groups = completions(plain, 3)
    batch = collate(groups)
    outputs = [policy.evaluate(batch) for policy in (plain, bare)]
    assert torch.equal(outputs[0].logprobs_BT, outputs[1].logprobs_BT)
    assert torch.equal(outputs[0].entropy_BT, outputs[1].entropy_BT)


def test_sampler_policy_and_reference_of_a_recipe_have_its_minimum(tmp_path: Path) -> None:
    folder = str(tiny_folder(tmp_path / "model"))
    for lora in (LoRAConfig(), LoRAConfig(rank=2)):
        config = RunConfig(
            model=folder, task=ArithmeticConfig(), lora=lora,
            sampling=SamplingConfig(min_new_tokens=20, max_new_tokens=24, temperature=1.3),
        )  # fmt: skip
        loaded = load_policy(config, build_machine("cpu", "fp32", 1))
        policy, adaptation = adapt(loaded.policy, config)
        minimum = MinimumLength(20, loaded.chat.end_ids)
        assert policy.minimum == adaptation.reference(policy).minimum == minimum
        groups = loaded.sampler.sample([Start(0, "1+2="), Start(1, "ab")], 16, 1)
        groups += greedy(loaded.sampler, 24).sample([Start(2, "7-")], 1, 1)
        assert min(len(rollout.actions) for group in groups for rollout in group.rollouts) > 20
        batch = collate(groups[:2])
        with torch.no_grad():
            difference_BT = policy.evaluate(batch).logprobs_BT - batch.behavior_logprobs_BT
        assert float(difference_BT.abs().max()) < 1e-4
