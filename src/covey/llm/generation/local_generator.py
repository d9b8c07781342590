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
from transformers import PreTrainedModel

from covey.data import EndReason
from covey.llm.generation.backend import Backend, Sampling
from covey.llm.generation.batch import ContinuousBatch, ConversationBatch, PrefixCache, TurnBatch
from covey.llm.generation.decoder import (
    PREFILL_TOKENS,
    copies_have_room,
    linear_layers,
    settle_copies,
    token_bytes,
    weights_of,
)
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
from covey.llm.generation.graph_decoder import BLOCK, MOST_PARTS, PROGRAMS, rung
from covey.llm.model.architecture import Heads, LayerModules
from covey.llm.model.lora import factors_of
from covey.llm.model.prefix_attention import shared_prompt_prefix
from covey.llm.policy import LanguagePolicy
from covey.llm.tasks.prompt_limit import length_fault
from covey.runtime.device import device_kind, return_unused, total_memory_bytes
from covey.runtime.rng import uniforms

# ---- memory on a GPU ----

# The number of rows of `GraphDecoder` follows from its memory, which `covey plan` predicts. Keys and values get what is
# free between updates. A prefill, the weights that are joined for decoding and the graphs of a step are in memory
# together with them.

EXACT_BYTES = 4  # of a number of the residual stream, or of a partial result of attention


