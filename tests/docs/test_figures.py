"""Figures that README and docs/ print are those of the files in benchmarks/results, rounded as they are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from helpers.pages import ROOT

TEXTS = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))]
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


AMD, INTEL, CONTROL = (
    results("cpu-amd-zen4-2026-11-23"),
    results("cpu-intel-2026-11-22"),
    results("control-cpu-2026-11-21"),
)


def spread(one: dict[str, float]) -> list[float]:
    return [one["median"], one["low"], one["high"]]


def both(name: str) -> list[float]:
    return [*spread(INTEL[name]), *spread(AMD[name])]


def medians(program: str, *keys: str, unit: float = 1) -> list[float]:
    """Of both machines, over the rounds."""
    return [median(one[program][key] for one in machine["rounds"]) / unit for machine in (INTEL, AMD) for key in keys]


def control(name: str, *, faster: bool = True) -> list[float]:
    one = CONTROL["seconds_to_475"][name]
    found = [one["median_seconds"], one["low_seconds"], one["high_seconds"], one["median_environment_steps"]]
    rows = [CONTROL["times_faster"][covey][name] for covey in ("covey_grpo", "covey_ppo")] if faster else []
    return [*found, *(number for row in rows for number in spread(row))]


def memory(case: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [number for one in (case, other) for number in (one["measured_bytes"] / 2**30, one["ratio"])]


def rates(kind: str) -> list[float]:
    """Environment steps a second of covey, then those of each peer with covey's ratio to it."""
    covey, *peers = KINDS[kind].values()
    keys = ("steps_per_second", "ratio", "low", "high")
    return [covey["steps_per_second"], *(one[key] for one in peers for key in keys)]


SPREAD = "# (# to #)"
GIB = 2**30
STEP, TRL_MEMORY = "step_ratio_vs_trl", medians("trl", "peak_memory_bytes", unit=GIB)
TO_475 = {name: one["median_seconds"] for name, one in CONTROL["seconds_to_475"].items()}
CURVES = results("curves-cpu-intel-2026-11-21")["curves"]
MEMORY = results("memory-cpu-2026-11-21")["cases"]
KINDS = results("control-kinds-cpu-2026-11-29")["by_kind"]
LARGE = [case for day in ("25", "26") for case in results(f"memory-large-cpu-2026-11-{day}")["cases"]]
# What a page says, with # in the places of numbers, and these; ? is any text of a cell, ~ one in brackets or none.
FIGURES: list[tuple[str, Sequence[float]]] = [
    (f"training step, times as fast as TRL 1.16 with its defaults | {SPREAD} | {SPREAD} |", both(STEP)),
    (f"update alone, times as fast as TRL's | {SPREAD} | {SPREAD} |", both("update_ratio_vs_trl")),
    (f"sampling, times as fast as TRL's | {SPREAD} | {SPREAD} |", both("sampling_ratio_vs_trl")),
    (f"sampling, times as fast as `model.generate` in bf16 | {SPREAD} |", both("sampling_ratio_vs_generate")[:3]),
    (f"peak memory of TRL, divided by covey's | {SPREAD} | {SPREAD} |", both("peak_memory_ratio_vs_trl")),
    ("covey, sampling and update | # s, # s | # s, # s |", medians("covey", "sampling_seconds", "update_seconds")),
    ("TRL, sampling and update | # s, # s | # s, # s |", medians("trl", "sampling_seconds", "update_seconds")),
    ("`model.generate` | # s | # s |", medians("generate", "sampling_seconds")),
    ("| # to # times as fast as TRL | 1 |", [AMD[STEP]["median"], INTEL[STEP]["median"]]),
    ("| 是 TRL 的 # 至 # 倍快 |", [AMD[STEP]["median"], INTEL[STEP]["median"]]),
    ("| # (GRPO), # (PPO) |", [TO_475["covey_grpo"], TO_475["covey_ppo"]]),
    ("covey, `cartpole_grpo` | # | # to # | # |", control("covey_grpo", faster=False)),
    ("covey, `cartpole_ppo` | # | # to # | # |", control("covey_ppo", faster=False)),
    (f"stable-baselines3 PPO, tuned | # | # to # | # | {SPREAD} | {SPREAD} |", control("sb3_tuned")),
    (f"stable-baselines3 PPO, defaults | # | # to # | # | {SPREAD} | {SPREAD} |", control("sb3_default")),
    (f"the articles' way, as they write it | # | # to # | # | {SPREAD} | {SPREAD} |", control("articles")),
    (f"| plain: CartPole-v1 | # | # | {SPREAD} | # | {SPREAD} |", rates("plain")),
    (f"| action masks: Taxi-v4 | # | # | {SPREAD} |", rates("action masks")),
    (f"| memory (GRU, LSTM of 64): CartPole-v1 | # | # | {SPREAD} | # | {SPREAD} |", rates("memory")),
    (f"| NatureCNN: pictures that cost nothing | # | # | {SPREAD} | # | {SPREAD} |", rates("pictures")),
    *(
        (f"| {grpo['case']['name']}~ | ? | # | # | # | # |", memory(grpo, ppo))
        for grpo, ppo in zip(MEMORY[::2], MEMORY[1::2], strict=True)
    ),
    *(
        (
            f"| {case['case']['name'].replace(', ', ' | ?', 1)} | # | # |",
            [case["predicted_bytes"] / GIB, case["measured_bytes"] / GIB],
        )
        for case in LARGE
    ),
    *(
        (
            f"| {label} | # | # | # | # | # |",
            [
                curve[-1][key] / curve[0][key]
                for key in ("at", "sampling_seconds", "update_seconds", "step_seconds", "peak_memory_bytes")
            ],
        )
        for label, curve in (
            ("group size 2 to 32", CURVES["group_size"]),
            ("completion length 16 to 256 tokens", CURVES["new_tokens"]),
            ("prompt length 32 to 512 tokens", CURVES["prompt_tokens"]),
            ("model size 25 to 362 million weights", CURVES["parameters"]),
        )
    ),
]


