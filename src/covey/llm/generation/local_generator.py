"""Generates completions on the policy's own weights, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.data import EndReason
from covey.llm.generation.backend import Backend
from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    GenerationSettings,
    Ready,
)
from covey.llm.policy import LanguagePolicy
from covey.llm.tasks.prompt_limit import length_fault
from covey.runtime.rng import uniforms

# Limit on the memory of the keys and values of a batch, if the settings do not give the number of rows.
CACHE_BYTES = 2 << 30


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
        start = self.clock()
        results: dict[int, GenerationResult] = {}
        batches: dict[tuple[int, GenerationSettings], list[int]] = {}
        for number, request in enumerate(requests):
            if failure := refusal(request, self.policy.module.config, self.version):
                results[number] = failure
            else:
                batches.setdefault((request.completions, request.settings), []).append(number)
        for numbers in batches.values():
            of_batch = {number: requests[number] for number in numbers}
            results |= zip(numbers, self._generate(of_batch, start, ready), strict=True)
        return [results[number] for number in range(len(requests))]

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
        """Results of requests, by their numbers, with equal settings and number of completions."""
        batch, numbers = self._batch(list(requests.values())), list(requests)
        results: dict[int, GenerationResult] = {}

        def hand_out(prompt: int) -> None:
            number = numbers[prompt]
            completions = [completion_of(*found, requests[number], self.version) for found in batch.completions(prompt)]
            results[number] = completions
            ready(number, completions)

        failure = self._run(batch, requests[numbers[0]].settings.deadline_seconds, start, hand_out)
        for number in numbers:
            if failure:
                results.setdefault(number, failure)
        return [results[number] for number in numbers]

    def _batch(self, requests: list[GenerationRequest]) -> ContinuousBatch:
        settings, completions = requests[0].settings, requests[0].completions
        prompts = [request.prompt for request in requests]
        fitting = settings.max_rows or self.rows_in_memory(prompts, settings.max_new_tokens)
        rows = rows_together(fitting, len(requests), completions)
        return ContinuousBatch(
            self.policy.backend.decoder(self.policy.module, rows, settings.max_new_tokens),
            prompts,
            np.concatenate([request_uniforms(request) for request in requests]),
            rows,
            settings.temperature,
            settings.end_ids,
            self.policy.backend.kernels,
            settings.shared_prefix,
            settings.stop,
            settings.truncation,
        )

    def _run(
        self,
        batch: ContinuousBatch,
        deadline_seconds: float | None,
        start: float,
        hand_out: Callable[[int], None],
    ) -> GenerationFailure | None:
        """Generate until all completions have ended, and hand out complete prompts; the failure if there is one."""
        handed_out = 0
        try:
            while not batch.is_done:
                if deadline_seconds is not None and self.clock() - start >= deadline_seconds:
                    return GenerationFailure(
                        FailureReason.DEADLINE,
                        f"the completions were not generated within their deadline of {deadline_seconds:g} s: allow "
                        "more time, or lower max_new_tokens",
                    )
                batch.advance()
                for prompt in batch.complete[handed_out:]:
                    hand_out(prompt)
                handed_out = len(batch.complete)
        except FloatingPointError:
            return non_finite()
        return None

    def rows_in_memory(self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> int:
        """Number of rows whose keys and values fit into `CACHE_BYTES`."""
        return fitting_rows(row_bytes(self.policy.backend, prompts, max_new_tokens))


def refusal(request: GenerationRequest, model_config: Any, version: int) -> GenerationFailure | None:
    """The failure of a request that a model with weights of this version cannot generate; None if it can."""
    settings = request.settings
    if settings.version != version:
        message = f"version {settings.version} of the weights is requested, the generator has {version}"
        return GenerationFailure(FailureReason.OTHER_WEIGHTS, message)
    if fault := length_fault(model_config, len(request.prompt), settings.max_new_tokens):
        return GenerationFailure(FailureReason.PROMPT_TOO_LONG, fault)
    return None


def non_finite() -> GenerationFailure:
    """The failure of requests of a batch in which logits are NaN or infinite."""
    return GenerationFailure(
        FailureReason.NON_FINITE_LOGITS,
        "the model's logits are not finite, so no token can be drawn: its weights have diverged. Go back to an "
        "earlier checkpoint and lower the learning rate",
    )


def completion_of(tokens: list[int], logprobs: list[float], request: GenerationRequest, version: int) -> Completion:
    """A completion of a request, by weights of this version."""
    settings = request.settings
    stopped = tokens[-1] in settings.end_ids or (settings.stop is not None and settings.stop.end(tokens))
    return Completion(tokens, logprobs, EndReason.STOP if stopped else EndReason.LENGTH, version)


def row_bytes(backend: Backend, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> int:
    """Bytes of the keys and values of a row."""
    longest = max(len(prompt) for prompt in prompts) if not backend.shares_prompts else 0
    return backend.row_bytes + backend.token_bytes * (max_new_tokens + longest)


def fitting_rows(row_bytes: int) -> int:
    """Number of rows whose keys and values, of `row_bytes` bytes each, fit into `CACHE_BYTES` together."""
    return CACHE_BYTES // row_bytes


def rows_together(fitting: int, requests: int, completions: int) -> int:
    """Number of rows that are decoded together: those that fit, at least the completions of one request."""
    return min(max(fitting, completions), requests * completions)


def request_uniforms(request: GenerationRequest) -> NDArray[np.float64]:
    """Random numbers in [0, 1) of a request's decisions, [completions, max_new_tokens]."""
    key, tokens = request.key, request.settings.max_new_tokens
    rollouts = key.first_rollout + np.arange(request.completions)
    positions = np.tile(np.arange(tokens), request.completions)
    numbers = uniforms(key.seed, key.step, key.group, rollouts.repeat(tokens), positions, stream=key.stream)
    return numbers.reshape(request.completions, tokens)
