"""The `Generator` interface on local weights: completions by request, failures as values, truncated distributions."""

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
from covey.llm.generation.token_sampling import WHOLE, Truncation
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


FEW_ENDS = torch.tensor([3, 7])
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
        MinNewTokensLengthLogitsProcessor(prompt, truncation.min_new_tokens, FEW_ENDS),
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
        applied_RV = truncation.apply(logits_RV, torch.full((40,), length), FEW_ENDS, temperature)
        expected_RV = of_transformers(truncation, logits_RV.clone(), length, temperature)
        torch.testing.assert_close(applied_RV.div(temperature).softmax(dim=1), expected_RV, rtol=1e-12, atol=1e-15)


def test_a_minimum_holds_for_each_row_alone():
    applied_RV = Truncation(min_new_tokens=2).apply(torch.zeros(3, 9), torch.tensor([1, 2, 3]), FEW_ENDS, 1.0)
    assert applied_RV[:, FEW_ENDS].isneginf().tolist() == [[True, True], [False, False], [False, False]]
    assert applied_RV.isfinite().sum().item() == 3 * 9 - 2


def test_probabilities_that_are_equal_keep_the_lower_ids_and_one_token_is_always_left():
    applied_RV = Truncation(top_k=2).apply(torch.zeros(1, 5), torch.zeros(1), FEW_ENDS[:1], 1.0)
    assert applied_RV.isfinite().tolist() == [[True, True, False, False, False]]
    applied_RV = Truncation(top_p=1e-9, min_p=1.0).apply(torch.zeros(1, 5), torch.zeros(1), FEW_ENDS[:1], 1.0)
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
