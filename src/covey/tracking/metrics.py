"""The metrics of a training step, each defined once, in `metrics.toml`. `docs/metrics.md` is printed from it.

python -m covey.tracking.metrics > docs/metrics.md
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

PAGE_HEAD = """# Metrics

The meaning of each number in `metrics.jsonl`, and its values in a healthy run. One line of that file is one training
step; a number that a run does not have is left out. A decision is a token of a language model, an action in control.
This page is printed by `python -m covey.tracking.metrics`.

The most frequent question: **is a loss of 0 a bug?** No. With one optimizer step for each batch of rollouts
(`epochs = 1`, `minibatches = 1`) the ratio is exactly 1, nothing is clipped, and the advantages of a group sum to 0, so
the loss is near 0 while its gradient is not. Read `reward/mean`, `score/mean` and `grad_norm` instead.

`covey diagnose RUN` checks these metrics for known faults; [healthy.md](healthy.md) has its thresholds.

"""


@dataclass(frozen=True)
class Metric:
    """One number of a training step."""

    name: str  # a part in <angle brackets> is a placeholder
    unit: str
    meaning: str
    healthy: str  # the values in a healthy run
    reproducible: bool = True  # False: it depends on the clock or on the machine


METRICS = {
    name: Metric(name, **fields)
    for name, fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def find(name: str) -> Metric:
    """The definition of a metric by its name in `metrics.jsonl`; `reward/format` finds `reward/<name>`,
    `reward/format/length` finds `reward/<reward>/<name>`, `x/held_out_auc` finds `x/held_out_<measure>`.

    Raises:
        KeyError: for a name that the glossary does not define.
    """
    if name in METRICS:
        return METRICS[name]
    section, slash, rest = name.partition("/")
    families = [f"{section}/<{section}>/<name>" if "/" in rest else f"{section}/<name>"]
    families += [f"{section}/held_out_<measure>"] if rest.startswith("held_out_") else []
    for family in families:
        if slash and rest and family in METRICS:
            return METRICS[family]
    raise KeyError(f"the metric {name!r} is not defined in covey/tracking/metrics.toml")


def is_reproducible(name: str) -> bool:
    """True if a repeated run gives the same number: every metric except those of time and memory."""
    return find(name).reproducible


def markdown_table() -> str:
    """The glossary as a markdown table, one row per metric."""
    lines = ["| metric | unit | meaning | a healthy run |", "|---|---|---|---|"]
    for metric in METRICS.values():
        differs = "" if metric.reproducible else " (differs from run to run)"
        meaning = metric.meaning.replace("|", "\\|") + differs
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {metric.healthy} |")
    return "\n".join(lines) + "\n"


def markdown_page() -> str:
    """`docs/metrics.md`."""
    return PAGE_HEAD + markdown_table()


if __name__ == "__main__":
    print(markdown_page(), end="")
