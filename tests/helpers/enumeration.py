"""Is an algorithm's gradient right on average? Answered exactly, on a policy whose every completion can be listed.

`PYTHONPATH=tests python -m helpers.enumeration` prints the tables of docs/mathematics.md; tests/core/test_unbiased.py
checks that they are there.

The policy: 2 prompts; the tokens `a`, `b` and `end`; a completion stops at `end` or after 3 tokens, so there are 15, of
1 to 3 tokens. The logits are a table by prompt and prefix, 42 numbers, drawn normally with seed 0. A training step is
one group from one of the prompts, each as likely as the other. The expected gradient is the sum over every group that
can be drawn, each as likely as it is; nothing is sampled. Everything is in float64.

Shapes: B rollouts, T decisions, O completions, P prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import torch
from torch import Tensor, nn

from covey.algorithms import (
    Algorithm,
    KLInLoss,
    KLInReward,
    KLPenalty,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
)
from covey.core import kl, schedules
from covey.core.loss_weights import constant_length, count, token_mean
from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate
from covey.train.prepare import prepare_batch

A, B, END = 0, 1, 2
LONGEST = 3
PROMPTS = 2
PREFIXES = 1 + 2 + 4  # the empty one, of one token, of two
COMPLETIONS = [
    tokens
    for length in range(1, LONGEST + 1)
    for tokens in product((A, B, END), repeat=length)
    if END not in tokens[:-1] and (tokens[-1] == END or length == LONGEST)
]
SUM = constant_length(1)  # the weight of every decision is 1 / B: a plain sum over a completion
NO_KL = KLPenalty()
EXACT = 1e-12


class ListedPolicy:
    """Logits by prompt and prefix. Meets `covey.data.Policy`; a row's context is its prompt and its completion."""

    def __init__(self, seed: int = 0) -> None:
        shape = (PROMPTS, PREFIXES, 3)
        self.table = nn.Parameter(torch.randn(shape, generator=generator(seed), dtype=torch.float64))

    def evaluate(self, batch: Batch) -> PolicyOutput:
        logprobs_BTV = self.table[prefixes(batch)].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, batch.actions_BT[..., None])[..., 0]
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        return PolicyOutput(logprobs_BT * batch.mask_BT, entropy_BT * batch.mask_BT, logprobs_BTV)

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        yield torch.arange(len(batch))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prefixes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Prompt and prefix of every decision, as indices into a table."""
    prompt_B1 = torch.tensor([prompt for prompt, _ in batch.context])[:, None]
    first_BT = batch.actions_BT.clamp(max=B)  # what stands after the end is never read
    columns = [torch.zeros_like(first_BT[:, 0]), 1 + first_BT[:, 0]]
    if first_BT.shape[1] == LONGEST:
        columns.append(3 + 2 * first_BT[:, 0] + first_BT[:, 1])
    prefix_BT = torch.stack(columns[: first_BT.shape[1]], dim=1)
    return prompt_B1.expand_as(prefix_BT), prefix_BT


def graded(seed: int | None = None) -> Tensor:
    """rewards_PO; with a seed, any numbers whatever.

    The first prompt pays 1/3 for every `a`; the second 1 for exactly `a b end`, which is rare, and else nothing.
    """
    if seed is not None:
        return torch.randn((PROMPTS, len(COMPLETIONS)), generator=generator(seed), dtype=torch.float64)
    paid = [[tokens.count(A) / 3 for tokens in COMPLETIONS], [float(tokens == (A, B, END)) for tokens in COMPLETIONS]]
    return torch.tensor(paid, dtype=torch.float64)


@contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64, so that weights such as 1/3 are as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def as_batch(rows: list[tuple[int, int]], group_size: int, rewards_PO: Tensor) -> Batch:
    """Groups of rollouts, each a (prompt, completion)."""
    rollouts = [
        Rollout(
            context=(prompt, completion),
            actions=list(COMPLETIONS[completion]),
            behavior_logprobs=[0.0] * len(COMPLETIONS[completion]),
            end=EndReason.STOP,
            reward=0.0,
        )
        for prompt, completion in rows
    ]
    groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
    batch = collate([Group(Start(i, ""), group) for i, group in enumerate(groups)])
    reward_B = torch.stack([rewards_PO[row] for row in rows])
    last_BT = batch.mask_BT & ~torch.nn.functional.pad(batch.mask_BT, (0, 1))[:, 1:]
    return replace(
        batch,
        reward_B=reward_B,
        rewards_BT=torch.where(last_BT, reward_B[:, None], 0.0),
        behavior_logprobs_BT=batch.behavior_logprobs_BT.double(),
    )


def every_completion(rewards_PO: Tensor | None = None, group_size: int = 1) -> Batch:
    """Every completion of every prompt once."""
    rows = list(product(range(PROMPTS), range(len(COMPLETIONS))))
    return as_batch(rows, group_size, nothing_paid() if rewards_PO is None else rewards_PO)


def nothing_paid() -> Tensor:
    """rewards_PO of zeros."""
    return torch.zeros((PROMPTS, len(COMPLETIONS)), dtype=torch.float64)


def probabilities(policy: ListedPolicy) -> Tensor:
    """probability_PO of every completion, with gradient."""
    return policy.evaluate(every_completion()).logprobs_BT.sum(dim=1).exp().view(PROMPTS, -1)


def true_gradient(policy: ListedPolicy, rewards_PO: Tensor) -> Tensor:
    """d/dtheta of the expected reward, mean over prompts of sum_o pi(o) r(o)."""
    value = (probabilities(policy) * rewards_PO).sum() / PROMPTS
    return torch.autograd.grad(value, policy.table)[0]


def groups(group_size: int) -> list[tuple[tuple[int, ...], int]]:
    """Every group of completions without its order, which changes nothing, and in how many orders it can be drawn."""
    return [
        (group, math.factorial(group_size) // math.prod(map(math.factorial, Counter(group).values())))
        for group in combinations_with_replacement(range(len(COMPLETIONS)), group_size)
    ]


Ready = Callable[[Batch, Algorithm], Batch]  # what of a batch the loss needs: advantages, weights, a reference


def with_weights(batch: Batch, algorithm: Algorithm) -> Batch:
    """What `prepare_batch` computes of a batch, but in float64 to the end."""
    return replace(
        batch,
        advantages_BT=algorithm.advantage(batch).advantages_BT,
        loss_weights_BT=algorithm.aggregation(batch.mask_BT, count(batch.mask_BT)),
    )


def expected_gradient(
    algorithm: Algorithm,
    policy: ListedPolicy,
    rewards_PO: Tensor,
    group_size: int,
    *,
    kl_coefficient: float = 0.0,
    critic_PS: Tensor | None = None,
    ready: Ready = with_weights,
) -> Tensor:
    """Minus the mean of the loss's gradient over every step that can be drawn, each as likely as it is."""
    probability_PO = probabilities(policy).detach()
    total = torch.zeros((), dtype=torch.float64)
    with float64():
        for prompt in range(PROMPTS):
            every = as_batch([(prompt, o) for o in range(len(COMPLETIONS))], 1, rewards_PO)
            said = policy.evaluate(every)
            for group, orders in groups(group_size):
                step = every.select(torch.tensor(group))
                step = ready(
                    with_values(replace(step, group_B=torch.zeros_like(step.group_B)), algorithm, critic_PS), algorithm
                )
                if len(step):
                    likely = orders * float(probability_PO[prompt, list(group)].prod()) / PROMPTS
                    total = total - likely * algorithm.loss(_of_rows(said, step), step, kl_coefficient).loss
    return torch.autograd.grad(total, policy.table)[0]


