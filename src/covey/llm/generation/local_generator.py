"""Generates completions on the policy's own weights, in this process: requests -> batch -> decoder.

`LocalGenerator` generates the requests of one call, `Engine` the requests of several callers, in a thread in which
also new weights are put in place. Its requests wait in a queue. The first ones with equal settings, number of
completions and shared prefix are generated in one batch, and further ones are admitted between two tokens, as rows
become free. A change of the weights is a job in the same queue: the batch before it ends first. Turns of conversations
begin with the keys and values of the turns before them (`PrefixCache`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.data import EndReason
from covey.llm.generation.backend import Backend, Sampling
from covey.llm.generation.batch import ContinuousBatch, ConversationBatch, PrefixCache, TurnBatch
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    GenerationSettings,
    OpenConversations,
    Ready,
    Respond,
    TurnAnswer,
)
from covey.llm.model.prefix_attention import shared_prompt_prefix
from covey.llm.policy import LanguagePolicy
from covey.llm.tasks.prompt_limit import length_fault
from covey.runtime.device import device_kind
from covey.runtime.rng import uniforms

# Limits on the memory of the keys and values of a batch, if the settings do not give the number of rows: on a CPU, and
# as a share of a GPU's. A plan for a GPU that this machine lacks assumes one of 80 GB.
CACHE_BYTES, CACHE_SHARE, ASSUMED_GPU_BYTES = 2 << 30, 0.125, 80 << 30


@dataclass
class LocalGenerator:
    """Generates with the policy in this process; implements `Generator`.

    The weights are the trainer's own tensors, so `refresh` only records their version.
    """

    policy: LanguagePolicy
    version: int = 0
    clock: Callable[[], float] = time.monotonic  # in seconds

    def generate(self, requests: Sequence[GenerationRequest], ready: Ready = lambda *_: None) -> list[GenerationResult]:
        """Generate the requests; those with equal settings and number of completions are one batch."""
        return self.generate_by_settings(requests, self.clock(), ready)

    def converse(
        self, requests: Sequence[GenerationRequest], respond: Respond, max_tokens: int | None = None
    ) -> list[GenerationFailure | None]:
        """Generate conversations; implements `TurnGenerator`.

        Models of `NativeDecoder` continue a turn from its keys and values while other rows go on (`_RowTurns`). For the
        others, the turns whose answers have come are generated together, with a prefill of all tokens so far, and
        answers that come meanwhile wait (`_TurnWaves`).
        """
        start, answers = self.clock(), queue.SimpleQueue[TurnAnswer]()
        conversations = OpenConversations(with_shared_prefix(requests), respond, self.policy.module.config, answers.put)
        if self.policy.backend.sampling is not Sampling.NATIVE:
            return _TurnWaves(self, conversations, answers, start).run()
        failed: dict[int, GenerationFailure] = {}
        for numbers in self._by_settings(conversations.turns, failed):
            batch = self._conversation_batch([conversations.turns[number] for number in numbers], max_tokens or 0)
            failed |= _RowTurns(self, conversations, answers, start, batch, numbers).run()
        return conversations.failures(failed)

    def _conversation_batch(self, requests: list[GenerationRequest], max_tokens: int) -> ConversationBatch:
        """A batch of the first turns of conversations with up to `max_tokens` tokens after the prompt."""
        tokens = max(max_tokens, requests[0].settings.max_new_tokens)
        rows = self._rows(requests, tokens)
        decoder = self.policy.backend.conversation_decoder(self.policy.module, rows, tokens)
        assert decoder is not None
        return ConversationBatch(decoder, **batch_arguments(self.policy.backend, requests, rows))

    def generate_by_settings(
        self, requests: Sequence[GenerationRequest], start: float, ready: Ready
    ) -> list[GenerationResult]:
        """The results of requests whose deadlines are counted from `start` on."""
        failed: dict[int, GenerationFailure] = {}
        batches = self._by_settings(requests, failed)
        results: dict[int, GenerationResult] = {**failed}
        for numbers in batches:
            of_batch = {number: requests[number] for number in numbers}
            results |= zip(numbers, self._generate(of_batch, start, ready), strict=True)
        return [results[number] for number in range(len(requests))]

    def _by_settings(
        self, requests: Sequence[GenerationRequest], failed: dict[int, GenerationFailure]
    ) -> list[list[int]]:
        """Numbers of the requests of each batch; those that cannot be generated are added to `failed`."""
        batches: dict[tuple[int, GenerationSettings], list[int]] = {}
        for number, request in enumerate(requests):
            if failure := refusal(request, self.policy.module.config, self.version):
                failed[number] = failure
            else:
                batches.setdefault((request.completions, request.settings), []).append(number)
        return list(batches.values())

    def refresh(self, version: int) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        """Empty."""
        return {}

    def close(self) -> None:
        """Nothing to end."""

    def _generate(
        self, requests: Mapping[int, GenerationRequest], start: float, ready: Ready
    ) -> list[GenerationResult]:
        """Results of requests, by their numbers, with equal settings and number of completions.

        Complete prompts are handed out at once; the others have the failure of the batch, if there is one.
        """
        batch, numbers = self._batch(list(requests.values())), list(requests)
        results: dict[int, GenerationResult] = {}
        deadline_seconds, failure = requests[numbers[0]].settings.deadline_seconds, None
        try:
            while not batch.is_done:
                if deadline_seconds is not None and self.clock() - start >= deadline_seconds:
                    failure = missed_deadline(deadline_seconds)
                    break
                batch.advance()
                for prompt in batch.complete[len(results) :]:
                    number = numbers[prompt]
                    found = batch.completions(prompt)
                    results[number] = made = [completion_of(*one, requests[number], self.version) for one in found]
                    ready(number, made)
        except FloatingPointError:
            failure = non_finite()
        for number in numbers:
            if failure:
                results.setdefault(number, failure)
        return [results[number] for number in numbers]

    def _batch(self, requests: list[GenerationRequest]) -> ContinuousBatch:
        tokens = requests[0].settings.max_new_tokens
        rows = self._rows(requests, tokens)
        decoder = self.policy.backend.decoder(self.policy.module, rows, tokens)
        return ContinuousBatch(decoder, **batch_arguments(self.policy.backend, requests, rows))

    def _rows(self, requests: list[GenerationRequest], tokens: int) -> int:
        """Number of rows of a batch with up to `tokens` tokens after each prompt."""
        fitting = requests[0].settings.max_rows or self.rows_in_memory([one.prompt for one in requests], tokens)
        return rows_together(fitting, len(requests), requests[0].completions)

    def rows_in_memory(self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> int:
        """Number of rows whose keys and values fit into `cache_limit`."""
        device = device_kind(self.policy.module.device)
        return fitting_rows(row_bytes(self.policy.backend, prompts, max_new_tokens), device)


@dataclass
class _Turns:
    """Conversations of one call of `converse`, and the queue in which answers arrive."""

    generator: LocalGenerator
    conversations: OpenConversations
    answers: queue.SimpleQueue[TurnAnswer]
    start: float

    def next_answer(self, wait: bool, deadline: float | None) -> TurnAnswer | None:
        """The next answer; None if none has come, with `wait` until the deadline."""
        left = None if deadline is None else max(self.start + deadline - self.generator.clock(), 0.0)
        try:
            return self.answers.get(block=wait, timeout=left)
        except queue.Empty:
            return None


class _TurnWaves(_Turns):
    """Generates the turns whose answers have come together, then the next ones."""

    def run(self) -> list[GenerationFailure | None]:
        failed: dict[int, GenerationFailure] = {}
        pending = list(range(len(self.conversations.turns)))
        while pending:
            failed |= self._generate(pending)
            pending = self._answered(failed)
        return self.conversations.failures(failed)

    def _generate(self, numbers: list[int]) -> dict[int, GenerationFailure]:
        """Generate the turns with these numbers, and ask for their continuations; the failures."""

        def end_turns(place: int, completions: list[Completion]) -> None:
            self.conversations.end_turns(numbers[place], completions)

        turns = [self.conversations.turns[number] for number in numbers]
        results = zip(numbers, self.generator.generate_by_settings(turns, self.start, end_turns), strict=True)
        return {number: result for number, result in results if isinstance(result, GenerationFailure)}

    def _answered(self, failed: dict[int, GenerationFailure]) -> list[int]:
        """Wait for a next turn, and take those of all answers that have come.

        Past the deadline, the turns that wait for an answer have failed.
        """
        deadline, found = self.conversations.turns[0].settings.deadline_seconds, list[int]()
        while self.conversations.unanswered and not (found and self.answers.empty()):
            answer = self.next_answer(True, deadline)
            if answer is None:
                failed |= dict.fromkeys(self.conversations.stop_waiting(), missed_deadline(deadline))
            elif (turn := self.conversations.next_turn(answer)) is not None:
                found.append(turn)
        return sorted(found, key=self.conversations.places.__getitem__)


class _RowTurns(_Turns):
    """Generates the conversations of one batch, each of which keeps its row."""

    def __init__(
        self,
        generator: LocalGenerator,
        conversations: OpenConversations,
        answers: queue.SimpleQueue[TurnAnswer],
        start: float,
        batch: ConversationBatch,
        requests: list[int],
    ) -> None:
        super().__init__(generator, conversations, answers, start)
        self.batch = batch
        # Of each conversation that has not ended, by its number in the batch: (turn, index of the completion in it).
        self.turns = dict(enumerate((number, index) for number in requests for index in range(batch.group_size)))
        self.waiting: dict[tuple[int, int], int] = {}  # conversation of each turn without an answer

    def run(self) -> dict[int, GenerationFailure]:
        """Failures by the numbers of turns."""
        deadline = self.conversations.turns[self.turns[0][0]].settings.deadline_seconds
        try:
            while self.turns:
                while answer := self.next_answer(bool(self.waiting) and not self.batch.can_advance, deadline):
                    self._take(answer)
                if deadline is not None and self.generator.clock() - self.start >= deadline:
                    return self._fail(missed_deadline(deadline))
                if self.batch.can_advance:
                    self.batch.advance()
                for number in self.batch.ended:
                    self._end_turn(number)
                self.batch.ended.clear()
        except FloatingPointError:
            return self._fail(non_finite())
        return {}

    def _end_turn(self, number: int) -> None:
        turn, index = self.turns[number]
        self.waiting[turn, index] = number
        request = self.conversations.turns[turn]
        completion = completion_of(*self.batch.turn(number), request, self.generator.version)
        self.conversations.end_turn(turn, index, completion)

    def _take(self, answer: TurnAnswer) -> None:
        number = self.waiting.pop((answer.turn, answer.index), None)
        turn = self.conversations.next_turn(answer)
        if number is None:  # of an earlier batch that has failed
            return
        if turn is None:
            self.batch.end(number)
            del self.turns[number]
            return
        self.turns[number] = turn, 0
        request = self.conversations.turns[turn]
        fed = 1 + request.key.first_position - self.conversations.turns[answer.turn].key.first_position
        fed -= len(answer.completion.tokens)  # the last of these and those of the reply
        self.batch.reply(number, request.prompt[-fed:], request_uniforms(request)[0])

    def _fail(self, failure: GenerationFailure) -> dict[int, GenerationFailure]:
        self.conversations.stop_waiting()
        return {turn: failure for turn, _ in self.turns.values()}


def with_shared_prefix(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """The requests with the shared prefix that a call of `generate` chooses for them together."""
    prompts: dict[tuple[int, GenerationSettings], list[tuple[int, ...]]] = {}
    for request in requests:
        prompts.setdefault((request.completions, request.settings), []).append(request.prompt)
    shared = {kind: shared_prompt_prefix(of_kind) for kind, of_kind in prompts.items()}
    return [
        replace(
            request,
            settings=replace(request.settings, shared_prefix=shared[request.completions, request.settings]),
        )
        for request in requests
    ]


def refusal(request: GenerationRequest, model_config: Any, version: int) -> GenerationFailure | None:
    """The failure of a request that a model with weights of this version cannot generate; None if it can."""
    settings = request.settings
    if settings.version != version:
        message = f"version {settings.version} of the weights is requested, the generator has {version}"
        return GenerationFailure(FailureReason.OTHER_WEIGHTS, message)
    if fault := length_fault(model_config, len(request.prompt), settings.max_new_tokens):
        return GenerationFailure(FailureReason.PROMPT_TOO_LONG, fault)
    return None


def missed_deadline(seconds: float | None) -> GenerationFailure:
    """The failure of requests that were not generated within this time."""
    return GenerationFailure(
        FailureReason.DEADLINE,
        f"the completions were not generated within their deadline of {seconds:g} s: allow more time, or lower "
        "max_new_tokens",
    )


def non_finite() -> GenerationFailure:
    """The failure of requests of a batch in which logits are NaN or infinite."""
    return GenerationFailure(
        FailureReason.NON_FINITE_LOGITS,
        "the model's logits are not finite, so no token can be drawn: its weights have diverged. Go back to an "
        "earlier checkpoint and lower the learning rate",
    )


def batch_arguments(backend: Backend, requests: Sequence[GenerationRequest], rows: int) -> dict[str, Any]:
    """The arguments of a batch of requests with equal settings besides its decoder, which has so many rows."""
    settings = requests[0].settings
    return {
        "prompts": [request.prompt for request in requests],
        "uniforms_NT": np.concatenate([request_uniforms(request) for request in requests]),
        "max_rows": rows,
        "temperature": settings.temperature,
        "end_ids": settings.end_ids,
        "kernels": backend.kernels,
        "shared_prefix": settings.shared_prefix,
        "stop": settings.stop,
        "truncation": settings.truncation,
    }


def completion_of(tokens: list[int], logprobs: list[float], request: GenerationRequest, version: int) -> Completion:
    """A completion of a request, by weights of this version."""
    settings = request.settings
    stopped = tokens[-1] in settings.end_ids or (settings.stop is not None and settings.stop.end(tokens))
    return Completion(tokens, logprobs, EndReason.STOP if stopped else EndReason.LENGTH, version)


def row_bytes(backend: Backend, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> int:
    """Bytes of the keys and values of a row."""
    longest = max(len(prompt) for prompt in prompts) if not backend.shares_prompts else 0
    return backend.row_bytes + backend.token_bytes * (max_new_tokens + longest)


def cache_limit(device: str) -> int:
    """Bytes for the keys and values of a batch on the device "cpu" or "cuda"."""
    if device == "cpu":
        return CACHE_BYTES
    has_gpu = torch.cuda.is_available()
    return int(CACHE_SHARE * (torch.cuda.get_device_properties().total_memory if has_gpu else ASSUMED_GPU_BYTES))


def fitting_rows(row_bytes: int, device: str) -> int:
    """Number of rows whose keys and values, of `row_bytes` bytes each, fit into `cache_limit` together."""
    return cache_limit(device) // row_bytes


def rows_together(fitting: int, requests: int, completions: int) -> int:
    """Number of rows that are decoded together: those that fit, at least the completions of one request."""
    return min(max(fitting, completions), requests * completions)


def request_uniforms(request: GenerationRequest) -> NDArray[np.float64]:
    """Random numbers in [0, 1) of a request's decisions, [completions, max_new_tokens]."""
    key, tokens = request.key, request.settings.max_new_tokens
    rollouts = key.first_rollout + np.arange(request.completions)
    positions = np.tile(key.first_position + np.arange(tokens), request.completions)
    numbers = uniforms(key.seed, key.step, key.group, rollouts.repeat(tokens), positions, stream=key.stream)
    return numbers.reshape(request.completions, tokens)


