"""Learning curves of the packaged recipes of conversations on the embedded model, over seeds.

    .venv/bin/python benchmarks/conversation_learning.py                      all; about two hours on two cores
    .venv/bin/python benchmarks/conversation_learning.py --cases calculator   a part
    .venv/bin/python benchmarks/conversation_learning.py --show benchmarks/results/conversation-learning-cpu-DATE.json

`calculator` is `covey sft calculator_grpo` and then `covey train` with its model. The games have no warm start. Runs
that are finished in `--folder` are read and not repeated. The interval of a mean reward is over the groups of the first
or the last five steps, because the rollouts of a group have the same prompt and are not independent.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from peers import RESULTS
from rich.console import Console
from rich.table import Table

from covey.tracking.statistics import mean_score

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "conversations.png"
COLORS = ("#0072b2", "#d55e00", "#009e73")
ENDS = 5  # steps at the beginning and at the end whose rewards are compared


@dataclass(frozen=True)
class Case:
    """A recipe and how it is trained."""

    name: str
    recipe: str
    fields: tuple[str, ...] = ()
    warm_start: bool = False


PPO = ("--algorithm", "ppo", "--critic.trunk", "policy")
CASES = (
    Case("calculator", "calculator_grpo", warm_start=True),
    Case("guess_number, GRPO", "guess_number_grpo"),
    Case("guess_number, PPO", "guess_number_grpo", (*PPO, "--gae-lambda", "1")),
    Case("maze, GRPO", "maze_grpo"),
    Case("maze, PPO", "maze_grpo", PPO),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--threads", type=int, default=0, help="threads of a run; 0: one per core")
    parser.add_argument("--folder", type=Path, default=Path("runs/conversation_learning"), help="the runs")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / f"conversation-learning-cpu-{datetime.now(UTC):%Y-%m-%d}.json"
    )
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--show", type=Path, help="print the table of these results and run nothing")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(arguments.show.read_text())["runs"])
        return
    runs = [
        figures(case, seed, train(case, seed, arguments.folder, arguments.threads))
        for case in CASES
        if arguments.cases in case.name
        for seed in arguments.seeds
    ]
    arguments.output.write_text(json.dumps({"runs": runs, "environment": machine()}, indent=1) + "\n")
    draw(runs, arguments.picture)
    show(runs)
    print(f"written to {arguments.output} and {arguments.picture}")


def machine() -> dict[str, Any]:
    """The environment on which the figures depend."""
    import torch

    from covey.runtime.device import choose_precision, environment

    cpu = torch.device("cpu")
    return environment(cpu, choose_precision("auto", cpu))


def train(case: Case, seed: int, folder: Path, threads: int) -> Path:
    """The folder of the finished run of a case."""
    name = f"{case.name.replace(', ', '-').lower()}-{seed}"
    run, common = folder / name, ["--seed", str(seed), "--threads", str(threads)]
    if (run / "summary.json").exists():
        return run
    model: list[str] = []
    if case.warm_start:
        start = folder / f"{name}-sft"
        if not (start / "summary.json").exists():
            covey("sft", case.recipe, *common, "--run-dir", str(start))
        model = ["--model", str(start / "model")]
    covey("train", case.recipe, *case.fields, *model, *common, "--run-dir", str(run))
    return run


def covey(*words: str) -> None:
    print("covey", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "covey", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"it failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def figures(case: Case, seed: int, run: Path) -> dict[str, Any]:
    """Rewards of every step, and scores of the held-out problems before and after."""
    summary = json.loads((run / "summary.json").read_text())
    start = run.with_name(f"{run.name}-sft") / "summary.json"
    groups: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            rollout = json.loads(line)
            groups[rollout["step"]][rollout["group"]].append(rollout["reward"])
    means = {step: [mean(rewards) for rewards in groups[step].values()] for step in sorted(groups)}
    steps = list(means)
    return {
        "case": case.name,
        "seed": seed,
        "steps": len(steps),
        "seconds": summary["seconds"],
        "warm_start_seconds": json.loads(start.read_text())["seconds"] if start.exists() else None,
        "reward_by_step": {step: mean_score(means[step]) for step in steps},
        "first": mean_score([value for step in steps[:ENDS] for value in means[step]]),
        "last": mean_score([value for step in steps[-ENDS:] for value in means[step]]),
        "held_out": {when: summary["evaluations"][0][when] for when in ("before", "after")},
        "decisions_sampled": summary["decisions_sampled"],
    }


def show(runs: Sequence[dict[str, Any]]) -> None:
    """One row for each run."""
    table = Table("case", "seed", "steps", "time", title=f"Mean reward (95 % interval), first and last {ENDS} steps")
    for column in ("reward, first", "reward, last", "held out, before", "held out, after"):
        table.add_column(column, justify="right")
    for run in runs:
        minutes, seconds = divmod(round(run["seconds"]), 60)
        cells = [estimate(run[key]) for key in ("first", "last")]
        cells += [estimate(run["held_out"][when]) for when in ("before", "after")]
        table.add_row(run["case"], str(run["seed"]), str(run["steps"]), f"{minutes}:{seconds:02}", *cells)
    Console(width=140).print(table)


def estimate(found: dict[str, Any]) -> str:
    return f"{found['score']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The mean reward over the steps, one panel for each case, one line for each seed."""
    cases = list(dict.fromkeys(run["case"] for run in runs))
    figure = Figure(figsize=(3.6 * len(cases), 3.4), dpi=130, facecolor="white", layout="constrained")
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for run, color in zip((run for run in runs if run["case"] == case), COLORS, strict=False):
            steps = [int(step) for step in run["reward_by_step"]]
            found = list(run["reward_by_step"].values())
            panel.plot(steps, [value["score"] for value in found], color=color, label=f"seed {run['seed']}")
            panel.fill_between(
                steps, [value["low"] for value in found], [value["high"] for value in found], color=color, alpha=0.15
            )
        panel.set_title(case, fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1.02)
        panel.grid(color="#e5e7eb")
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("mean reward")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
