"""Iterative GRPO: the order of steps, trainings of the reward model and checkpoints; stop and resume."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from covey.train.iterate import iterate
from covey.train.state import Progress, load_checkpoint
from helpers.loop_world import World, build, never


@dataclass
class Trained:
    """A reward model whose training has `parts` parts, of which an interruption leaves the rest."""

    world: World
    parts: int = 2
    iterations: int = 0
    done: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)

    def update(self, should_stop: Any) -> None:
        while self.done < self.parts:
            self.done += 1
            self.log.append(("part", len(self.world.recorded)))
            if should_stop() and self.done < self.parts:
                return
        self.done = 0
        self.iterations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"iterations": self.iterations, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iterations, self.done = state["iterations"], state["done"]


def test_the_reward_model_is_trained_after_each_iteration_and_saved() -> None:
    world, progress = World(), Progress()
    trained = Trained(world)
    parts, settings = build(world, 6, reward_model=trained, iteration_steps=2, checkpoint_every=100)
    iterate(parts, settings, progress, should_stop=never)
    assert progress.step == 6
    assert trained.iterations == 3
    assert trained.log == [("part", 2), ("part", 2), ("part", 4), ("part", 4), ("part", 6), ("part", 6)]
    saved = [(step, state["reward_model"]["iterations"]) for step, state in world.saved]
    assert saved == [(2, 0), (2, 1), (4, 1), (4, 2), (6, 2), (6, 3)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stop_after", range(1, 13))
def test_a_stopped_run_continues_where_it_was(stop_after: int) -> None:
    """Stopped at each question whether to stop, in steps and in trainings of the reward model."""
    whole, world = World(), World()
    expected = Trained(whole)
    whole_parts, settings = build(whole, 6, reward_model=expected, iteration_steps=2)
    iterate(whole_parts, settings, Progress(), should_stop=never)

    trained, asked = Trained(world), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= stop_after

    parts, settings = build(world, 6, reward_model=trained, iteration_steps=2)
    iterate(parts, settings, Progress(), should_stop=stop)
    log = trained.log
    if world.saved:
        state = world.saved[-1][1]
        fresh = Trained(world, log=log)
        again, settings = build(world, 6, reward_model=fresh, iteration_steps=2)
        again.policy.module.load_state_dict(parts.policy.module.state_dict())
        progress = load_checkpoint(again, state | {"progress": dict(state["progress"])})
    else:
        fresh, again, progress = trained, parts, Progress()
    iterate(again, settings, progress, should_stop=never)
    assert (progress.step, fresh.iterations) == (6, 3)
    assert log == expected.log
    assert again.policy.table.equal(whole_parts.policy.table)


def test_a_budget_that_ends_within_an_iteration_ends_the_run_without_a_training() -> None:
    world = World()
    trained = Trained(world)
    parts, settings = build(world, 6, reward_model=trained, iteration_steps=2, decision_budget=20)
    iterate(parts, settings, Progress(), should_stop=never)
    assert len(world.recorded) == 3
    assert trained.iterations == 1
