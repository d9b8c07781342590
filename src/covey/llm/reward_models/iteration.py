"""Trains the reward model of an iterative run on what the policy has sampled since the last training.

DeepSeekMath (arXiv 2402.03300), algorithm 1, line 11: continued training with a replay of earlier examples.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from covey.config import ConfigError, IterationConfig
from covey.config.sft import RewardModelConfig
from covey.data import ExampleTrainer, Group, RewardModelUpdater, StepRecord
from covey.llm.data.reward_examples import Example
from covey.llm.reward_models.examples import EncodedExample, encode_example
from covey.llm.reward_models.graded_groups import ExampleSource, decode_state, encode_state, graded_completions
from covey.llm.reward_models.model import RewardModel, ScoreScale
from covey.llm.reward_models.training import Metrics, evaluate, rank_agreement, train_epochs
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.runtime.rng import REPLAYING, batches_per_epoch, permutation

MOST_HISTORY = 50_000  # examples of earlier iterations, the newest ones

Record = dict[str, Any]


class Monitor(Protocol):
    """Shows and records the trainings of the reward model."""

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar; the function takes the number of items just finished."""

    def record(self, records: Sequence[Record], *, restored: bool = False) -> None:
        """Record all iterations so far, of which the last one is new unless they are those of a checkpoint."""


@dataclass
class Training:
    """A training that has begun."""

    before: dict[str, float]  # quality of the reward model before it
    losses: list[float]  # of the minibatches so far


