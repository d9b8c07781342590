"""LoRA beside training of all weights on the embedded model: memory, seconds a step, accuracy after the same tokens.

    .venv/bin/python benchmarks/lora.py                                           all; many hours on two cores
    .venv/bin/python benchmarks/lora.py --ranks 0 16 --learning-rates 3e-4 --seeds 0 --token-budget 5000   a part
    .venv/bin/python benchmarks/lora.py --show benchmarks/results/lora-cpu-DATE.json                       the table

Rank 0 trains all weights. Every run is a process of its own, one after the other, with the recipe arithmetic_grpo and
`--token-budget` sampled tokens, so all runs of a table have seen the same number of tokens. The accuracy is that of
greedy answers to held-out problems. A finished run is written to the output at once, and is not repeated.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from peers import RESULTS
from rich.console import Console
from rich.table import Table

RANKS = (0, 4, 16, 64)
LEARNING_RATES = {True: (1e-4, 3e-4, 1e-3), False: (1e-5, 3e-5, 1e-4)}  # with LoRA, of all weights
SEEDS = (0, 1, 2)
TOKEN_BUDGET = 150_000
STEPS = 1000  # more than the budget allows
FIRST_STEPS = 2  # not timed: memory is new to the process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="0: all weights")
    parser.add_argument("--learning-rates", type=float, nargs="+", help="of every rank; default: three for each kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--token-budget", type=int, default=TOKEN_BUDGET, help="sampled tokens of a run")
    parser.add_argument("--problems", type=int, default=256, help="held-out problems")
    parser.add_argument("--output", type=Path, default=RESULTS / f"lora-cpu-{datetime.now(UTC):%Y-%m-%d}.json")
    parser.add_argument("--show", type=Path, help="print the table of these results and run nothing")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(arguments.show.read_text())["runs"])
        return
    done: list[dict[str, Any]] = json.loads(arguments.output.read_text())["runs"] if arguments.output.exists() else []
    for settings in cases(arguments):
        if any(settings.items() <= run.items() for run in done):
            continue
        done.append(settings | train(settings))
        arguments.output.write_text(json.dumps({"runs": done, "environment": machine()}, indent=2) + "\n")
        print(json.dumps(done[-1]), flush=True)
    show(done)


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The settings of every run. The seeds change slowest, so a part of the runs is a table of fewer seeds."""
    for seed, rank in itertools.product(arguments.seeds, arguments.ranks):
        for rate in arguments.learning_rates or LEARNING_RATES[rank > 0]:
            yield {
                "rank": rank, "learning_rate": rate, "seed": seed, "token_budget": arguments.token_budget,
                "problems": arguments.problems,
            }  # fmt: skip


def machine() -> dict[str, Any]:
    """The environment on which the figures depend."""
    import torch

    from covey.runtime.device import choose_precision, environment

    cpu = torch.device("cpu")
    return environment(cpu, choose_precision("auto", cpu))


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run; its figures."""
    with tempfile.TemporaryDirectory(prefix="covey-lora-") as folder:
        words = [
            "--rank", settings["rank"], "--learning-rate", settings["learning_rate"], "--schedule", "constant",
            "--seed", settings["seed"], "--token-budget", settings["token_budget"], "--steps", STEPS,
            "--problems", settings["problems"], "--device", "cpu", "--run-dir", f"{folder}/run",
        ]  # fmt: skip
        command = [sys.executable, "-m", "covey", "train", "arithmetic_grpo", *map(str, words)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            sys.exit(f"{settings} failed:\n{found.stdout[-2000:]}{found.stderr[-3000:]}")
        return figures(Path(folder) / "run")


def figures(run: Path) -> dict[str, Any]:
    """Accuracy, memory and times of a finished run."""
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = steps[FIRST_STEPS:] or steps
    parts = {part: median(step[f"time/{part}"] for step in timed) for part in ("sample", "prepare", "update")}
    mismatch = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
    return {
        "evaluations": summary["evaluations"],
        "steps": len(steps),
        "sampled_tokens": summary["decisions_sampled"],
        "seconds": summary["seconds"],
        "step_seconds": median(sum(step[f"time/{part}"] for part in parts) for step in timed),
        "seconds_by_part": parts,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "mismatch_kl": {"mean": mean(mismatch), "largest": max(mismatch)} if mismatch else None,
        "checkpoint_bytes": max(
            (sum(file.stat().st_size for file in step.iterdir()) for step in (run / "checkpoints").glob("step-*")),
            default=0,
        ),
    }


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Means over the seeds."""
    table = Table("rank", "learning rate", "seeds", title="LoRA beside all weights (rank 0)")
    for column in ("accuracy (range)", "s / step", "memory, GiB", "checkpoint, MiB", "mismatch/kl"):
        table.add_column(column, justify="right")
    keys = sorted({(run["rank"], run["learning_rate"]) for run in runs})
    for rank, rate in keys:
        these = [run for run in runs if (run["rank"], run["learning_rate"]) == (rank, rate)]
        right = [accuracy(run) for run in these]
        mismatch = [run["mismatch_kl"]["mean"] for run in these if run["mismatch_kl"]]
        table.add_row(
            str(rank),
            f"{rate:g}",
            str(len(these)),
            f"{mean(right):.1%} ({min(right):.1%} to {max(right):.1%})",
            f"{median(run['step_seconds'] for run in these):.2f}",
            f"{mean(run['peak_memory_bytes'] for run in these) / 2**30:.2f}",
            f"{mean(run['checkpoint_bytes'] for run in these) / 2**20:.0f}",
            f"{mean(mismatch):.1e}" if mismatch else "-",
        )
    Console(width=120).print(table)


def accuracy(run: dict[str, Any]) -> float:
    """Held-out accuracy after training, at the recipe's first token limit."""
    return float(run["evaluations"][0]["after"]["score"])


if __name__ == "__main__":
    main()
