"""Generates the requests of several callers, in a thread in which also new weights are put in place.

Requests wait in a queue. Those at its beginning with equal settings, number of completions and shared prefix are
generated in one batch, and further ones are admitted between two tokens, as rows become free. A change of the weights
is a job in the same queue: the batch before it ends first. Turns of conversations begin with the keys and values of the
turns before them (`PrefixCache`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.conversation_batch import PrefixCache, TurnBatch
from covey.llm.generation.generator import GenerationRequest, GenerationResult, GenerationSettings
from covey.llm.generation.local_generator import (
    batch_arguments,
    completion_of,
    fitting_rows,
    non_finite,
    refusal,
    request_uniforms,
    row_bytes,
)
from covey.llm.policy import LanguagePolicy
from covey.runtime.device import device_kind

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
