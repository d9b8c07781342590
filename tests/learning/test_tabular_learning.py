"""A policy of twenty-four rows of logits learns what is rewarded, and unlearns it when the reward is negated."""

from functools import lru_cache

import pytest
import torch

from covey.data import Group, Start, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.gradients import ALGORITHMS, make
from helpers.tabular_policy import ACTIONS, CONTEXTS, PlainDescent, ToyPolicy, generator, rollout
from helpers.updates import one_update

STEPS = 25
LENGTH = 2
SIZE = 8


def preferred(context: int) -> int:
    return (context + 1) % ACTIONS


def share_of_preferred(policy: ToyPolicy) -> float:
    """Mean probability of the preferred action as the first decision."""
    first = policy.table[:, ACTIONS].softmax(-1)
    return float(torch.stack([first[c, preferred(c)] for c in range(CONTEXTS)]).mean().detach())


def sample(policy: ToyPolicy, step: int, sign: float) -> list[Group]:
    """A group from each context; the reward is the share of preferred actions."""
    source = generator(step)
    context_B = torch.arange(CONTEXTS).repeat_interleave(SIZE)
    actions, logprobs, previous_B = [], [], torch.full_like(context_B, ACTIONS)
    for _ in range(LENGTH):
        logprobs_BV = policy.table.detach()[context_B, previous_B].log_softmax(-1)
        previous_B = torch.multinomial(logprobs_BV.exp(), 1, generator=source)[:, 0]
        actions.append(previous_B)
        logprobs.append(logprobs_BV.gather(1, previous_B[:, None])[:, 0])
    rollouts = []
    for context, chosen, old in zip(
        context_B.tolist(), torch.stack(actions, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True
    ):
        reward = sign * sum(action == preferred(context) for action in chosen) / LENGTH
        made = rollout(chosen, reward, context=context)
        made.behavior_logprobs = old
        rollouts.append(made)
    return [Group(Start(c, c), rollouts[c * SIZE : (c + 1) * SIZE]) for c in range(CONTEXTS)]


@lru_cache
def train(name: str, kl: str, sign: float, plan: UpdatePlan, steps: int = STEPS) -> float:
    policy, reference, algorithm = ToyPolicy(seed=None), ToyPolicy(seed=None), make(name, kl)
    for step in range(1, steps + 1):
        coefficient = algorithm.kl.coefficient(step)
        batch, _ = prepare_batch(
            collate(sample(policy, step, sign)),
            policy,
            algorithm,
            reference=reference,
            kl_coefficient=coefficient,
            optimizer_steps=plan.optimizer_steps(1),
        )
        one_update(
            policy,
            PlainDescent(policy),
            algorithm,
            batch,
            plan,
            learning_rate=RATE[name],
            kl_coefficient=coefficient,
            seed=0,
            step=step,
        )
    return share_of_preferred(policy)


# Z-scores are about three times the plain differences, and Dr.GRPO divides by 10 where the others divide by 2
RATE = {"grpo": 5.0, "dr_grpo": 75.0, "rloo": 15.0, "reinforce": 15.0}
PLANS = {"on_policy": UpdatePlan(), "two_epochs_of_two": UpdatePlan(epochs=2, minibatches=2)}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_learns_and_unlearns(name, plan):
    assert train(name, "no_kl", +1.0, PLANS[plan]) > 0.8  # starts at 0.2
    assert train(name, "no_kl", -1.0, PLANS[plan]) < 0.1


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kl", ["k2_in_loss", "k3_in_loss", "k1_in_reward"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_kl_holds_the_policy_back(name, kl):
    assert train(name, kl, +1.0, UpdatePlan()) < train(name, "no_kl", +1.0, UpdatePlan()) - 0.05


def test_without_a_reward_nothing_moves():
    assert train("grpo", "no_kl", 0.0, UpdatePlan(), steps=3) == pytest.approx(1 / ACTIONS)
