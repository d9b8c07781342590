"""DAPO, GSPO, CISPO and REINFORCE++: their whole gradient from the papers, and where they are one another.

The old policy is one that the current policy has left, so that ratios are clipped.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
import torch
from torch import Tensor

from covey.algorithms import (
    ALGORITHMS,
    Algorithm,
    KLInReward,
    KLPenalty,
    cispo,
    dapo,
    grpo,
    gspo,
    reinforce,
    reinforce_pp,
)
from covey.algorithms.advantages import batch_normalized_returns
from covey.core import loss_weights, schedules
from covey.core.baselines import group_zscore
from covey.core.kl import k1
from covey.data import Batch, Group, Start, collate
from covey.train.prepare import prepare_batch
from helpers.gradients import same
from helpers.tabular_policy import ToyPolicy, random_groups, rollout

NO_KL = KLPenalty()
RELATIVES = {"dapo": dapo(), "gspo": gspo(), "cispo": cispo(), "reinforce_pp": reinforce_pp(kl=NO_KL)}
EVERY = pytest.mark.parametrize("name", RELATIVES)


def ready(groups: list[Group], algorithm: Algorithm, old: ToyPolicy | None) -> Batch:
    """Annotated, with the log-probabilities of the policy that sampled, or of the current one."""
    coefficient = algorithm.kl.coefficient(1)
    options = {"kl_coefficient": coefficient, "optimizer_steps": 1, "mask_truncated": False}
    batch = prepare_batch(collate(groups), ToyPolicy(seed=1), algorithm, reference=ToyPolicy(seed=2), **options)[0]
    return batch if old is None else replace(batch, proximal_logprobs_BT=old.evaluate(batch).logprobs_BT.detach())


def gradient_of(groups: list[Group], algorithm: Algorithm, old: ToyPolicy | None = None) -> Tensor:
    batch, policy = ready(groups, algorithm, old), ToyPolicy(seed=1)
    algorithm.loss(policy.evaluate(batch), batch, 0.0).loss.backward()
    assert policy.table.grad is not None
    return policy.table.grad


def formula(groups: list[Group], name: str, old: ToyPolicy) -> Tensor:
    """Minus the gradient of the papers' objectives, decision by decision in plain Python."""
    policy = ToyPolicy(seed=1)
    rollouts = [item for group in groups for item in group.rollouts]
    everyone = [item.reward for item in rollouts for _ in item.actions]  # the return of every decision of the step
    tokens = sum(len(item.actions) for item in rollouts)
    objective = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = [item.reward for item in group.rollouts]
        for item in group.rollouts:
            batch = collate([Group(group.start, [item])])
            new, before = policy.evaluate(batch).logprobs_BT[0], old.evaluate(batch).logprobs_BT[0].detach()
            compared = everyone if name == "reinforce_pp" else rewards
            advantage = (item.reward - fmean(compared)) / (pstdev(compared) + 1e-6)
            terms: dict[str, Callable[[], Tensor]] = {
                "dapo": lambda n=new, b=before, a=advantage: clip_term((n - b).exp(), a, 0.8, 1.28).sum() / tokens,
                "gspo": lambda n=new, b=before, a=advantage: (
                    clip_term((n - b).mean().exp(), a, 1 - 3e-4, 1 + 4e-4) / len(rollouts)
                ),
                "cispo": lambda n=new, b=before, a=advantage: (
                    ((n - b).exp().detach().clamp(0, 5) * a * n).sum() / tokens
                ),
                "reinforce_pp": lambda n=new, b=before, a=advantage: (
                    clip_term((n - b).exp(), a, 0.8, 1.2).sum() / tokens
                ),
            }
            objective = objective + terms[name]()
    return torch.autograd.grad(-objective, policy.table)[0]


