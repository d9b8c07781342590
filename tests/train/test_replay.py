"""Groups of earlier steps are learnt from again: which, how often, with which gradient, and what is counted of them.

Shapes: B rollouts, T decisions, O completions, P prompts.
"""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithms import Algorithm, KLInLoss, KLInReward, KLPenalty, dr_grpo, grpo, ppo, reinforce
from covey.config import ConfigError
from covey.core import schedules
from covey.core.ratios import ImportanceWeights, sequence_product_log_ratio, token_log_ratio
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.data.serialization import for_learning
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.optimizer import MasterAdamW
from covey.train.learners import UpdatePlan
from covey.train.loop import train
from covey.train.prepare import Prepared, prepare_rows
from covey.train.replay import RecentGroups, Replay, joined
from covey.train.selection import PromptSelection
from covey.train.state import Progress, load_checkpoint
from helpers.enumeration import COMPLETIONS, PROMPTS, ListedPolicy, graded, probabilities, summed, true_gradient
from helpers.gradients import make
from helpers.loop_world import World, build, never
from helpers.tabular_policy import Recorder, ToyPolicy, off_policy_groups, random_groups, rollout
from helpers.updates import learners_of, one_update

WEIGHTS = ImportanceWeights(cap=2.0)
NO_KL = KLPenalty()
PLANS = [UpdatePlan(), UpdatePlan(epochs=2, minibatches=2)]


def weighted(algorithm: Algorithm, weights: ImportanceWeights = WEIGHTS) -> Algorithm:
    return replace(algorithm, importance=weights)


GRPO = weighted(grpo(kl=NO_KL))


def live(*names: int) -> list[Group]:
    """Groups with a gradient, each told by the length of its rollouts."""
    return [Group(Start(i, n), [rollout([1] * n, 1.0), rollout([2] * n, 0.0)]) for i, n in enumerate(names)]


def with_tokens(groups: list[Group]) -> list[Group]:
    """The groups with a prompt of one token, as a language model has it."""
    for group in groups:
        for item in group.rollouts:
            item.context = (0,)
    return groups


class TokenWorld(World):
    """With prompts of one token."""

    def sample(self, starts, group_size, step, first_rollout=0):
        return with_tokens(super().sample(starts, group_size, step, first_rollout))


def dead(name: int = 1) -> Group:
    return Group(Start(0, name), [rollout([1] * name, 1.0), rollout([2] * name, 1.0)])


def ready(groups: list[Group], replayed: list[Group] = (), algorithm: Algorithm = GRPO, **options: Any) -> Prepared:  # type: ignore[assignment]
    return prepare_rows(joined(groups, list(replayed)), ToyPolicy(seed=1), algorithm, **options)


def learn(replay: RecentGroups, step: int, groups: list[Group]) -> None:
    replay.after(step, groups, ready(groups))


def names(groups: list[Group]) -> list[int]:
    return [len(group.rollouts[0].actions) for group in groups]


# ---- which groups, and how often ----


def test_the_newest_groups_come_first_and_each_is_used_once():
    replay = RecentGroups(groups=2, max_age=3)
    assert replay.draw(1).metrics == {"replay/groups": 0.0}
    learn(replay, 1, live(11, 12, 13, 14))
    assert names(replay.draw(2).groups) == [11, 12]
    learn(replay, 2, live(21))
    drawn = replay.draw(3)
    assert names(drawn.groups) == [21, 13]
    assert drawn.metrics == {"replay/groups": 2.0, "replay/age": 1.5}
    assert names(replay.draw(4).groups) == [14]
    assert names(replay.draw(5).groups) == []


def test_a_group_of_the_largest_age_is_replayed_and_an_older_one_is_not():
    for step, found in ((4, [5]), (5, [])):
        replay = RecentGroups(groups=1, max_age=3)
        learn(replay, 1, live(5))
        assert names(replay.draw(step).groups) == found


def test_a_group_is_replayed_as_often_as_the_recipe_says():
    replay = RecentGroups(groups=1, max_age=9, max_uses=2)
    learn(replay, 1, live(5))
    assert [names(replay.draw(step).groups) for step in (2, 3, 4)] == [[5], [5], []]


