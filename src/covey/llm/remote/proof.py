"""The numerical proof that a sampler has the trainer's weights.

A server's statement about its version proves nothing: an update may have changed a part of the weights only, or a
prefix may have been cached under old ones. So log-probabilities of a server's first completions are compared with the
trainer's own, for every call of `generate` and before anything is learnt from them.

vLLM is also probed when it has started. Version 0.32 on CPUs answers every update with 200 and the new version, and
multiplies by a packed copy of a tied output layer that is still the old one. A step of training changes weights so
little that such a part would show only after many steps. So the server is given weights that differ much, and then the
first ones again, and its log-probabilities are compared with the policy's own each time.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.config import RunError
from covey.data import Batch
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.token_sampling import Truncation
from covey.llm.model.architecture import vocabulary_of
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client, FailedRequest, LostServer
from covey.llm.remote.weights import Transport, gathered, give

MOST_DECISIONS = 256  # that are compared of a server
# Mean |difference| in nats that is expected before any was measured, and the least that a measured level may be, which
# is a mean of few hundred decisions. Measured on vLLM 0.32: 8e-6 in fp32 and 0.035 in bf16.
EXPECTED = {torch.float32: 1e-4, torch.float64: 1e-4}
LEAST = {torch.float32: 1e-5, torch.float64: 1e-5}
EXPECTED_16, LEAST_16 = 0.04, 0.01  # bf16, fp16
# A mean of few decisions is uncertain, so it counts together with this many decisions at the level.
PRIOR_DECISIONS = 32

# Of the probe, whose log-probabilities are the same in every run of a model:
SEED = 20261124
PROMPTS, PROMPT_TOKENS, COMPLETIONS, NEW_TOKENS = 8, 16, 2, 24
# Weights times 1 + NOISE * N(0, 1). Measured on SmolLM2-135M, mean |difference| in nats: 0.06 in bf16 with the right
# weights, 0.17 with an old embedding, 0.73 with an old output layer, 0.97 with old weights.
NOISE = 0.05
# Largest mean |difference| in nats at the first weights, and the least that is allowed after an update.
MOST_GAP = {torch.float32: 1e-3}
MOST_GAP_16 = 0.15
FACTOR = 2.0  # of the difference at the first weights that is allowed after an update
LEAST_GAP = {torch.float32: 1e-3}
LEAST_GAP_16 = 0.05

Sampled = Sequence[tuple[GenerationRequest, Completion]]


@dataclass
class _Level:
    """Differences at the first version of the weights, in nats."""

    total: float = 0.0
    decisions: int = 0


@dataclass
class Proof:
    """Compares completions with the policy. Greedy completions have a level of their own: they are easier to predict.

    The level is measured at the first version of the weights that is proven, after servers beyond `max_mismatch` times
    the expected one were refused.
    """

    policy: LanguagePolicy
    max_mismatch: float
    first_version: int | None = None
    levels: dict[bool, _Level] = field(default_factory=dict)  # greedy -> level

    @torch.no_grad()
    def refused(self, sampled: Mapping[int, Sampled]) -> dict[int, str]:
        """The servers whose log-probabilities are not the policy's, with the reason in one line.

        Evaluates the policy exactly once, also without completions, because ranks that share weights must do it alike.

        Args:
            sampled: requests with one of their completions each, by the number of the server; all at one temperature.
        """
        rows = [
            (server, *row)
            for server, found in sampled.items()
            for row in _rows(found, self.policy.microbatch_tokens // len(sampled))
        ]
        greedy = any(request.settings.temperature == 0.0 for _, request, _ in rows)
        temperature = 1.0 if greedy else self.policy.temperature
        evaluated = self.policy if temperature == self.policy.temperature else self._at(temperature)
        batch = batch_of([(request.prompt, completion.tokens) for _, request, completion in rows] or [((0,), [0])])
        logprobs_BT = evaluated.evaluate(batch).logprobs_BT.cpu().double()
        gaps: dict[int, list[float]] = {}
        for row, (server, request, completion) in enumerate(rows):
            if self.first_version is None:
                self.first_version = request.settings.version
            theirs = torch.tensor(completion.logprobs, dtype=torch.float64)
            gaps.setdefault(server, []).extend((logprobs_BT[row, : len(theirs)] - theirs).abs().tolist())
        refused = {server: message for server, gap in gaps.items() if (message := self._fault(gap, greedy))}
        if rows and rows[0][1].settings.version == self.first_version:
            level = self.levels.setdefault(greedy, _Level())
            for server in gaps.keys() - refused.keys():
                level.total += sum(gaps[server])
                level.decisions += len(gaps[server])
        return refused

    def level(self, greedy: bool) -> float:
        """Mean |difference| in nats at the first version."""
        dtype = self.policy.dtype
        known = self.levels.get(greedy, _Level())
        expected = EXPECTED.get(dtype, EXPECTED_16)
        mean = (known.total + PRIOR_DECISIONS * expected) / (known.decisions + PRIOR_DECISIONS)
        return max(mean, LEAST.get(dtype, LEAST_16))

    def _fault(self, gap: list[float], greedy: bool) -> str:
        level = self.level(greedy)
        mean = (sum(gap) + PRIOR_DECISIONS * level) / (len(gap) + PRIOR_DECISIONS)
        if mean <= self.max_mismatch * level:
            return ""
        return (
            f"its log-probabilities differ from the trainer's by {sum(gap) / len(gap):.2g} nats in the mean of "
            f"{len(gap)} tokens, where {level:.2g} is expected"
        )

    def _at(self, temperature: float) -> LanguagePolicy:
        """The policy on the same weights at another temperature."""
        policy = self.policy
        return LanguagePolicy(
            policy.module, temperature=temperature, microbatch_tokens=policy.microbatch_tokens, backend=policy.backend,
            weights=policy.weights, minimum=policy.minimum,
        )  # fmt: skip


def _rows(sampled: Sampled, most_tokens: int) -> Sampled:
    """The first completions, cut to `MOST_DECISIONS` together, and to about `most_tokens` tokens with their prompts."""
    chosen: list[tuple[GenerationRequest, Completion]] = []
    decisions, tokens = MOST_DECISIONS, most_tokens
    prompts: set[tuple[int, ...]] = set()
    for request, completion in sampled:
        prompt = 0 if request.prompt in prompts else len(request.prompt)
        length = min(len(completion.tokens), decisions, tokens - prompt)
        if length <= 0 and chosen:
            break
        length = max(length, 1)
        cut = Completion(completion.tokens[:length], completion.logprobs[:length], completion.end, completion.version)
        chosen.append((request, cut))
        prompts.add(request.prompt)
        decisions, tokens = decisions - length, tokens - prompt - length
    return chosen


def batch_of(rows: Sequence[tuple[tuple[int, ...], Sequence[int]]]) -> Batch:
    """A batch of prompts and tokens; rows with the same prompt are one group, so that it is computed once."""
    lengths = torch.tensor([len(tokens) for _, tokens in rows])
    mask_BT = torch.arange(int(lengths.max())) < lengths[:, None]
    actions_BT = torch.zeros(mask_BT.shape, dtype=torch.int64)
    actions_BT[mask_BT] = torch.tensor([token for _, tokens in rows for token in tokens])
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in rows))}
    group_B = torch.tensor([numbers[prompt] for prompt, _ in rows])
    return Batch.blank(mask_BT, context=tuple(prompt for prompt, _ in rows), actions_BT=actions_BT, group_B=group_B)


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
    module = policy.module
    dtype, vocabulary, requests = module.dtype, vocabulary_of(module), _requests(policy, end_ids)

    async def exchange(version: str) -> list[list[Completion]]:
        with transport.offered(gathered(module, dtype), version) as offer:
            await give(client, offer, version, covey=covey)
        return await asyncio.gather(*(client.generate(one, version, vocabulary, covey=covey) for one in requests))

    def gap_at(version: str) -> float:
        return mean_gap(policy, requests, asyncio.run(exchange(version)))

    try:
        before, most = gap_at("probe-0"), MOST_GAP.get(dtype, MOST_GAP_16)
        if before > most:
            raise RunError(
                f"the server at {client.address} is refused: its log-probabilities differ from covey's by {before:.2g} "
                f"nats before any update, where {most:g} is allowed: it serves another model or in another precision"
            )
        with _changed(policy):
            changed = gap_at("probe-1")
        after = gap_at("probe-2")
    except FailedRequest as error:
        raise RunError(f"the server at {client.address} cannot be probed: {error}") from None
    except LostServer as error:
        raise RunError(f"the server cannot be probed: {error}") from None
    allowed = max(FACTOR * before, LEAST_GAP.get(dtype, LEAST_GAP_16))
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
