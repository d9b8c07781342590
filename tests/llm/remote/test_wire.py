"""Answers from outside are parsed strictly: whatever is not the answer to the request raises `BadJson`."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.data import EndReason
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.token_sampling import Truncation
from covey.llm.remote import wire
from covey.runtime.foreign_json import BadJson

SETTINGS = GenerationSettings(4, 1.0, frozenset({1, 2}), 7, shared_prefix=1)
REQUEST = GenerationRequest((5, 6), 2, RandomKey(3, 1, 4), SETTINGS)
COMPLETIONS = [
    Completion([9, 8, 1], [-0.5, -1e-3, -2.25], EndReason.STOP, 7),
    Completion([9, 9, 9, 9], [-0.1, -0.2, 0.0, -0.3], EndReason.LENGTH, 7, cached_tokens=2),
]
NO_STOP = {(): None}.__getitem__
RIGHT: dict[str, Any] = json.loads(wire.answer_body(COMPLETIONS, "run-7"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def read(answer: Any, request: GenerationRequest = REQUEST) -> list[Completion]:
    return wire.read_answer(json.dumps(answer).encode(), request, "run-7", vocabulary=10)


def read_request(body: Any) -> GenerationRequest:
    return wire.read_request(json.dumps(body).encode(), 10, ("run-7", 7), NO_STOP)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(path: tuple[Any, ...], new: Any) -> Any:
    answer = copy.deepcopy(RIGHT)
    if not path:
        return new
    owner = answer
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = new
    return answer


def test_an_answer_is_read_as_it_was_written():
    assert read(RIGHT) == COMPLETIONS
    assert read({"choices": RIGHT["choices"][::-1], "id": "x"}) == COMPLETIONS


CHOICE = ("choices", 0)
PROBABILITY = (*CHOICE, "logprobs", "content", 1, "logprob")
SPAN = (*CHOICE, "weight_versions", 0)


@pytest.mark.parametrize(
    ("path", "new", "kind"),
    [
        ((*CHOICE, "token_ids", 0), 10, BadJson),
        ((*CHOICE, "token_ids", 0), -1, BadJson),
        ((*CHOICE, "token_ids", 0), True, BadJson),
        ((*CHOICE, "token_ids", 0), 9.0, BadJson),
        ((*CHOICE, "token_ids", 0), 1, BadJson),  # goes on after its end
        ((*CHOICE, "token_ids", 2), 9, BadJson),  # is cut
        ((*CHOICE, "token_ids"), [], BadJson),
        ((*CHOICE, "finish_reason"), "length", BadJson),
        ((*CHOICE, "finish_reason"), "abort", BadJson),
        ((*CHOICE, "finish_reason"), None, BadJson),
        ((*CHOICE, "index"), 1, BadJson),
        ((*CHOICE, "index"), 2, BadJson),
        (PROBABILITY, 0.001, BadJson),
        (PROBABILITY, float("nan"), BadJson),
        (PROBABILITY, float("-inf"), BadJson),
        (PROBABILITY, None, BadJson),
        (PROBABILITY, "-1", BadJson),
        ((*CHOICE, "logprobs", "content"), [], BadJson),
        ((*CHOICE, "logprobs"), None, BadJson),
        ((*SPAN, "version"), "run-6", wire.WrongVersion),
        ((*SPAN, "version"), 7, wire.WrongVersion),
        ((*SPAN, "start"), 1, BadJson),
        ((*SPAN, "end"), 2, BadJson),
        ((*SPAN, "end"), 4, BadJson),
        ((*CHOICE, "weight_versions"), [], BadJson),
        ((*CHOICE, "weight_versions"), None, BadJson),
        ((*CHOICE, "cached_tokens"), 3, BadJson),  # the prompt has two tokens
        ((*CHOICE, "cached_tokens"), -1, BadJson),
        (("choices",), RIGHT["choices"][:1], BadJson),
        (("choices",), RIGHT["choices"] * 2, BadJson),
        ((), [], BadJson),
    ],
)
def test_an_answer_that_is_wrong_in_one_place_is_refused(path: tuple[Any, ...], new: Any, kind: type) -> None:
    with pytest.raises(BadJson) as caught:
        read(replaced(path, new))
    assert type(caught.value) is kind


def test_a_completion_that_was_cut_is_refused():
    answer = replaced((*CHOICE, "token_ids", 2), 9)
    answer["choices"][0]["finish_reason"] = "length"
    with pytest.raises(BadJson, match="is cut"):
        read(answer)


def test_spans_of_one_version_may_be_several():
    answer = replaced(
        (*CHOICE, "weight_versions"),
        [{"version": "run-7", "start": 0, "end": 1}, {"version": "run-7", "start": 1, "end": 3}],
    )
    assert read(answer) == COMPLETIONS
    answer["choices"][0]["weight_versions"][0]["version"] = "run-6"
    with pytest.raises(wire.WrongVersion):
        read(answer)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_an_answer_with_anything_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(RIGHT)))
    try:
        found = read(replaced(path, data.draw(PLAIN)))
    except BadJson:
        return
    assert [len(one.tokens) for one in found] == [len(one.logprobs) for one in found]
    assert all(0 <= token < 10 for one in found for token in one.tokens)
    assert all(-1e30 < logprob <= wire.ROUNDING for one in found for logprob in one.logprobs)


@given(st.binary(max_size=60))
@example(b"[" * 100_000)
@example(b"1" * 5000)
@example(b"\xff")
def test_bytes_that_are_no_answer_are_refused(content: bytes) -> None:
    with pytest.raises(BadJson):
        wire.read_answer(content, REQUEST, "run-7", 10)


@given(st.dictionaries(st.sampled_from(["token_ids", "sampling_params", "covey", "weight_version"]), PLAIN))
def test_a_request_is_read_or_refused(changes: dict[str, Any]) -> None:
    body = wire.request_body(REQUEST, "run-7", covey=True) | changes
    try:
        read_request(body)
    except BadJson:
        return


LAST_WORDS = RandomKey(1, 2, 3, 0, 0, 2**32 - 4)


@pytest.mark.parametrize(
    ("request_", "place", "wrong", "named"),
    [
        (REQUEST, ("covey", "shared_prefix"), 2, "shared_prefix must be at most 1"),
        (replace(REQUEST, key=RandomKey(1, 2, 3, 4, 5, 6)), ("covey", "seed"), 2**32, "seed"),
        (replace(REQUEST, key=RandomKey(2**32 - 1, 0, 0, 2**32 - 2, 0)), ("covey", "first_rollout"), 2**32 - 1,
         "first_rollout must be at most"),
        (replace(REQUEST, key=LAST_WORDS), ("covey", "first_position"), 2**32 - 3, "first_position must be at most"),
        (replace(REQUEST, settings=replace(SETTINGS, continues=True)), ("covey", "continues"), 1,
         "continues must be true or false"),
        (replace(REQUEST, settings=replace(SETTINGS, truncation=Truncation(min_new_tokens=3))),
         ("sampling_params", "min_tokens"), -1, r"sampling_params\.min_tokens"),
    ],
)  # fmt: skip
def test_a_request_is_read_as_it_was_written(
    request_: GenerationRequest, place: tuple[str, str], wrong: Any, named: str
) -> None:
    body = wire.request_body(request_, "run-7", covey=True)
    assert read_request(body) == request_
    assert ("min_tokens" in body["sampling_params"]) == bool(request_.settings.truncation.min_new_tokens)
    body[place[0]][place[1]] = wrong
    with pytest.raises(BadJson, match=named):
        read_request(body)


def test_a_request_to_vllm_has_its_fields_alone_and_a_seed_of_the_whole_key():
    body = wire.request_body(REQUEST, "run-7", covey=False)
    assert body.keys() == {"token_ids", "sampling_params", "cache_salt"}
    assert body["cache_salt"] == "run-7"
    keys = [
        RandomKey(3, 1, 4), RandomKey(4, 1, 4), RandomKey(3, 2, 4), RandomKey(3, 1, 5), RandomKey(3, 1, 4, 1),
        RandomKey(3, 1, 4, 0, 1), RandomKey(3, 1, 4, 0, 0, 1), RandomKey(1, 3, 4),
        RandomKey(3, 4, 1),
    ]  # fmt: skip
    seeds = [wire.request_seed(key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(seed >= 0 and seed + 2**20 < 2**63 for seed in seeds)
    assert max(seeds) > 2**55
    assert body["sampling_params"]["seed"] == seeds[0]


def test_the_longest_right_answer_fits_into_its_limit():
    settings = GenerationSettings(50, 1.0, frozenset(), 7)
    request = GenerationRequest((5,), 30, RandomKey(0, 0, 0), settings)
    longest = [Completion([10**9] * 50, [-1.2345678901234567e-300] * 50, EndReason.LENGTH, 7)] * 30
    assert len(wire.answer_body(longest, "x" * wire.LONGEST_VERSION)) < wire.answer_bytes(request)
