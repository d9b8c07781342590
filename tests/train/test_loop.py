"""The loop: what it hands to whom, what it records, when it saves and when it gives up."""

import math
from dataclasses import replace

import pytest
import torch

from covey.config import RunError
from covey.data import EndReason, Group, Rollout, Start
from covey.train.loop import train
from covey.train.metrics import describe
from covey.train.state import Progress, load_checkpoint
from helpers.loop_world import World, build, never
from helpers.tabular_policy import rollout


def test_a_run_learns_records_and_saves():
    world, progress = World(), Progress()
    parts, settings = build(world, 5, checkpoint_every=2)
    train(parts, settings, progress, should_stop=never)
    assert [step for step, _, _ in world.recorded] == [1, 2, 3, 4, 5]
    assert [step for step, _ in world.saved] == [2, 4, 5]
    assert world.refreshed == [1, 2, 3, 4, 5]
    assert (progress.step, progress.version, progress.decisions, progress.starts) == (5, 5, 40, 10)
    assert [groups[0].rollouts[0].version for _, _, groups in world.recorded] == [0, 1, 2, 3, 4]
    first = parts.policy.table[0, 5].softmax(-1)
    assert float(first[3].detach()) > float(first[0].detach())
    metrics = world.recorded[0][1]
    assert metrics["reward/mean"] == 1.5
    assert metrics["learning_rate"] == 0.1
    assert metrics["update/optimizer_steps"] == 1
    assert metrics["groups/zero_advantage_fraction"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_last_step_is_saved_once():
    world = World()
    train(*build(world, 4, checkpoint_every=2), Progress(), should_stop=never)
    assert [step for step, _ in world.saved] == [2, 4]


def test_a_stopped_run_saves_where_it_is():
    world = World()
    train(*build(world, 100), Progress(), should_stop=lambda: len(world.recorded) == 3)
    assert [step for step, _ in world.saved] == [3]


def test_resumed_run_ends_like_one_that_never_stopped():
    whole, halves = World(), World()
    parts, settings = build(whole, 6)
    train(parts, settings, Progress(), should_stop=never)
    first, _ = build(halves, 3)
    train(first, replace(settings, steps=3), Progress(), should_stop=never)
    second, _ = build(halves, 6)
    state = halves.saved[-1][1]
    progress = load_checkpoint(second, state | {"progress": dict(state["progress"])})
    second.policy.module.load_state_dict(first.policy.module.state_dict())
    train(second, settings, progress, should_stop=never)
    assert progress.step == 6
    assert torch.equal(second.policy.table, parts.policy.table)
    assert halves.refreshed == [1, 2, 3, 3, 4, 5, 6]


def test_evaluation_joins_the_metrics_of_its_step():
    world = World()
    train(*build(world, 2, evaluate=lambda step: {"held_out": 0.5} if step == 2 else {}), Progress(), should_stop=never)
    assert ["held_out" in metrics for _, metrics, _ in world.recorded] == [False, True]


def test_five_bad_updates_in_a_row_stop_the_run_and_leave_the_weights():
    world = World()
    parts, settings = build(world, 20)
    with torch.no_grad():
        parts.policy.table[0, 5, 4] = math.inf  # every log-probability is NaN
    before = parts.policy.table.clone()
    with pytest.raises(RunError, match="5 updates in a row"):
        train(parts, settings, Progress(), should_stop=never)
    assert len(world.recorded) == 5
    assert [metrics["update/skipped_steps"] for _, metrics, _ in world.recorded] == [1] * 5
    assert torch.equal(parts.policy.table, before)


def test_steps_without_a_live_group_are_not_bad_updates():
    world, progress = World(rewards=[1.0] * 4), Progress()
    train(*build(world, 7), progress, should_stop=never)
    assert progress.step == 7
    assert [metrics["groups/zero_advantage_fraction"] for _, metrics, _ in world.recorded] == [1.0] * 7


def test_describe_by_hand():
    made = [
        rollout([1, 2, 3], 1.0),
        rollout([1], None),
        rollout([1, 2], 0.0, end=EndReason.LENGTH),
        rollout([1, 2], 0.5, end=EndReason.TERMINATED),
    ]
    made[0].score, made[2].score = 1.0, 0.0
    made[0].reward_parts, made[1].reward_parts = {"format": 0.2}, {"format": None}
    metrics = describe([Group(Start(0, "a"), made[:2]), Group(Start(1, "b"), made[2:])])
    assert metrics == {
        "groups/failed_rollouts": 1.0,
        "length/mean": 2.0,  # (3 + 1 + 2 + 2) / 4
        "length/max": 3.0,
        "length/truncated_fraction": 0.25,
        "length/truncated_reward": 0.0,
        "decisions/sampled": 8.0,
        "reward/mean": 0.5,  # of 1, 0 and 0.5
        "reward/std": pytest.approx(math.sqrt(0.5 / 3)),  # deviations 0.5, -0.5, 0
        "score/mean": 0.5,
        "reward/format": 0.2,
    }


def test_describe_where_every_grade_failed():
    only: list[Rollout] = [rollout([1], None)]
    metrics = describe([Group(Start(0, "a"), only)])
    assert "reward/mean" not in metrics
    assert metrics["groups/failed_rollouts"] == 1.0


SCORES = [-5.0, -7.0, math.nan, -4.0, -4.0, -4.5, -3.0, -3.5, -9.0]  # NaN: no evaluation after that step


def held_out(step: int) -> dict[str, float]:
    score = SCORES[step - 1]
    return {} if math.isnan(score) else {"eval/score": score}


def test_training_ends_after_evaluations_without_a_better_score():
    """-4 after step 4 is not exceeded after steps 5 and 6: neither an equal score nor a lower one is better."""
    world, progress = World(), Progress()
    train(*build(world, 9, evaluate=held_out, patience=2), progress, should_stop=never)
    assert progress.step == 6
    assert (progress.best_step, progress.best_score, progress.evaluations_since_best) == (4, -4.0, 2)
    assert [step for step, _ in world.saved] == [6]
    assert world.bests == [4]


def test_a_step_without_an_evaluation_does_not_count():
    progress = Progress()
    train(*build(World(), 9, evaluate=held_out, patience=3), progress, should_stop=never)
    assert progress.step == 9
    assert (progress.best_step, progress.evaluations_since_best) == (7, 2)


def test_every_best_step_is_saved_and_named():
    world = World()
    train(*build(world, 9, evaluate=held_out, keep_best=True, checkpoint_every=6), Progress(), should_stop=never)
    assert [step for step, _ in world.saved] == [1, 4, 6, 7, 9]
    assert world.bests == [1, 4, 4, 7, 7]


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_resumed_run_counts_the_evaluations_before(stop: int):
    world, progress = World(), Progress()
    parts, settings = build(world, 9, evaluate=held_out, patience=2, keep_best=True)
    train(parts, settings, progress, should_stop=lambda: progress.step == stop)
    state = world.saved[-1][1]
    again = load_checkpoint(parts, state | {"progress": dict(state["progress"])})
    train(parts, settings, again, should_stop=never)
    assert (again.step, again.best_step, again.evaluations_since_best) == (6, 4, 2)


def test_a_run_that_ended_early_is_done_after_it_is_resumed():
    world, progress = World(), Progress()
    parts, settings = build(world, 9, evaluate=held_out, patience=2)
    train(parts, settings, progress, should_stop=never)
    assert settings.is_done(progress)
    assert settings.ends_early(progress)
    train(parts, settings, progress, should_stop=never)
    assert len(world.recorded) == 6
