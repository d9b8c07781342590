"""A server that keeps the turns of conversations computes them as the training process does."""

import queue
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.llm.generation.batch import ContinuousBatch, PrefixCache
from covey.llm.generation.decoder import KeptRow, SharedPrompt
from covey.llm.generation.generator import (
    GenerationRequest,
    GenerationSettings,
    OpenConversations,
    RandomKey,
    TurnAnswer,
)
from covey.llm.generation.local_generator import Engine, LocalGenerator, request_uniforms, with_shared_prefix
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import tiny_model
from llm.generation.test_turns import END_IDS, Script, make_requests

SETTINGS = GenerationSettings(5, 0.7, END_IDS, 0, continues=True)


def converse_on(engine: Engine, requests: Sequence[GenerationRequest], script: Script) -> list[tuple[int, int]]:
    """Conversations whose turns are requests; (tokens of the prompt, cached ones) of every turn after the first."""
    answers = queue.SimpleQueue[TurnAnswer]()
    conversations = OpenConversations(with_shared_prefix(requests), script, engine.policy.module.config, answers.put)
    waiting = {number: engine.generate(turn) for number, turn in enumerate(conversations.turns)}
    counts: list[tuple[int, int]] = []
    while waiting or conversations.unanswered:
        for turn in list(waiting):
            found = waiting.pop(turn).result(60)
            assert isinstance(found, list)
            if turn >= len(requests):
                counts += [(len(conversations.turns[turn].prompt), one.cached_tokens) for one in found]
            else:
                assert not any(one.cached_tokens for one in found)
            conversations.end_turns(turn, found)
        while conversations.unanswered:
            number = conversations.next_turn(answers.get(timeout=60))
            if number is not None:
                waiting[number] = engine.generate(conversations.turns[number])
    return counts


@pytest.fixture
def engine() -> Engine:
    return Engine(LanguagePolicy(tiny_model(), temperature=0.7))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 0), (torch.bfloat16, 4)], ids=["fp32", "bf16"])
def test_turns_have_the_bits_of_conversations_in_the_training_process(dtype: torch.dtype, rows: int) -> None:
    policy = LanguagePolicy(tiny_model(dtype=dtype), temperature=0.7)
    requests, here, served = make_requests(SETTINGS), Script(always=True), Script(always=True)
    assert LocalGenerator(policy).converse(requests, here, 60) == [None] * len(requests)
    engine = Engine(LanguagePolicy(tiny_model(dtype=dtype), temperature=0.7), rows=rows)
    engine.start()
    counts = converse_on(engine, requests, served)
    engine.stop()
    assert (served.tokens, served.logprobs, served.ends) == (here.tokens, here.logprobs, here.ends)
    assert len(counts) > 10
    for prompt, cached in counts:  # all but the last token of the turn and the reply
        assert prompt - cached == 1 + served.longest


def test_without_room_the_prompts_are_computed_again(engine: Engine) -> None:
    engine.cache.limit = 0
    requests, here, served = make_requests(SETTINGS), Script(), Script()
    LocalGenerator(engine.policy).converse(requests, here, 60)
    engine.start()
    assert not any(cached for _, cached in converse_on(engine, requests, served))
    engine.stop()
    assert (served.tokens, engine.cache.bytes) == (here.tokens, 0)
    for place, logprobs in here.logprobs.items():
        assert served.logprobs[place] == pytest.approx(logprobs, abs=2e-5)


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_models_of_other_decoders_keep_nothing(kind: str) -> None:
    engine, served, here = Engine(LanguagePolicy(tiny_model(kind), temperature=0.7)), Script(), Script()
    requests = make_requests(SETTINGS, 2)
    LocalGenerator(engine.policy).converse(requests, here, 60)
    engine.start()
    assert not any(cached for _, cached in converse_on(engine, requests, served))
    engine.stop()
    assert served.tokens == here.tokens


