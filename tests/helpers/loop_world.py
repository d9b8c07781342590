"""A run of the loop on a table of action values: every part at once."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from covey.core import schedules
from covey.data import Group, Start, StepRecord, collate
from covey.runtime.optimizer import MasterAdamW
from covey.train.collect import fixed_size
from covey.train.learners import Coefficient
from covey.train.loop import train
from covey.train.state import Components, LoopConfig, Progress
from helpers.gradients import make
from helpers.tabular_policy import ToyPolicy, rollout
from helpers.updates import learners_of


@dataclass
class World:
    """Every part of a run at once: the sampler tries every action in turn, the reward is the action's number."""

    rewards: list[float] = field(default_factory=lambda: [0.0, 1.0, 2.0, 3.0])
    recorded: list[tuple[int, dict[str, float], list[Group]]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    saved: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    bests: list[int] = field(default_factory=list)  # the best step with each checkpoint
    refreshed: list[int] = field(default_factory=list)
    version: int = 0

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        assert before == (step - 1) * count + first
        return [Start(index, prompt=(seed, step, index)) for index in range(first, first + count)]

    def held_out(self, count: int) -> list[Start]:
        return []

    def sample(self, starts, group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        assert first_rollout == 0
        assert all(start.prompt[1] == step for start in starts)
        return [
            Group(start, [replace(rollout([action], None), version=self.version) for action in range(group_size)])
            for start in starts
        ]

    def refresh(self, version: int) -> None:
        self.version = version
        self.refreshed.append(version)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def grade(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for item, reward in zip(group.rollouts, self.rewards, strict=True):
                item.reward = reward
        return groups

    def record(self, record: StepRecord) -> None:
        self.recorded.append((record.step, record.metrics, list(record.groups)))
        self.records.append(record)

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        self.saved.append((step, state | {"progress": dict(state["progress"])}))
        self.bests.append(best)


@dataclass
class PolicyWorld:
    """Tries every action of every start, with its log-probability under the policy. The reward is the action's number,
    so that the policy moves steadily.
    """

    policy: ToyPolicy
    recorded: list[dict[str, float]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)

    def draw(self, seed: int, step: int, count: int, **_: Any) -> list[Start]:
        return [Start(index, prompt=index) for index in range(count)]

    def held_out(self, count: int) -> list[Start]:
        return []

    def sample(self, starts, group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        groups = [Group(s, [rollout([a], None, context=s.index) for a in range(group_size)]) for s in starts]
        with torch.no_grad():
            logprobs_BT = self.policy.evaluate(collate(groups)).logprobs_BT
        for item, logprob in zip((r for g in groups for r in g.rollouts), logprobs_BT[:, 0].tolist(), strict=True):
            item.behavior_logprobs = [logprob]
        return groups

    def refresh(self, version: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def grade(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for item in group.rollouts:
                item.reward = float(item.actions[0])
        return groups

    def record(self, record: StepRecord) -> None:
        self.recorded.append(record.metrics)

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        self.saved.append(copy.deepcopy(state))

    def series(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.recorded]


def build(world: World, steps: int, **changes: Any) -> tuple[Components, LoopConfig]:
    policy = ToyPolicy(seed=None)
    parts = Components(
        task=world, sampler=world, grader=world, policy=policy, algorithm=make("grpo"),
        learners=learners_of(policy, MasterAdamW(policy.module, lr=0.1), make("grpo")),
        kl_coefficient=Coefficient(schedules.constant(0.0)), observers=[world], checkpoints=world,
    )  # fmt: skip
    settings = LoopConfig(steps=steps, seed=7, starts_per_step=2, group_size=fixed_size(4))
    return replace(parts, **{k: v for k, v in changes.items() if hasattr(parts, k)}), replace(
        settings, **{k: v for k, v in changes.items() if hasattr(settings, k)}
    )


def never() -> bool:
    return False


def go(parts: Components, settings: LoopConfig, progress: Progress | None = None) -> Progress:
    progress = progress or Progress()
    train(parts, settings, progress, should_stop=lambda: False)
    return progress
