"""The probe of a server when it has started: does an update of its weights take?

A server's statement about its version proves nothing. vLLM 0.32 on CPUs answers every update with 200 and the new
version, and multiplies by a packed copy of a tied output layer that is still the old one. A step of training changes
weights so little that such a part would show only after many steps. So the server is given weights that differ much,
and then the first ones again, and its log-probabilities are compared with the policy's own each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.config import RunError
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.truncation import Truncation
from covey.llm.model.architecture import vocabulary_of
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.client import Client, FailedRequest, LostServer
from covey.llm.remote.proof import batch_of
from covey.llm.remote.weights import Transport, gathered, give

SEED = 20261124
PROMPTS, PROMPT_TOKENS, COMPLETIONS, NEW_TOKENS = 8, 16, 2, 24
LONGEST = PROMPT_TOKENS + NEW_TOKENS
# Weights times 1 + NOISE * N(0, 1). Measured on SmolLM2-135M, mean |difference| in nats: 0.06 in bf16 with the right
# weights, 0.17 with an old embedding, 0.73 with an old output layer, 0.97 with old weights.
NOISE = 0.05
# Largest mean |difference| in nats at the first weights, and the least that is allowed after an update.
MOST = {torch.float32: 1e-3}
MOST_16 = 0.15
FACTOR = 2.0  # of the difference at the first weights that is allowed after an update
LEAST = {torch.float32: 1e-3}
LEAST_16 = 0.05


@dataclass(frozen=True)
class ProbeResult:
    """Mean |difference| of log-probabilities between server and policy, in nats."""

    before: float  # at the policy's weights
    changed: float  # at other weights
    after: float  # at the policy's weights again

    @property
    def line(self) -> str:
        return (
            f"{self.before:.2g} nats, {self.changed:.2g} at changed weights, {self.after:.2g} at the first ones again"
        )


def probe(
    client: Client, policy: LanguagePolicy, transport: Transport, end_ids: frozenset[int], *, covey: bool = False
) -> ProbeResult:
    """Change a server's weights and change them back.

    Args:
        client: of a server that serves the policy's model and nobody else uses.
        policy: its weights are changed in place while the probe runs.
        transport: how the weights travel.
        end_ids: the model's end tokens, at which the server stops.
        covey: True for covey's own server, False for vLLM.

    Raises:
        RunError: if the server's log-probabilities are not the policy's, or it does not answer.
    """
    dtype = policy.module.dtype
    asked = _Asked(client, policy, transport, _requests(policy, end_ids), covey)
    try:
        before = asked.gap("probe-0")
        if before > MOST.get(dtype, MOST_16):
            raise RunError(
                f"the server at {client.address} is refused: its log-probabilities differ from covey's by {before:.2g} "
                f"nats before any update, where {MOST.get(dtype, MOST_16):g} is allowed: it serves another model or in "
                "another precision"
            )
        with _changed(policy):
            changed = asked.gap("probe-1")
        after = asked.gap("probe-2")
    except FailedRequest as error:
        raise RunError(f"the server at {client.address} cannot be probed: {error}") from None
    except LostServer as error:
        raise RunError(f"the server cannot be probed: {error}") from None
    allowed = max(FACTOR * before, LEAST.get(dtype, LEAST_16))
    for gap in (changed, after):
        if gap > allowed:
            raise RunError(
                f"the server at {client.address} is refused: after an update of its weights its log-probabilities "
                f"differ from covey's by {gap:.2g} nats where {allowed:.2g} is allowed, so a part of the weights did "
                "not change (vLLM's tied output layer, without the package covey_vllm)"
            )
    return ProbeResult(before, changed, after)


def _requests(policy: LanguagePolicy, end_ids: frozenset[int]) -> list[GenerationRequest]:
    """Random prompts, the same in every probe of a model."""
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(vocabulary_of(policy.module), (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    shortest = Truncation(min_new_tokens=policy.minimum.tokens)
    settings = GenerationSettings(NEW_TOKENS, 1.0, end_ids, 0, truncation=shortest)
    return [
        GenerationRequest(tuple(prompt), COMPLETIONS, RandomKey(SEED, 0, number), settings)
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class _Asked:
    """A server, and what it is asked at every version of the weights."""

    client: Client
    policy: LanguagePolicy
    transport: Transport
    requests: Sequence[GenerationRequest]
    covey: bool

    def gap(self, version: str) -> float:
        """Give the policy's weights to the server and compare."""
        return mean_gap(self.policy, self.requests, asyncio.run(self._exchange(version)))

    async def _exchange(self, version: str) -> list[list[Completion]]:
        module = self.policy.module
        with self.transport.offered(gathered(module, module.dtype), version) as offer:
            await give(self.client, offer, version, covey=self.covey)
        return await asyncio.gather(*(self._ask(request, version) for request in self.requests))

    async def _ask(self, request: GenerationRequest, version: str) -> list[Completion]:
        body = wire.request_body(request, version, covey=self.covey)
        content = await self.client.post_raw(wire.GENERATE, body, wire.answer_bytes(request))
        try:
            return wire.read_answer(content, request, version, vocabulary_of(self.policy.module))
        except wire.BadBody as error:
            raise LostServer(f"{self.client.address}: {error}") from None


@torch.no_grad()
def mean_gap(
    policy: LanguagePolicy, requests: Sequence[GenerationRequest], completions: Sequence[Sequence[Completion]]
) -> float:
    """Mean |difference| between the completions' log-probabilities and the policy's, in nats."""
    rows = [(request.prompt, one) for request, found in zip(requests, completions, strict=True) for one in found]
    batch = batch_of([(prompt, one.tokens) for prompt, one in rows])
    total, count = 0.0, 0
    for piece in policy.microbatches(batch):
        part = batch.select(piece)
        logprobs_BT = policy.evaluate(part).logprobs_BT.cpu().double()
        for row, number in enumerate(piece.tolist()):
            theirs = torch.tensor(rows[number][1].logprobs, dtype=torch.float64)
            total += float((logprobs_BT[row, : len(theirs)] - theirs).abs().sum())
            count += len(theirs)
    return total / count


@contextmanager
def _changed(policy: LanguagePolicy) -> Iterator[None]:
    """Context manager within which the policy has other weights."""
    generator = torch.Generator().manual_seed(SEED)
    own: list[tuple[Tensor, Tensor]] = [(p.data, p.detach().clone()) for p in policy.module.parameters()]
    for weight, _ in own:
        noise = torch.randn(weight.shape, generator=generator).to(device=weight.device)
        weight.copy_((weight.float() * (1 + NOISE * noise)).to(weight.dtype))
    try:
        yield
    finally:
        for weight, first in own:
            weight.copy_(first)
