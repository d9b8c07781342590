"""Shards: the same bits for any number of ranks, gradients added in one order, and the gradient of one shard up to
rounding.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from covey.algorithms import Algorithm, HighCovariance, KLInLoss, KLInReward, KLPenalty, dapo, grpo, ppo, reinforce_pp
from covey.config import RunError
from covey.core import kl, schedules
from covey.data import Batch, EndReason, Group, Rollout, Start, Team, collate
from covey.runtime.distributed import GradientTree, fill_rows, gather_groups, own_shards, shard_rows, share
from covey.runtime.optimizer import MasterAdamW
from covey.train.collect import GroupSource
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from covey.train.update import update
from helpers.tabular_policy import ACTIONS, CONTEXTS, ToyCritic, ToyPolicy
from helpers.thread_team import on_ranks
from helpers.updates import learners_of

COEFFICIENT = schedules.constant(0.1)
K3, K1 = KLPenalty(COEFFICIENT, KLInLoss(kl.k3)), KLPenalty(COEFFICIENT, KLInReward())
ALGORITHMS: dict[str, tuple[Algorithm, UpdatePlan]] = {
    "grpo": (grpo(kl=K3), UpdatePlan(epochs=2, minibatches=2)),
    "grpo_target_kl": (grpo(kl=K3), UpdatePlan(epochs=5, target_kl=1e-3)),
    "dapo": (dapo(kl=KLPenalty()), UpdatePlan()),
    "dapo_entropy": (
        replace(dapo(kl=KLPenalty()), high_covariance=HighCovariance(0.2, (0.0, 9.0), 0.2)),
        UpdatePlan(epochs=2, minibatches=2),
    ),
    "reinforce_pp": (reinforce_pp(kl=K1), UpdatePlan()),
    "ppo": (ppo(kl=K1), UpdatePlan(epochs=2, minibatches=3, critic_epochs=1)),
}


def some_groups(count: int = 7) -> list[Group]:
    """Groups of three rollouts with different lengths and rewards; the rewards of the last are equal."""
    generator = torch.Generator().manual_seed(count)

    def draw(limit: int, size: int = 1) -> list[int]:
        return torch.randint(limit, (size,), generator=generator).tolist()

    groups = []
    for index in range(count):
        rollouts = []
        for member in range(3):
            length = 1 + draw(6)[0]
            logprobs = (-torch.rand(length, generator=generator)).tolist()
            reward = 0.5 if index == count - 1 else float(draw(3)[0])
            end = EndReason.LENGTH if member == 1 else EndReason.STOP
            rollouts.append(Rollout(draw(CONTEXTS)[0], draw(ACTIONS, length), logprobs, end, reward=reward))
        groups.append(Group(Start(index, index), rollouts))
    return groups


def trained(team: Team, name: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and weights after three updates on the same rollouts."""
    algorithm, plan = ALGORITHMS[name]
    policy, critic = ToyPolicy(seed=1, rows=2), ToyCritic()
    optimizers = [MasterAdamW(one.module, lr=0.1, max_grad_norm=0.05, team=team) for one in (policy, critic)]
    critics = (critic,) if algorithm.needs_critic else ()
    learners = learners_of(
        policy, optimizers[0], algorithm, plan, kl_coefficient=0.1, critic=critic if critics else None,
        critic_optimizer=optimizers[1], critic_learning_rate=0.1,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    for step in (1, 2, 3):
        batch, prepared = prepare_batch(
            collate(some_groups()), policy, algorithm, reference=ToyPolicy(seed=2, rows=2), critics=critics,
            kl_coefficient=0.1, optimizer_steps=plan.optimizer_steps(step), team=team,
        )  # fmt: skip
        updated = update(learners, batch, seed=0, step=step, team=team)
        metrics |= {f"{step}/{key}": value for key, value in (prepared | updated).items()}
    return metrics, {
        f"{i}/{key}": t for i, one in enumerate(optimizers) for key, t in one.state_dict()["masters"].items()
    }


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("shards", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_several_ranks_have_the_bits_of_one(name: str, shards: int) -> None:
    metrics, masters = trained(Team(shards), name)
    for size in (2, 4):
        for found, weights in on_ranks(size, shards, lambda team: trained(team, name)):
            assert found == metrics
            assert all(torch.equal(weights[key], master) for key, master in masters.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce_pp", "ppo"])
def test_shards_change_the_gradient_by_rounding_alone(name: str) -> None:
    metrics, masters = trained(Team(1), name)
    found, weights = trained(Team(4), name)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for key, master in masters.items():
        torch.testing.assert_close(weights[key], master, rtol=1e-4, atol=1e-5)


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=9)


@given(SIZES, st.sampled_from([1, 2, 4, 8]))
@example([1, 1, 1, 4, 4, 2], 2)
def test_every_row_is_in_one_shard_and_groups_stay_whole(sizes: list[int], count: int) -> None:
    group_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    batch = Batch.blank(torch.ones(len(group_B), 3, dtype=torch.bool), group_B=group_B)
    shards = shard_rows(batch, count)
    assert len(shards) == count
    assert sorted(torch.cat(shards).tolist()) == list(range(len(group_B)))
    found = [set(group_B[rows].tolist()) for rows in shards]
    assert sum(map(len, found)) == len(sizes)
    loads = [len(rows) for rows in shards]
    assert max(loads) - min(loads) <= max(sizes)  # the longest group goes first, so no shard is behind by more than one
    assert all(rows.tolist() == sorted(rows.tolist()) for rows in shards)


def test_long_groups_are_balanced_by_short_ones() -> None:
    mask_BT = torch.arange(5) < torch.tensor([5, 1, 1, 1, 1, 1])[:, None]
    batch = Batch.blank(mask_BT, group_B=torch.arange(6))
    assert [rows.tolist() for rows in shard_rows(batch, 2)] == [[0], [1, 2, 3, 4, 5]]


@given(st.integers(0, 20), st.sampled_from([1, 2, 4, 8]))
@example(3, 8)
def test_starts_are_shared_evenly_and_in_order(items: int, count: int) -> None:
    parts = share(items, Team(count))
    assert [i for part in parts for i in range(items)[part]] == list(range(items))
    assert max(len(range(items)[part]) for part in parts) - min(len(range(items)[part]) for part in parts) <= 1


def test_rows_come_from_the_rank_that_computed_them() -> None:
    shards = [torch.tensor([3, 5]), torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2, 4])]

    def filled(team: Team) -> list[float]:
        value_BT = torch.full((6, 2), float("nan"))
        for shard in own_shards(team):
            value_BT[shards[shard]] = shards[shard][:, None] + torch.tensor([0.0, 0.5])
        fill_rows(value_BT, shards, team)
        return value_BT.flatten().tolist()

    expected = [row + half for row in range(6) for half in (0.0, 0.5)]
    assert on_ranks(2, 4, filled) == [expected] * 2
    assert on_ranks(4, 4, filled) == [expected] * 4


