"""What keeps the entropy up: Clip-Cov and KL-Cov in a step, and the controllers over a run.

Shapes: B rollouts, T decisions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import HighCovariance, KLInLoss, KLPenalty, cispo, dapo, grpo, gspo
from covey.config import LossBase
from covey.core import kl, schedules
from covey.core.covariance import covariance
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.experiment.algorithm import build_algorithm, build_entropy_control
from covey.runtime.optimizer import MasterAdamW
from covey.train.collect import fixed_size
from covey.train.learners import NO_ENTROPY_CONTROL, Coefficient, PolicyLearner, UpdatePlan
from covey.train.prepare import Prepared, prepare_rows
from covey.train.state import Components, LoopConfig, Progress, load_checkpoint
from helpers.gradients import gradient_of, make, same, step_gradients
from helpers.loop_world import PolicyWorld, go
from helpers.tabular_policy import ACTIONS, ToyPolicy, random_groups, rollout
from helpers.updates import one_update

EVERYTHING = (-1e9, 1e9)


def never(mask_BT: Tensor) -> Tensor:
    raise AssertionError("a number was drawn")


def prepared(groups: Sequence[Group], covariance: HighCovariance, **options: Any) -> Prepared:
    algorithm = replace(make("grpo"), high_covariance=covariance)
    return prepare_rows(collate(list(groups)), ToyPolicy(seed=1), algorithm, **options)


def group(index: int, *rollouts: Rollout) -> Group:
    return Group(Start(index, index), list(rollouts))


def two_groups() -> list[Group]:
    """In the first, the probable action 0 is good and the improbable one bad; in the second nothing differs."""
    first = group(0, rollout([0, 1], 1.0, logprob=-0.5), rollout([2, 3], 0.0, logprob=-2.5))
    return [first, group(1, rollout([0], 1.0, logprob=-9.0), rollout([1], 1.0, logprob=-9.0))]


# ---- Clip-Cov ----


def test_clip_cov_takes_the_advantage_of_the_drawn_decisions_and_nothing_else():
    plain = prepared(random_groups(), HighCovariance())
    found = prepared(random_groups(), HighCovariance(clip_fraction=0.3, clip_bounds=(0.1, 9.0)))
    before_BT, after_BT = plain.rows.advantages_BT, found.rows.advantages_BT
    covariance_BT = covariance(plain.rows.behavior_logprobs_BT, before_BT, plain.rows.mask_BT)
    changed_BT = before_BT != after_BT
    within_BT = plain.rows.mask_BT & (covariance_BT >= 0.1) & (covariance_BT <= 9.0)
    count = int(plain.rows.mask_BT.sum())
    assert within_BT.sum() > int(0.3 * count) == changed_BT.sum(), "the test needs more candidates than are drawn"
    assert (within_BT | ~changed_BT).all()
    assert (after_BT[changed_BT] == 0).all()
    assert torch.equal(found.rows.loss_weights_BT, plain.rows.loss_weights_BT)
    assert torch.equal(found.rows.mask_BT, plain.rows.mask_BT)
    assert torch.equal(found.advantages_BT, plain.advantages_BT), "what is recorded"
    assert found.metrics["covariance/clipped_fraction"] == pytest.approx(int(0.3 * count) / count)
    assert found.metrics["covariance/mean"] == pytest.approx(float(covariance_BT[plain.rows.mask_BT].mean()))
    assert found.metrics["covariance/max"] == pytest.approx(float(covariance_BT.max()))


def test_the_draw_is_a_function_of_seed_and_step():
    restrained = HighCovariance(clip_fraction=0.2, clip_bounds=EVERYTHING)
    draws = [
        prepared(random_groups(), restrained, seed=seed, step=step).rows.advantages_BT
        for seed, step in ((3, 1), (3, 1), (3, 2), (4, 1))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])
    left_BT, mask_BT = draws[0] != 0, collate(random_groups()).mask_BT
    assert (left_BT.any(dim=1) & (mask_BT & ~left_BT).any(dim=1)).sum() > 5, "decisions are drawn, not rows"


def test_every_decision_is_drawn_equally_often():
    restrained = HighCovariance(clip_fraction=0.25, clip_bounds=EVERYTHING)
    batch = collate(random_groups())
    among_BT = batch.mask_BT
    batch.advantages_BT = torch.ones(batch.mask_BT.shape)
    drawn_BT = torch.zeros(batch.mask_BT.shape)
    source = torch.Generator().manual_seed(0)
    for _ in range(400):
        chosen, _ = restrained.choose(batch, among_BT, lambda mask_BT: torch.rand(mask_BT.shape, generator=source))
        drawn_BT += chosen.advantages_BT == 0
    share = int(0.25 * int(among_BT.sum())) / int(among_BT.sum())
    error = math.sqrt(share * (1 - share) / 400)
    assert (drawn_BT[among_BT] / 400 - share).abs().max() < 4 * error
    assert not drawn_BT[~among_BT].any()


def test_only_the_policy_gradient_is_taken():
    """With every advantage taken, the gradients of KL and entropy remain, and their denominators."""
    algorithm = replace(make("grpo", "k3_in_loss"), entropy_coefficient=0.1)
    restrained = replace(algorithm, high_covariance=HighCovariance(clip_fraction=1.0, clip_bounds=EVERYTHING))
    without = replace(
        algorithm, surrogate=lambda logprobs, ratio, advantages: grpo().surrogate(ratio, ratio, 0 * ratio)
    )
    same(gradient_of(random_groups(), restrained), gradient_of(random_groups(), without))
    assert gradient_of(random_groups(), replace(restrained, kl=KLPenalty(), entropy_coefficient=0.0)).abs().max() == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_the_division_of_a_step_does_not_change_what_is_clipped(name):
    restrained = HighCovariance(clip_fraction=0.2, clip_bounds=(0.0, 9.0))
    algorithm = replace(make(name), high_covariance=restrained)
    expected = gradient_of(random_groups(), algorithm)
    assert not torch.allclose(expected, gradient_of(random_groups(), make(name)))
    same(gradient_of(random_groups(), algorithm, rows=3), expected)
    gradients, _ = step_gradients(collate(random_groups()), algorithm, plan=UpdatePlan(minibatches=2), rows=3)
    same(sum(gradients) / 2, expected)


# ---- KL-Cov ----


def unmarked(batch: Batch) -> Batch:
    return replace(batch, penalised_BT=None)


def test_kl_cov_marks_the_highest_covariances():
    found = prepared(random_groups(), HighCovariance(kl_fraction=0.2))
    rows = found.rows
    covariance_BT = covariance(rows.behavior_logprobs_BT, rows.advantages_BT, rows.mask_BT)
    count = int(0.2 * int(rows.mask_BT.sum()))
    threshold = covariance_BT[rows.mask_BT].sort(descending=True).values[count - 1]
    assert rows.penalised_BT.tolist() == (rows.mask_BT & (covariance_BT >= threshold)).tolist()
    assert found.metrics["covariance/penalised_fraction"] == pytest.approx(count / int(rows.mask_BT.sum()))


@pytest.mark.parametrize("algorithm", [dapo(), gspo(), cispo(kl=KLPenalty(schedules.constant(0.3), KLInLoss(kl.k2)))])
def test_the_penalty_is_its_coefficient_times_the_distance_of_single_decisions(algorithm):
    """In value and in gradient, also where the ratio is that of the sequence or the surrogate has none."""
    rows = prepared(random_groups(), HighCovariance(kl_fraction=0.3)).rows
    policy, old = ToyPolicy(seed=2), ToyPolicy(seed=3, padding=math.nan)
    with torch.no_grad():
        rows.proximal_logprobs_BT = old.evaluate(rows).logprobs_BT.float()
    rows.reference_logprobs_BT = rows.behavior_logprobs_BT
    restrained = replace(algorithm, high_covariance=HighCovariance(kl_fraction=0.3, kl_coefficient=0.7))
    output = policy.evaluate(rows)
    coefficient = algorithm.kl.coefficient(1)
    added = restrained.loss(output, rows, coefficient).loss - algorithm.loss(output, unmarked(rows), coefficient).loss
    gap_BT = output.logprobs_BT - rows.proximal_logprobs_BT
    expected = 0.7 * (rows.loss_weights_BT * gap_BT.abs())[rows.penalised_BT].sum()
    same(added.detach(), expected.detach())
    gradients = [torch.autograd.grad(value, policy.table, retain_graph=True)[0] for value in (added, expected)]
    same(*gradients)
    assert gradients[0].abs().max() > 0


def test_a_minibatch_of_single_decisions_penalises_its_own():
    rows = prepared(random_groups(), HighCovariance(kl_fraction=1.0)).rows
    part = rows.restrict(rows.mask_BT.flatten().nonzero()[:3, 0])
    algorithm = replace(dapo(), high_covariance=HighCovariance(kl_fraction=1.0))
    part.proximal_logprobs_BT = torch.zeros(part.mask_BT.shape)
    output = ToyPolicy(seed=2).evaluate(rows)
    added = algorithm.loss(output, part, 0.0).loss - dapo().loss(output, unmarked(part), 0.0).loss
    same(added.detach(), (part.loss_weights_BT * output.logprobs_BT.abs())[part.mask_BT].sum().detach())


def test_a_decision_with_an_average_reward_is_penalised_too():
    """A row without an advantage of its own belongs to the update, as with a KL in the loss."""
    rows = [rollout([0], reward) for reward in (0.0, 1.0, 2.0)]
    assert prepared([group(0, *rows)], HighCovariance()).kept_B.tolist() == [True, False, True]
    assert prepared([group(0, *rows)], HighCovariance(kl_fraction=0.5)).kept_B.tolist() == [True, True, True]


def test_kl_cov_holds_the_policy_back():
    """Over several epochs the penalised decisions move less, and the entropy is higher."""
    found = {}
    for fraction in (0.0, 0.5):
        algorithm = replace(grpo(kl=KLPenalty()), high_covariance=HighCovariance(kl_fraction=fraction))
        policy = ToyPolicy(seed=None)
        groups = [
            group(i, *(rollout([a], float(a), context=i, logprob=-math.log(ACTIONS)) for a in range(ACTIONS)))
            for i in range(2)
        ]
        rows = prepare_rows(collate(groups), policy, algorithm, optimizer_steps=4).batch()
        one_update(policy, MasterAdamW(policy.module, lr=0.05), algorithm, rows, UpdatePlan(epochs=4))
        found[fraction] = float(policy.evaluate(rows).entropy_BT.detach().mean())
    assert found[0.0] < found[0.5] < math.log(ACTIONS)


# ---- both ----


@pytest.mark.parametrize("restrained", [HighCovariance(0.5, EVERYTHING), HighCovariance(kl_fraction=0.5)])
def test_groups_without_a_signal_are_not_compared(restrained):
    """They have no gradient, so a choice among them would be none; and their log-probabilities move no mean."""
    found = prepared(two_groups(), restrained)
    assert found.metrics["covariance/mean"] == pytest.approx(1.0, rel=1e-5)  # (-0.5 - -1.5) 1 and (-2.5 - -1.5) (-1)
    chosen_BT = (found.advantages_BT != found.rows.advantages_BT) | (
        torch.zeros_like(found.decided_BT) if found.rows.penalised_BT is None else found.rows.penalised_BT
    )
    assert chosen_BT.sum(dim=1).tolist()[2:] == [0, 0]
    assert chosen_BT.sum() == 2  # half of four


def test_without_a_signal_nothing_is_compared():
    found = prepared(two_groups()[1:], HighCovariance(0.5, EVERYTHING, 0.5))
    assert not [name for name in found.metrics if name.startswith("covariance")]


def test_truncated_rollouts_that_do_not_count_are_not_chosen():
    cut = rollout([1, 2], 1.0, end=EndReason.LENGTH)
    found = prepared([group(0, rollout([0], 0.0), cut)], HighCovariance(1.0, EVERYTHING, 1.0), mask_truncated=True)
    assert found.rows.penalised_BT.tolist() == [[True, False], [False, False]]
    assert found.metrics["covariance/clipped_fraction"] == 1


def test_off_draws_nothing_and_leaves_the_batch():
    batch = collate(random_groups())
    same_batch, metrics = HighCovariance().choose(batch, batch.mask_BT, never)
    assert same_batch is batch
    assert metrics == {}
    batch.advantages_BT = torch.ones(batch.mask_BT.shape)
    HighCovariance(kl_fraction=0.5).choose(batch, batch.mask_BT, never)
    with pytest.raises(AssertionError, match="was drawn"):
        HighCovariance(clip_fraction=0.5).choose(batch, batch.mask_BT, never)
    loss_BT = torch.ones(batch.mask_BT.shape)
    assert HighCovariance().add(loss_BT, loss_BT, loss_BT, batch) is loss_BT


# ---- the controllers ----


def build(
    loss: LossBase, name: str = "grpo", *, steps: int = 12, epochs: int = 3, kind: type[PolicyWorld] = PolicyWorld
):
    """A run, and what it recorded. The learning rate is large, so that the ratios leave the clip range."""
    policy = ToyPolicy(seed=None)
    world = kind(policy)
    algorithm = build_algorithm(name, loss)
    control = build_entropy_control(name, loss)
    coefficient = Coefficient(algorithm.kl.coefficient)
    learner = PolicyLearner(
        policy, MasterAdamW(policy.module, lr=0.1), algorithm, UpdatePlan(epochs=epochs), schedules.constant(0.1),
        coefficient, entropy_control=control,
    )  # fmt: skip
    parts = Components(
        task=world, sampler=world, grader=world, policy=policy, algorithm=algorithm, learners=[learner],
        kl_coefficient=coefficient, observers=[world], checkpoints=world,
    )  # fmt: skip
    return world, parts, LoopConfig(
        steps=steps, seed=7, starts_per_step=2, group_size=fixed_size(ACTIONS), checkpoint_every=5
    )  # fmt: skip


BONUS = LossBase(kl_coefficient=0.0, entropy_coefficient=0.1, entropy_target=1.2)
CLIP = LossBase(kl_coefficient=0.0, entropy_target=1.2, entropy_controller="clip", clip_high=0.3)


def follow_by_hand(measured: list[float], target: float, low: float, high: float) -> list[float]:
    found = [1.0]
    for entropy in measured[:-1]:
        error = max(-1.0, min(1.0, (target - entropy) / target))
        found.append(max(low, min(high, found[-1] * math.exp(0.2 * error))))
    return found


def test_the_bonus_follows_the_measured_entropy():
    world, parts, settings = build(BONUS)
    go(parts, settings)
    factors = follow_by_hand(world.series("entropy"), 1.2, 0.01, 100.0)
    assert world.series("entropy_coefficient") == pytest.approx([0.1 * factor for factor in factors], rel=1e-12)
    assert max(world.series("entropy")) > 1.2 > min(world.series("entropy")), "the test needs both directions"


def test_the_clip_range_follows_the_measured_entropy():
    world, parts, settings = build(CLIP)
    go(parts, settings)
    factors = follow_by_hand(world.series("entropy"), 1.2, 0.25, 4.0)
    assert world.series("clip/range_high") == pytest.approx([0.3 * factor for factor in factors], rel=1e-12)
    assert world.series("clip/range_low") == pytest.approx([min(1.0, 0.2 / factor) for factor in factors], rel=1e-12)
    assert max(world.series("entropy")) > 1.2 > min(world.series("entropy")), "the test needs both directions"


@pytest.mark.parametrize("name", ["dapo", "gspo", "ppo"])
def test_the_clip_range_begins_at_that_of_the_algorithm(name):
    control = build_entropy_control(name, LossBase(entropy_target=1.0, entropy_controller="clip"))
    first = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "ppo": (0.2, 0.2)}[name]
    assert tuple(control.coefficients(1).values()) == pytest.approx(first)


@pytest.mark.parametrize("bounds", [(0.5, 2.0), ()])
def test_the_bounds_are_factors(bounds):
    loss = LossBase(entropy_coefficient=0.1, entropy_target=1.0, entropy_gain=1.0, entropy_bounds=bounds)
    control = build_entropy_control("grpo", loss)
    for entropy, bound in ((9.0, 0.05 if bounds else 0.001), (0.0, 0.2 if bounds else 10.0)):
        for step in range(1, 20):
            control.after(step, {"entropy": entropy}, 8)
        assert control.coefficients(20) == {"entropy_coefficient": pytest.approx(bound)}


def test_the_controlled_loss_is_the_one_with_these_numbers():
    """Each step is that of a run with the numbers that the controller had."""
    for loss in (BONUS, CLIP):
        world, parts, settings = build(loss)
        go(parts, settings)
        entropies = iter(world.recorded)
        again, fixed, _ = build(replace(loss, entropy_target=None, entropy_controller="bonus"), steps=1)
        for number, found in enumerate(entropies):
            if loss is BONUS:
                algorithm = replace(fixed.algorithm, entropy_coefficient=found["entropy_coefficient"])
            else:
                low, high = found["clip/range_low"], found["clip/range_high"]
                algorithm = replace(
                    fixed.algorithm, surrogate=partial(fixed.algorithm.surrogate, clip_low=low, clip_high=high)
                )
            learners = [replace(fixed.learners[0], algorithm=algorithm)]
            go(replace(fixed, algorithm=algorithm, learners=learners), replace(settings, steps=number + 1),
               Progress(step=number))  # fmt: skip
        assert torch.equal(parts.policy.table, fixed.policy.table)
        assert len({step["loss"] for step in again.recorded}) > 5


def test_a_step_without_a_measured_entropy_changes_nothing():
    world, parts, settings = build(BONUS)

    def nothing(groups: list[Group]) -> list[Group]:
        for item in (r for g in groups for r in g.rollouts):
            item.reward = 1.0
        return groups

    world.grade = nothing  # type: ignore[method-assign]
    go(parts, settings)
    assert set(world.series("entropy_coefficient")) == {0.1}


class OnPolicy(PolicyWorld):
    """Samples actions from the policy; the reward is the action's number with noise, so that it always differs."""

    def sample(self, starts, group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        groups = []
        for start in starts:
            source = torch.Generator().manual_seed(1000 * step + start.index)
            probabilities = self.policy.table[start.index, -1].detach().softmax(-1)
            actions = torch.multinomial(probabilities, group_size, replacement=True, generator=source).tolist()
            noise = torch.randn(group_size, generator=source).tolist()
            rollouts = [
                replace(rollout([a], None, context=start.index, logprob=float(probabilities[a].log())), score=a + 2 * n)
                for a, n in zip(actions, noise, strict=True)
            ]
            groups.append(Group(start, rollouts))
        return groups

    def grade(self, groups: list[Group]) -> list[Group]:
        for item in (r for g in groups for r in g.rollouts):
            item.reward = item.score
        return groups


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [0.3, 3.0])
def test_the_entropy_comes_to_its_target_from_below_and_from_above(start):
    """With the coefficient 0.3 it would fall below the target, with 3 it would stay near ln 5 = 1.61."""
    ends = {}
    for target in (1.2, None):
        loss = replace(BONUS, entropy_coefficient=start, entropy_target=target, entropy_gain=0.5 if target else 0.2)
        world, parts, settings = build(loss, steps=40, epochs=4, kind=OnPolicy)
        go(parts, replace(settings, group_size=fixed_size(32)))
        ends[target] = sum(world.series("entropy")[-10:]) / 10
    assert ends[1.2] == pytest.approx(1.2, abs=0.15)
    assert abs(ends[None] - 1.2) > 0.3


