"""Prompts are selected by the signal that is expected of them."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from covey.algorithms.presets import ALGORITHMS
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.train.prepare import prepare_rows
from covey.train.selection import ByExpectedSignal, PromptSelection

RATES = {"known": 0.98, "half": 0.5, "impossible": 0.0}


class Kinds:
    """A third of the starts of each kind; each has a prompt of its own."""

    def draw(self, seed, step, count, *, first=0, before=None):
        rng = random.Random(f"{seed} {step}")
        return [
            Start(index, f"{step} {index}", kind=rng.choice(list(RATES)))
            for index in range(first + count)
        ][first:]  # fmt: skip


class Rows:
    """A data set of rows without kinds, which are drawn in turn."""

    def __init__(self, size):
        self.size = size

    def draw(self, seed, step, count, *, first=0, before=None):
        return [Start(first + i, f"row {(before + i) % self.size}") for i in range(count)]


def graded(starts, rewards_of):
    """Groups with the rewards that `rewards_of` gives for each start."""
    return [
        Group(start, [Rollout((1,), [1], [0.0], EndReason.STOP, reward=reward) for reward in rewards_of(start)])
        for start in starts
    ]


def run(selection, task, rewards_of, steps=40, count=30, before=0):
    """The starts of every step after the first `before`."""
    found = []
    for step in range(before + 1, before + steps + 1):
        starts = selection.draw(task, 0, step, count, first=0, before=count * (step - 1))
        selection.after(step, graded(starts, rewards_of))
        found.append(starts)
    return found


def by_rate(rng):
    return lambda start: [float(rng.random() < RATES[start.kind]) for _ in range(8)]


def shares(found, key=lambda start: start.kind):
    counts = Counter(key(start) for starts in found[10:] for start in starts)
    return {name: times / counts.total() for name, times in counts.items()}


def test_the_kind_with_signal_is_drawn_more_often_and_no_kind_is_forgotten():
    found = shares(run(ByExpectedSignal(candidates=8), Kinds(), by_rate(random.Random(0))))
    assert found["half"] > 0.6
    assert min(found.values()) > 0.05


def test_the_floor_bounds_what_is_left_out():
    found = shares(run(ByExpectedSignal(candidates=8, floor=1.0), Kinds(), by_rate(random.Random(0))))
    assert all(share == pytest.approx(1 / 3, abs=0.05) for share in found.values())


def test_without_selection_the_draws_are_those_of_the_task():
    task = Kinds()
    assert PromptSelection().draw(task, 3, 2, 5, first=4, before=9) == task.draw(3, 2, 5, first=4, before=9)


def test_starts_are_numbered_as_the_step_needs_them():
    starts = ByExpectedSignal(candidates=3).draw(Kinds(), 0, 1, 6, first=4, before=4)
    assert [start.index for start in starts] == [4, 5, 6, 7, 8, 9]
    assert len({start.prompt for start in starts}) == 6
    assert {start.weight for start in starts} == {1.0}


def test_further_draws_of_a_step_are_other_candidates():
    selection = ByExpectedSignal(candidates=3)
    first = selection.draw(Kinds(), 0, 1, 6, first=0, before=0)
    further = selection.draw(Kinds(), 0, 1, 6, first=6, before=6)
    assert not {start.prompt for start in first} & {start.prompt for start in further}


def test_what_was_learnt_long_ago_is_forgotten():
    """After the kind that was known becomes hard, it is drawn again."""
    rates = dict(RATES)
    rng = random.Random(1)

    def rewards_of(start):
        return [float(rng.random() < rates[start.kind]) for _ in range(8)]

    selection, task = ByExpectedSignal(candidates=8, half_life=5.0), Kinds()
    run(selection, task, rewards_of)
    rates |= {"known": 0.5, "half": 1.0}
    assert shares(run(selection, task, rewards_of, before=40))["known"] > 0.6


def test_rewards_of_any_kind_are_compared_by_their_variance_within_groups():
    """A large difference between groups is not a signal."""
    rng = random.Random(2)

    def rewards_of(start):
        level = rng.choice([-50.0, 50.0])
        return [level + rng.gauss(0, 4.0 if start.kind == "half" else 0.1) for _ in range(8)]

    found = shares(run(ByExpectedSignal(candidates=8), Kinds(), rewards_of))
    assert found["half"] > 0.75
    assert min(found.values()) > 0.05


def test_prompts_of_a_data_set_are_kinds_of_their_own():
    rng = random.Random(3)
    rates = {f"row {i}": 0.5 if i < 10 else 0.0 for i in range(60)}

    def rewards_of(start):
        return [float(rng.random() < rates[start.prompt]) for _ in range(8)]

    found = run(ByExpectedSignal(candidates=4, half_life=50.0), Rows(60), rewards_of, steps=80, count=8)
    assert shares(found, lambda start: rates[start.prompt] > 0)[True] > 0.28  # a sixth of the rows
    assert all(len({start.prompt for start in starts}) == 8 for starts in found)


def test_a_data_set_smaller_than_the_step_repeats_its_rows():
    starts = ByExpectedSignal(candidates=4).draw(Rows(5), 0, 1, 8, first=0, before=0)
    assert len(starts) == 8
    assert len({start.prompt for start in starts}) == 5


def test_failed_gradings_count_for_nothing():
    selection = ByExpectedSignal(candidates=2)
    selection.after(1, graded([Start(0, "p", kind="a"), Start(1, "q", kind="b")], lambda start: [None, None]))
    assert selection.after(2, graded([Start(0, "p", kind="a")], lambda start: [1.0, None, 0.0])) == {
        "selection/kinds": 1.0
    }
    assert selection.state_dict()["observed"]["a"] == {
        "step": 2, "successes": 1.0, "failures": 1.0, "squares": 0.5, "freedom": 1
    }  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_restored_selection_goes_on_with_the_same_starts(scale):
    def selection():
        return ByExpectedSignal(candidates=4, half_life=7.0)

    def rewards():
        generator = by_rate(random.Random(4))
        return lambda start: [scale * reward for reward in generator(start)]

    whole = selection()
    rewards_of = rewards()
    first = run(whole, Kinds(), rewards_of, steps=6)
    state = json.loads(json.dumps(whole.state_dict()))
    restored = selection()
    restored.load_state_dict(state)
    for step in range(7, 12):
        starts = [one.draw(Kinds(), 0, step, 30, first=0, before=30 * (step - 1)) for one in (whole, restored)]
        assert starts[0] == starts[1]
        groups = graded(starts[0], rewards_of)
        for one in (whole, restored):
            one.after(step, groups)
    assert len(first) == 6


def test_other_seeds_select_other_prompts():
    selection = ByExpectedSignal(candidates=4)
    chosen = [[start.prompt for start in selection.draw(Kinds(), 0, step, 30, first=0, before=0)] for step in (1, 1, 2)]
    assert chosen[0] == chosen[1]
    places = [[int(prompt.split()[1]) for prompt in prompts] for prompts in chosen]
    assert places[0] != places[2]


def test_weights_back_to_the_data_undo_the_selection():
    """The weighted mean of a number of the prompts is its mean over the task's own draws."""
    selection = ByExpectedSignal(candidates=8, back_to_data=True)
    found = run(selection, Kinds(), by_rate(random.Random(5)), steps=120)
    halves = [(start.kind == "half", start.weight) for starts in found[10:] for start in starts]
    plain = sum(is_half for is_half, _ in halves) / len(halves)
    weighted = sum(is_half * weight for is_half, weight in halves) / sum(weight for _, weight in halves)
    assert plain > 0.6
    assert weighted == pytest.approx(1 / 3, abs=0.06)


