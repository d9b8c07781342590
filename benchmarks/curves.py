"""How the time and the memory of a training step grow with the group, the completions, the prompts and the model.

    .venv/bin/python benchmarks/curves.py      about 15 minutes on two cores; a table, benchmarks/results/ and a picture

One of the four is changed at a time. Every point is a process of its own; the points are gone through `--rounds` times
and the median is drawn. Larger models have the shapes of their family and random weights.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from peers import RESULTS, run_contestant
from rich.progress import track
from shape import Shape
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from covey.llm.model.gguf import EMBEDDED
from covey.llm.model.loading import find_model
from covey.runtime.device import choose_precision, environment, set_threads

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "cost_curves.png"
GIB = 2**30

# hidden, layers, MLP, heads, key-value heads: SmolLM2's own three sizes are 135M, 360M and 1.7B.
MODELS = {"30M": (288, 12, 768, 9, 3), "65M": (384, 24, 1024, 6, 3), "135M": None, "360M": (960, 32, 2560, 15, 5)}
CURVES: dict[str, list[int]] = {
    "group_size": [2, 4, 8, 16, 32],
    "new_tokens": [16, 32, 64, 128, 256],
    "prompt_tokens": [32, 64, 128, 256, 512],
}
TITLES = {
    "group_size": "completions per prompt",
    "new_tokens": "tokens of a completion",
    "prompt_tokens": "tokens of a prompt",
    "parameters": "million weights",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / f"curves-cpu-{datetime.now(UTC):%Y-%m-%d}.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    center = Shape(
        find_model(EMBEDDED), prompts=4, group_size=8, prompt_tokens=64, new_tokens=64, threads=set_threads(0)
    )
    with tempfile.TemporaryDirectory() as folder:
        shapes = {
            axis: [(float(value), changed(center, axis, value)) for value in values] for axis, values in CURVES.items()
        }
        shapes["parameters"] = [
            (size / 1e6, changed(center, "model", path)) for size, path in make_models(Path(folder), center.model)
        ]
        different = dict.fromkeys(shape for points in shapes.values() for _, shape in points)
        told: dict[Shape, list[dict[str, float]]] = {}
        for shape in track([*different] * arguments.rounds, description="points"):
            told.setdefault(shape, []).append(run_contestant("covey", sys.executable, asdict(shape)))
        curves = {
            axis: [
                {"at": at} | {key: median(numbers[key] for numbers in told[shape]) for key in told[shape][0]}
                for at, shape in points
            ]
            for axis, points in shapes.items()
        }
    device = torch.device("cpu")
    record = {
        "curves": curves,
        "center": asdict(center) | {"model": EMBEDDED},
        "rounds": arguments.rounds,
        "environment": environment(device, choose_precision("auto", device)),
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    draw(curves, center, arguments.picture)
    show(curves)
    print(f"written to {arguments.output} and {arguments.picture}")


def changed(center: Shape, axis: str, value: Any) -> Shape:
    return replace(center, **{axis: value})


def make_models(folder: Path, embedded: str) -> list[tuple[int, str]]:
    """(weights, folder) of a model of every size."""
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    made = []
    for name, sizes in MODELS.items():
        config = AutoConfig.from_pretrained(embedded)
        path = embedded
        if sizes is not None:
            config.hidden_size, config.num_hidden_layers, config.intermediate_size = sizes[:3]
            config.num_attention_heads, config.num_key_value_heads = sizes[3:]
            config.head_dim = config.hidden_size // config.num_attention_heads
            path = str(folder / name)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
            tokenizer.save_pretrained(path)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        made.append((size, path))
    return made


def show(curves: dict[str, list[dict[str, float]]]) -> None:
    for axis, points in curves.items():
        print(f"\n{TITLES[axis]:>24}   sampling   update   step   peak memory")
        for point in points:
            seconds = "   ".join(f"{point[f'{part}_seconds']:6.1f} s" for part in ("sampling", "update", "step"))
            print(f"{point['at']:24.0f}   {seconds}   {point['peak_memory_bytes'] / GIB:6.1f} GiB")


def draw(curves: dict[str, list[dict[str, float]]], center: Shape, path: Path) -> None:
    """Seconds above, memory below; one column for what changes."""
    figure = Figure(figsize=(13, 5.6), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplots(2, len(curves), sharey="row")
    for column, (axis, points) in enumerate(curves.items()):
        at = [point["at"] for point in points]
        above, below = panels[0][column], panels[1][column]
        for part, color, style in (("sampling", "#0072b2", "-"), ("update", "#d55e00", "--")):
            above.plot(at, [point[f"{part}_seconds"] for point in points], style, color=color, marker="o", label=part)
        below.plot(at, [point["peak_memory_bytes"] / GIB for point in points], color="#009e73", marker="o")
        below.set_xlabel(TITLES[axis])
        for panel in (above, below):
            panel.set_xscale("log", base=2)
            panel.set_xticks(at, [f"{value:.0f}" for value in at])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.grid(color="#e5e7eb")
            panel.spines[["top", "right"]].set_visible(False)
        above.set_yscale("log")
        above.yaxis.set_major_formatter(ScalarFormatter())
    panels[0][0].set_ylabel("seconds of a step")
    panels[0][0].legend(frameon=False)
    panels[1][0].set_ylabel("peak memory, GiB")
    panels[1][0].set_ylim(bottom=0)
    figure.suptitle(
        f"SmolLM2-135M, {center.prompts} prompts x {center.group_size} completions, {center.prompt_tokens} + "
        f"{center.new_tokens} tokens, where nothing else is said; {center.threads} threads"
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