# A batch begins when no further request has come for QUIET_SECONDS, so that requests of one step begin together.
QUIET_SECONDS, LONGEST_QUIET_SECONDS = 0.005, 0.1
ROWS = 512  # that a batch has room for at least, if they fit into memory
MOST_REQUESTS = 1 << 14  # of one batch, whose arrays grow with every further request

Kind = tuple[int, GenerationSettings, tuple[int, ...]]


@dataclass(eq=False)
class _Waiting:
    """A request, and the future of its result."""

    request: GenerationRequest
    future: Future[GenerationResult]

    @property
    def kind(self) -> Kind:
        """Requests of one kind can be in one batch; the last part are the tokens that their prompts share."""
        settings = self.request.settings
        return self.request.completions, settings, self.request.prompt[: settings.shared_prefix or 0]


@dataclass(eq=False)
class _Change:
    """A change of the weights, and the future of its end."""

    apply: Callable[[], None]
    future: Future[None]
    kind = None


@dataclass
class Engine:
    """Generates with one model; its thread begins with `start`. Deadlines of settings have no effect."""

    policy: LanguagePolicy
    rows: int = 0  # largest number of completions that are decoded together; 0: chosen by memory
    version: int = 0  # of the weights
    cache: PrefixCache = field(default_factory=PrefixCache)
    _queue: deque[_Waiting | _Change] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, each once."""
        return {name: parameter.data for name, parameter in self.policy.module.named_parameters()}

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def stop(self) -> None:
        """End the thread after the current token; requests that wait are never answered."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def generate(self, request: GenerationRequest) -> Future[GenerationResult]:
        """The result of a request. If the future is cancelled before the request has begun, it is not generated."""
        waiting = _Waiting(request, Future())
        self._put(waiting)
        return waiting.future

    def change_weights(self, tensors: Mapping[str, Tensor], version: int) -> Future[None]:
        """Copy these tensors into the model, after all requests before. They must fit its parameters."""

        @torch.no_grad()
        def apply() -> None:
            for name, parameter in self.weights.items():
                parameter.copy_(tensors[name])
            self.version = version
            self.cache.clear()

        change = _Change(apply, Future())
        self._put(change)
        return change.future

    def _put(self, job: _Waiting | _Change) -> None:
        with self._changed:
            self._queue.append(job)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._queue)
                if self._stopped:
                    return
                job = self._queue[0]
                if isinstance(job, _Change):
                    self._queue.popleft()
            if isinstance(job, _Change):
                job.apply()
                job.future.set_result(None)
            else:
                self._gather()
                self._run_batch(job.kind)

    def _gather(self) -> None:
        """Wait until no further request has come for a moment."""
        latest = time.monotonic() + LONGEST_QUIET_SECONDS
        with self._changed:
            while self._changed.wait(QUIET_SECONDS) and time.monotonic() < latest:
                pass

    def _take(self, kind: Kind) -> list[_Waiting]:
        """The requests of this kind at the beginning of the queue, without those that cannot be generated."""
        taken: list[_Waiting] = []
        with self._changed:
            while self._queue and self._queue[0].kind == kind:
                job = self._queue.popleft()
                assert isinstance(job, _Waiting)
                if job.future.set_running_or_notify_cancel():
                    if failure := refusal(job.request, self.policy.module.config, self.version):
                        job.future.set_result(failure)
                    else:
                        taken.append(job)
        return taken

    def _run_batch(self, kind: Kind) -> None:
        """Generate the requests of a kind, and those of it that follow in the queue."""
        jobs = self._take(kind)
        if not jobs:
            return
        handed_out = 0
        try:
            batch = self._batch(jobs)
            while not batch.is_done and not self._stopped:
                batch.advance()
                for prompt in batch.complete[handed_out:]:
                    job = jobs[prompt]
                    found = [completion_of(*one, job.request, self.version) for one in batch.completions(prompt)]
                    cached = batch.cached.get(prompt, 0) if isinstance(batch, TurnBatch) else 0
                    job.future.set_result([replace(one, cached_tokens=cached) for one in found])
                handed_out = len(batch.complete)
                if self._queue and len(jobs) < MOST_REQUESTS and (later := self._take(kind)):
                    uniforms_NT = np.concatenate([request_uniforms(job.request) for job in later])
                    batch.add([job.request.prompt for job in later], uniforms_NT)
                    jobs += later
        except FloatingPointError:
            for job in jobs:
                if not job.future.done():
                    job.future.set_result(non_finite())
        except Exception as error:  # such as too little memory; the next batch may be smaller
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)

    def _batch(self, jobs: list[_Waiting]) -> ContinuousBatch:
        prompts, (completions, settings, _) = [job.request.prompt for job in jobs], jobs[0].kind
        backend, module, tokens = self.policy.backend, self.policy.module, settings.max_new_tokens
        if settings.continues:  # a row has the tokens of earlier turns too
            tokens += max(map(len, prompts))
        fitting = self.rows or fitting_rows(row_bytes(backend, prompts, tokens), device_kind(module.device))
        rows = max(min(fitting, max(ROWS, len(jobs) * completions)), completions)
        arguments = batch_arguments(backend, [job.request for job in jobs], rows)
        if settings.continues and (decoder := backend.conversation_decoder(module, rows, tokens)):
            return TurnBatch(decoder, self.cache, **arguments)
        return ContinuousBatch(backend.decoder(module, rows, tokens), **arguments)
