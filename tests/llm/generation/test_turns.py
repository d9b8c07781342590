"""Conversations have the tokens and log-probabilities of full forward passes, in any order of their answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    RandomKey,
)
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.turns import Continuation, room
from covey.llm.policy import LanguagePolicy
from covey.runtime.rng import uniforms
from helpers.tiny_models import tiny_model

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
    delays: random.Random | None = None  # replies come from threads, after random times
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
        if self.delays is None:
            future.set_result(reply)
        else:
            threading.Timer(self.delays.random() / 50, future.set_result, [reply]).start()
        return future

    def reply(self, turns: int, tokens: Sequence[int]) -> Continuation | None:
        drawn = random.Random(str(tokens))
        if turns == self.turns or drawn.random() < 0.2:
            return None
        return Continuation(tuple(drawn.choices(range(3, 80), k=drawn.randint(1, self.longest))), self.limit)


def logprobs_of(module: torch.nn.Module, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of the token after each of these tokens, [tokens, V], from one ordinary forward pass."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(tokens)])).logits[0]
    return (logits.float() / temperature).log_softmax(1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_every_decision_is_that_of_one_full_forward_and_of_its_own_random_number(kind: str) -> None:
    policy, script = LanguagePolicy(tiny_model(kind), temperature=0.7), Script()
    requests = make_requests(GenerationSettings(5, 0.7, END_IDS, 0))
    assert LocalGenerator(policy).converse(requests, script) == [None] * len(requests)
    assert len(script.tokens) == sum(request.completions for request in requests)
    assert {len(ends) for ends in script.ends.values()} >= {1, 4}
    assert {end for ends in script.ends.values() for end in ends} == {EndReason.STOP, EndReason.LENGTH}
    for (number, rollout), tokens in script.tokens.items():
        request = requests[number]
        whole = logprobs_of(policy.module, (*request.prompt, *tokens), 0.7)[len(request.prompt) - 1 : -1]
        drawn = uniforms(3, 2, number, request.key.first_rollout + rollout, np.arange(len(tokens)))
        for position, decided in enumerate(script.decided[number, rollout]):
            if decided:
                token, found = tokens[position], script.logprobs[number, rollout][position]
                assert found == pytest.approx(float(whole[position, token]), abs=2e-5)
                upto = whole[position].double().exp().cumsum(0)
                assert upto[token] > drawn[position] - 1e-5
                assert token == 0 or upto[token - 1] < drawn[position] + 1e-5


def test_a_policy_evaluates_the_decisions_of_conversations_alike() -> None:
    policy, script = LanguagePolicy(tiny_model(), microbatch_tokens=60), Script(longest=20)
    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0))
    LocalGenerator(policy).converse(requests, script)
    groups = [
        Group(
            Start(number, ""),
            [
                Rollout(request.prompt, tuple(script.tokens[number, i]), tuple(script.logprobs[number, i]),
                        EndReason.STOP, reward=0.0, decided=tuple(script.decided[number, i]))
                for i in range(request.completions)
            ],
        )
        for number, request in enumerate(requests)
    ]  # fmt: skip
    batch = collate(groups)
    with torch.no_grad():
        found = policy.evaluate(batch).logprobs_BT
    assert 0 < int(batch.mask_BT.sum()) < sum(map(len, script.tokens.values()))
    torch.testing.assert_close(
        found[batch.mask_BT], batch.behavior_logprobs_BT[batch.mask_BT].to(found.dtype), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_the_time_of_an_answer_changes_nothing(kind: str) -> None:
    generator = LocalGenerator(LanguagePolicy(tiny_model(kind)))
    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0), 6)
    at_once = Script()
    generator.converse(requests, at_once)
    for seed in range(3):
        late = Script(delays=random.Random(seed))
        generator.converse(requests, late)
        assert late.tokens == at_once.tokens
        if kind == "llama":
            assert late.logprobs == at_once.logprobs
        for place, logprobs in at_once.logprobs.items():
            assert late.logprobs[place] == pytest.approx(logprobs, abs=1e-5)


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


def test_past_the_deadline_the_conversations_that_wait_have_failed() -> None:
    clock = [0.0]

    def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future: Future[Continuation | None] = Future()
        if number == 0:
            future.set_result(None)
        else:
            clock[0] = 100.0
        return future

    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0, deadline_seconds=2.0), 2)
    generator = LocalGenerator(LanguagePolicy(tiny_model()), clock=lambda: clock[0])
    done, failed = generator.converse(requests, respond)
    assert done is None
    assert isinstance(failed, GenerationFailure)
    assert failed.reason is FailureReason.DEADLINE


def test_a_request_that_is_too_long_fails_alone_and_an_exception_is_raised() -> None:
    generator = LocalGenerator(LanguagePolicy(tiny_model("gpt2")))
    requests = make_requests(GenerationSettings(5, 1.0, END_IDS, 0), 3)
    requests[1] = GenerationRequest((3,) * 5000, 2, RandomKey(1, 1, 1), requests[0].settings)
    script = Script()
    first, failed, last = generator.converse(requests, script)
    assert first is last is None
    assert failed is not None
    assert failed.reason is FailureReason.PROMPT_TOO_LONG
    assert {number for number, _ in script.tokens} == {0, 2}

    def broken(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future: Future[Continuation | None] = Future()
        future.set_exception(RuntimeError("no reply"))
        return future

    with pytest.raises(RuntimeError, match="no reply"):
        generator.converse(requests[:1], broken)