def test_groups_without_a_gradient_are_not_kept():
    replay = RecentGroups(groups=9, max_age=9)
    learn(replay, 1, [dead(3), *live(4), dead(5)])
    assert names(replay.draw(2).groups) == [4]


@pytest.mark.parametrize("max_uses", [1, 2])
def test_what_is_not_kept_for_want_of_room_would_never_be_replayed(max_uses):
    """Beside a replay that keeps everything."""
    small, large = (RecentGroups(groups=2, max_age=3, max_uses=max_uses) for _ in range(2))
    counts = [9, 0, 1, 7, 3, 0, 0, 5, 2, 8]
    for step, count in enumerate(counts, start=1):
        large.groups = 2
        assert names(small.draw(step).groups) == names(large.draw(step).groups)
        groups = [*live(*(10 * step + i for i in range(count))), dead()]
        learn(small, step, groups)
        large.groups = 10**6
        learn(large, step, groups)
        assert len(small._kept) <= 2 * 3


# ---- the gradient ----


def gradients(prepared: Prepared, plan: UpdatePlan, algorithm: Algorithm) -> list[Tensor]:
    policy = ToyPolicy(seed=1)
    recorder = Recorder(policy)
    one_update(policy, recorder, algorithm, prepared.batch(), plan)
    return recorder.gradients


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_with_an_unchanged_policy_a_replayed_group_has_the_gradient_of_a_fresh_one(name, plan):
    algorithm, steps = weighted(make(name)), plan.optimizer_steps(1)
    groups = random_groups(seed=3, count=6)
    replay = RecentGroups(groups=3, max_age=1)
    replay.after(1, groups[3:], ready(groups[3:]))
    kept = replay.draw(2).groups
    assert len(kept) == 3
    fresh = ready(groups, algorithm=algorithm, optimizer_steps=steps)
    replayed = ready(groups[:3], kept, algorithm, optimizer_steps=steps)
    for one, other in zip(*(gradients(each, plan, algorithm) for each in (fresh, replayed)), strict=True):
        assert torch.equal(one, other)


def listed(
    policy: ListedPolicy, sampler: ListedPolicy, rewards_PO: Tensor, weights: ImportanceWeights
) -> tuple[Tensor, int]:
    """The expected gradient of replayed groups of two, over all that the sampler may have drawn, and the groups."""
    probability_PO = probabilities(sampler).detach()
    groups = []
    for prompt, pair in itertools.product(range(PROMPTS), itertools.product(range(len(COMPLETIONS)), repeat=2)):
        made = [
            Rollout((prompt, o), list(COMPLETIONS[o]), [0.0] * len(COMPLETIONS[o]), EndReason.STOP)
            for o in pair
        ]  # fmt: skip
        for item, o in zip(made, pair, strict=True):
            item.reward = float(rewards_PO[prompt, o])
        likely = float(probability_PO[prompt, list(pair)].prod()) / PROMPTS
        groups.append(Group(Start(0, None, weight=likely), made))
    with torch.no_grad():
        batch = joined([Group(Start(0, None), groups[0].rollouts)], groups)  # the first group is dead: twice the same
        batch = replace(batch, behavior_logprobs_BT=sampler.evaluate(batch).logprobs_BT)
    algorithm = weighted(summed(reinforce()), weights)
    prepared = prepare_rows(batch, policy, algorithm)
    assert int(prepared.kept_B.sum()) == sum(len({*group_rewards(group)}) > 1 for group in groups) * 2
    loss = algorithm.loss(policy.evaluate(prepared.rows), prepared.rows, 0.0).loss
    scale = len(batch) / 2  # the loss is divided by all rows, and a group has two
    return -scale * torch.autograd.grad(loss, policy.table)[0], len(groups)


def group_rewards(group: Group) -> list[float | None]:
    return [item.reward for item in group.rollouts]


