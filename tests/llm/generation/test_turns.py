"""Conversations have the tokens and log-probabilities of full forward passes, in any order of their answers."""

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from covey.data import EndReason
from covey.llm.generation.batch import ConversationBatch
from covey.llm.generation.generator import (
    Completion,
    Continuation,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    RandomKey,
    TurnAnswer,
    room,
)
from covey.llm.generation.local_generator import LocalGenerator, _Turns
from covey.llm.generation.native_decoder import NativeDecoder
from covey.llm.model.chat import Chat
from covey.llm.model.stop_strings import stop_strings
from covey.llm.native.bindings import kernels_for
from covey.llm.policy import LanguagePolicy
from covey.runtime.rng import uniforms
from helpers.tiny_models import tiny_model, tiny_tokenizer

NATIVE = ("llama", "qwen2", "qwen3")  # of `NativeDecoder`
OTHERS = ("gpt2", "bloom", "mistral")  # with a layout, with transformers' cache, with a sliding window
END_IDS = frozenset(range(1, 85, 11))


def make_requests(settings: GenerationSettings, count: int = 4) -> list[GenerationRequest]:
    """Prompts of different lengths that begin alike, with different group sizes."""
    return [
        GenerationRequest((*range(10), *range(20, 24 + 3 * group)), 1 + 2 * (group % 2), RandomKey(3, 2, group, 5),
                          settings)
        for group in range(count)
    ]  # fmt: skip


