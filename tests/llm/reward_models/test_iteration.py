"""The reward model of an iterative run: what it is trained on, where it begins, what is measured and recorded."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.config import IterationConfig, RewardConfig
from covey.config.sft import RewardModelConfig, RewardModelKind
from covey.data import Group
from covey.experiment.reward_models import build_reward_trainer
from covey.llm.reward_models import training as module
from covey.llm.reward_models.examples import LabelObjective
from covey.llm.reward_models.graded_groups import GradeSource
from covey.llm.reward_models.model import RewardModel
from covey.llm.reward_models.reward import ModelReward
from covey.llm.reward_models.training import IteratedRewardModel, Record
from covey.llm.rewards.weighted_reward import WeightedReward
from helpers.graded import group, start
from helpers.reward_models import tiny_reward_model
from helpers.step_records import step_record

GROUP = 4  # completions of a step


class Monitor:
    def __init__(self) -> None:
        self.records: list[Record] = []

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda count: None

    def record(self, records: Sequence[Record], *, restored: bool = False) -> None:
        self.records = list(records)


def step_of(step: int) -> list[Group]:
    """The graded completions of a step, with texts that no other step has."""
    made = group(start(0, "2+3="), *(f"{step} {number}" for number in range(GROUP)))
    return [replace(made, rollouts=[replace(one, score=float(n % 2)) for n, one in enumerate(made.rollouts)])]


class Model:
    """A reward model whose recipe has the weights of seed 0."""

    def __init__(self, **fields: Any) -> None:
        settings = IterationConfig(**{"steps": 2, "reward_model_learning_rate": 1e-2} | fields)
        self.runner = ModelReward(RewardConfig(model="the recipe's"))
        self.monitor = Monitor()
        config = RewardModelConfig(batch_size=2, learning_rate=1e-2, schedule="constant", seed=5)
        proxy = WeightedReward("reward_model", self.runner, {})
        self.trained = IteratedRewardModel(
            settings, config, GradeSource(5, 8), proxy, self.load,
            lambda model: build_reward_trainer(model, config, LabelObjective()),
            lambda number: step_of(1000 + number), self.monitor,
        )  # fmt: skip

    def load(self) -> RewardModel:
        self.runner._model = tiny_reward_model(RewardModelKind.OUTCOME)
        return self.runner.loaded()

    def iterate(self, iterations: int, *, first: int = 1, should_stop: Callable[[], bool] = lambda: False) -> None:
        for number in range(first, first + iterations):
            for step in (2 * number - 1, 2 * number):
                self.trained.record(step_record(step, {}, step_of(step)))
            self.trained.update(should_stop)

    def weights(self) -> Tensor:
        return torch.cat([one.detach().flatten().clone() for one in self.runner.loaded().module.parameters()])


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of every training."""
    found: list[list[str]] = []
    train = module.train_epochs

    def record(trainer: Any, examples: Sequence[Any], config: Any, **options: Any) -> int:
        found.append([one.example.completion for one in examples])
        return train(trainer, examples, config, **options)

    monkeypatch.setattr(module, "train_epochs", record)
    return found


def steps_in(texts: list[str]) -> list[int]:
    return sorted(int(text.split()[0]) for text in texts)


def test_a_training_has_the_iteration_s_completions_and_a_fraction_of_the_history(trained_on: list[list[str]]) -> None:
    model = Model(replay_fraction=0.5)
    model.iterate(3)
    assert steps_in(trained_on[0]) == [1] * GROUP + [2] * GROUP
    assert steps_in(trained_on[1]) == sorted([1, 2, 3, 4] * GROUP)  # half of it is all that there was
    new, old = trained_on[2][: 2 * GROUP], trained_on[2][2 * GROUP :]
    assert steps_in(new) == [5] * GROUP + [6] * GROUP
    assert len(old) == 2 * GROUP
    assert len(set(old)) == 2 * GROUP
    assert set(steps_in(old)) <= {1, 2, 3, 4}
    assert [(one["examples"], one["replayed"]) for one in model.monitor.records] == [(8, 0), (16, 8), (16, 8)]
    assert [(one["iteration"], one["step"]) for one in model.monitor.records] == [(1, 2), (2, 4), (3, 6)]


def test_training_goes_on_or_begins_anew(trained_on: list[list[str]]) -> None:
    """With the same data twice, a model that begins again ends twice with the same weights in the same order."""
    going, again = Model(replay_fraction=0.0), Model(replay_fraction=0.0, restart_reward_model=True)
    begun = going.weights()
    going.iterate(1)
    again.iterate(1)
    first = going.weights()
    assert not torch.equal(first, begun)
    assert torch.equal(again.weights(), first)
    going.iterate(1, first=2)
    again.iterate(1, first=2)
    assert float((going.weights() - begun).norm()) > 1.2 * float((again.weights() - begun).norm())


def test_a_frozen_model_is_measured_only(trained_on: list[list[str]]) -> None:
    model = Model(reward_model_epochs=0)
    begun = model.weights()
    model.iterate(2)
    assert torch.equal(model.weights(), begun)
    assert not trained_on
    assert model.trained.state_dict()["trainer"] == {}
    for record in model.monitor.records:
        assert record["before"] == record["after"]
        assert {"proxy_reward", "rank_agreement", "accuracy", "auc", "calibration_error"} <= record["before"].keys()
        assert record["true_reward"] == 0.5
        assert (record["examples"], record["optimizer_steps"]) == (0, 0)


def test_the_quality_is_that_of_the_rewards() -> None:
    """By hand, from the rewards of the four completions: 0 and 2 are wrong, 1 and 3 right."""
    model = Model(reward_model_epochs=0)
    model.iterate(1)
    proxy = WeightedReward("reward_model", model.runner, {})
    rewards = [result.value for result in proxy.evaluate(step_of(1001))]
    agreeing = sum(rewards[right] > rewards[wrong] for right in (1, 3) for wrong in (0, 2))  # type: ignore[operator]
    (record,) = model.monitor.records
    assert record["before"]["proxy_reward"] == pytest.approx(sum(rewards) / 4)  # type: ignore[arg-type]
    assert record["before"]["rank_agreement"] == agreeing / 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_stopped_training_continues_to_the_same_bits(stop_after: int) -> None:
    whole, stopped = Model(), Model()
    whole.iterate(2)
    stopped.iterate(1)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == stop_after

    stopped.iterate(1, first=2, should_stop=stop)
    assert stopped.trained.iterations == 1
    fresh = Model()
    fresh.trained.load_state_dict(copy.deepcopy(stopped.trained.state_dict()))
    assert fresh.monitor.records == stopped.monitor.records
    fresh.trained.update(lambda: False)
    assert torch.equal(fresh.weights(), whole.weights())
    assert fresh.monitor.records == whole.monitor.records
    assert fresh.trained.state_dict()["history"] == whole.trained.state_dict()["history"]


def test_an_iteration_without_examples_trains_nothing() -> None:
    model = Model()
    begun = model.weights()
    model.trained.record(step_record(1, {}, [group(start(0, "2+3="), "5")]))  # not graded
    model.trained.update(lambda: False)
    assert torch.equal(model.weights(), begun)
    assert model.trained.iterations == 1