def test_without_a_cap_the_gradient_of_replayed_groups_is_unbiased_if_whole_rollouts_are_weighted():
    """(G - 1) / G of the true gradient, as on policy: a rollout is in its own baseline."""
    policy, sampler, rewards_PO = ListedPolicy(seed=0), ListedPolicy(seed=1), graded(seed=1)
    truth = true_gradient(policy, rewards_PO) / 2

    def error(weights: ImportanceWeights) -> float:
        found, _ = listed(policy, sampler, rewards_PO, weights)
        return float((found - truth).norm() / truth.norm())

    assert error(ImportanceWeights(log_ratio=sequence_product_log_ratio)) < 1e-5
    assert error(ImportanceWeights(cap=2.0, log_ratio=sequence_product_log_ratio)) > 0.05
    assert error(ImportanceWeights(log_ratio=token_log_ratio)) > 0.05  # prefixes are those of the sampler
    assert error(ImportanceWeights(high=0.0)) == pytest.approx(1.0)


def test_for_single_decisions_the_weights_of_tokens_are_unbiased():
    """A bandit: every prompt has one decision."""
    policy, sampler = ToyPolicy(seed=1), ToyPolicy(seed=4)
    rewards = (0.3, -1.0, 2.0, 0.5, -0.2)

    def expected(drawn_by: ToyPolicy, weights: ImportanceWeights) -> Tensor:
        actions = list(itertools.product(range(5), repeat=2))
        groups = [Group(Start(0, 0), [rollout([a], rewards[a]) for a in pair]) for pair in actions]
        batch = joined([dead()], groups)
        with torch.no_grad():
            behavior_BT = drawn_by.evaluate(batch).logprobs_BT
        likely_G = [math.exp(float(behavior_BT[2 + 2 * i : 4 + 2 * i, 0].sum())) for i in range(len(groups))]
        weight_B = torch.tensor([0.0, *likely_G]).repeat_interleave(2)
        batch = replace(batch, behavior_logprobs_BT=behavior_BT, group_weight_B=weight_B)
        algorithm = weighted(dr_grpo(max_length=1), weights)
        rows = prepare_rows(batch, policy, algorithm).rows
        return torch.autograd.grad(algorithm.loss(policy.evaluate(rows), rows, 0.0).loss, policy.table)[0]

    truth = expected(policy, ImportanceWeights())
    replayed = expected(sampler, ImportanceWeights())
    torch.testing.assert_close(replayed, truth, rtol=1e-5, atol=1e-9)
    assert float((expected(sampler, ImportanceWeights(cap=1.0)) - truth).norm()) > 0.1 * float(truth.norm())


def test_the_loss_is_divided_by_all_rows_of_the_update():
    fresh, kept = random_groups(seed=3, count=2), random_groups(seed=4, count=1)
    parts = [gradients(ready(groups), PLANS[0], GRPO)[0] for groups in (fresh, kept)]
    both = gradients(ready(fresh, kept), PLANS[0], GRPO)[0]
    torch.testing.assert_close(both, (2 * parts[0] + parts[1]) / 3, rtol=1e-6, atol=1e-9)


def test_the_weight_of_a_group_in_the_loss_is_kept():
    groups = with_tokens(live(3, 4))
    groups[0].start = replace(groups[0].start, weight=0.25)
    replay = RecentGroups(groups=2, max_age=1)
    replay.after(1, groups, ready(groups))
    again = RecentGroups(groups=2, max_age=1)
    again.load_state_dict(replay.state_dict())
    for one in (replay, again):
        assert [group.start.weight for group in one.draw(2).groups] == [0.25, 1.0]


# ---- what is counted ----


def test_metrics_of_the_weights_by_hand():
    policy = ToyPolicy(seed=1)
    groups = off_policy_groups(policy)
    for plan in PLANS[:1], [UpdatePlan(epochs=2)]:
        steps = plan[0].optimizer_steps(1)
        rows = ready(live(1), groups, optimizer_steps=steps).batch()
        metrics = one_update(policy, Recorder(policy), GRPO, rows, plan[0])
        assert metrics["replay/importance_weight"] == pytest.approx((2.0 + 0.5) / 2)  # 4 is capped at 2
        assert metrics["replay/effective_sample_fraction"] == pytest.approx(2.5**2 / (2 * (4 + 0.25)))
        assert metrics["replay/capped_fraction"] == 0.5
    low = weighted(grpo(kl=NO_KL), ImportanceWeights(low=0.75))
    metrics = one_update(policy, Recorder(policy), low, ready(live(1), groups, low).batch())
    assert metrics["replay/importance_weight"] == pytest.approx(2.0)  # 4 and 0
    assert metrics["replay/capped_fraction"] == 0.5
    nothing = weighted(grpo(kl=NO_KL), ImportanceWeights(low=0.75, high=2.0))
    metrics = one_update(policy, Recorder(policy), nothing, ready(live(1), groups, nothing).batch())
    assert metrics["replay/importance_weight"] == 0.0
    assert "replay/effective_sample_fraction" not in metrics


