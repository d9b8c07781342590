"""A policy small enough to check by hand, and what the tests of the update need around it.

Shape legend: B rollouts, T decisions, V actions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate

ACTIONS = 5
CONTEXTS = 4


class ToyPolicy:
    """A table of logits over the next action, by context and previous action, in float64. Meets `covey.data.Policy`.

    Args:
        seed: of the table's values; None starts uniform.
        rows: of a microbatch.
        padding: what it answers where nothing was decided.
    """

    def __init__(self, seed: int | None = 0, rows: int = 1000, padding: float = 0.0) -> None:
        shape = (CONTEXTS, ACTIONS + 1, ACTIONS)
        values = torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator(seed))
        self.module = nn.Module()
        self.module.table = nn.Parameter(values.double())
        self.rows = rows
        self.padding = padding

    @property
    def table(self) -> Tensor:
        return self.module.get_parameter("table")

    def evaluate(self, batch: Batch) -> PolicyOutput:
        logprobs_BTV = self.table[state(batch)].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, batch.actions_BT[..., None])[..., 0]
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        mask_BT = batch.mask_BT
        return PolicyOutput(
            torch.where(mask_BT, logprobs_BT, self.padding),
            torch.where(mask_BT, entropy_BT, self.padding),
            torch.where(mask_BT[..., None], logprobs_BTV, self.padding),
        )

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        yield from (rows for rows in torch.arange(len(batch)).split(self.rows) if len(rows))


class ToyCritic:
    """A table of values by context and previous action, in float64; another of what comes after the last action. Meets
    `covey.data.Critic`. Arguments as of `ToyPolicy`.
    """

    def __init__(self, seed: int = 5, padding: float = 0.0) -> None:
        source = generator(seed)
        self.module = nn.Module()
        self.module.table = nn.Parameter(torch.randn((CONTEXTS, ACTIONS + 1), generator=source).double())
        self.following = torch.randn((CONTEXTS, ACTIONS), generator=source).double()
        self.padding = padding

    @property
    def table(self) -> Tensor:
        return self.module.get_parameter("table")

    def values(self, batch: Batch) -> Tensor:
        return torch.where(batch.mask_BT, self.table[state(batch)], self.padding)

    def bootstrap_values(self, batch: Batch) -> Tensor:
        columns_BT = torch.arange(batch.mask_BT.shape[1]) * batch.mask_BT
        last_B1 = batch.actions_BT.gather(1, columns_BT.amax(dim=1, keepdim=True))
        return self.following[torch.tensor(batch.context, dtype=torch.int64), last_B1[:, 0]]


def state(batch: Batch) -> tuple[Tensor, Tensor]:
    """Context and previous action of every decision, as indices into a table."""
    context_B1 = torch.tensor(batch.context, dtype=torch.int64, device=batch.actions_BT.device).reshape(-1, 1)
    first_B1 = torch.full_like(batch.actions_BT[:, :1], ACTIONS)
    previous_BT = torch.cat([first_B1, batch.actions_BT[:, :-1]], dim=1)
    return context_B1.expand_as(previous_BT), previous_BT


@dataclass
class Result:
    grad_norm: float
    applied: bool = True


class Recorder:
    """An optimizer that keeps every gradient and changes nothing."""

    def __init__(self, policy: ToyPolicy | ToyCritic) -> None:
        self.policy = policy
        self.gradients: list[Tensor] = []
        self.learning_rates: list[float] = []

    def before_last_pass(self) -> None: ...

    def step(self, learning_rate: float) -> Result:
        gradient = self.policy.table.grad
        assert gradient is not None
        self.gradients.append(gradient.clone())
        self.learning_rates.append(learning_rate)
        self.policy.table.grad = None
        return Result(float(gradient.norm()))


class PlainDescent:
    """Gradient descent on the loss, without momentum or clipping."""

    def __init__(self, policy: ToyPolicy | ToyCritic) -> None:
        self.policy = policy

    def before_last_pass(self) -> None: ...

    def step(self, learning_rate: float) -> Result:
        gradient = self.policy.table.grad
        assert gradient is not None
        with torch.no_grad():
            self.policy.table.sub_(learning_rate * gradient)
        self.policy.table.grad = None
        return Result(float(gradient.norm()))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rollout(
    actions: Sequence[int],
    reward: float | None,
    *,
    context: int = 0,
    end: EndReason = EndReason.STOP,
    logprob: float = -1.0,
) -> Rollout:
    return Rollout(
        context=context, actions=list(actions), behavior_logprobs=[logprob] * len(actions), end=end, reward=reward
    )


def random_groups(seed: int = 0, count: int = 4, size: int = 4, longest: int = 6) -> list[Group]:
    """Groups of rollouts with random lengths, actions and rewards; the last rollout of each was cut by the limit."""
    source = generator(seed)
    groups = []
    for index in range(count):
        rollouts = []
        for place in range(size):
            length = int(torch.randint(1, longest + 1, (), generator=source))
            made = rollout(
                torch.randint(0, ACTIONS, (length,), generator=source).tolist(),
                float(torch.randn((), generator=source)),
                context=index % CONTEXTS,
                end=EndReason.LENGTH if place == size - 1 else EndReason.STOP,
            )
            made.behavior_logprobs = (-3 * torch.rand(length, generator=source)).tolist()
            rollouts.append(made)
        groups.append(Group(Start(index=index, prompt=index), rollouts))
    return groups


def off_policy_groups(policy: ToyPolicy) -> list[Group]:
    """A right and a wrong decision, which the policy makes 4 times and half as often as the sampler did."""
    groups = [Group(Start(0, 0), [Rollout(0, [a], [0.0], EndReason.STOP, reward=r) for a, r in ((0, 1.0), (3, 0.0))])]
    logprobs = policy.evaluate(collate(groups)).logprobs_BT[:, 0].tolist()
    for item, logprob, ratio in zip(groups[0].rollouts, logprobs, (4.0, 0.5), strict=True):
        item.behavior_logprobs = [logprob - math.log(ratio)]
    return groups