def test_other_requests_keep_nothing_and_new_weights_forget_all(engine: Engine) -> None:
    (request,) = make_requests(SETTINGS, 1)
    other = {name: one.detach().clone() for name, one in tiny_model(seed=1).named_parameters()}
    engine.start()
    engine.generate(replace(request, settings=replace(SETTINGS, continues=False))).result(60)
    assert engine.cache.bytes == 0
    (first,) = engine.generate(request).result(60)
    kept = (*request.prompt, *first.tokens[:-1])
    assert kept in engine.cache
    engine.change_weights(other, 1).result(60)
    assert kept not in engine.cache
    assert engine.cache.bytes == 0
    turn = GenerationRequest(
        (*request.prompt, *first.tokens, 9), 1, replace(request.key, first_position=6), replace(SETTINGS, version=1)
    )
    (found,) = engine.generate(turn).result(60)
    engine.stop()
    (expected,) = LocalGenerator(LanguagePolicy(tiny_model(seed=1), temperature=0.7), version=1).generate([turn])[0]
    assert (found.tokens, found.cached_tokens) == (expected.tokens, 0)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_siblings_that_go_on_alike_begin_with_one_row(engine: Engine) -> None:
    (request,) = make_requests(SETTINGS, 1)
    engine.start()
    (first,) = engine.generate(request).result(60)
    key = RandomKey(3, 2, 0, 5, first_position=len(first.tokens) + 1)
    turn = GenerationRequest((*request.prompt, *first.tokens, 9), 4, key, SETTINGS)
    found = engine.generate(turn).result(60)
    engine.stop()
    expected = LocalGenerator(engine.policy).generate([turn])[0]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert len({tuple(one.tokens) for one in found}) > 1
    assert {one.cached_tokens for one in found} == {len(turn.prompt) - 2}


def row_of(tokens: int, prompt: SharedPrompt) -> KeptRow:
    return KeptRow(prompt, torch.zeros(tokens), torch.zeros(tokens), tokens)


def prompt_of(tokens: int) -> SharedPrompt:
    return SharedPrompt(torch.zeros(tokens), torch.zeros(tokens), tokens)


def test_the_longest_row_before_a_prompt_is_found() -> None:
    cache, prompt = PrefixCache(), prompt_of(2)
    rows = {length: row_of(length, prompt) for length in (2, 4, 6)}
    for length, row in rows.items():
        cache.put(tuple(range(length)), row)
    cache.put((9, 9, 9, 9, 9), row_of(5, prompt))
    assert cache.find(range(7)) == (6, rows[6])
    assert cache.find(range(6)) == (4, rows[4]), "at least one token is fed"
    assert cache.find((0, 1, 2, 3, 9, 9)) == (4, rows[4])
    assert cache.find((0, 1)) is None
    assert cache.find((8, 9)) is None


def test_rows_that_were_not_used_are_forgotten_first_and_a_prompt_counts_once() -> None:
    cache, first, second = PrefixCache(limit=400), prompt_of(10), prompt_of(5)
    cache.put((1,), row_of(10, first))
    assert cache.bytes == 160
    cache.put((2,), row_of(10, first))
    cache.put((2,), row_of(10, first))
    assert cache.bytes == 240
    cache.put((3,), row_of(10, second))
    assert cache.bytes == 360
    assert cache.find((1, 5)) is not None
    cache.put((4,), row_of(10, second))
    assert [(token,) in cache for token in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.bytes == 360
    cache.put((6,), row_of(30, second))
    assert [(token,) in cache for token in (1, 3, 4, 6)] == [False, False, True, True]
    assert cache.bytes == 360
    cache.clear()
    assert (cache.bytes, cache.find((6, 7))) == (0, None)


OTHER_SETTINGS = GenerationSettings(12, 1.0, frozenset(range(1, 85, 11)), 0)
REQUESTS = [
    GenerationRequest(tuple(range(3 + group, 13 + group)), 3, RandomKey(3, 1, group), OTHER_SETTINGS)
    for group in range(9)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("rows", [3, 7, 100])
def test_added_prompts_have_their_own_completions(kind: str, rows: int) -> None:
    policy = LanguagePolicy(tiny_model(kind))
    backend = policy.backend
    batch = ContinuousBatch(
        backend.decoder(policy.module, rows, 12), [REQUESTS[0].prompt], request_uniforms(REQUESTS[0]), rows, 1.0,
        OTHER_SETTINGS.end_ids, backend.kernels,
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
    later = GenerationSettings(12, 1.0, OTHER_SETTINGS.end_ids, version=1)
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