OF_ALL_ROWS = ("decisions/trained", "loss", "grad_norm")


@pytest.mark.parametrize("plan", [UpdatePlan(), UpdatePlan(epochs=2)])
def test_metrics_of_rollouts_leave_replayed_ones_out(plan):
    algorithm = weighted(grpo(kl=KLPenalty(schedules.constant(0.3), KLInLoss())))
    fresh, kept = [*random_groups(seed=3, count=2), dead(2)], random_groups(seed=4, count=3, longest=9)
    options: dict[str, Any] = {"reference": ToyPolicy(seed=2), "kl_coefficient": 0.3}
    found = []
    for replayed in ([], kept):
        prepared = ready(fresh, replayed, algorithm, optimizer_steps=plan.optimizer_steps(1), **options)
        policy = ToyPolicy(seed=1)
        updated = one_update(policy, Recorder(policy), algorithm, prepared.batch(), plan, kl_coefficient=0.3)
        found.append(prepared.metrics | updated)
    alone, both = found
    assert {name for name in both if name not in alone} == {
        "replay/importance_weight", "replay/effective_sample_fraction", "replay/capped_fraction",
    }  # fmt: skip
    assert "entropy" in alone
    assert "kl" in alone
    for name in alone.keys() - set(OF_ALL_ROWS):
        assert both[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-9), name
    assert both["decisions/trained"] > alone["decisions/trained"]


class Counted(ToyPolicy):
    """A reference that counts the rows it evaluates."""

    rows_seen = 0

    def evaluate(self, batch):
        self.rows_seen += len(batch)
        return super().evaluate(batch)


def test_a_reference_that_only_measures_the_kl_evaluates_no_replayed_rows():
    reference = Counted(seed=2)
    ready(random_groups(count=1), random_groups(count=9), reference=reference)
    assert reference.rows_seen == 4


# ---- in the loop ----


