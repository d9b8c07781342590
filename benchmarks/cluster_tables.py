"""The tables of docs/planning.md, from the output of `covey plan --ranks` and `--cluster`.

    .venv/bin/python benchmarks/cluster_tables.py           print them
    .venv/bin/python benchmarks/cluster_tables.py --write   replace them in the docs

They are predictions; nothing is computed on a GPU. `tests/cluster/test_throughput.py` compares the docs with
them.
"""

import argparse
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from covey.cli.main import main as covey

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "planning.md"
COMMON = ["--device-memory", "80GiB", "--prompts-per-step", "64", "--group-size", "16"]
MODELS = {  # ranks and tokens of a microbatch
    "7b": (8, 16384),
    "32b": (16, 16384),
    "70b": (32, 8192),
}
MEMORY_TOKENS = ["--max-new-tokens", "8192"]
SIMULATED_TOKENS = ["--max-new-tokens", "32768", "--mean-tokens", "4000", "--recompute", "true", "--cluster"]
SIGMAS = ("0", "0.5", "0.9", "1.3")
STATE = ("fp32 master weights", "optimizer moments", "gradients", "reference")


def plan(name: str, *words: str) -> str:
    """The output of `covey plan` for a model of `benchmarks/models/`."""
    ranks, microbatch_tokens = MODELS[name]
    model = str(ROOT / "benchmarks" / "models" / f"{name}.json")
    given = ["--ranks", str(ranks), *COMMON, "--microbatch-tokens", str(microbatch_tokens), *words]
    with redirect_stdout(io.StringIO()) as output:
        assert covey(["plan", model, *given]) == 0
    return output.getvalue()


def last_column(report: str, name: str) -> str:
    """The figure for FSDP2 without exact sums, which is the last column."""
    (line,) = (line for line in report.splitlines() if line.strip().startswith(f"{name}  "))
    return line.split()[-1]


def row(name: str, cells: Sequence[object]) -> str:
    return f"| {name} | {' | '.join(map(str, cells))} |"


def memory_table() -> list[str]:
    """Memory, nodes and seconds of a step with FSDP2."""
    wanted = [*MEMORY_TOKENS, "--external-sampler"]
    now = {name: plan(name, *wanted) for name in MODELS}
    reports = {name: plan(name, *wanted, "--recompute", "true") for name in MODELS}

    def cells(name: str, source: dict[str, str] = reports) -> list[str]:
        return [last_column(report, name) for report in source.values()]

    state = [f"{sum(float(last_column(report, part)) for part in STATE):.1f}" for report in reports.values()]
    sizes = [re.search(r"\(([\d,.]+) million", report) for report in reports.values()]
    weights = [f"{float(size[1].replace(',', '')) / 1000:.1f}" for size in sizes if size]
    fits = "fits in 80.0 GiB"
    return [
        row("FSDP2, GiB of one rank", [f"{name.upper()}, {MODELS[name][0]} ranks" for name in MODELS]),
        row("---", ["---"] * len(MODELS)),
        row("billion weights", weights),
        row("tokens of a microbatch", [f"{tokens:,}" for _, tokens in MODELS.values()]),
        row("state and reference", state),
        row("gathered layers", cells("gathered layers")),
        row("gradients of gathered layers", cells("gradients of shards")),
        row("activations", cells("activations", now)),
        row("activations with update.recompute", cells("activations")),
        row("logits", cells("logits")),
        row("at the most", cells("at the most", now)),
        row("at the most, with update.recompute", cells("at the most")),
        row("fits", cells(fits, now)),
        row("fits, with update.recompute", cells(fits)),
        row("fewest ranks that fit, with update.recompute", cells("fewest ranks that fit")),
        row("seconds: gathers and reductions of a step", cells("gathers of weights")),
        row("seconds: computing of a step", cells("computing")),
        row("seconds: weights to the samplers", cells("weights to the samplers")),
    ]


def simulated_rows(report: str) -> dict[str, str]:
    """Trained tokens/s of every schedule with external samplers."""
    lines = [line for line in report.splitlines() if re.match(r"\d+ +[a-z]", line)]
    return {line[10:30].strip(): line[30:].split()[0] for line in lines}


def simulated_table(sigmas: Sequence[str] = SIGMAS) -> list[str]:
    """Trained tokens/s of the 7B model by schedule and sigma, on as many sampler devices as ranks."""
    found = {sigma: simulated_rows(plan("7b", *SIMULATED_TOKENS, "--sigma", sigma)) for sigma in sigmas}
    schedules = list(next(iter(found.values())))
    lines = [row("sigma", schedules), row("---", ["---"] * len(schedules))]
    return lines + [row(sigma, [found[sigma][schedule] for schedule in schedules]) for sigma in sigmas]


def crash_table() -> list[str]:
    """Trained tokens/s of the 7B model with crashes of servers."""
    found = {
        seconds: simulated_rows(
            plan("7b", *SIMULATED_TOKENS, *(["--crash-every", seconds] if seconds != "never" else []))
        )
        for seconds in ("never", "1200", "600")
    }
    schedules = list(found["never"])
    lines = [row("seconds between crashes of one of 8 servers", schedules), row("---", ["---"] * len(schedules))]
    return lines + [row(seconds, [rows[schedule] for schedule in schedules]) for seconds, rows in found.items()]


TABLES = {"memory": memory_table, "simulated": simulated_table, "crashes": crash_table}


def block(name: str) -> re.Pattern[str]:
    """A table in the docs, between two comments."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/planning.md")
    arguments = parser.parse_args()
    text = DOCS.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        lines = "\n".join(table())
        print(lines, "\n")
        old = block(name).search(text)
        assert old is not None, f"{DOCS} has no table {name}"
        text = text.replace(old[0], lines)
    if arguments.write:
        DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