def clip_term(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


@EVERY
@pytest.mark.parametrize("apart", [1e-4, 0.3, 2.0])
def test_gradient_of_the_relatives_is_the_papers(name, apart):
    # the old policy's logits lie so far from the current one's: inside GSPO's bounds, inside DAPO's, beyond CISPO's cap
    old = ToyPolicy(seed=1)
    with torch.no_grad():
        old.table.add_(apart * ToyPolicy(seed=3).table)
    groups = random_groups()
    same(gradient_of(groups, RELATIVES[name], old), formula(groups, name, old))


@pytest.mark.parametrize(
    ("name", "inside", "beyond"),
    [
        ("dapo", [0.81, 1.27], [0.79, 1.29]),
        ("gspo", [1 - 2.9e-4, 1 + 3.9e-4], [1 - 3.1e-4, 1 + 4.1e-4]),
        ("cispo", [1e-3, 4.9], [-1.0, 5.1]),  # no ratio is below 0
        ("reinforce_pp", [0.81, 1.19], [0.79, 1.21]),
    ],
)
def test_the_bounds_are_those_of_the_papers(name, inside, beyond):
    # a bad decision at the lower bound and a good one at the upper
    def bounded(ratios: list[float]) -> list[bool]:
        log_ratio_BT = torch.tensor([ratios], dtype=torch.float64).clamp(min=1e-9).log()
        made = RELATIVES[name].surrogate(log_ratio_BT, log_ratio_BT, torch.tensor([[-1.0, 1.0]]))
        return (made.clipped_low_BT | made.clipped_high_BT)[0].tolist()

    assert bounded(inside) == [False, False]
    assert bounded(beyond) == [beyond[0] > 0, True]


def test_gspo_is_grpo_on_policy():
    groups = random_groups()
    same(gradient_of(groups, gspo()), gradient_of(groups, grpo(kl=NO_KL)))


def test_gspo_clips_whole_rollouts():
    old, groups = ToyPolicy(seed=3), random_groups()
    batch = ready(groups, gspo(), old)
    terms = gspo().loss(ToyPolicy(seed=1).evaluate(batch), batch, 0.0)
    clipped_BT = terms.clipped_low_BT | terms.clipped_high_BT
    assert clipped_BT.any()
    assert (clipped_BT | ~batch.mask_BT).all(dim=1).tolist() == clipped_BT.any(dim=1).tolist()


def test_cispo_on_policy_is_reinforce_with_dapos_advantage_and_averaging():
    groups = random_groups()
    plain = replace(dapo(), surrogate=reinforce().surrogate)
    same(gradient_of(groups, cispo()), gradient_of(groups, plain))
    same(gradient_of(groups, cispo()), gradient_of(groups, dapo()))


def test_dapo_is_grpo_with_more_room_above_and_another_mean():
    old, groups = ToyPolicy(seed=3), random_groups()
    made = replace(grpo(kl=NO_KL, clip_high=0.28), aggregation=loss_weights.token_mean)
    same(gradient_of(groups, dapo(), old), gradient_of(groups, made, old))


def test_returns_over_batch_by_hand():
    # rewards 3 at the end of 1 decision and 0 after 2: returns 3, 0, 0 with mean 1 and variance 2, over both groups
    groups = [Group(Start(0, ""), [rollout([1], 3.0)]), Group(Start(1, ""), [rollout([1, 2], 0.0)])]
    found_BT = batch_normalized_returns(group_zscore)(collate(groups)).advantages_BT
    assert found_BT.tolist() == [
        pytest.approx([2 / math.sqrt(2), 0.0], abs=1e-5),
        pytest.approx([-1 / math.sqrt(2)] * 2, abs=1e-5),
    ]


def test_returns_over_batch_are_discounted_and_start_where_the_decision_is():
    # 0 then 4, at gamma 1/2: returns 2 and 4; the other row 0: mean 2
    row = rollout([1, 2], 4.0)
    row.step_rewards = [0.0, 4.0]
    batch = collate([Group(Start(0, ""), [row, rollout([3], 0.0)])])
    found_BT = batch_normalized_returns(group_zscore, gamma=0.5)(batch).advantages_BT
    std = math.sqrt(8 / 3)
    assert found_BT.flatten().tolist() == pytest.approx([0.0, 2 / std, -2 / std, 0.0], abs=1e-5)


def test_advantages_of_reinforce_pp_have_mean_0_and_std_1_over_the_step():
    algorithm = reinforce_pp(kl=KLPenalty(schedules.constant(0.1), KLInReward(k1)))
    batch = ready(random_groups(), algorithm, None)
    advantages = batch.advantages_BT[batch.mask_BT].double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    # the KL makes the decisions of one rollout differ
    assert len(batch.advantages_BT[0][batch.mask_BT[0]].unique()) > 1


def test_failed_rollouts_are_not_in_the_mean_of_reinforce_pp():
    groups = random_groups()
    with_failure = [*groups, Group(Start(9, ""), [rollout([1, 2], None)])]
    same(gradient_of(with_failure, RELATIVES["reinforce_pp"]), gradient_of(groups, RELATIVES["reinforce_pp"]))


def test_every_algorithm_names_itself_and_its_source():
    for name, build in ALGORITHMS.items():
        made = build(max_length=8) if name == "dr_grpo" else build()
        assert made.name == name
        assert build.__doc__ is not None
        assert "arXiv" in build.__doc__ or "Williams" in build.__doc__
