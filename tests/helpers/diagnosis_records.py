"""Records of healthy and sick runs, which the tests of the diagnosis read, and the tables of docs/reference/checks.md.

    PYTHONPATH=tests .venv/bin/python -m helpers.diagnosis_records runs/diagnosis

trains the runs that the folder lacks (a file of JSON each; about half an hour on two cores), adds those of the
embedded model (`helpers.healthy_runs.COMMANDS`) from run folders there that have their names, and writes the records
beside the tests (`HEALTHY_FILE`, `SICK_FILE`).
"""

import json
import lzma
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from covey.config.recipe import read_tables
from covey.tracking.diagnosis import CHECKS, diagnose
from covey.tracking.metrics import find
from covey.tracking.run_folder import SUMMARY_FILE
from covey.tracking.run_store import read_metrics
from helpers.diagnosed_runs import train_tables
from helpers.healthy_runs import COMMANDS, HEALTHY
from helpers.sick_runs import SICK

FOLDER = Path(__file__).parents[1] / "tracking" / "diagnosis"
HEALTHY_FILE, SICK_FILE = FOLDER / "healthy_runs.jsonl.xz", FOLDER / "sick_runs.jsonl.xz"
DIGITS_KEPT = 6


@dataclass(frozen=True)
class RecordedRun:
    """A run: its recipe, its metrics without those of time and memory, and its evaluations before and after."""

    name: str
    config: Mapping[str, Any]
    metrics: list[dict[str, float | None]]
    evaluations: list[dict[str, Any]]

    def found(self) -> list[str]:
        """The names of the checks that find something."""
        return [finding.check for finding in diagnose(self.metrics, self.config, self.evaluations)]


def read_recorded(path: Path) -> list[RecordedRun]:
    """The recorded runs of a file."""
    with lzma.open(path, "rt") as file:
        return [RecordedRun(**json.loads(line)) for line in file]


def record(folder: Path) -> None:
    """Train the runs that `folder` lacks, and write the records."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in [*HEALTHY.items(), *SICK.items()]:
        path = folder / f"{name}.json"
        if not path.exists():
            with TemporaryDirectory() as temporary:
                metrics, _, _ = train_tables(
                    Path(temporary), run.tables, run.rewards, getattr(run, "change", lambda parts: None)
                )
            line = {"name": name, "config": dict(run.tables), "metrics": metrics, "evaluations": []}
            path.write_text(json.dumps(line))
            print(name, file=sys.stderr, flush=True)
    healthy = [json.loads((folder / f"{name}.json").read_text()) for name in HEALTHY]
    _write(HEALTHY_FILE, healthy + [_of_folder(name, folder / name) for name in COMMANDS])
    _write(SICK_FILE, [json.loads((folder / f"{name}.json").read_text()) for name in SICK])


def _of_folder(name: str, run_dir: Path) -> dict[str, Any]:
    evaluations = json.loads((run_dir / SUMMARY_FILE).read_text())["evaluations"]
    config = read_tables(run_dir / "config.toml")
    return {"name": name, "config": config, "metrics": read_metrics(run_dir), "evaluations": evaluations}


def _write(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    with lzma.open(path, "wt", preset=9) as file:
        for run in runs:
            kept = run | {"metrics": [dict(_rounded(record)) for record in run["metrics"]]}
            file.write(json.dumps(kept) + "\n")


def _rounded(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name == "step" or value is None:
            yield name, value
        elif find(name).reproducible:
            yield name, float(f"{value:.{DIGITS_KEPT}g}")


def alarms_table() -> str:
    """How often each check finds something in the healthy and in the sick runs, as a markdown table."""
    healthy, sick = read_recorded(HEALTHY_FILE), read_recorded(SICK_FILE)
    found = {run.name: run.found() for run in sick}
    lines = [
        f"| check | false alarms in {len(healthy)} healthy runs | its sick run | found there | other sick runs |",
        "|---|---|---|---|---|",
    ]
    for check in (check for check in CHECKS if check.name in SICK):  # the others are not of policies
        false = sum(check.name in run.found() for run in healthy)
        others = [name for name, names in found.items() if check.name in names and name != check.name]
        own = "yes" if check.name in found[check.name] else "no"
        lines.append(
            f"| {check.name} | {false} | {SICK[check.name].fault} | {own} | {', '.join(others) if others else '-'} |"
        )
    return "\n".join(lines) + "\n"


def checks_table() -> str:
    """The checks with their conditions and sources as a markdown table."""
    lines = ["| check | it finds something if | source of the threshold |", "|---|---|---|"]
    lines += [f"| {check.name} | {check.condition} | {check.source or '-'} |" for check in CHECKS]
    return "\n".join(lines) + "\n"


def runs_table() -> str:
    """The healthy runs as a markdown table."""
    lines = ["| run | steps | score at first | at the end |", "|---|---|---|---|"]
    for run in read_recorded(HEALTHY_FILE):
        scores = [record["score/mean"] for record in run.metrics if record.get("score/mean") is not None]
        lines.append(f"| {run.name} | {len(run.metrics)} | {sum(scores[:5]) / 5:.3g} | {sum(scores[-5:]) / 5:.3g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    record(Path(sys.argv[1]))
