"""What happens to the KL over a run: its coefficient follows a target, its reference is refreshed; and the weights that
correct for a sampler which is not quite the policy.

Shapes: B rollouts, T decisions.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covey.algorithms import Algorithm, KLInLoss, KLPenalty, cispo, grpo, reinforce
from covey.config import LossBase, RunConfig
from covey.config.llm import IterationConfig, ReferenceConfig
from covey.core import kl, schedules
from covey.core.ratios import ImportanceWeights
from covey.data import Batch, Group, ReferenceUpdater, Start, collate
from covey.experiment.algorithm import build_algorithm, build_kl_coefficient
from covey.experiment.llm import build_reference_updater
from covey.runtime.distributed import WHOLE
from covey.runtime.optimizer import EMAWeights, MasterAdamW
from covey.train.collect import fixed_size
from covey.train.learners import Coefficient, PolicyLearner, UpdatePlan
from covey.train.prepare import prepare_batch
from covey.train.state import Components, LoopConfig, load_checkpoint
from helpers.loop_world import PolicyWorld, go
from helpers.tabular_policy import ACTIONS, Recorder, ToyPolicy, off_policy_groups, rollout
from helpers.updates import one_update

ROLLOUTS = 2 * ACTIONS
TARGET, HORIZON = 0.02, 100


def build(
    penalty: KLPenalty,
    kl_coefficient: Coefficient | None = None,
    *,
    epochs: int = 1,
    share: float | None = None,
    every: int = 1,
    **settings: Any,
):
    policy = ToyPolicy(seed=None)
    world, reference = PolicyWorld(policy), ToyPolicy(seed=None)
    updater = ReferenceUpdater() if share is None else EMAWeights(reference.module, policy.module, share, every=every)
    algorithm, optimizer = grpo(kl=penalty), MasterAdamW(policy.module, lr=0.05)
    kl_coefficient = kl_coefficient or Coefficient(penalty.coefficient)
    learner = PolicyLearner(
        policy, optimizer, algorithm, UpdatePlan(epochs=epochs), schedules.constant(0.05), kl_coefficient
    )
    parts = Components(
        task=world, sampler=world, grader=world, policy=policy, reference=reference, algorithm=algorithm,
        learners=[learner], kl_coefficient=kl_coefficient, observers=[world], checkpoints=world,
        reference_updater=updater,
    )  # fmt: skip
    return world, parts, LoopConfig(steps=12, seed=7, starts_per_step=2, group_size=fixed_size(ACTIONS), **settings)


def controlled(coefficient: float = 0.05, warmup: int = 0, to: str = "reference") -> tuple[KLPenalty, Coefficient]:
    loss = LossBase(
        kl_coefficient=coefficient, kl_warmup_steps=warmup, adaptive_kl_target=TARGET, adaptive_kl_horizon=HORIZON,
        kl_to=to,
    )  # fmt: skip
    penalty = build_algorithm("grpo", loss).kl
    return penalty, build_kl_coefficient(penalty, loss)


def follow_by_hand(first: float, measured: list[float]) -> list[float]:
    made = [first]
    for value in measured[:-1]:
        made.append(made[-1] * (1 + max(-0.2, min(0.2, value / TARGET - 1)) * ROLLOUTS / HORIZON))
    return made


@pytest.mark.parametrize("to", ["reference", "behavior"])
def test_the_coefficient_follows_the_measured_kl(to):
    world, parts, settings = build(*controlled(to=to), epochs=3)
    go(parts, settings)
    measured = world.series("kl/behavior" if to == "behavior" else "kl")
    assert world.series("kl_coefficient") == pytest.approx(follow_by_hand(0.05, measured), rel=1e-12)
    assert min(measured) < TARGET < max(measured) or to == "behavior", "the test needs both directions"
    following = parts.kl_coefficient.at(settings.steps + 1)
    assert following != world.series("kl_coefficient")[-1], "the last step counts too"


def test_the_coefficient_is_the_one_in_the_loss():
    world, parts, settings = build(*controlled(0.05))
    go(parts, settings)
    _, fixed, _ = build(KLPenalty(schedules.constant(0.05)))
    go(fixed, settings)
    assert not torch.equal(parts.policy.table, fixed.policy.table)
    _, scheduled, _ = build(KLPenalty(lambda step: world.series("kl_coefficient")[step - 1]))
    go(scheduled, settings)
    assert torch.equal(parts.policy.table, scheduled.policy.table)


def test_during_the_warmup_the_schedule_counts_and_from_its_end_the_controller():
    world, parts, settings = build(*controlled(0.05, warmup=4))
    go(parts, settings)
    found, measured = world.series("kl_coefficient"), world.series("kl")
    assert found[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    assert found[3:] == pytest.approx(follow_by_hand(0.05, measured[3:]), rel=1e-12)


def test_a_step_without_a_measured_kl_leaves_the_coefficient():
    world, parts, settings = build(*controlled())

    def nothing(groups: list[Group]) -> list[Group]:
        for group in groups:
            for item in group.rollouts:
                item.reward = 1.0  # every group is dead, and its KL is neither measured nor in the loss
        return groups

    world.grade = nothing  # type: ignore[method-assign]
    go(parts, settings)
    assert "kl" not in world.recorded[0]
    assert set(world.series("kl_coefficient")) == {0.05}


def test_a_schedule_without_a_target_is_left_alone():
    world, parts, settings = build(build_algorithm("grpo", LossBase(kl_coefficient=0.05)).kl)
    go(parts, settings)
    assert set(world.series("kl_coefficient")) == {0.05}


# ---- the reference follows ----


def test_a_copy_brings_the_kl_back_to_zero_every_so_many_steps():
    world, parts, settings = build(KLPenalty(schedules.constant(0.05)), share=1.0, every=3)
    go(parts, settings)
    measured = world.series("kl")
    assert [step for step, value in enumerate(measured, start=1) if value < 1e-12] == [1, 4, 7, 10]
    assert torch.equal(parts.reference.table, parts.policy.table)  # 12 steps: the last one refreshed


def test_a_moving_average_is_that_of_the_policies_at_those_steps():
    _, parts, settings = build(KLPenalty(schedules.constant(0.05)), share=0.25, every=2)
    seen: list[Tensor] = []
    parts = replace(parts, evaluate=lambda step: seen.append(parts.policy.table.detach().clone()) or {})
    go(parts, settings)
    expected = torch.zeros_like(seen[0])
    for table in seen[1::2]:
        expected = expected + 0.25 * (table - expected)
    torch.testing.assert_close(parts.reference.table.detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "fields", [{"reference": ReferenceConfig(refresh_every=3)}, {"iteration": IterationConfig(steps=3)}], ids=str
)
def test_the_reference_of_a_language_run_is_the_policy_after_each_third_step(fields):
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    models = SimpleNamespace(
        policy=SimpleNamespace(trained=policy), reference=SimpleNamespace(trained=reference, weights=WHOLE)
    )
    updater = build_reference_updater(RunConfig(**fields), models)
    copied = []
    for step in range(1, 8):
        with torch.no_grad():
            policy.weight.fill_(step)
        updater.after(step)
        copied.append(reference.weight.item())
    assert copied[2:] == [3, 3, 3, 6, 6]


@pytest.mark.parametrize("share", [1.0, 0.25, None])
def test_a_resumed_run_has_the_same_coefficient_reference_and_weights(share):
    options = {"share": share, "every": 2}
    world, whole, settings = build(*controlled(warmup=2), **options, checkpoint_every=5)
    go(whole, settings)
    state = world.saved[0]
    assert state["progress"]["step"] == 5
    assert bool(state["reference"]) == (share is not None)
    assert state["kl_coefficient"]
    again, parts, _ = build(*controlled(warmup=2), **options)
    progress = load_checkpoint(parts, state)
    with torch.no_grad():
        parts.policy.table.copy_(state["optimizer"]["masters"]["table"])  # float64: the optimizer's is a copy
    go(parts, settings, progress)
    assert again.series("kl") == world.series("kl")[5:]
    assert again.series("kl_coefficient") == world.series("kl_coefficient")[5:]
    assert torch.equal(parts.policy.table, whole.policy.table)
    assert torch.equal(parts.reference.table, whole.reference.table)


# ---- a sampler that is not quite the policy ----

REWARDS = (0.3, -1.0, 2.0, 0.5, -0.2)


def expected_gradient(algorithm: Algorithm, sampler: ToyPolicy, *, proximal: bool = False) -> Tensor:
    """Of the loss at one state, over everything that the sampler may do there: sum_a mu(a) grad loss(a)."""
    policy = ToyPolicy(seed=1)
    rows = [rollout([action], reward) for action, reward in enumerate(REWARDS)]
    batch = collate([Group(Start(0, 0), rows)])
    with torch.no_grad():
        mu_BT = sampler.evaluate(batch).logprobs_BT
        old_BT = policy.evaluate(batch).logprobs_BT
    batch = replace(
        batch,
        behavior_logprobs_BT=mu_BT,
        advantages_BT=torch.tensor(REWARDS, dtype=torch.float64)[:, None],
        loss_weights_BT=mu_BT.exp(),
        reference_logprobs_BT=ToyPolicy(seed=2).evaluate(batch).logprobs_BT.detach(),
        proximal_logprobs_BT=old_BT if proximal else None,
    )
    algorithm.loss(policy.evaluate(batch), batch, algorithm.kl.coefficient(1)).loss.backward()
    assert policy.table.grad is not None
    return policy.table.grad


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {"reinforce": reinforce, "grpo": grpo, "cispo": cispo}


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_correct_for_a_sampler_with_other_weights(name, proximal):
    algorithm = ALGORITHMS[name](kl=KLPenalty())
    truth = expected_gradient(algorithm, ToyPolicy(seed=1), proximal=proximal)  # the sampler is the policy
    stale = ToyPolicy(seed=4)
    wrong = expected_gradient(algorithm, stale, proximal=proximal)
    assert float((wrong - truth).norm()) > 0.2 * float(truth.norm()), "the sampler must be far enough away"
    corrected = expected_gradient(
        replace(algorithm, importance=ImportanceWeights(cap=math.inf)), stale, proximal=proximal
    )
    torch.testing.assert_close(corrected, truth, rtol=0, atol=1e-12)


def test_a_cap_leaves_a_part_of_the_error_and_bounds_every_weight():
    stale, algorithm = ToyPolicy(seed=4), reinforce()
    truth = expected_gradient(algorithm, ToyPolicy(seed=1))
    errors = [
        float((expected_gradient(replace(algorithm, importance=ImportanceWeights(cap)), stale) - truth).norm())
        for cap in (1.0, 2.0, 8.0, math.inf)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12 < errors[0]


def test_weights_multiply_the_surrogate_and_neither_the_kl_nor_the_entropy():
    stale = ToyPolicy(seed=4)
    for algorithm in (
        replace(reinforce(), entropy_coefficient=0.3),
        reinforce(kl=KLPenalty(schedules.constant(0.3), KLInLoss(kl.k3))),
    ):
        weights = (None, ImportanceWeights(cap=2.0))
        plain, weighted = (expected_gradient(replace(algorithm, importance=one), stale) for one in weights)
        bare = [expected_gradient(replace(reinforce(), importance=one), stale) for one in weights]
        torch.testing.assert_close(weighted - plain, bare[1] - bare[0], rtol=0, atol=1e-12)


def stepped(algorithm: Algorithm, batch: Batch, plan: UpdatePlan = UpdatePlan()) -> dict[str, float]:  # noqa: B008
    policy = ToyPolicy(seed=1)
    ready, _ = prepare_batch(batch, policy, algorithm, optimizer_steps=plan.optimizer_steps(1))
    return one_update(policy, Recorder(policy), algorithm, ready, plan, learning_rate=0.1, seed=0, step=1)


def test_mismatch_metrics_by_hand():
    groups = off_policy_groups(ToyPolicy(seed=1))
    algorithm = replace(grpo(kl=KLPenalty()), importance=ImportanceWeights(cap=2.0))
    for plan in (UpdatePlan(), UpdatePlan(epochs=2)):
        metrics = stepped(algorithm, collate(groups), plan)
        assert metrics["mismatch/mean"] == pytest.approx((math.log(4) + math.log(2)) / 2, rel=1e-5)
        # k3 = x - log x - 1: (4 - log 4 - 1 + 0.5 + log 2 - 1) / 2
        assert metrics["mismatch/kl"] == pytest.approx((4 - math.log(4) - 1 + 0.5 + math.log(2) - 1) / 2, rel=1e-5)
        assert metrics["mismatch/capped_fraction"] == 0.5
        assert metrics["mismatch/masked_fraction"] == 0.0
        # weights 4 and 1/2: (4.5)^2 / (2 (16 + 1/4))
        assert metrics["mismatch/effective_sample_fraction"] == pytest.approx(4.5**2 / (2 * 16.25), rel=1e-5)
    plain = stepped(grpo(kl=KLPenalty()), collate(groups))
    assert not {"mismatch/capped_fraction", "mismatch/masked_fraction"} & plain.keys()
    masked = replace(algorithm, importance=ImportanceWeights(low=0.75))
    assert stepped(masked, collate(groups))["mismatch/masked_fraction"] == 0.5


def test_bounds_leave_decisions_out_of_the_surrogate_and_not_of_its_denominator():
    """Two decisions with the ratios 4 and 1/2: the gradients of each alone sum to that of both."""
    policy = ToyPolicy(seed=1)
    groups = off_policy_groups(policy)

    def gradient(weights: ImportanceWeights) -> Tensor:
        algorithm = replace(grpo(kl=KLPenalty()), importance=weights)
        batch, _ = prepare_batch(collate(groups), policy, algorithm)
        return torch.autograd.grad(algorithm.loss(policy.evaluate(batch), batch, 0.0).loss, policy.table)[0]

    first, second = gradient(ImportanceWeights(high=5.0, low=0.75)), gradient(ImportanceWeights(high=3.0))
    assert float(first.norm()) > 0
    assert float(second.norm()) > 0
    torch.testing.assert_close(first + second, gradient(ImportanceWeights()))
    torch.testing.assert_close(gradient(ImportanceWeights(low=0.75, high=3.0)), torch.zeros_like(first))
