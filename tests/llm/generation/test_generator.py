"""The `Generator` interface on local weights: completions by request, and failures as values."""

from dataclasses import replace

import pytest
import torch

from covey.config import ConfigError, RunError
from covey.data import EndReason, Start
from covey.llm.generation.generator import (
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    RandomKey,
)
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler, greedy
from helpers.tiny_models import tiny_model, tiny_tokenizer

ENDS = frozenset(range(1, 85, 11))
SETTINGS = GenerationSettings(max_new_tokens=20, temperature=1.0, end_ids=ENDS, version=0)
PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 10, 11), (12,)]


def make_generator() -> LocalGenerator:
    torch.set_num_threads(1)
    return LocalGenerator(LanguagePolicy(tiny_model("llama")))


def make_requests(settings: GenerationSettings = SETTINGS) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, 4, RandomKey(3, 1, group), settings) for group, prompt in enumerate(PROMPTS)]


class Clock:
    """Advances by a second each time it is read."""

    def __init__(self) -> None:
        self.seconds = -1.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_a_completion_says_its_tokens_its_end_and_its_version():
    generator = make_generator()
    generator.refresh(7)
    results = generator.generate(make_requests(replace(SETTINGS, version=7)))
    made = [completion for result in results for completion in result]
    assert len(made) == 4 * len(PROMPTS)
    for completion in made:
        assert len(completion.tokens) == len(completion.logprobs) <= 20
        assert completion.version == 7
        assert not ENDS & set(completion.tokens[:-1])
        assert (completion.end is EndReason.STOP) == (completion.tokens[-1] in ENDS)
        assert completion.end is EndReason.STOP or len(completion.tokens) == 20
    assert {completion.end for completion in made} == {EndReason.STOP, EndReason.LENGTH}


def test_a_request_has_the_same_completions_in_any_company():
    generator, requests = make_generator(), make_requests()
    together = generator.generate(requests)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = generator.generate([request])
        assert [completion.tokens for completion in alone] == [completion.tokens for completion in expected]
    later = [replace(request, completions=2, key=replace(request.key, first_rollout=2)) for request in requests]
    for siblings, expected in zip(generator.generate(later), together, strict=True):
        assert [completion.tokens for completion in siblings] == [completion.tokens for completion in expected[2:]]


def test_requests_of_one_call_may_differ_in_their_settings():
    generator, requests = make_generator(), make_requests()
    requests[1] = replace(requests[1], settings=replace(SETTINGS, max_new_tokens=3))
    requests[2] = replace(requests[2], completions=1)
    results = generator.generate(requests)
    assert [len(result) for result in results] == [4, 4, 1, 4]
    for request, result in zip(requests, results, strict=True):
        (alone,) = generator.generate([request])
        assert [completion.tokens for completion in result] == [completion.tokens for completion in alone]
    assert max(len(completion.tokens) for completion in results[1]) == 3


def test_a_prompt_that_is_too_long_fails_alone():
    generator, requests = make_generator(), make_requests()
    positions = generator.policy.module.config.max_position_embeddings
    requests[2] = replace(requests[2], prompt=(5,) * (positions - 19))
    results = generator.generate(requests)
    assert [isinstance(result, GenerationFailure) for result in results] == [False, False, True, False]
    assert results[2].reason is FailureReason.PROMPT_TOO_LONG
    assert f"exceed the model's {positions} positions" in results[2].message


def test_other_weights_than_those_asked_for_are_a_failure():
    generator = make_generator()
    generator.refresh(2)
    for result in generator.generate(make_requests()):
        assert result.reason is FailureReason.OTHER_WEIGHTS
        assert result.message == "version 0 of the weights is requested, the generator has 2"


@pytest.mark.parametrize("seconds", [0.0, 12.0])
def test_past_the_deadline_only_whole_groups_are_returned(seconds):
    generator = make_generator()
    generator.clock = Clock()
    ends = frozenset(range(1, 85, 3))  # short completions
    settings = replace(SETTINGS, end_ids=ends, max_rows=4, deadline_seconds=seconds)
    handed_out = {}
    results = generator.generate(make_requests(settings), handed_out.__setitem__)
    failed = [isinstance(result, GenerationFailure) for result in results]
    assert handed_out == {n: found for n, found in enumerate(results) if not failed[n]}
    assert failed == ([True] * 4 if seconds == 0 else sorted(failed))
    assert any(failed)
    assert all(failed) == (seconds == 0)
    whole = generator.generate(make_requests(replace(settings, deadline_seconds=None)))
    for result, expected in zip(results, whole, strict=True):
        assert isinstance(result, GenerationFailure) or result == expected  # the same bits, in the same company
    assert {result.reason for result in results if isinstance(result, GenerationFailure)} == {FailureReason.DEADLINE}


@pytest.mark.parametrize("max_rows", [4, 8, 16])
def test_completions_are_handed_out_when_their_request_is_complete(max_rows):
    """The clock is read once for each token."""
    generator, times = make_generator(), {}
    clock = generator.clock = Clock()
    requests = make_requests(replace(SETTINGS, max_rows=max_rows, deadline_seconds=1e6))
    handed_out = {}

    def ready(number, completions):
        assert number not in handed_out
        handed_out[number], times[number] = completions, clock.seconds

    assert generator.generate(requests, ready) == [handed_out[number] for number in range(len(requests))]
    longest = {number: max(len(one.tokens) for one in found) for number, found in handed_out.items()}
    if max_rows == 16:  # all are generated together
        assert times == longest
    assert min(times.values()) < max(times.values()) == clock.seconds


def test_the_sampler_hands_out_the_groups_that_it_returns():
    handed_out = []
    chat = Chat(tiny_tokenizer(), ENDS)
    sampler = LanguageSampler(make_generator(), chat, seed=1, max_new_tokens=20, ready=handed_out.append)
    groups = sampler.sample([Start(index, text) for index, text in enumerate(("12+34", "a", "7"))], 4, step=1)
    assert sorted(map(id, handed_out)) == sorted(map(id, groups))
    assert greedy(sampler, 5).sample([Start(0, "7")], 1, step=0)
    assert len(handed_out) == 3  # those of an evaluation are graded afterwards


def test_logits_that_are_not_finite_are_a_failure():
    generator = make_generator()
    with torch.no_grad():
        generator.policy.module.get_output_embeddings().weight[3] = torch.nan
    assert {result.reason for result in generator.generate(make_requests())} == {FailureReason.NON_FINITE_LOGITS}


def test_the_sampler_ends_a_step_with_the_failure():
    generator = make_generator()
    sampler = LanguageSampler(generator, Chat(tiny_tokenizer(), ENDS), seed=1, max_new_tokens=20, deadline_seconds=5.0)
    generator.clock = Clock()
    with pytest.raises(RunError, match="not generated within their deadline of 5 s"):
        sampler.sample([Start(0, "12+34")], 8, step=1)
    sampler.deadline_seconds = None
    with pytest.raises(ConfigError, match="positions"):
        sampler.sample([Start(0, "1"), Start(1, "1" * 500)], 2, step=1)
    generator.refresh(1)
    with pytest.raises(RunError, match="version 0 of the weights"):
        sampler.sample([Start(0, "12+34")], 2, step=1)