def _of_rows(said: PolicyOutput, batch: Batch) -> PolicyOutput:
    """What was said of every completion, for the rows of `batch`."""
    rows = torch.tensor([completion for _, completion in batch.context])
    width = batch.mask_BT.shape[1]
    assert said.all_logprobs_BTV is not None
    return PolicyOutput(
        said.logprobs_BT[rows, :width], said.entropy_BT[rows, :width], said.all_logprobs_BTV[rows, :width]
    )


def endless_gradient(algorithm: Algorithm, policy: ListedPolicy, rewards_PO: Tensor, rollouts: int = 20_000) -> Tensor:
    """The same where a step is so large that chance is gone: so many rollouts of each prompt, every completion as
    often as its probability says, rounded.
    """
    counts_N = (probabilities(policy).detach() * rollouts).round().to(torch.int64).flatten()
    every = every_completion(rewards_PO, len(COMPLETIONS))
    with float64():
        step = every.select(torch.arange(len(counts_N)).repeat_interleave(counts_N))
        step = with_weights(with_values(step, algorithm), algorithm)
        return torch.autograd.grad(-algorithm.loss(policy.evaluate(step), step, 0.0).loss, policy.table)[0]


def with_values(batch: Batch, algorithm: Algorithm, critic_PS: Tensor | None = None) -> Batch:
    """Where the algorithm has a critic: what it says, by prompt and prefix; any numbers unless they are given."""
    if algorithm.value_loss is None:
        return batch
    if critic_PS is None:
        critic_PS = 0.3 * torch.randn((PROMPTS, PREFIXES), generator=generator(2), dtype=torch.float64)
    values_BT = torch.where(batch.mask_BT, critic_PS[prefixes(batch)], 0.0)
    return replace(batch, values_BT=values_BT, bootstrap_value_B=torch.zeros_like(batch.reward_B))


