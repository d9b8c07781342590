"""What `covey sft` and `covey reward-model train` share: a training on examples."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from covey.config import CheckpointConfig, ConfigError, UpdateConfig
from covey.config.fields import command
from covey.config.model_sources import MODEL_FOLDER
from covey.config.sft import SFT_ALGORITHM, SupervisedBase
from covey.data import Team
from covey.experiment import advice
from covey.experiment.advice import Finished
from covey.experiment.algorithm import build_optimizer
from covey.experiment.job import Evaluation, Experiment, ExperimentBuilder, build_checkpoints, resumed, team_for
from covey.runtime.device import Machine, build_machine, environment
from covey.runtime.distributed import Weights, exchange_json, is_sharded, joined_ranks, team_of
from covey.runtime.optimizer import learning_rate_schedule
from covey.runtime.variables import check_ranks
from covey.tracking.console import Display, RunResult, describe_size
from covey.tracking.diagnosis import conclusion
from covey.tracking.run_store import RunStore, read_metrics
from covey.train.metrics import Clock
from covey.train.pace import Pace
from covey.train.state import Limits
from covey.train.supervised import Criterion, SupervisedRun, SupervisedTrainer, train_supervised


class SupervisedBuilder(ExperimentBuilder):
    """Builder of a training on examples. `algorithm_name` is also the first part of its metrics' names."""

    command: str  # its words, such as "sft"
    patience: int  # epochs without a lower held-out loss, after which training ends; 0: never
    score_kind = "loss"
    has_rollouts = False
    show_rollouts_every = 0
    pace = Pace()

    def __init__(self, config: Any, data: Any, machine: Machine, parameters: int | None = None) -> None:
        """`data` is what `read` returns, `parameters` as for `team_for`."""
        self.config, self.data, self.machine, self.team = config, data, machine, team_for(config, parameters)

    @classmethod
    def read(cls, config: Any, run_dir: Path) -> Any:
        """The data of a training that is resumed; `inputs` has the checksums by which it knows them.

        Raises:
            ConfigError: for the first mistake in the config or the data.
        """
        raise NotImplementedError

    @classmethod
    def resume(cls, run_dir: Path, limits: Mapping[str, Any] = MappingProxyType({})) -> RunResult | None:
        """Continue a stopped training exactly, from its last checkpoint, or a finished one beyond its limits.

        Returns:
            the content of summary.json; None if it was stopped again.

        Raises:
            ConfigError: if there is none, it is finished, or its settings or data have changed.
        """
        with joined_ranks(), resumed(team_of(0), run_dir, cls.command, limits) as job:
            config: Any = job.config
            if job.store.finished() and not limits:
                more = command(*cls.command.split(), "--resume", run_dir, "--epochs", "N")
                raise ConfigError(
                    f"the training in {run_dir} is finished: its model is {run_dir / MODEL_FOLDER}; it goes on with "
                    f"{more}"
                )
            check_ranks(config, sft=cls.command == SFT_ALGORITHM)
            data = cls.read(config, job.store.shared_dir)
            job.refuse_changed(data.inputs)
            machine = build_machine(config.device, config.precision, config.threads)
            return job.run(cls(config, data, machine), data.inputs)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of examples."""
        raise NotImplementedError

    @property
    def per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        raise NotImplementedError

    def experiment(
        self,
        store: RunStore,
        display: Display,
        *,
        trainer: SupervisedTrainer,
        batches: Callable[[int], Iterator[Any]],
        measured: Callable[[], dict[str, float]],
        collect: Callable[[], Callable[[Path], None]],
        facts: Callable[[], dict[str, Any]],
        backend: dict[str, Any],
        checkpoint: CheckpointConfig,
    ) -> Experiment:
        """The components of the training.

        Args:
            trainer: the model with its optimizer.
            batches: the batches after so many steps.
            measured: the held-out metrics of the model; {} without held-out examples.
            collect: returns a function that writes the model into the run folder.
            facts: further keys of the summary.
            backend: what computes the model, as far as bits depend on it.
            checkpoint: when checkpoints are written, and which are kept.
        """
        check_same_data(self.data.inputs, self.team)
        last: list[dict[str, float]] = []  # measured after the last epoch

        def due(step: int) -> dict[str, float]:
            """The held-out metrics after a step that ends an epoch."""
            if step % self.per_epoch:
                return {}
            last[:] = [measured()]
            return self._named(last[0])

        def measure(label: str) -> list[Evaluation]:
            """The evaluation before or after training."""
            clock = Clock()
            (found,) = last or [measured()]
            if not found:
                return []
            if label == "before":
                display.note(f"before training: held-out loss {found['loss']:.4f}")
            count = int(found.get("count", self.counts["held_out"]))
            estimate = {"score": found["loss"], "low": None, "high": None, "count": count}
            return [estimate | {"seconds": clock.total(), "measured": found}]

        in_parts = any(map(is_sharded, trainer.optimizer.parameters.values()))
        parts = SupervisedRun(
            trainer=trainer,
            batches=batches,
            steps_per_epoch=self.per_epoch,
            evaluate=due,
            observers=() if self.team.rank else (store, display),
            checkpoints=build_checkpoints(store, checkpoint.keep, self.team, best=checkpoint.best, in_parts=in_parts),
        )
        limits = Limits(
            steps=self.config.steps,
            checkpoint_every=checkpoint.every,
            patience=self.patience or math.inf,
            keep_best=checkpoint.best,
            score_metric=f"{self.algorithm_name}/held_out_loss",
            lower_is_better=True,
            pace=self.pace,
        )
        machine = environment(self.machine.device, self.machine.dtype) | backend
        return Experiment(
            parts, limits, measure, collect, machine,
            lambda: facts() | {"examples": self.counts} | self._losses(store), train_supervised,
        )  # fmt: skip

    def tracked(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        return self._named(evaluations[0]["measured"]) if evaluations else {}

    def _named(self, measured: Mapping[str, float]) -> dict[str, float]:
        return {f"{self.algorithm_name}/held_out_{name}": value for name, value in measured.items()}

    def _losses(self, store: RunStore) -> dict[str, Any]:
        """The losses of the first and of the last step, for the summary."""
        name = f"{self.algorithm_name}/loss"
        losses = [record[name] for record in read_metrics(store.run_dir) if name in record]
        return {"loss": {"first": losses[0], "last": losses[-1]} if losses else {}}

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        """Show the result in one sentence, the diagnosis, and what the model is for."""
        loss = summary["loss"]
        words = f"loss of the first step {loss['first']:.4f}, of the last {loss['last']:.4f}" if loss else ""
        for one in summary["evaluations"]:
            words = f"held-out loss {one['before']['score']:.4f} before, {one['after']['score']:.4f} after"
        display.note(f"{words}. Everything is in {run.run_dir}{describe_size(Path(run.run_dir))}")
        display.note(conclusion(summary))
        if measures := self.measures():
            display.note(measures)
        display.note(advice.after_training(run, summary))

    def measures(self) -> str:
        """Further measures of the result, in one line."""
        return ""

    def draw(self, store: RunStore) -> None:
        """Nothing to draw."""


def check_same_data(inputs: dict[str, str], team: Team) -> None:
    """Compare the checksums of the examples that the ranks have read; every rank calls it.

    Raises:
        ConfigError: on every rank, if they differ.
    """
    first, *others = exchange_json(team, inputs)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ConfigError(f"rank {rank} has read other examples than rank 0: copy the same data to every machine")


def build_trainer(
    criterion: Criterion, module: nn.Module, config: SupervisedBase, update: UpdateConfig, steps: int, team: Team,
    weights: Weights, pace: Pace, restarts: Sequence[int] = (),
) -> SupervisedTrainer:  # fmt: skip
    """The trainer of a model.

    Args:
        criterion: the loss.
        module: the model, whose weights the ranks have divided by `weights`.
        config: with the learning rate and its schedule.
        update: with the other settings of the optimizer.
        steps: over which the learning rate falls.
        team: the ranks.
        pace: of the learning rate.
        restarts: steps after which a falling learning rate begins again.
    """
    optimizer = build_optimizer(module, replace(update, learning_rate=config.learning_rate), team, weights)
    rate = learning_rate_schedule(
        config.schedule, config.learning_rate, steps=steps, warmup_steps=config.warmup_steps, restarts=restarts
    )
    return SupervisedTrainer(criterion, optimizer, pace.over(rate), team)