def found(said: str) -> list[tuple[str, ...]]:
    """The numbers of each place that says this."""
    pattern = re.escape(said).replace(r"\#", NUMBER).replace(r"\?", "[^|]*").replace(r"\~", r"(?: \([^|]*\))?")
    return [match.groups() for text in TEXTS for match in re.finditer(pattern, text)]


@pytest.mark.parametrize(("said", "numbers"), FIGURES, ids=[said for said, _ in FIGURES])
def test_a_printed_figure_is_the_stored_one(said: str, numbers: Sequence[float]) -> None:
    for groups in found(said):
        for printed, number in zip(groups, numbers, strict=True):
            text = printed.replace(",", "")
            digits = len(text.partition(".")[2])
            assert abs(float(text) - number) <= 0.5001 * 10**-digits, f"{said}: {printed} instead of {number:.4g}"


def test_figures_are_found() -> None:
    """The test above would pass if nothing was found any more."""
    assert sum(bool(found(said)) for said, _ in FIGURES) >= 0.8 * len(FIGURES)


def test_a_figure_beside_a_link_stands_on_the_linked_page() -> None:
    link, figure = (
        re.compile(r"\(\[[^\]]*\]\(([\w/]+\.md)[^)]*\)\)"),
        re.compile(r"\d[\d,]*\.\d+|\d{1,3},\d{3}|\d+(?= %)"),
    )
    checked = 0
    for page in (ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in ("exercises", "questions"))):
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            for said, target in zip(*[iter(link.split(paragraph))] * 2, strict=False):
                stands = (page.parent / target).read_text(encoding="utf-8")
                for number in figure.findall(re.split(r"(?<=[.|])\s", said)[-1]):
                    assert number in stands, f"{page.name}: {number} is not in {target}"
                    checked += 1
    assert checked > 8