def right_critic(policy: ListedPolicy, rewards_PO: Tensor) -> Tensor:
    """values_PS: the mean reward of the completions that pass through each prefix."""
    paid_PS, passed_PS = (torch.zeros(PROMPTS, PREFIXES, dtype=torch.float64) for _ in range(2))
    for prompt, of_prompt in enumerate(probabilities(policy).detach()):
        batch = as_batch([(prompt, o) for o in range(len(COMPLETIONS))], 1, rewards_PO)
        prefix_OT = prefixes(batch)[1]
        for completion, mask_T in enumerate(batch.mask_BT):
            passed = prefix_OT[completion, mask_T]
            passed_PS[prompt, passed] += of_prompt[completion]
            paid_PS[prompt, passed] += of_prompt[completion] * rewards_PO[prompt, completion]
    return paid_PS / passed_PS


@dataclass(frozen=True)
class Bias:
    """An expected gradient against the true one."""

    length: float  # over that of the true one
    cosine: float  # 1: the same direction
    error: float  # what is left at the best learning rate: min_c |c g - g_true| / |g_true|

    @staticmethod
    def of(gradient: Tensor, truth: Tensor) -> Bias:
        length = float(gradient.norm() / truth.norm())
        if length < EXACT:
            return Bias(0.0, math.nan, 1.0)
        unit, unit_truth = gradient / gradient.norm(), truth / truth.norm()
        cosine = float((unit * unit_truth).sum())
        return Bias(length, cosine, float((unit_truth - cosine * unit).norm()))


def summed(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, aggregation=SUM)


def named() -> dict[str, Algorithm]:
    """Every algorithm of the family as recipes build it, without its KL."""
    return {
        "`grpo`": grpo(kl=NO_KL),
        "`dr_grpo`": dr_grpo(max_length=LONGEST),
        "`dapo`": dapo(),
        "`gspo`": gspo(),
        "`cispo`": cispo(),
        "`rloo`": rloo(kl=NO_KL),
        "`reinforce`": reinforce(),
        "`reinforce_pp`": reinforce_pp(kl=NO_KL),
        "`ppo`, any critic": ppo(gamma=1.0),
    }


def composed() -> dict[str, Algorithm]:
    """Sums over completions, and one change at a time away from them."""
    return {
        "`reinforce`, sum": summed(reinforce()),
        "`rloo`, sum": summed(rloo(kl=NO_KL)),
        "`ppo`, λ = 1, sum, not whitened, any critic": summed(ppo(gamma=1.0, lam=1.0, whiten=False)),
        "`reinforce` over all decisions": replace(reinforce(), aggregation=token_mean),
        "`grpo`, sum": summed(grpo(kl=NO_KL)),
        "`reinforce_pp`, sum": summed(reinforce_pp(kl=NO_KL)),
        "`ppo`, λ = 1, sum, any critic": summed(ppo(gamma=1.0, lam=1.0)),
        "`ppo`, sum, not whitened, any critic": summed(ppo(gamma=1.0, whiten=False)),
    }