@pytest.mark.parametrize("loss", [BONUS, CLIP], ids=["bonus", "clip"])
def test_a_resumed_run_has_the_same_numbers_and_weights(loss):
    loss = replace(loss, clip_cov_fraction=0.2, clip_cov_bounds=(0.0, 9.0), kl_cov_fraction=0.2)
    world, whole, settings = build(loss)
    go(whole, settings)
    state = world.saved[0]
    assert state["progress"]["step"] == 5
    assert state["entropy_control"]
    again, parts, _ = build(loss)
    progress = load_checkpoint(parts, state)
    with torch.no_grad():
        parts.policy.table.copy_(state["optimizer"]["masters"]["table"])  # float64: the optimizer's is a copy
    go(parts, settings, progress)
    for name in ("entropy", *parts.entropy_control.coefficients(1), "covariance/mean"):
        assert again.series(name) == world.series(name)[5:]
    assert torch.equal(parts.policy.table, whole.policy.table)


def test_without_a_target_there_is_no_controller():
    control = build_entropy_control("grpo", LossBase(entropy_coefficient=0.1))
    algorithm = grpo()
    assert control is NO_ENTROPY_CONTROL
    assert control.acting(algorithm, 1) is algorithm
    assert control.coefficients(1) == {}
    assert control.state_dict() == {}
