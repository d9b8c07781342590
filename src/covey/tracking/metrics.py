"""The metrics of a training step, each defined once, in `metrics.toml`; docs/reference/metrics.md is made from it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


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