def family_table() -> str:
    policy, rewards_PO = ListedPolicy(), graded()
    truth = true_gradient(policy, rewards_PO)
    lines = [
        "| on policy | length, groups of 3 | cosine | error, groups of 2 | groups of 3 | infinite step |",
        "|---|---|---|---|---|---|",
    ]
    for name, algorithm in (named() | composed()).items():
        two, three = (Bias.of(expected_gradient(algorithm, policy, rewards_PO, size), truth) for size in (2, 3))
        endless = Bias.of(endless_gradient(algorithm, policy, rewards_PO), truth)
        numbers = [
            shown(three.length),
            shown(three.cosine),
            *map(shown, (two.error, three.error)),
            shown(endless.error, 2),
        ]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def kl_table() -> str:
    policy, reference = ListedPolicy(), ListedPolicy(seed=1)
    of_decisions, of_completions = (kl_gradient(policy, reference, whole=whole) for whole in (False, True))
    lines = [
        "| estimator | length | error, prefixes as given | length | error, whole completions |",
        "|---|---|---|---|---|",
    ]
    for (name, where), gradient in kl_gradients(policy, reference).items():
        cells = []
        for truth in (of_decisions, of_completions):
            found = Bias.of(gradient, truth)
            cells += [shown(found.length), shown(found.error)]
        lines.append(f"| {name} in the {where} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kl_gradients(policy: ListedPolicy, reference: ListedPolicy) -> dict[tuple[str, str], Tensor]:
    """The expected gradient that each estimator adds to the objective, summed over completions, with coefficient 1."""

    def beside_reference(batch: Batch, algorithm: Algorithm) -> Batch:
        with torch.no_grad():
            said = reference.evaluate(batch)
        return replace(
            with_weights(batch, algorithm),
            reference_logprobs_BT=said.logprobs_BT,
            reference_all_logprobs_BTV=said.all_logprobs_BTV,
        )

    def charged(batch: Batch, algorithm: Algorithm) -> Batch:
        with torch.no_grad():
            batch = replace(batch, behavior_logprobs_BT=policy.evaluate(batch).logprobs_BT)
        options = {"kl_coefficient": 1.0, "optimizer_steps": 1, "mask_truncated": False}
        return prepare_batch(batch, policy, algorithm, reference=reference, **options)[0]

    made = {}
    for name in ("k1", "k2", "k3", "exact"):
        algorithm = summed(reinforce(kl=KLPenalty(schedules.constant(1.0), KLInLoss(getattr(kl, name)))))
        made[name, "loss"] = expected_gradient(
            algorithm, policy, nothing_paid(), 1, kl_coefficient=1.0, ready=beside_reference
        )
    for name in ("k1", "k2", "k3"):
        algorithm = summed(rloo(kl=KLPenalty(schedules.constant(1.0), KLInReward(getattr(kl, name)))))
        # In groups of two the weights are 1/2, which float32 holds exactly.
        made[name, "reward"] = expected_gradient(
            algorithm, policy, nothing_paid(), 2, kl_coefficient=1.0, ready=charged
        )
    return made


def kl_gradient(policy: ListedPolicy, reference: ListedPolicy, *, whole: bool) -> Tensor:
    """d/dtheta of -KL(pi || reference), mean over prompts: of whole completions, or of decisions only, where how
    often each prefix is reached is taken as given.
    """
    probability_PO = probabilities(policy)
    if whole:
        value = (probability_PO * (probability_PO.log() - probabilities(reference).detach().log())).sum()
    else:
        batch = every_completion()
        now_BTV, then_BTV = policy.evaluate(batch).all_logprobs_BTV, reference.evaluate(batch).all_logprobs_BTV
        assert now_BTV is not None
        assert then_BTV is not None
        kl_BT = (now_BTV.exp() * (now_BTV - then_BTV)).sum(-1) * batch.mask_BT
        value = (probability_PO.detach().flatten() * kl_BT.sum(dim=1)).sum()
    return torch.autograd.grad(-value / PROMPTS, policy.table)[0]


def shown(number: float, digits: int = 3) -> str:
    """What is nothing but rounding is shown as 0 without a point."""
    return "0" if abs(number) < EXACT else "–" if math.isnan(number) else f"{number:.{digits}f}"


if __name__ == "__main__":
    print(family_table(), kl_table(), sep="\n\n")
