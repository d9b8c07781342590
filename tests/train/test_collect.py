"""How the groups of a step come together: sizes, budgets, tries, what is dropped, and that all of it is counted."""

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core import schedules
from covey.data import Group, Start, StepRecord
from covey.runtime.optimizer import MasterAdamW
from covey.runtime.rng import uniforms
from covey.train.collect import (
    AdaptiveGroups,
    Collector,
    DynamicSampling,
    FixedGroups,
    LogGroupSizes,
    StepGroups,
    fixed_size,
    linear_size,
)
from covey.train.learners import Coefficient
from covey.train.loop import collect, train, train_step
from covey.train.metrics import Clock
from covey.train.state import Components, LoopConfig, Progress
from helpers.gradients import make
from helpers.tabular_policy import CONTEXTS, ToyPolicy, rollout
from helpers.updates import learners_of

SEED = 7


@dataclass
class World:
    """Starts whose rollouts are right with a chance of their own; the chances are gone through in turn. Notes calls."""

    chances: list[float]
    draws: list[tuple[int, int, int]] = field(default_factory=list)  # count, first, before
    calls: list[tuple[int, int, int]] = field(default_factory=list)  # starts, group size, first rollout
    recorded: list[tuple[dict[str, float], list[Group]]] = field(default_factory=list)
    version: int = 0

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        assert before is not None
        self.draws.append((count, first, before))
        return [Start(first + place, prompt=before + place) for place in range(count)]

    def held_out(self, count: int) -> list[Start]:
        return []

    def sample(self, starts, group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        self.calls.append((len(starts), group_size, first_rollout))
        assert starts
        assert group_size > 0
        return [
            Group(start, [self.made(start, step, first_rollout + number) for number in range(group_size)])
            for start in starts
        ]

    def made(self, start: Start, step: int, number: int):
        """Its action is its number; its text says how the start's coin fell."""
        right = uniforms(SEED, step, start.index, number, 0)[0] < self.chances[start.prompt % len(self.chances)]
        made = rollout([number % 5], None, context=start.prompt % CONTEXTS)
        made.text = f"{start.index}/{number} {'right' if right else 'wrong'}"
        return made

    def grade(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for item in group.rollouts:
                assert item.reward is None, "graded twice"
                item.reward = item.score = float(item.text.endswith("right"))
        return groups

    def refresh(self, version: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def record(self, record: StepRecord) -> None:
        self.recorded.append((record.metrics, list(record.groups)))

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None: ...


def build(
    world: World,
    way: Collector,
    *,
    starts: int = 4,
    size: int = 8,
    last: int | None = None,
    steps: int = 10,
    **changes: Any,
):
    policy = ToyPolicy(seed=None)
    parts = Components(
        task=world, sampler=world, grader=world, policy=policy, algorithm=make("grpo"),
        learners=learners_of(policy, MasterAdamW(policy.module, lr=0.1), make("grpo")),
        kl_coefficient=Coefficient(schedules.constant(0.0)), observers=[world], checkpoints=world,
        collector=way if last is None else LogGroupSizes(way),
    )  # fmt: skip
    group_size = fixed_size(size) if last is None else linear_size(size, last, steps)
    settings = LoopConfig(steps=steps, seed=SEED, starts_per_step=starts, group_size=group_size, **changes)
    return parts, settings


def gathered(world: World, way: Collector, *, step: int = 1, drawn: int = 0, **sizes: int) -> StepGroups:
    parts, settings = build(world, way, **sizes)
    return collect(parts, settings, Progress(step=step - 1, starts=drawn), Clock())


def texts(group: Group) -> list[str]:
    return [item.text for item in group.rollouts]


def varies(group: Group) -> bool:
    return len({item.reward for item in group.rollouts}) > 1


# ---- fixed and scheduled ----


def test_a_fixed_size_samples_every_group_once():
    world = World([0.5])
    found = gathered(world, FixedGroups(), drawn=40, step=3)
    assert world.calls == [(4, 8, 0)]
    assert world.draws == [(4, 0, 40)]
    assert [len(group.rollouts) for group in found.groups] == [8] * 4
    assert found.unselected == found.groups == found.all_groups
    assert found.metrics == {}
    assert found.dropped == []


@pytest.mark.parametrize(("first", "last", "steps"), [(16, 128, 100), (4, 5, 2), (32, 8, 7), (6, 6, 3), (2, 90, 1000)])
def test_the_schedule_begins_and_ends_exactly_and_moves_one_way(first, last, steps):
    _, settings = build(World([0.5]), FixedGroups(), size=first, steps=steps, last=last)
    sizes = [settings.group_size(step) for step in range(1, steps + 1)]
    assert (sizes[0], sizes[-1]) == (first, last)
    assert sizes == sorted(sizes, reverse=last < first)
    straight = [first + (last - first) * (step - 1) / (steps - 1) for step in range(1, steps + 1)]
    assert max(abs(size - exact) for size, exact in zip(sizes, straight, strict=True)) <= 0.5


def test_a_scheduled_size_is_sampled_and_reported():
    world = World([0.5])
    parts, settings = build(world, FixedGroups(), size=4, steps=3, last=12)
    train(parts, settings, Progress(), should_stop=lambda: False)
    assert [call[1] for call in world.calls] == [4, 8, 12]
    assert [metrics["groups/size_mean"] for metrics, _ in world.recorded] == [4, 8, 12]
    assert [metrics["groups/size_max"] for metrics, _ in world.recorded] == [4, 8, 12]


# ---- adaptive ----


def adaptive(first: int, most: int = 0) -> AdaptiveGroups:
    return AdaptiveGroups(first, most)


@pytest.mark.slow
@example(chances=[0.5, 0.5, 0.0], first=6, size=1, most=30, step=1)  # 3 rollouts are left for 2 groups
@given(
    chances=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=9),
    first=st.integers(2, 6),
    size=st.integers(0, 12),
    most=st.integers(0, 30),
    step=st.integers(1, 50),
)
def test_the_budget_is_spent_on_what_varies_and_never_exceeded(chances, first, size, most, step):
    size, most = first + size, first + size + most
    world, starts = World(chances), len(chances)
    found = gathered(world, adaptive(first, most), starts=starts, size=size, step=step)
    sizes = [len(group.rollouts) for group in found.groups]
    unspent = found.metrics["groups/unused_budget"]
    assert sum(sizes) + unspent == starts * size
    assert unspent >= 0
    assert max(sizes) <= most
    live = [group for group in found.groups if len({item.reward for item in group.rollouts[:first]}) > 1]
    assert all(len(group.rollouts) == first for group in found.groups if group not in live)
    assert len({len(group.rollouts) for group in live}) <= 1, "live groups get the same"
    if live and max(sizes) < most:
        assert unspent < len(live), "only what cannot be split evenly is left"
    assert len(world.calls) <= 2
    assert [group.start.index for group in found.groups] == list(range(starts))
    assert found.metrics["groups/size_mean"] == sum(sizes) / starts
    assert found.metrics["groups/size_max"] == max(sizes)


def test_a_group_that_grew_is_the_one_that_was_sampled_at_once():
    chances = [0.0, 0.5, 0.6, 1.0]
    found = gathered(World(chances), adaptive(3))
    grown = [group for group in found.groups if len(group.rollouts) > 3]
    assert grown
    at_once = gathered(World(chances), FixedGroups(), size=len(grown[0].rollouts))
    for group in found.groups:
        assert texts(group) == texts(at_once.groups[group.start.index])[: len(group.rollouts)]


def test_without_further_words_a_group_grows_to_four_times_the_size():
    world = World([0.5] + [0.0] * 15)
    steps = range(1, 12)
    largest = [gathered(world, adaptive(4), starts=16, size=4 + 2, step=step).metrics for step in steps]
    assert {metrics["groups/size_max"] for metrics in largest} == {4, 24}
    assert {metrics["groups/unused_budget"] for metrics in largest} == {32, 32 - 20}


def test_where_no_group_varies_the_rest_is_not_spent():
    world = World([0.0, 1.0])
    found = gathered(world, adaptive(4))
    assert world.calls == [(4, 4, 0)]
    assert found.metrics["groups/unused_budget"] == 4 * 4
    assert found.metrics["groups/size_max"] == 4


def test_the_budget_of_an_adaptive_step_follows_the_schedule():
    world = World([0.5])
    parts, settings = build(world, adaptive(4), starts=4, size=4, steps=5, last=20)
    for step in range(1, 6):
        found = collect(parts, settings, Progress(step=step - 1), Clock())
        rollouts = sum(len(group.rollouts) for group in found.groups)
        assert rollouts + found.metrics["groups/unused_budget"] == 4 * (4, 8, 12, 16, 20)[step - 1]


def test_means_are_those_of_the_first_round():
    """Further rollouts go where rewards vary, so a mean over all would be drawn toward one half."""
    world = World([0.95, 0.9])
    parts, settings = build(world, adaptive(4), starts=8, size=16)
    record = train_step(parts, settings, Progress())
    metrics, groups = record.metrics, record.groups
    first = [item.reward for group in groups for item in group.rollouts[:4]]
    everything = [item.reward for group in groups for item in group.rollouts]
    assert metrics["reward/mean"] == metrics["score/mean"] == pytest.approx(sum(first) / 32)
    assert sum(everything) / len(everything) != pytest.approx(sum(first) / 32)
    assert metrics["decisions/sampled"] == len(everything)


# ---- redraws ----


def test_a_group_that_varies_ends_the_tries():
    world = World([1.0, 0.5, 0.5, 0.0, 0.5, 0.5])
    found = gathered(world, DynamicSampling(3), drawn=12, step=4)
    assert world.draws == [(4, 0, 12), (2, 4, 16)]  # exactly what is missing, and on from there
    assert world.calls == [(4, 8, 0), (2, 8, 0)]
    assert [group.start.index for group in found.groups] == [1, 2, 4, 5]
    assert [(group.start.index, group.dropped) for group in found.dropped] == [(0, True), (3, True)]
    assert [group.start.index for group in found.all_groups] == list(range(6))
    assert found.unselected == found.all_groups
    assert found.metrics == {"groups/drawn": 6, "groups/resamples": 1}


@pytest.mark.parametrize("resamples", [1, 2, 5])
def test_where_no_group_ever_varies_the_tries_are_bounded_and_the_last_stay(resamples):
    world = World([0.0, 1.0])
    found = gathered(world, DynamicSampling(resamples))
    assert len(world.calls) == 1 + resamples
    assert [group.start.index for group in found.groups] == [4 * resamples + place for place in range(4)]
    assert not any(group.dropped for group in found.groups)
    assert len(found.dropped) == 4 * resamples
    assert found.metrics == {"groups/drawn": 4 * (1 + resamples), "groups/resamples": resamples}


def test_a_step_may_end_with_fewer_groups():
    world = World([0.5, 0.0, 0.0, 0.0])
    found = gathered(world, DynamicSampling(1))
    assert world.draws == [(4, 0, 0), (3, 4, 4)]
    assert [group.start.index for group in found.groups] == [0, 4]
    assert len(found.dropped) == 5


@pytest.mark.slow
@given(
    chances=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=9),
    resamples=st.integers(1, 4),
    starts=st.integers(1, 5),
    step=st.integers(1, 50),
)
def test_every_live_group_is_kept_and_every_drawn_group_is_somewhere(chances, resamples, starts, step):
    world = World(chances)
    found = gathered(world, DynamicSampling(resamples), starts=starts, step=step, size=4)
    drawn = [group.start.index for group in found.all_groups]
    assert drawn == list(range(sum(count for count, _, _ in world.draws)))
    assert not any(varies(group) for group in found.dropped)
    assert all(group.dropped for group in found.dropped)
    assert len(found.groups) <= starts
    assert len(world.draws) <= 1 + resamples
    if any(varies(group) for group in found.all_groups):
        assert all(varies(group) for group in found.groups)
    else:
        assert len(found.groups) == starts
    if len(found.groups) < starts:
        assert len(world.draws) == 1 + resamples


class Nearly(World):
    """Rewards that differ by rounding, and rollouts whose grading failed."""

    def grade(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for number, item in enumerate(group.rollouts):
                item.reward = {0: 0.3 + 1e-8 * number, 1: None if number % 2 else 1.0, 2: None, 3: 0.1 * number}[
                    group.start.prompt % 4
                ]
        return groups


def test_rounding_and_failed_grades_make_no_group_live():
    found = gathered(Nearly([0.5]), DynamicSampling(1))
    assert [group.start.index for group in found.groups] == [3]


def test_everything_sampled_is_counted_and_recorded():
    world, progress = World([0.0, 0.5, 1.0, 0.5]), Progress()
    parts, settings = build(world, DynamicSampling(1), steps=2)
    train(parts, settings, progress, should_stop=lambda: False)
    metrics, groups = world.recorded[0]
    dropped = [group for group in groups if group.dropped]
    assert 0 < len(dropped) < len(groups)
    assert all(metrics["decisions/sampled"] == 8 * len(groups) for metrics, groups in world.recorded)
    assert progress.decisions == sum(8 * len(groups) for _, groups in world.recorded)
    assert progress.starts == sum(len(groups) for _, groups in world.recorded)
    assert [before for _, first, before in world.draws if first == 0] == [0, len(groups)]
    rewards = [item.reward for group in groups for item in group.rollouts]
    assert metrics["reward/mean"] == sum(rewards) / len(rewards)
    assert metrics["groups/zero_advantage_fraction"] == pytest.approx(len(dropped) / len(groups))
    assert metrics["update/rows"] == pytest.approx(1 - len(dropped) / len(groups))
    assert metrics["decisions/trained"] == 8 * (len(groups) - len(dropped))


def test_a_step_whose_groups_are_all_dead_updates_nothing_and_goes_on():
    world, progress = World([0.0]), Progress()
    parts, settings = build(world, DynamicSampling(2), steps=7)
    before = parts.policy.table.clone()
    train(parts, settings, progress, should_stop=lambda: False)
    assert progress.step == 7
    assert bool((parts.policy.table == before).all())
    assert [metrics["groups/zero_advantage_fraction"] for metrics, _ in world.recorded] == [1.0] * 7
    assert [metrics["update/rows"] for metrics, _ in world.recorded] == [0.0] * 7


def test_dropped_groups_change_no_gradient():
    """The update sees the kept groups as if no other had been drawn."""
    chances = [0.0, 0.5, 1.0, 0.5]
    parts, settings = build(World(chances), DynamicSampling(1))
    groups = train_step(parts, settings, Progress()).groups
    kept = [replace(group, rollouts=list(group.rollouts)) for group in groups if not group.dropped]

    class Only(World):
        def draw(self, *_: Any, **__: Any) -> list[Start]:
            return [group.start for group in kept]

        def sample(self, *_: Any) -> list[Group]:
            return kept

        def grade(self, groups: list[Group]) -> list[Group]:
            return groups

    alone, plain = build(Only(chances), FixedGroups(), starts=len(kept))
    train_step(alone, plain, Progress())
    assert bool((alone.policy.table == parts.policy.table).all())


@pytest.mark.parametrize(
    ("way", "last"), [(FixedGroups(), None), (adaptive(4), None), (DynamicSampling(2), None), (FixedGroups(), 3)]
)
def test_the_same_step_is_collected_again_the_same(way, last):
    chances = [0.0, 0.4, 0.9, 1.0, 0.2]
    one, other = (gathered(World(chances), way, step=5, drawn=30, last=last) for _ in range(2))
    assert one == other
    assert one != gathered(World(chances), way, step=6, drawn=30, last=last)


# ---- what the selection does to the gradient ----


def expected_weight(chance: float, way: str, first: int, more: int) -> float:
    """E[sum_i (r_i - mean(r)) score_i] / dp, of right-or-wrong rewards, by listing every outcome.

    Given its reward, a rollout's score is on average dp / p if right and -dp / (1 - p) if wrong.
    """
    total = 0.0
    for rewards in product([0, 1], repeat=first + more):
        used = rewards
        if way == "adaptive" and len(set(rewards[:first])) == 1:
            used = rewards[:first]
        mean = sum(used) / len(used)
        score = {1: 1 / chance, 0: -1 / (1 - chance)}
        probability = math.prod(chance if reward else 1 - chance for reward in rewards)
        total += probability * sum((reward - mean) * score[reward] for reward in used)
    return total


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.8])
def test_selection_changes_how_much_a_prompt_counts_but_not_its_direction(chance):
    """docs/groups.md: a fixed group of n weighs n - 1 whatever p; an adaptive one less where p is near 0 or 1."""
    fixed = expected_weight(chance, "fixed", 4, 6)
    assert fixed == pytest.approx(9)
    live = 1 - chance**4 - (1 - chance) ** 4
    selected = expected_weight(chance, "adaptive", 4, 6)
    later = 6 * live * (1 - 1 / 10)  # the second round is independent of what chose it
    assert later < selected < fixed