class IteratedRewardModel(RewardModelUpdater):
    """Collects the examples of an iteration and trains the reward model on them.

    It is also a `covey.data.Observer` of the completions. If `reward_model_epochs`
    is 0, the model is frozen and only measured.

    The record of an iteration has these keys, and in `before` and `after` the quality before and after training:

        iteration, step                     its number, and that of its last step
        reward                              name of the reward model among the rewards
        examples, replayed                  number of examples, and of those from earlier iterations
        optimizer_steps, loss               their number and mean loss
        true_reward                         mean of the completions on which the model is measured

        accuracy, auc, calibration_error    of examples as those of training (`evaluate`)
        proxy_reward                        mean reward of the completions by the model, as the run gets it
        rank_agreement                      share of right and wrong completions of one prompt in the right order
    """

    def __init__(
        self,
        settings: IterationConfig,
        config: RewardModelConfig,
        source: ExampleSource,
        proxy: WeightedReward,
        load: Callable[[], RewardModel],
        trainer_of: Callable[[RewardModel], ExampleTrainer],
        sample: Callable[[int], list[Group]],
        monitor: Monitor,
    ) -> None:
        """
        Args:
            config: of the trainings.
            source: makes examples.
            proxy: the reward model as a term of the run's reward.
            load: loads the recipe's reward model into `proxy`.
            trainer_of: makes a trainer of a model, with a constant learning rate.
            sample: iteration -> completions of held-out problems by the current policy, graded.
            monitor: shows and records.
        """
        self.settings, self.config = settings, config
        self.iterations = 0
        self.records: list[Record] = []
        self._source, self._proxy, self._load, self._sample, self._monitor = source, proxy, load, sample, monitor
        self._trainer_of = trainer_of
        self._begin()
        self._step = 0  # last one
        self._new: list[Example] = []  # of this iteration
        self._history: list[Example] = []  # of earlier ones
        self._training: Training | None = None  # None: not begun

    def record(self, step: StepRecord) -> None:
        """Collect the examples of a step."""
        self._step = step.step
        if self.settings.reward_model_epochs:
            self._new += self._source.examples(step.groups, step.step)

    def update(self, should_stop: Callable[[], bool]) -> None:
        """Train the reward model on the new examples and some of the history."""
        number = self.iterations + 1
        groups = self._sample(number)
        held_out = self._source.examples(groups, self._step)
        if self._training is None:
            self._training = Training(self._quality(groups, held_out), [])
            if self.settings.restart_reward_model and self.settings.reward_model_epochs:
                self._begin()
        examples = _encoded(self._model, [*self._new, *self._replayed(number)])
        if all(self._train(trainer, examples, self._training.losses, should_stop) for trainer in self._trainers):
            self._finish(groups, held_out, examples)

    def save(self, folder: Path) -> None:
        """Write the reward model in the format of transformers."""
        self._model.save(folder)

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state is not copied. Frozen, the weights are those of the recipe's model and are left out."""
        return {
            "iterations": self.iterations,
            "step": self._step,
            "records": json.dumps(self.records),
            "new": encode_state(self._new),
            "history": encode_state(self._history),
            "training": json.dumps(None if self._training is None else asdict(self._training)),
            "scale": json.dumps(asdict(self._model.scale)),
            "trainer": {str(number): trainer.state_dict() for number, trainer in enumerate(self._trainers)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, bit for bit."""
        self.iterations, self._step = state["iterations"], state["step"]
        self.records = json.loads(state["records"])
        self._new, self._history = decode_state(state["new"]), decode_state(state["history"])
        training = json.loads(state["training"])
        self._training = None if training is None else Training(**training)
        self._model.scale = ScoreScale(**json.loads(state["scale"]))
        for number, trainer in enumerate(self._trainers):
            trainer.load_state_dict(state["trainer"][str(number)])
        self._monitor.record(self.records, restored=True)

    def _begin(self) -> None:
        """Load the recipe's reward model; unless it is frozen, with an optimizer."""
        self._model = self._load()
        self._trainers = [self._trainer_of(self._model)] if self.settings.reward_model_epochs else []

    def _replayed(self, number: int) -> list[Example]:
        """Examples of earlier iterations, so that they are `replay_fraction` of all; at most the whole history."""
        fraction = self.settings.replay_fraction
        count = round(fraction / (1 - fraction) * len(self._new))
        order = permutation(self.config.seed, number, 0, len(self._history), stream=REPLAYING)
        return [self._history[place] for place in sorted(order[:count])]

    def _train(
        self,
        trainer: ExampleTrainer,
        examples: Sequence[EncodedExample],
        losses: list[float],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Train from the minibatch after the last finished one; False if it was stopped."""
        number, epochs = self.iterations + 1, self.settings.reward_model_epochs
        total = epochs * batches_per_epoch(len(examples), self.config.batch_size)
        if not total:
            return True
        with self._monitor.progress(f"reward model, iteration {number}", total) as advance:
            advance(len(losses))

            def on_step(done: int, metrics: Metrics) -> bool:
                losses.append(metrics["reward_model/loss"])
                advance(1)
                return not should_stop()

            done = train_epochs(
                trainer, examples, self.config, epochs=epochs, on_step=on_step, done=len(losses), iteration=number
            )
        return done == total

    def _finish(self, groups: Sequence[Group], held_out: Sequence[Example], examples: Sequence[EncodedExample]) -> None:
        """Record a training, and begin the next iteration."""
        assert self._training is not None
        model, losses = self._model, self._training.losses
        model.measure_scale([row for one in examples for row in one.rows])
        self.iterations += 1
        record: Record = {
            "iteration": self.iterations,
            "step": self._step,
            "reward": self._proxy.name,
            "examples": len(examples),
            "replayed": max(0, len(examples) - len(self._new)),
            "optimizer_steps": len(losses),
            "before": self._training.before,
            "after": self._quality(groups, held_out) if losses else self._training.before,
        }
        grades = [one.grade for one in graded_completions(groups)]
        record |= {name: fmean(values) for name, values in (("true_reward", grades), ("loss", losses)) if values}
        self.records.append(record)
        self._history = [*self._history, *self._new][-MOST_HISTORY:]
        self._new, self._training = [], None
        self._monitor.record(self.records)

    def _quality(self, groups: Sequence[Group], held_out: Sequence[Example]) -> dict[str, float]:
        """Quality of the reward model on completions of the current policy."""
        results = self._proxy.evaluate(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scored = [result.value for result, rollout in zip(results, rollouts, strict=True) if rollout.score is not None]
        found: dict[str, float] = {}
        known = [value for value in scored if value is not None]
        if known:
            found["proxy_reward"] = fmean(known)
        if len(known) == len(scored):
            agreement = rank_agreement(torch.tensor(known), graded_completions(groups))
            found |= {} if agreement is None else {"rank_agreement": agreement}
        if encoded := _encoded(self._model, held_out):
            metrics = evaluate(self._model, encoded, self._source.objective).metrics
            found |= {name: metrics[name] for name in ("accuracy", "auc", "calibration_error") if name in metrics}
        return found


def _encoded(model: RewardModel, examples: Sequence[Example]) -> list[EncodedExample]:
    """The examples that the model can take: those that are not too long, and that its chat template does not refuse."""
    found = []
    for example in examples:
        with suppress(ConfigError):
            encoded = encode_example(example, model.encoder)
            if model.longest is None or encoded.tokens <= model.longest:
                found.append(encoded)
    return found
