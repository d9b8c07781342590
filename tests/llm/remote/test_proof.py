"""The comparison of a sampler's log-probabilities with the trainer's: its level, its limit, its few decisions."""

from __future__ import annotations

import pytest

from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.proof import EXPECTED, LEAST, MOST_DECISIONS, PRIOR_DECISIONS, Proof
from helpers.tiny_models import tiny_model

ENDS = frozenset({1})
FP32 = EXPECTED[tiny_model().dtype]  # type: ignore[index]


def sampled(
    policy: LanguagePolicy,
    off: float = 0.0,
    version: int = 0,
    temperature: float = 1.0,
    tokens: int = 12,
    count: int = 4,
) -> list[tuple[GenerationRequest, Completion]]:
    """Completions whose log-probabilities are alternately too high and too low by `off` nats."""
    settings = GenerationSettings(tokens, temperature, ENDS, version)
    requests = [
        GenerationRequest(tuple(range(3 + group, 13 + group)), 2, RandomKey(1, 1, group), settings)
        for group in range(count)
    ]
    return [
        (request, Completion(one.tokens, [p + off * (-1) ** i for i, p in enumerate(one.logprobs)], one.end, version))
        for request, made in zip(requests, LocalGenerator(policy, version).generate(requests), strict=True)
        for one in made  # type: ignore[union-attr]
    ]


@pytest.fixture
def policy() -> LanguagePolicy:
    return LanguagePolicy(tiny_model(), temperature=0.7)


def test_a_server_with_the_weights_passes_and_one_that_is_off_does_not(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    right, wrong = sampled(policy, temperature=0.7), sampled(policy, 0.01, temperature=0.7)
    refused = proof.refused({0: right, 4: wrong})
    assert list(refused) == [4]
    assert "0.01 nats" in refused[4]


def test_nothing_and_nan_are_told_apart(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.refused({}) == {}
    assert list(proof.refused({2: sampled(policy, float("nan"), temperature=0.7)})) == [2]


def test_the_level_is_that_of_the_first_version(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.level(greedy=False) == FP32
    first = sampled(policy, 5e-5, temperature=0.7)
    assert proof.refused({0: first, 1: sampled(policy, 0.5, temperature=0.7)}).keys() == {1}
    decisions = sum(len(one.tokens) for _, one in first)
    level = proof.level(greedy=False)
    expected = (5e-5 * decisions + FP32 * PRIOR_DECISIONS) / (decisions + PRIOR_DECISIONS)
    assert level == pytest.approx(expected, rel=0.02)
    later = sampled(policy, 2.9 * level, version=1, temperature=0.7)
    assert proof.refused({0: later}) == {}
    assert proof.level(greedy=False) == level
    assert proof.refused({0: sampled(policy, 3.0 * level * 1.6, version=1, temperature=0.7)})
    assert proof.level(greedy=True) == FP32


def test_greedy_completions_are_compared_at_temperature_one(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.refused({0: sampled(policy, temperature=0.0)}) == {}
    assert proof.level(greedy=True) < FP32
    assert proof.level(greedy=False) == FP32


@pytest.mark.slow
def test_the_level_is_at_least_the_noise(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    for _ in range(20):
        assert proof.refused({0: sampled(policy, temperature=0.7)}) == {}
    assert proof.level(greedy=False) == LEAST[policy.module.dtype]


def test_few_decisions_need_a_larger_difference(policy: LanguagePolicy) -> None:
    few = sampled(policy, 4 * FP32, temperature=0.7, tokens=2, count=1)
    assert Proof(policy, 3.0).refused({0: few}) == {}
    many = sampled(policy, 4 * FP32, temperature=0.7, tokens=40, count=8)
    assert Proof(policy, 3.0).refused({0: many})


def test_only_the_first_decisions_are_evaluated(policy: LanguagePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: sizes.append(int(batch.mask_BT.sum())) or evaluate(batch))  # type: ignore[func-returns-value]
    whole = sampled(policy, temperature=0.7, tokens=100, count=6)
    assert sum(len(one.tokens) for _, one in whole) > MOST_DECISIONS
    Proof(policy, 3.0).refused({0: whole, 1: whole[:1]})
    policy.microbatch_tokens = 30
    Proof(policy, 3.0).refused({0: whole, 1: whole})
    assert sizes[0] == MOST_DECISIONS + len(whole[0][1].tokens)
    assert 2 <= sizes[1] <= 30
