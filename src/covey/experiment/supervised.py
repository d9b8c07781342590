"""What the builders of `covey sft` and of `covey reward-model train` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.experiment.advice import Finished
from covey.experiment.build import Evaluation
from covey.tracking.console import Display, describe_size
from covey.tracking.diagnosis import conclusion
from covey.tracking.run_store import RunStore, read_metrics
from covey.tracking.wording import Wording
from covey.train.metrics import Clock


class SupervisedBuilder:
    """Builder of a training on examples; a base of `covey.experiment.build.ExperimentBuilder`."""

    name = "language"
    score_kind = "score"
    score_name = "loss"
    has_rollouts = False
    show_rollouts_every = 0
    wording: Wording
    prefix: str  # first part of its metrics' names

    def tracked(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        return {f"{self.prefix}/held_out_{name}": value for name, value in _measured(evaluations).items()}

    def results(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> dict[str, Any]:
        losses = {"before": _measured(before).get("loss"), "after": _measured(after).get("loss")}
        return {"evaluations": [], "held_out_loss": losses}

    def losses(self, store: RunStore) -> dict[str, Any]:
        """The losses of the first and of the last step, for the summary."""
        records = [record for record in read_metrics(store.run_dir) if f"{self.prefix}/loss" in record]
        ends = {"first": records[:1], "last": records[-1:]}
        return {"loss": {name: record[f"{self.prefix}/loss"] for name, found in ends.items() for record in found}}

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        """Show the result in one sentence, and the diagnosis."""
        held_out, loss = summary["held_out_loss"], summary["loss"]
        words = f"loss of the first step {loss['first']:.4f}, of the last {loss['last']:.4f}" if loss else ""
        if held_out["before"] is not None and held_out["after"] is not None:
            words = f"held-out loss {held_out['before']:.4f} before, {held_out['after']:.4f} after"
        display.note(f"{words}. Everything is in {run.run_dir}{describe_size(Path(run.run_dir))}")
        display.note(conclusion(summary))

    def draw(self, store: RunStore) -> None:
        """Nothing to draw."""

    def drawable(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to end."""


def _measured(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    return {name: value for one in evaluations for name, value in one.items() if name != "seconds"}


class HeldOutExamples:
    """Evaluates a model on held-out examples: before training, after each epoch, and at the end."""

    def __init__(
        self, builder: SupervisedBuilder, measured: Callable[[], dict[str, float]], every: int, display: Display
    ) -> None:
        """
        Args:
            builder: names the metrics.
            measured: measures the model; {} without held-out examples.
            every: optimizer steps of an epoch.
            display: shows the evaluation before training.
        """
        self._builder, self._measured, self._every, self._display = builder, measured, every, display
        self._last: dict[str, float] | None = None  # after the last epoch

    def due(self, step: int) -> dict[str, float]:
        """The metrics after a step that ends an epoch."""
        if step % self._every:
            return {}
        self._last = self._measured()
        return self._builder.tracked([self._last])

    def measure(self, label: str) -> list[Evaluation]:
        """The evaluation before or after training."""
        clock = Clock()
        found = self._measured() if self._last is None else self._last
        if not found:
            return []
        if label == "before":
            self._display.note(f"before training: held-out loss {found['loss']:.4f}")
        return [found | {"seconds": clock.total()}]