@dataclass(frozen=True)
class DecoderMemory:
    """The memory of a model's `GraphDecoder`, in bytes."""

    hidden: int
    intermediate: int
    vocabulary: int
    layers: int
    heads: Heads
    linear: int  # weights of all linear layers
    joined: int  # those of which the decoder has a copy, if there is room
    itemsize: int  # bytes of a weight and of an activation

    @classmethod
    def of(cls, module: PreTrainedModel) -> DecoderMemory:
        config, base = module.config.get_text_config(), module.base_model
        copied = [one for layer in base.layers for one in _copied(LayerModules.of(layer))]  # type: ignore[union-attr]
        return cls(
            config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers,
            Heads.of(module), weights_of(linear_layers(module)),
            weights_of(copied), module.dtype.itemsize,
        )  # fmt: skip

    def keys_and_values(self, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
        """Of all rows, of the slot for rows without effect, and of each prompt once."""
        own = (rows + 1) * (max_new_tokens + BLOCK)
        return self._token * (own + prompts * prompt_tokens)

    def prefill(self, prompts: int, prompt_tokens: int) -> int:
        """The activations of a layer at the prompts that are prefilled together, and their keys and values, which are
        then copied."""
        tokens = max(min(PREFILL_TOKENS["cuda"], prompts * prompt_tokens), prompt_tokens)
        heads = 2 * (self.heads.queries + self.heads.keys) * self.heads.width  # before and after the rotation
        numbers = 2 * self.hidden + heads + 3 * self.intermediate
        return tokens * (2 * self.hidden * EXACT_BYTES + numbers * self.itemsize + self._token)

    def step(self, rows: int) -> int:
        """What the graphs of a step hold. They share their memory, but a larger one that comes after a smaller one may
        find no place in what that has left, so that the largest counts twice."""
        graph = rung(rows)
        of_row = self.vocabulary * self.itemsize + self.hidden * (EXACT_BYTES + 2 * self.itemsize)
        of_row += 3 * self.intermediate * self.itemsize
        partial = MOST_PARTS * graph + max(PROGRAMS // self.heads.keys, graph)
        return 2 * graph * of_row + partial * self.heads.queries * (self.heads.width + 1) * EXACT_BYTES

    def copies(self, room: float) -> int:
        """Of the joined weights, if these have room (`copies_have_room`)."""
        return self.joined * self.itemsize if copies_have_room(self.linear * self.itemsize, room) else 0

    def fitting_rows(self, room: int, completions: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
        """Number of rows, in whole groups of `completions`, that fit into so many bytes; 0 if no group does.

        The joined weights have room too (`copies_have_room`).
        """
        linear = self.linear * self.itemsize
        room -= self.prefill(prompts, prompt_tokens) + (2 * linear if copies_have_room(linear, room) else 0)

        def fits(groups: int) -> bool:
            rows = groups * completions
            return self.keys_and_values(rows, max_new_tokens, groups, prompt_tokens) + self.step(rows) <= room

        least, most = 0, prompts
        while least < most:
            middle = -(-(least + most) // 2)
            least, most = (middle, most) if fits(middle) else (least, middle - 1)
        return least * completions

    @property
    def _token(self) -> int:
        return token_bytes(self.layers, self.heads, self.itemsize)


def _copied(layer: LayerModules) -> list[Any]:
    """The linear layers of a layer that are joined, or merged with their adapters, in a copy."""
    merged = [one for one in (layer.output, layer.down) if factors_of(one) is not None]
    return [*layer.qkv, *layer.gate_up, *merged]


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
    room: int | None = None  # bytes of a GPU that are free between updates; None: CACHE_SHARE of it

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ready: Ready = lambda *_: None,
        start: float | None = None,  # from which deadlines are counted; None: now
    ) -> list[GenerationResult]:
        """Generate the requests; those with equal settings and number of completions are one batch."""
        start = self.clock() if start is None else start
        failed: dict[int, GenerationFailure] = {}
        batches = self.by_settings(requests, failed)
        results: dict[int, GenerationResult] = {**failed}
        for numbers in batches:
            return_unused(self.policy.module.device)  # of the update, or of the batch before
            results |= self._generate({number: requests[number] for number in numbers}, start, ready)
        return_unused(self.policy.module.device)
        return [results[number] for number in range(len(requests))]

    def converse(
        self, requests: Sequence[GenerationRequest], respond: Respond, max_tokens: int | None = None
    ) -> list[GenerationFailure | None]:
        """Generate conversations; implements `TurnGenerator`.

        Models of a `SlotDecoder` continue a turn from its keys and values while other rows go on (`in_rows`). For the
        others, the turns whose answers have come are generated together, with a prefill of all tokens so far, and
        answers that come meanwhile wait (`in_waves`).
        """
        start, answers = self.clock(), queue.SimpleQueue[TurnAnswer]()
        conversations = OpenConversations(with_shared_prefix(requests), respond, self.policy.module.config, answers.put)
        turns, failed = _Turns(self, conversations, answers, start), dict[int, GenerationFailure]()
        for numbers in self.by_settings(conversations.turns, failed):
            batch = self._conversation_batch([conversations.turns[number] for number in numbers], max_tokens or 0)
            if batch is None:
                turns.in_waves(failed)
                break
            failed |= turns.in_rows(batch, numbers)
        return conversations.failures(failed)

    def by_settings(
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

    def overdue(self, start: float, deadline_seconds: float | None) -> GenerationFailure | None:
        """The failure of requests whose deadline, counted from `start`, has passed."""
        late = deadline_seconds is not None and self.clock() - start >= deadline_seconds
        return missed_deadline(deadline_seconds) if late else None

    def refresh(self, version: int) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        """Empty."""
        return {}

    def close(self) -> None:
        """Nothing to end."""

    def _generate(
        self, requests: Mapping[int, GenerationRequest], start: float, ready: Ready
    ) -> dict[int, GenerationResult]:
        """Results of requests, by their numbers, with equal settings and number of completions.

        Complete prompts are handed out at once; the others have the failure of the batch, if there is one.
        """
        numbers, results = list(requests), dict[int, GenerationResult]()
        settings = requests[numbers[0]].settings
        rows = batch_rows(
            self.policy, list(requests.values()), settings.max_new_tokens, settings.max_rows, room=self.room
        )
        decoder = self.policy.backend.decoder(self.policy.module, rows, settings.max_new_tokens)
        batch = ContinuousBatch(decoder, **batch_arguments(self.policy.backend, list(requests.values()), rows))

        def hand_out() -> None:
            for prompt in batch.complete[len(results) :]:
                number = numbers[prompt]
                found = batch.completions(prompt)
                results[number] = made = [completion_of(*one, requests[number], self.version) for one in found]
                ready(number, made)

        failure = advance(
            batch, lambda: not batch.is_done, lambda: self.overdue(start, settings.deadline_seconds), hand_out
        )
        if failure:
            results = {number: results.get(number, failure) for number in numbers}
        return results

    def _conversation_batch(self, requests: list[GenerationRequest], max_tokens: int) -> ConversationBatch | None:
        """A batch of the first turns of conversations with up to `max_tokens` tokens after the prompt; None if rows
        cannot be parked."""
        settings = requests[0].settings
        tokens = max(max_tokens, settings.max_new_tokens)
        rows = batch_rows(self.policy, requests, tokens, settings.max_rows, room=self.room)
        decoder = self.policy.backend.conversation_decoder(self.policy.module, rows, tokens)
        if decoder is None:
            return None
        return ConversationBatch(decoder, **batch_arguments(self.policy.backend, requests, rows))


def advance(
    batch: ContinuousBatch,
    is_open: Callable[[], bool],
    before: Callable[[], GenerationFailure | None],
    after: Callable[[], None],
) -> GenerationFailure | None:
    """Generate token by token, between calls of `before`, which may end it with a failure, and `after`.

    Returns:
        the failure of the requests that are left; None if there are none.
    """
    try:
        while is_open():
            if failure := before():
                return failure
            batch.advance()
            after()
    except FloatingPointError:
        return GenerationFailure(
            FailureReason.NON_FINITE_LOGITS,
            "the model's logits are not finite, so no token can be drawn: its weights have diverged. Go back to an "
            "earlier checkpoint and lower the learning rate",
        )
    return None


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

    def in_waves(self, failed: dict[int, GenerationFailure]) -> None:
        """Generate the turns whose answers have come together, then the next ones; adds the failures of turns."""
        open, pending = self.conversations, list(range(len(self.conversations.turns)))
        while pending:
            numbers = pending

            def end_turns(place: int, completions: list[Completion], numbers: list[int] = numbers) -> None:
                open.end_turns(numbers[place], completions)

            results = self.generator.generate([open.turns[number] for number in numbers], end_turns, self.start)
            every = zip(numbers, results, strict=True)
            failed |= {number: result for number, result in every if isinstance(result, GenerationFailure)}
            pending = self._answered(failed)

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

    def in_rows(self, batch: ConversationBatch, requests: list[int]) -> dict[int, GenerationFailure]:
        """Generate the conversations of one batch, each of which keeps its row; failures by the numbers of turns."""
        open = self.conversations
        # Of each conversation that has not ended, by its number in the batch: (turn, index of the completion in it).
        turns = dict(enumerate((number, index) for number in requests for index in range(batch.group_size)))
        waiting: dict[tuple[int, int], int] = {}  # conversation of each turn without an answer
        deadline = open.turns[requests[0]].settings.deadline_seconds

        def take_answers() -> GenerationFailure | None:
            while answer := self.next_answer(bool(waiting) and not batch.can_advance, deadline):
                number = waiting.pop((answer.turn, answer.index), None)
                turn = open.next_turn(answer)
                if number is None:  # of an earlier batch that has failed
                    continue
                if turn is None or answer.continuation is None:
                    batch.end(number)
                    del turns[number]
                    continue
                turns[number] = turn, 0
                fed = answer.completion.tokens[-1], *answer.continuation.tokens
                batch.reply(number, fed, request_uniforms(open.turns[turn])[0])
            return self.generator.overdue(self.start, deadline)

        def end_turns() -> None:
            for number in batch.ended:
                turn, index = turns[number]
                waiting[turn, index] = number
                completion = completion_of(*batch.completion(number), open.turns[turn], self.generator.version)
                open.end_turn(turn, index, completion)
            batch.ended.clear()

        failure = advance(batch, lambda: bool(turns), take_answers, end_turns)
        if failure is None:
            return {}
        open.stop_waiting()
        return {turn: failure for turn, _ in turns.values()}


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


def rows_in_memory(policy: LanguagePolicy, requests: Sequence[GenerationRequest], tokens: int, room: int | None) -> int:
    """Number of rows whose keys and values, of up to `tokens` tokens after each prompt, fit into `cache_limit`, or with
    what else a `GraphDecoder` needs into `room` bytes.
    """
    backend, longest = policy.backend, max(len(request.prompt) for request in requests)
    if room is not None and backend.sampling is Sampling.NATIVE and device_kind(policy.module.device) == "cuda":
        memory = DecoderMemory.of(policy.module)
        return memory.fitting_rows(room, requests[0].completions, tokens, len(requests), longest)
    longest = 0 if backend.shares_prompts else longest
    return fitting_rows(backend.row_bytes + backend.token_bytes * (tokens + longest), device_kind(policy.module.device))


def batch_rows(
    policy: LanguagePolicy,
    requests: Sequence[GenerationRequest],
    tokens: int,
    given: int,
    least: int = 0,
    room: int | None = None,
) -> int:
    """Number of rows of a batch with up to `tokens` tokens after each prompt; `given`, or chosen by memory if it is 0.

    Further requests have room if that is fewer than `least`.
    """
    settle_copies(policy.module, room)
    fitting = given or rows_in_memory(policy, requests, tokens, room)
    completions = requests[0].completions
    return max(rows_together(fitting, len(requests), completions), min(fitting, least))


def cache_limit(device: str, gpu_bytes: int | None = None) -> int:
    """Bytes for the keys and values of a batch on the device "cpu" or "cuda".

    Args:
        device: "cpu" or "cuda".
        gpu_bytes: memory of the GPU; None: the GPU of this machine.
    """
    if device == "cpu":
        return CACHE_BYTES
    if gpu_bytes is None and torch.cuda.is_available():
        gpu_bytes = total_memory_bytes(torch.device("cuda", torch.cuda.current_device()))
    return int(CACHE_SHARE * (gpu_bytes or ASSUMED_GPU_BYTES))


def fitting_rows(row_bytes: int, device: str, gpu_bytes: int | None = None) -> int:
    """Number of rows whose keys and values, of `row_bytes` bytes each, fit into `cache_limit` together."""
    return cache_limit(device, gpu_bytes) // row_bytes


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

        def hand_out_and_add() -> None:
            nonlocal handed_out
            for prompt in batch.complete[handed_out:]:
                job = jobs[prompt]
                found = [completion_of(*one, job.request, self.version) for one in batch.completions(prompt)]
                cached = batch.cached.get(prompt, 0) if isinstance(batch, TurnBatch) else 0
                job.future.set_result([replace(one, cached_tokens=cached) for one in found])
            handed_out = len(batch.complete)
            if self._queue and len(jobs) < MOST_REQUESTS and (later := self._take(kind)):
                uniforms_NT = np.concatenate([request_uniforms(job.request) for job in later])
                batch.add([job.request.prompt for job in later], uniforms_NT)
                jobs.extend(later)

        try:
            batch = self._batch([job.request for job in jobs])
            failure = advance(batch, lambda: not (batch.is_done or self._stopped), lambda: None, hand_out_and_add)
        except Exception as error:  # such as too little memory; the next batch may be smaller
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)
        else:
            for job in jobs:
                if failure and not job.future.done():
                    job.future.set_result(failure)

    def _batch(self, requests: list[GenerationRequest]) -> ContinuousBatch:
        settings, backend, module = requests[0].settings, self.policy.backend, self.policy.module
        tokens = settings.max_new_tokens
        if settings.continues:  # a row has the tokens of earlier turns too
            tokens += max(len(request.prompt) for request in requests)
        rows = batch_rows(self.policy, requests, tokens, self.rows, least=ROWS)
        arguments = batch_arguments(backend, requests, rows)
        if settings.continues and (decoder := backend.conversation_decoder(module, rows, tokens)):
            return TurnBatch(decoder, self.cache, **arguments)
        return ContinuousBatch(backend.decoder(module, rows, tokens), **arguments)