@dataclass
class Script:
    """An environment whose replies are functions of the conversation; records the tokens and who decided them."""

    turns: int = 4
    longest: int = 9  # tokens of a reply
    limit: int = 6  # of turns after the first
    always: bool = False  # no conversation ends before its last turn, and replies are of the longest length
    delays: random.Random | None = None  # replies come from threads, after random times
    late: random.Random | None = None  # replies come after random numbers of steps, see `by_steps`
    held: list[tuple[int, Future[Continuation | None], Continuation | None]] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    decided: dict[tuple[int, int], list[bool]] = field(default_factory=dict)
    ends: dict[tuple[int, int], list[EndReason]] = field(default_factory=dict)

    def __call__(self, number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        place = number, rollout
        for record in (self.tokens, self.logprobs, self.decided, self.ends):
            record.setdefault(place, [])  # type: ignore[attr-defined]
        self.tokens[place] += turn.tokens
        self.logprobs[place] += turn.logprobs
        self.decided[place] += [True] * len(turn.tokens)
        self.ends[place].append(turn.end)
        reply = self.reply(len(self.ends[place]), self.tokens[place])
        if reply is not None:
            self.tokens[place] += reply.tokens
            self.logprobs[place] += [0.0] * len(reply.tokens)
            self.decided[place] += [False] * len(reply.tokens)
        future: Future[Continuation | None] = Future()
        if self.late is not None:
            self.held.append((self.late.randrange(12), future, reply))
        elif self.delays is not None:
            threading.Timer(self.delays.random() / 50, future.set_result, [reply]).start()
        else:
            future.set_result(reply)
        return future

    @contextmanager
    def by_steps(self) -> Iterator[None]:
        """The number of steps is counted in calls of `next_answer`, so that each run has the same order of replies."""
        next_answer = _Turns.next_answer

        def count(turns: _Turns, wait: bool, deadline: float | None) -> TurnAnswer | None:
            soonest = min((steps for steps, _, _ in self.held), default=0) if wait and turns.answers.empty() else 0
            self.held = [(steps - 1 - soonest, future, reply) for steps, future, reply in self.held]
            arrived = [(future, reply) for steps, future, reply in self.held if steps < 0]
            self.held = [one for one in self.held if one[0] >= 0]
            for future, reply in arrived:
                future.set_result(reply)
            return next_answer(turns, wait, deadline)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Turns, "next_answer", count)
            yield

    def turns_of(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Begin and end of each turn of a conversation among its tokens."""
        decided = [False, *self.decided[place], False]
        changes = [at for at, (last, now) in enumerate(pairwise(decided)) if last is not now]
        return list(zip(changes[::2], changes[1::2], strict=True))

    def reply(self, turns: int, tokens: Sequence[int]) -> Continuation | None:
        drawn = random.Random(str(tokens))
        if turns == self.turns or (not self.always and drawn.random() < 0.2):
            return None
        length = self.longest if self.always else drawn.randint(1, self.longest)
        return Continuation(tuple(drawn.choices(range(3, 80), k=length)), self.limit)


def logprobs_of(module: torch.nn.Module, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of the token after each of these tokens, [tokens, V], from one ordinary forward pass."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(tokens)])).logits[0]
    return (logits.float() / temperature).log_softmax(1)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [(kind, torch.float32, 2e-5) for kind in (*NATIVE, *OTHERS)] + [(kind, torch.bfloat16, 0.12) for kind in NATIVE],
)
def test_every_decision_is_that_of_one_full_forward_and_of_its_own_random_number(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    policy, script = LanguagePolicy(tiny_model(kind, dtype=dtype), temperature=0.7), Script()
    requests = make_requests(GenerationSettings(5, 0.7, END_IDS, 0))
    assert LocalGenerator(policy).converse(requests, script) == [None] * len(requests)
    assert len(script.tokens) == sum(request.completions for request in requests)
    assert {len(ends) for ends in script.ends.values()} >= {1, 4}
    assert {end for ends in script.ends.values() for end in ends} == {EndReason.STOP, EndReason.LENGTH}
    check_decisions(policy, requests, script, 0.7, tolerance)


def check_decisions(
    policy: LanguagePolicy, requests: list[GenerationRequest], script: Script, temperature: float, tolerance: float
) -> None:
    for (number, rollout), tokens in script.tokens.items():
        request = requests[number]
        whole = logprobs_of(policy.module, (*request.prompt, *tokens), temperature)[len(request.prompt) - 1 : -1]
        drawn = uniforms(3, 2, number, request.key.first_rollout + rollout, np.arange(len(tokens)))
        for position, decided in enumerate(script.decided[number, rollout]):
            if decided:
                token, found = tokens[position], script.logprobs[number, rollout][position]
                assert found == pytest.approx(float(whole[position, token]), abs=tolerance)
                upto = whole[position].double().exp().cumsum(0)
                assert upto[token] > drawn[position] - tolerance
                assert token == 0 or upto[token - 1] < drawn[position] + tolerance


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("reply", [0, 1, 150])
@pytest.mark.parametrize("limits", [(1, 1), (1, 30), (9, 2)])
def test_replies_of_any_length_and_turns_of_one_token(kind: str, reply: int, limits: tuple[int, int]) -> None:
    """150 tokens are more than are fed at once, and more than rows have room for at first."""
    policy, script = LanguagePolicy(tiny_model(kind)), Script(turns=2, longest=reply, limit=limits[1], always=True)
    requests = make_requests(GenerationSettings(limits[0], 1.0, frozenset(), 0), 2)
    assert LocalGenerator(policy).converse(requests, script) == [None] * len(requests)
    assert {len(tokens) for tokens in script.tokens.values()} == {limits[0] + reply + limits[1]}
    check_decisions(policy, requests, script, 1.0, 3e-5)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("llama", "gpt2") else pytest.mark.slow) for kind in (*NATIVE, *OTHERS)],
)
@settings(max_examples=4)
@example(seed=0, rows=3)
@example(seed=1, rows=100)
@given(seed=st.integers(0, 1000), rows=st.sampled_from([3, 5, 8, 100]))
def test_the_time_and_order_of_replies_change_nothing(kind: str, seed: int, rows: int) -> None:
    generator = LocalGenerator(LanguagePolicy(tiny_model(kind)))
    at_once, late = Script(), Script(late=random.Random(seed))
    generator.converse(make_requests(GenerationSettings(5, 1.0, END_IDS, 0, max_rows=100), 6), at_once)
    with late.by_steps():
        generator.converse(make_requests(GenerationSettings(5, 1.0, END_IDS, 0, max_rows=rows), 6), late)
    assert late.tokens == at_once.tokens
    if kind in NATIVE:
        assert late.logprobs == at_once.logprobs
    for place, logprobs in at_once.logprobs.items():
        assert late.logprobs[place] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_other_conversations_go_on_while_one_waits(kind: str) -> None:
    """The first conversation gets its reply after all others have ended."""
    script, held = Script(always=True), list[tuple[Future[Continuation | None], Continuation | None]]()

    def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future = script(number, rollout, turn)
        if (number, rollout) == (0, 0) and not held:
            held.append((Future(), future.result()))
            return held[0][0]
        if (
            sum(len(ends) == script.turns for ends in script.ends.values()) == conversations - 1
            and not held[0][0].done()
        ):
            held[0][0].set_result(held[0][1])
        return future

    requests = [replace(one, completions=3) for one in make_requests(GenerationSettings(5, 1.0, END_IDS, 0))]
    conversations = sum(request.completions for request in requests)
    generator = LocalGenerator(LanguagePolicy(tiny_model(kind)))
    assert generator.converse(requests, respond) == [None] * len(requests)
    assert {len(ends) for ends in script.ends.values()} == {script.turns}
    at_once = Script(always=True)
    generator.converse(requests, at_once)
    assert script.tokens == at_once.tokens


class WatchedGenerator(LocalGenerator):
    """Records the batches of conversations, the prompt tokens that are computed and the slots in use."""

    def _conversation_batch(self, requests: list[GenerationRequest], max_tokens: int) -> ConversationBatch:
        batch = super()._conversation_batch(requests, max_tokens)
        self.__dict__.setdefault("batches", []).append(batch)
        batch.prefilled, batch.slots = [], []  # type: ignore[attr-defined]
        prefill, feed = batch.decoder.prefill, batch.decoder._feed

        def watched_prefill(prompts: list[list[int]], group_size: int, common: int | None = None) -> torch.Tensor:
            batch.prefilled.extend(map(tuple, prompts))  # type: ignore[attr-defined]
            return prefill(prompts, group_size, common)

        def watched_feed(tokens: torch.Tensor, rows: Any, decoded: torch.Tensor) -> torch.Tensor:
            batch.slots.append(batch.max_rows - batch.decoder.free_rows())  # type: ignore[attr-defined]
            return feed(tokens, rows, decoded)

        batch.decoder.prefill, batch.decoder._feed = watched_prefill, watched_feed  # type: ignore[method-assign]
        return batch


@pytest.mark.sampled(4)
@pytest.mark.parametrize("delays", [None, 3])
@pytest.mark.parametrize("rows", [4, 100])
def test_rows_keep_their_keys_and_values_and_are_given_back(delays: int | None, rows: int) -> None:
    generator = WatchedGenerator(LanguagePolicy(tiny_model()))
    script = Script(delays=None if delays is None else random.Random(delays))
    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0, max_rows=rows), 6)
    generator.converse(requests, script)
    batches: list[Any] = generator.__dict__["batches"]
    assert len(batches) == 2  # groups of 1 and of 3
    assert sorted(prompt for batch in batches for prompt in batch.prefilled) == sorted(one.prompt for one in requests)
    for batch in batches:
        assert batch.decoder.free_rows() == batch.max_rows <= rows
        assert sorted(batch.decoder.free) == list(range(batch.max_rows))
        assert not batch.decoder.parked
        assert not batch.parked


@pytest.mark.slow
def test_siblings_share_every_token_that_they_have_in_common() -> None:
    """Without randomness, all completions of a prompt are one row until replies to them differ, which come together."""
    generator, script = WatchedGenerator(LanguagePolicy(tiny_model())), Script(always=True)
    requests = [replace(one, completions=5) for one in make_requests(GenerationSettings(5, 0.0, END_IDS, 0))]
    generator.converse(requests, script)
    (batch,) = generator.__dict__["batches"]
    assert max(batch.slots) == len(requests)
    late = Script(always=True, delays=random.Random(0))
    generator.converse(requests, late)
    assert late.tokens == script.tokens
    assert late.logprobs == script.logprobs

    class ByRollout(Script):
        def __call__(self, number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
            self.rollout = rollout
            return super().__call__(number, rollout, turn)

        def reply(self, turns: int, tokens: Sequence[int]) -> Continuation | None:
            return super().reply(turns, [*tokens, self.rollout % 2])

    different = ByRollout(always=True)
    generator.converse(requests, different)
    assert max(generator.__dict__["batches"][-1].slots) == 2 * len(requests)
    for (number, rollout), tokens in different.tokens.items():
        prompt = requests[number].prompt
        whole = logprobs_of(generator.policy.module, (*prompt, *tokens), 1.0)[len(prompt) - 1 : -1]
        decided = torch.tensor(different.decided[number, rollout])
        assert torch.equal(whole.argmax(1)[decided], torch.tensor(tokens)[decided])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_are_fed_together_have_the_bits_of_those_fed_one_by_one(threads: int, dtype: torch.dtype) -> None:
    module = LanguagePolicy(tiny_model(dtype=dtype)).module
    kernels = kernels_for(dtype, torch.device("cpu"))
    assert kernels is not None
    together, *single = (NativeDecoder(module, kernels, 4, 300, chunk=64) for _ in range(4))
    replies = [[3 + (7 * place + row) % 80 for place in range(length)] for row, length in enumerate((90, 1, 170))]
    for decoder in (together, *single):
        decoder.prefill([[5, 6, 7], [8, 9]], 1)
    together.select(torch.tensor([0, 0, 1]))
    for decoder, prompt in zip(single, (0, 0, 1), strict=True):
        decoder.select(torch.tensor([prompt]))
    torch.set_num_threads(threads)
    try:
        found = together.extend(replies)
        expected = [
            [decoder.step(torch.tensor([token])) for token in reply][-1]
            for decoder, reply in zip(single, replies, strict=True)
        ]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("decoded", [3, 16, 17, 40])
def test_a_parked_row_is_unchanged_when_it_comes_back_after_others_went_on_in_its_slot(decoded: int) -> None:
    module = LanguagePolicy(tiny_model()).module
    kernels = kernels_for(torch.float32, torch.device("cpu"))
    assert kernels is not None
    tokens = [3 + (7 * place) % 80 for place in range(decoded)]

    def prefilled() -> NativeDecoder:
        decoder = NativeDecoder(module, kernels, 3, 64, chunk=64)
        decoder.prefill([[5, 6, 7]], 1)
        return decoder

    def after(*more: int) -> torch.Tensor:
        return prefilled().extend([[*tokens, *more]])

    decoder = prefilled()
    decoder.extend([tokens])
    copied, not_copied = decoder.park(0), decoder.park(0)
    assert torch.equal(decoder.extend([[11, 12]]), after(11, 12))
    decoder.bring_back(copied)
    assert torch.equal(decoder.extend([[13], [21, 22]]), torch.cat([after(11, 12, 13), after(21, 22)]))
    decoder.select(torch.tensor([1]))
    decoder.bring_back(not_copied)
    assert torch.equal(decoder.extend([[23], [31]]), torch.cat([after(21, 22, 23), after(31)]))
    assert decoder.free_rows() == 1
    assert not decoder.parked


def test_a_turn_is_limited_by_the_models_positions_and_a_conversation_without_room_ends() -> None:
    policy = LanguagePolicy(tiny_model("gpt2"))
    limit = room(policy.module.config, 0)
    assert limit is not None

    def turns_after(reply: int) -> list[int]:
        lengths: list[int] = []

        def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
            lengths.append(len(turn.tokens))
            future: Future[Continuation | None] = Future()
            future.set_result(Continuation((5,) * reply, 7))
            return future

        request = GenerationRequest((3,) * 10, 1, RandomKey(1, 1, 1), GenerationSettings(4, 1.0, frozenset(), 0))
        assert LocalGenerator(policy).converse([request], respond) == [None]
        return lengths

    assert turns_after(limit - 14 - 7 + 1) == [4, 6]  # and then there is no room for the same reply
    assert turns_after(limit - 14 - 1) == [4, 1]
    assert turns_after(limit - 14) == [4]
    assert turns_after(limit) == [4]
    with pytest.raises(ValueError, match="at least 1"):
        Continuation((), 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    """Products of few rows with wide matrices are computed in another order, in the layers of every other decoder."""
    if dtype is torch.float32 and Version(torch.__version__) < Version("2.13"):
        pytest.skip("oneDNN 3.10 of torch 2.11 computes 16 rows in another order than 15")
    config = AutoConfig.for_model(
        "llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=90,
    )  # fmt: skip
    module = LanguagePolicy(AutoModelForCausalLM.from_config(config, dtype=dtype)).module
    kernels = kernels_for(dtype, torch.device("cpu"))
    assert kernels is not None
    found: dict[int, torch.Tensor] = {}
    for rows in (1, 2, 4, 5, 8, 9, 33):
        decoder = NativeDecoder(module, kernels, rows, 8, chunk=64)
        first = decoder.prefill([[5, 6, 7]], 1)
        decoder.select(torch.zeros(rows, dtype=torch.int64))
        found[rows] = torch.cat([first, decoder.step(torch.arange(rows))[:1]])
    for logits in found.values():
        assert torch.equal(logits, found[1])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_past_the_deadline_the_conversations_that_wait_have_failed(kind: str) -> None:
    clock = [0.0]

    def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future: Future[Continuation | None] = Future()
        if number == 0:
            future.set_result(None)
        else:
            clock[0] = 100.0
        return future

    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0, deadline_seconds=2.0), 2)
    generator = LocalGenerator(LanguagePolicy(tiny_model(kind)), clock=lambda: clock[0])
    done, failed = generator.converse(requests, respond)
    assert done is None
    assert isinstance(failed, GenerationFailure)
    assert failed.reason is FailureReason.DEADLINE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_requests_and_replies_that_fail_do_so_alone(kind: str) -> None:
    """The first rollout of the last request has no reply: its future has failed, or was cancelled."""
    generator = LocalGenerator(LanguagePolicy(tiny_model(kind)))
    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0), 4)
    requests[1] = GenerationRequest((3,) * 5000, 2, RandomKey(1, 1, 1), requests[0].settings)
    whole, script = Script(always=True), Script(always=True)
    generator.converse(requests, whole)

    def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future = script(number, rollout, turn)
        if (number, rollout) == (3, 0):
            future = Future()
            if kind == "llama":
                future.set_exception(RuntimeError("no reply"))
            else:
                future.cancel()
        return future

    first, failed, *last = generator.converse(requests, respond)
    assert [first, *last] == [None] * 3
    assert failed is not None
    assert failed.reason is FailureReason.PROMPT_TOO_LONG
    assert len(script.ends[3, 0]) == 1
    del script.logprobs[3, 0], whole.logprobs[3, 0]
    assert {number for number, _ in script.logprobs} == {0, 2, 3}
    assert script.logprobs.keys() == whole.logprobs.keys()
    for place, logprobs in whole.logprobs.items():
        assert script.logprobs[place] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_stop_string_ends_a_turn_but_not_if_a_reply_has_a_part_of_it(kind: str) -> None:
    chat = Chat(tiny_tokenizer(), frozenset({1}), 84)
    stop = stop_strings(chat, tuple("abcdefg") + tuple(f"{last}{next}" for last in "0123456789" for next in "hijk"))
    policy, script = LanguagePolicy(tiny_model(kind)), Script(always=True, limit=12)
    requests = make_requests(GenerationSettings(12, 1.0, frozenset({1}), 0, stop=stop))
    assert LocalGenerator(policy).converse(requests, script) == [None] * len(requests)
    check_decisions(policy, requests, script, 1.0, 2e-5)
    stopped = 0
    for place, tokens in script.tokens.items():
        turns = script.turns_of(place)
        assert len(turns) == script.turns
        for (begin, end), reason in zip(turns, script.ends[place], strict=True):
            turn = tokens[begin:end]
            assert stop.end_of(turn) in (len(turn), None)
            by_text = stop.end_of(turn) == len(turn)
            assert reason is (EndReason.STOP if by_text or turn[-1] == 1 else EndReason.LENGTH)
            stopped += by_text
    assert stopped > 5


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_that_are_not_finite_are_a_failure_of_all(kind: str) -> None:
    model = tiny_model(kind)
    next(model.parameters()).data.fill_(float("nan"))
    policy = LanguagePolicy(tiny_model(kind))
    policy.module.load_state_dict(model.state_dict())
    failures = LocalGenerator(policy).converse(make_requests(GenerationSettings(5, 1.0, END_IDS, 0)), Script())
    assert {failure.reason for failure in failures if failure} == {FailureReason.NON_FINITE_LOGITS}
    assert None not in failures
