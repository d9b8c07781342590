"""Measures what recording costs a training step: with rollouts, with every token, and without, in turn in one run.

    .venv/bin/python benchmarks/recording.py              about three minutes on two cores
    .venv/bin/python benchmarks/recording.py --rounds 20

The cost of a step is the time of its recorder, of the rollouts file and of the line of metrics, as a fraction of the
rest of the step. It is measured in every step, so it does not depend on how much steps differ. The last column compares
the medians of whole steps, which differ by more than recording costs.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from covey.config import RecordConfig, RunConfig
from covey.config.recipe import read_recipe
from covey.data import RolloutCredit
from covey.experiment.run import open_builder
from covey.tracking.console import Display
from covey.tracking.run_store import RunStore
from covey.train.collect import StepGroups, fixed_size
from covey.train.loop import train_step
from covey.train.prepare import Prepared
from covey.train.record import Recorder, RolloutRecorder
from covey.train.state import Components, LoopConfig, Progress

NOTHING, ROLLOUTS, TOKENS = "nothing", "rollouts", "rollouts and tokens"


class RecordNothing(RolloutRecorder):
    """A recorder that computes nothing."""

    def credits(self, collected: StepGroups, prepared: Prepared) -> list[list[RolloutCredit]]:
        unknown = RolloutCredit(None, None)
        return [[unknown] * len(group.rollouts) for group in collected.all_groups]


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and the bytes that it wrote."""

    recording: float
    whole: float
    size: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="arithmetic_grpo")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind")
    parser.add_argument("--group-size", type=int, default=10, help="the recipe's is 6 to 16")
    options = parser.parse_args()
    config = read_recipe(options.recipe, ["--evaluation.problems", "2", "--steps", str(3 * options.rounds + 1)])
    assert isinstance(config, RunConfig)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, record=RecordConfig(tokens=True), run_dir=folder)
        steps = measure(config, options.rounds, options.group_size, Path(folder) / "run")
    report(steps, options)


def measure(config: RunConfig, rounds: int, group_size: int, run_dir: Path) -> dict[str, list[Step]]:
    """Train; each round has one step of each kind. A first step is left out."""
    builder = open_builder(config)
    steps: dict[str, list[Step]] = {NOTHING: [], ROLLOUTS: [], TOKENS: []}
    try:
        with RunStore(run_dir) as store:
            experiment = builder.build(store, Display(console=Console(quiet=True)))
            parts, progress = experiment.parts, Progress()
            assert isinstance(parts, Components)
            assert isinstance(experiment.settings, LoopConfig)
            settings = replace(experiment.settings, group_size=fixed_size(group_size))
            recorders: dict[str, Recorder] = {
                NOTHING: RecordNothing(),
                ROLLOUTS: RolloutRecorder(),
                TOKENS: parts.recorder,
            }
            parts.sampler.refresh(0)
            train_step(parts, settings, progress)
            for number in range(rounds):
                for kind, recorder in recorders.items():
                    began = time.perf_counter()
                    record = train_step(replace(parts, recorder=recorder), settings, progress)
                    trained = time.perf_counter()
                    if kind != NOTHING:
                        store.record(record)
                    ended = time.perf_counter()
                    recording = ended - trained + record.metrics["time/record"]
                    path = store.rollouts_path(record.step)
                    steps[kind].append(Step(recording, ended - began, path.stat().st_size if path.exists() else 0))
                    print(f"round {number + 1}, {kind}: {ended - began:.2f} s, recording {recording:.4f} s", flush=True)
    finally:
        builder.close()
    return steps


def report(steps: dict[str, list[Step]], options: argparse.Namespace) -> None:
    print(f"\n{options.recipe}, groups of {options.group_size}, {options.rounds} steps of each kind, medians")
    print(f"{'recorded':22}{'step':>10}{'recording':>12}{'cost':>9}{'bytes':>12}{'step / nothing':>16}")
    for kind, found in steps.items():
        cost = median(step.recording / (step.whole - step.recording) for step in found)
        whole = median(step.whole for step in found)
        ratio = whole / median(step.whole for step in steps[NOTHING])
        print(
            f"{kind:22}{whole:8.2f} s{median(step.recording for step in found):10.4f} s{cost:9.2%}"
            f"{median(step.size for step in found):12,.0f}{ratio:16.3f}"
        )


if __name__ == "__main__":
    main()