def test_the_weight_of_a_group_multiplies_its_loss_weights():
    starts = [Start(0, "p", weight=0.5), Start(1, "q", weight=1.5)]
    groups = graded(starts, lambda start: [0.0, 1.0])
    algorithm = ALGORITHMS["dr_grpo"](max_length=4)
    weighted = prepare_rows(collate(groups), None, algorithm).rows.loss_weights_BT
    plain = prepare_rows(
        collate([replace(group, start=replace(group.start, weight=1.0)) for group in groups]), None, algorithm
    ).rows.loss_weights_BT
    torch.testing.assert_close(weighted[:, 0] / plain[:, 0], torch.tensor([0.5, 0.5, 1.5, 1.5]))
    assert collate(groups).group_weight_B.tolist() == [0.5, 0.5, 1.5, 1.5]
    assert collate([replace(groups[0], start=Start(0, "p"))]).group_weight_B is None


def test_the_candidates_of_a_data_set_follow_each_other():
    """Each row is a candidate once before any row is one twice."""
    looked_at = []

    class Recorded(Rows):
        def draw(self, seed, step, count, *, first=0, before=None):
            starts = super().draw(seed, step, count, first=first, before=before)
            looked_at.extend(start.prompt for start in starts)
            return starts

    run(ByExpectedSignal(candidates=4), Recorded(60), lambda start: [0.0, 1.0], steps=5, count=3)
    assert sorted(looked_at) == sorted(f"row {i}" for i in range(60))
