"""The critic and PPO: GAE in a batch, PPO's gradient from its formulas, what moves the critic, when an update ends."""

import math
from dataclasses import replace

import pytest
import torch

from covey.algorithms import KLInReward, KLPenalty, grpo, ppo
from covey.algorithms.advantages import gae_advantage
from covey.config import ConfigError
from covey.core import kl, schedules
from covey.data import Batch, EndReason, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.credits import (
    episode,
    gradient_of,
    gradients,
    group,
    moved,
    moved_critic,
    ppo_gradient,
    random_episodes,
    ready,
)
from helpers.gradients import same
from helpers.tabular_policy import PlainDescent, Result, ToyCritic, ToyPolicy
from helpers.updates import one_update

NO_KL = KLPenalty()


# rewards 1 2 with values 2 4, gamma = lambda = 1/2: delta 1 + 4/2 - 2 = 1, 2 - 4 = -2; A 1 - 2/4 = 0.5, -2
# reward 3 with value 1, cut before a state worth 8: 3 + 8/2 - 1 = 6. Mean 1.5, variance (1 + 12.25 + 20.25) / 3
def with_values() -> Batch:
    batch = collate([group(episode([1, 2]), episode([3], end=EndReason.CUT))])
    return replace(batch, values_BT=torch.tensor([[2.0, 4.0], [1.0, 99.0]]), bootstrap_value_B=torch.tensor([0.0, 8.0]))


def test_critic_by_hand():
    found = gae_advantage(gamma=0.5, lam=0.5, whiten=False)(with_values())
    assert found.advantages_BT.tolist() == [[0.5, -2], [6, 0]]
    assert found.returns_BT is not None
    assert found.returns_BT.tolist() == [[2.5, 2], [7, 0]]


def test_whitening_leaves_the_returns_as_they_are():
    found = gae_advantage(gamma=0.5, lam=0.5)(with_values())
    std = math.sqrt(33.5 / 3)
    expected = torch.tensor([[-1 / std, -3.5 / std], [4.5 / std, 0]])
    torch.testing.assert_close(found.advantages_BT, expected)
    assert found.returns_BT is not None
    assert found.returns_BT.tolist() == [[2.5, 2], [7, 0]]


def test_failed_rows_are_not_whitened_with_the_others():
    batch = with_values()
    wider = replace(
        collate([group(episode([1, 2]), episode([3], end=EndReason.CUT), episode([1e6, -1e6]))]),
        values_BT=torch.tensor([[2.0, 4.0], [1.0, 99.0], [5.0, 5.0]]),
        bootstrap_value_B=torch.tensor([0.0, 8.0, 0.0]),
        valid_B=torch.tensor([True, True, False]),
    )
    estimate = gae_advantage(gamma=0.5, lam=0.5)
    torch.testing.assert_close(estimate(wider).advantages_BT[:2], estimate(batch).advantages_BT)
    assert estimate(wider).advantages_BT[2].tolist() == [0, 0]


@pytest.mark.parametrize("end", EndReason)
def test_only_what_stopped_before_the_episodes_end_is_worth_what_follows(end):
    batch, _ = ready([group(episode([1, 2], end=end))], ppo())
    assert batch.bootstrap_value_B is not None
    expected = 0.0 if end in (EndReason.STOP, EndReason.TERMINATED) else ToyCritic().following[0, 1].item()
    assert batch.bootstrap_value_B.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
@pytest.mark.parametrize(
    ("whiten", "value_clip", "entropy_coefficient"), [(True, None, 0.0), (True, 0.2, 0.05), (False, None, 0.05)]
)
def test_gradient_of_ppo_is_the_papers(whiten, value_clip, entropy_coefficient, kl_coefficient):
    options = {
        "gamma": 0.9, "lam": 0.8, "whiten": whiten, "value_coefficient": 0.7, "value_clip": value_clip,
        "entropy_coefficient": entropy_coefficient,
    }  # fmt: skip
    groups = random_episodes()
    groups[1].rollouts[0].reward = None
    penalty = KLPenalty(schedules.constant(kl_coefficient), KLInReward(kl.k1))
    made = gradient_of(groups, ppo(**options, kl=penalty))
    same(made, ppo_gradient(groups, **options, kl_coefficient=kl_coefficient))


def test_the_critic_learns_from_rows_without_an_advantage():
    # the critic says exactly what will be: nothing to do for the policy, and yet the rows stay
    known = ToyCritic().table[:2, 5].tolist()
    batch, metrics = ready([group(*(episode([known[i]], context=i) for i in (0, 1)))], ppo(whiten=False))
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.tolist() == [[0], [0]]
    assert len(batch) == 2
    assert metrics["update/rows"] == 1
    assert metrics["value/explained_variance"] == 1