class Recorded:
    """A sampler and grader that note the starts of their calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def sample(self, starts, group_size, step, first_rollout=0):  # type: ignore[no-untyped-def]
        self.calls.append([start.index for start in starts])
        return [Group(start, [Rollout((), [start.index, 1], [0.0, -1.0], EndReason.STOP)]) for start in starts]

    def grade(self, groups):  # type: ignore[no-untyped-def]
        for group in groups:
            group.rollouts[0].reward = group.start.index / 3
        return groups


def test_each_rank_samples_its_own_starts_and_has_the_groups_of_all() -> None:
    starts = [Start(index, f"prompt {index}") for index in range(5)]

    def collected(team: Team) -> tuple[list[list[int]], list[tuple[int, float | None, list[int]]]]:
        world = Recorded()
        source = GroupSource(None, world, world, None, 0, 1, 0, measure, team)  # type: ignore[arg-type]
        groups = source.rollouts(starts, 1)
        return world.calls, [(g.start.index, g.rollouts[0].reward, g.rollouts[0].actions) for g in groups]

    everything = [(index, index / 3, [index, 1]) for index in range(5)]
    assert collected(Team(4)) == ([[0], [1], [2], [3, 4]], everything)
    assert on_ranks(2, 4, collected) == [([[0], [1]], everything), ([[2], [3, 4]], everything)]
    assert Counter(map(str, on_ranks(8, 8, collected)))[str(([[]], everything))] == 3  # more shards than starts


def measure(name: str):  # type: ignore[no-untyped-def]
    from contextlib import nullcontext

    return nullcontext()


def test_ranks_that_drew_other_starts_are_named() -> None:
    def gathered(team: Team) -> str:
        starts = [Start(0, "same"), Start(1, "same" if team.rank != 2 else "other")]
        with pytest.raises(RunError) as error:
            gather_groups([], starts, team, "step 7")
        return str(error.value)

    assert all("rank 2 has drawn other prompts than rank 0 in step 7" in one for one in on_ranks(4, 4, gathered))


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_gradients_are_added_in_the_order_of_a_binary_tree(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    shards = [torch.randn(1000, generator=generator) * 10.0 ** (i % 5) for i in range(count)]
    tree = GradientTree()
    for shard in shards:
        gradient = shard.clone()
        tree.add([gradient])
        gradient.fill_(float("nan"))  # an optimizer reuses the memory
    (total,) = tree.total()
    assert torch.equal(total, tree_sum(shards))
    if count >= 4:
        assert not torch.equal(total, sum(shards)), "another order gives other bits"
    tree.add([shards[0]])
    assert torch.equal(tree.total()[0], shards[0]), "the tree is empty again"


def test_one_rank_is_the_identity() -> None:
    team, tensor = Team(4), torch.ones(3)
    team.sum([tensor])
    assert tensor.tolist() == [1.0] * 3
    assert team.exchange(b"message") == [b"message"]
    assert (team.rank, team.size, team.shards) == (0, 1, 4)