class Followed(PromptSelection):
    """A selection that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def after(self, step, groups):
        self.told.append(len(groups))
        return {}


def run_loop(replay: Any, steps: int = 4, **changes: Any) -> tuple[World, Any, Progress]:
    world, algorithm = TokenWorld(), weighted(make("grpo"))
    policy = ToyPolicy(seed=None)
    parts, settings = build(
        world, steps, algorithm=algorithm, policy=policy, replay=replay,
        learners=learners_of(policy, MasterAdamW(policy.module, lr=0.1), algorithm), **changes,
    )  # fmt: skip
    progress = Progress()
    train(parts, settings, progress, should_stop=never)
    return world, parts, progress


def test_records_selection_and_progress_count_the_rollouts_of_the_step_alone():
    selection = Followed()
    world, _, progress = run_loop(RecentGroups(groups=2, max_age=2), selection=selection)
    alone, _, expected = run_loop(Replay())
    assert [metrics["replay/groups"] for _, metrics, _ in world.recorded] == [0, 2, 2, 2]
    assert [metrics["decisions/trained"] for _, metrics, _ in world.recorded] == [8, 16, 16, 16]
    assert selection.told == [2] * 4
    assert (progress.decisions, progress.starts) == (expected.decisions, expected.starts)
    for record, other in zip(world.records, alone.records, strict=True):
        assert [len(one) for one in record.credits] == [4, 4]
        assert record.credits == other.credits
        assert record.metrics["decisions/sampled"] == other.metrics["decisions/sampled"]
        assert all(item.version == record.step - 1 for group in record.groups for item in group.rollouts)


# ---- the state ----


def full_rollout() -> Rollout:
    return Rollout(
        context=(5, 9), actions=[7, 3, 4, 8], behavior_logprobs=[-0.1, 0.0, 0.0, -1 / 3], end=EndReason.LENGTH,
        text="long", decided=[True, False, False, True], messages=[{"role": "user"}], step_rewards=[0.1, 0.0, 0.0, 2.0],
        step_ends=[0, 3], reward=2.1, reward_parts={"a/b": 0.1, "c": None}, version=6,
    )  # fmt: skip


def control_rollout() -> Rollout:
    source = np.arange(24, dtype=np.float32).reshape(4, 6) / 7
    return Rollout(
        context=source[:, :3].copy(), actions=source[:3, 3:5], behavior_logprobs=source[:3, 5], end=EndReason.TRUNCATED,
        step_rewards=source[:3, 0].astype(np.float64), reward=np.float64(1.5), version=2,
    )  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("make_rollout", [full_rollout, control_rollout])
def test_the_state_survives_a_checkpoint_exactly(make_rollout, tmp_path):
    first, second = make_rollout(), make_rollout()
    second.reward = None
    second.step_rewards = None
    groups = [Group(Start(4, "prompt"), [first, second, replace(make_rollout(), reward=-1.0)])]
    batch = collate(groups)
    replay = RecentGroups(groups=3, max_age=2, max_uses=5)
    everything = Prepared(batch, torch.ones(3, dtype=torch.bool), batch.mask_BT, batch.rewards_BT, {})
    replay.after(7, groups, everything)
    replay.draw(8)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(8, {"replay": replay.state_dict()})
    again = RecentGroups(groups=3, max_age=2, max_uses=5)
    again.load_state_dict(folder.load(8)["replay"])
    assert [(one.step, one.uses) for one in again._kept] == [(7, 1)]
    rows = zip(*(one._kept[0].group.rollouts for one in (replay, again)), strict=True)
    for kept, loaded in rows:
        for name in Rollout.__dataclass_fields__:
            assert same(getattr(kept, name), getattr(loaded, name)), name
    loaded_batch = collate(again.draw(9).groups)
    assert loaded_batch.context[0] is not None
    for name in ("actions_BT", "mask_BT", "behavior_logprobs_BT", "reward_B", "rewards_BT", "valid_B", "step_end_BT",
                 "truncated_B", "reward_parts_BR"):  # fmt: skip
        one, other = getattr(batch, name), getattr(loaded_batch, name)
        assert one is other is None or torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)), name


def test_an_empty_state_survives_a_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(1, {"replay": RecentGroups(groups=1, max_age=1).state_dict()})
    again = RecentGroups(groups=1, max_age=1)
    again.load_state_dict(folder.load(1)["replay"])
    assert again.draw(2).groups == []


def test_what_is_kept_has_no_texts_and_does_not_keep_the_step_in_memory():
    made = full_rollout()
    kept = for_learning(made)
    assert (kept.text, kept.messages, kept.context) == ("", None, made.context)
    step = control_rollout()
    assert not np.shares_memory(for_learning(step).actions, step.actions)
    assert not np.shares_memory(for_learning(step).behavior_logprobs, step.behavior_logprobs)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (grpo(kl=NO_KL), {}, "has no importance weights"),
        (
            weighted(grpo(kl=KLPenalty(schedules.constant(0.1), KLInReward()))),
            {"kl_coefficient": 0.1, "reference": ToyPolicy(seed=2)},
            "KL in the reward",
        ),
        (weighted(ppo()), {"critics": [None]}, "has a critic"),
    ],
)
def test_rows_of_earlier_steps_are_refused_where_they_would_be_wrong(algorithm, options, message):
    with pytest.raises(ConfigError, match=message):
        ready(live(1), live(2), algorithm, **options)


def test_a_loaded_run_goes_on_with_the_same_groups():
    """The loop's checkpoint has the state of replay."""
    world, parts, _ = run_loop(RecentGroups(groups=2, max_age=2), steps=2)
    saved = copy.deepcopy(world.saved[-1][1]["replay"])
    assert [one["step"] for one in saved["kept"]] == [2, 2]
    again = RecentGroups(groups=2, max_age=2)
    state = world.saved[-1][1] | {"replay": saved}
    load_checkpoint(replace(parts, replay=again), state)
    assert names(again.draw(3).groups) == names(parts.replay.draw(3).groups)