@pytest.mark.parametrize("rows", [1, 1000])
def test_value_loss_metric_is_the_loss_however_cut(rows):
    groups, algorithm = random_episodes(), ppo(value_coefficient=0.5)
    batch, _ = ready(groups, algorithm)
    assert batch.returns_BT is not None
    error = (moved_critic().values(batch) - batch.returns_BT)[batch.mask_BT] ** 2
    expected = 0.5 * float(error.detach().mean())
    for plan in (UpdatePlan(), UpdatePlan(2, 3, single_decisions=True, critic_epochs=1)):
        assert gradients(groups, algorithm, plan=plan, rows=rows)[2]["loss/value"] == pytest.approx(expected, rel=1e-5)


def test_further_epochs_of_the_critic_move_the_critic_only():
    groups, algorithm = random_episodes(), ppo()
    actor, of_critic, metrics = gradients(groups, algorithm, plan=UpdatePlan(minibatches=2, critic_epochs=3))
    assert (len(actor), len(of_critic)) == (2, 8)
    assert metrics["update/optimizer_steps"] == 2
    batch, _ = ready(groups, algorithm)
    policy, it = moved(), moved_critic()
    optimizer, critic_optimizer = PlainDescent(policy), PlainDescent(it)
    errors = []
    for critic_epochs in (0, 0, 5):
        plan = UpdatePlan(critic_epochs=critic_epochs)
        metrics = one_update(
            policy, optimizer, algorithm, batch, plan, learning_rate=0.0, critic=it, critic_optimizer=critic_optimizer,
            critic_learning_rate=0.5,
        )  # fmt: skip
        errors.append(metrics["loss/value"])
    torch.testing.assert_close(policy.table, moved().table, rtol=0, atol=0)
    with torch.no_grad():
        errors.append(float(algorithm.critic_loss(it.values(batch), batch)))
    assert errors[0] > errors[1] > errors[3]


def test_the_policys_loss_has_no_gradient_in_the_critic_nor_the_other_way_round():
    groups = random_episodes()
    alone, _, _ = gradients(groups, ppo(value_coefficient=0.5))
    louder, critics, _ = gradients(groups, ppo(value_coefficient=50.0))
    torch.testing.assert_close(alone[0], louder[0], rtol=0, atol=0)
    quiet = gradients(groups, ppo(value_coefficient=0.5))[1][0]
    same(critics[0], 100 * quiet)


def test_algorithm_and_critic_must_fit():
    arguments = {"kl_coefficient": 0.0, "optimizer_steps": 1, "mask_truncated": False}
    batch, policy = collate(random_episodes()), ToyPolicy()
    with pytest.raises(ConfigError, match="ppo needs a critic"):
        prepare_batch(batch, policy, ppo(), **arguments)
    with pytest.raises(ConfigError, match="grpo has no value loss"):
        prepare_batch(batch, policy, grpo(kl=NO_KL), critics=(ToyCritic(),), **arguments)


# --- when the policy has gone far enough ---


@pytest.mark.parametrize(("share", "epochs"), [(0.99, 1), (1.01, 4)])
def test_epochs_end_where_the_kl_passes_its_target(share, epochs):
    groups, algorithm = random_episodes(), ppo()
    kl_of_moved = gradients(groups, algorithm)[2]["kl/behavior"]
    plan = UpdatePlan(epochs=4, minibatches=2, target_kl=share * kl_of_moved, critic_epochs=2)
    actor, of_critic, metrics = gradients(groups, algorithm, plan=plan)
    assert metrics["update/epochs"] == epochs
    assert len(actor) == 2 * epochs
    assert len(of_critic) == 2 * (4 + 2), "the critic's passes do not depend on the policy's KL"
    assert metrics["loss"] == pytest.approx(gradients(groups, algorithm)[2]["loss"], rel=1e-5)


def test_the_kl_is_that_of_the_epoch_and_not_of_all_so_far():
    groups, algorithm = random_episodes(), grpo(kl=NO_KL)

    class Jump:
        """Moves at the second optimizer step, far."""

        def __init__(self, policy: ToyPolicy) -> None:
            self.policy, self.steps = policy, 0

        def before_last_pass(self) -> None: ...

        def step(self, learning_rate: float) -> Result:
            self.policy.table.grad = None
            self.steps += 1
            if self.steps == 2:
                self.policy.table.data.copy_(moved().table)
            return Result(1.0)

    kl_of_moved = gradients(groups, algorithm)[2]["kl/behavior"]
    policy = ToyPolicy(seed=1)
    batch, _ = ready(groups, algorithm)
    plan = UpdatePlan(epochs=6, target_kl=0.9 * kl_of_moved)
    metrics = one_update(policy, Jump(policy), algorithm, batch, plan, learning_rate=0.1, seed=0, step=1)
    # epochs 1 and 2 see the old policy, epoch 3 the moved one
    assert metrics["update/epochs"] == 3
    assert metrics["kl/behavior"] == pytest.approx(kl_of_moved / 3, rel=1e-5)
