"""The numerical proof that a sampler has the trainer's weights.

A server's statement about its version proves nothing: an update may have changed a part of the weights only, or a
prefix may have been cached under old ones. So log-probabilities of a server's first completions are compared with the
trainer's own, for every call of `generate` and before anything is learnt from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from covey.data import Batch
from covey.llm.generation.generator import Completion, GenerationRequest
from covey.llm.policy import LanguagePolicy

MOST_DECISIONS = 256  # that are compared of a server
# Mean |difference| in nats that is expected before any was measured, and the least that a measured level may be, which
# is a mean of few hundred decisions. Measured on vLLM 0.32: 8e-6 in fp32 and 0.035 in bf16.
EXPECTED = {torch.float32: 1e-4, torch.float64: 1e-4}
LEAST = {torch.float32: 1e-5, torch.float64: 1e-5}
EXPECTED_16, LEAST_16 = 0.04, 0.01  # bf16, fp16
# A mean of few decisions is uncertain, so it counts together with this many decisions at the level.
PRIOR_DECISIONS = 32

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
