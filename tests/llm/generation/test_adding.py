"""Prompts that are added to a batch between two tokens have the completions that they have alone."""

from __future__ import annotations

import numpy as np
import pytest

from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import Engine, LocalGenerator, request_uniforms
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import tiny_model

SETTINGS = GenerationSettings(12, 1.0, frozenset(range(1, 85, 11)), 0)
REQUESTS = [
    GenerationRequest(tuple(range(3 + group, 13 + group)), 3, RandomKey(3, 1, group), SETTINGS) for group in range(9)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("rows", [3, 7, 100])
def test_added_prompts_have_their_own_completions(kind: str, rows: int) -> None:
    policy = LanguagePolicy(tiny_model(kind))
    backend = policy.backend
    batch = ContinuousBatch(
        backend.decoder(policy.module, rows, 12), [REQUESTS[0].prompt], request_uniforms(REQUESTS[0]), rows, 1.0,
        SETTINGS.end_ids, backend.kernels,
    )  # fmt: skip
    waiting = [REQUESTS[1:2], REQUESTS[2:6], [], REQUESTS[6:]]
    while not batch.is_done or waiting:
        if waiting and (later := waiting.pop(0)):
            batch.add([one.prompt for one in later], np.concatenate([request_uniforms(one) for one in later]))
        if not batch.is_done:
            batch.advance()
    assert sorted(batch.complete) == list(range(9))
    for number, expected in enumerate(LocalGenerator(policy).generate(REQUESTS)):
        found = batch.completions(number)
        assert [tokens for tokens, _ in found] == [one.tokens for one in expected]  # type: ignore[union-attr]
        for (_, logprobs), one in zip(found, expected, strict=True):  # type: ignore[arg-type]
            assert logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_a_cancelled_request_is_not_generated_and_the_others_are():
    engine = Engine(LanguagePolicy(tiny_model()))
    futures = [engine.generate(request) for request in REQUESTS]
    assert futures[4].cancel()
    engine.start()
    expected = LocalGenerator(LanguagePolicy(tiny_model())).generate(REQUESTS)
    for number, future in enumerate(futures):
        if number != 4:
            assert [one.tokens for one in future.result(60)] == [one.tokens for one in expected[number]]  # type: ignore[union-attr]
    engine.stop()


def test_weights_change_after_the_requests_before_and_before_those_after():
    policy, other = (LanguagePolicy(tiny_model(seed=seed)) for seed in (0, 1))
    engine = Engine(policy)
    tensors = {name: parameter.detach().clone() for name, parameter in other.module.named_parameters()}
    later = GenerationSettings(12, 1.0, SETTINGS.end_ids, version=1)
    before = LocalGenerator(LanguagePolicy(tiny_model())).generate(REQUESTS[:1])
    second = GenerationRequest(REQUESTS[0].prompt, 3, REQUESTS[0].key, later)
    after = LocalGenerator(other, version=1).generate([second])
    found = engine.generate(REQUESTS[0])
    changed = engine.change_weights(tensors, 1)
    new = engine.generate(second)
    engine.start()
    assert changed.result(60) is None
    assert [found.result(60), new.result(60)] == [*before, *after]
    engine.stop()
