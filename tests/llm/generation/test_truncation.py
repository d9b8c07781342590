"""Top-k, top-p, min-p and the minimum length are those of transformers' logits processors."""

from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from covey.data import EndReason, Start
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import WHOLE, Truncation
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from helpers.tiny_models import tiny_model, tiny_tokenizer

ENDS = torch.tensor([3, 7])
CASES = [
    Truncation(top_k=1),
    Truncation(top_k=5),
    Truncation(top_p=0.3),
    Truncation(top_p=0.9),
    Truncation(min_p=0.2),
    Truncation(top_k=9, top_p=0.6),
    Truncation(top_k=9, top_p=0.95, min_p=0.3),
    Truncation(min_new_tokens=4),
    Truncation(min_new_tokens=4, top_k=6, top_p=0.8, min_p=0.05),
]


def of_transformers(truncation: Truncation, logits_RV: torch.Tensor, length: int, temperature: float) -> torch.Tensor:
    """The probabilities after transformers' processors, in the order in which `generate` applies them."""
    prompt = 2
    ids = torch.zeros(len(logits_RV), prompt + length, dtype=torch.int64)
    processors = [
        MinNewTokensLengthLogitsProcessor(prompt, truncation.min_new_tokens, ENDS),
        TemperatureLogitsWarper(temperature),
    ]
    processors += [TopKLogitsWarper(truncation.top_k)] if truncation.top_k else []
    processors += [TopPLogitsWarper(truncation.top_p)] if truncation.top_p < 1 else []
    processors += [MinPLogitsWarper(truncation.min_p)] if truncation.min_p else []
    for processor in processors:
        logits_RV = processor(ids, logits_RV)
    return logits_RV.softmax(dim=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("truncation", CASES, ids=str)
def test_the_distribution_is_that_of_transformers(truncation: Truncation, temperature: float) -> None:
    logits_RV = torch.randn(40, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    for length in (0, 3, 4):
        applied_RV = truncation.apply(logits_RV, torch.full((40,), length), ENDS, temperature)
        expected_RV = of_transformers(truncation, logits_RV.clone(), length, temperature)
        torch.testing.assert_close(applied_RV.div(temperature).softmax(dim=1), expected_RV, rtol=1e-12, atol=1e-15)


def test_a_minimum_holds_for_each_row_alone():
    applied_RV = Truncation(min_new_tokens=2).apply(torch.zeros(3, 9), torch.tensor([1, 2, 3]), ENDS, 1.0)
    assert applied_RV[:, ENDS].isneginf().tolist() == [[True, True], [False, False], [False, False]]
    assert applied_RV.isfinite().sum().item() == 3 * 9 - 2


def test_probabilities_that_are_equal_keep_the_lower_ids_and_one_token_is_always_left():
    applied_RV = Truncation(top_k=2).apply(torch.zeros(1, 5), torch.zeros(1), ENDS[:1], 1.0)
    assert applied_RV.isfinite().tolist() == [[True, True, False, False, False]]
    applied_RV = Truncation(top_p=1e-9, min_p=1.0).apply(torch.zeros(1, 5), torch.zeros(1), ENDS[:1], 1.0)
    assert applied_RV.isfinite().tolist() == [[True, False, False, False, False]]


def test_a_truncated_sampler_draws_from_what_is_left():
    policy = LanguagePolicy(tiny_model())
    chat = Chat(tiny_tokenizer(), frozenset(range(1, 85, 3)), 84)
    whole = LanguageSampler(LocalGenerator(policy), chat, 3, 12)
    starts = [Start(index, text) for index, text in enumerate(["12+3=", "ab"])]
    (first, second) = replace(whole, truncation=Truncation(top_k=1)).sample(starts, 3, 1)
    greedy_groups = replace(whole, temperature=0.0).sample(starts, 1, 1)
    for group, expected in zip((first, second), greedy_groups, strict=True):
        for rollout in group.rollouts:
            assert rollout.actions == expected.rollouts[0].actions
            assert rollout.behavior_logprobs == [0.0] * len(rollout.actions)  # of the renormalised distribution
    for temperature in (0.0, 1.0):
        groups = replace(whole, temperature=temperature, truncation=Truncation(min_new_tokens=5)).sample(starts, 3, 1)
        lengths = [len(rollout.actions) for group in groups for rollout in group.rollouts]
        assert min(lengths) >= 6  # the end token is not counted
        assert any(rollout.end is EndReason.STOP for group in groups for rollout in group.rollouts)
    same = replace(whole, truncation=WHOLE).sample(starts, 3, 1)
    assert [g.rollouts for g in same] == [g.rollouts for g in whole.sample(starts, 3, 1)]
    assert not WHOLE.restricts(0)
    assert all(other.restricts(0) for other in CASES)


def test_a_minimum_restricts_until_it_is_reached():
    assert [Truncation(min_new_tokens=3).restricts(shortest) for shortest in (0, 2, 3, 4)] == [True, True, False, False]
    assert Truncation(min_new_tokens=3, top_k=5).restricts(9)
    assert Truncation(top_k=5, min_new_tokens=3).after(2) == Truncation(top_k=5, min_new_tokens=1)
    assert Truncation(min_new_tokens=3).after(7) == WHOLE
