"""Times GRPO on a language model beside its peers, in turn, on the same prompts and token counts, and prints ratios.

    .venv/bin/python benchmarks/bench.py language      the whole comparison, half an hour on two cores
    .venv/bin/python benchmarks/bench.py language --peers generate plain --new-tokens 32 --rounds 1     a short one

A lone time says little on a shared machine, so every figure is a ratio within one round: covey, covey without its
kernels (`torch`), `model.generate`, a plain update on top of transformers, and TRL run one after another, each in a
process of its own, and the rounds are repeated. What is timed is the second step of the full size, as in a long run.
Results go to benchmarks/results/.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory import RANDOM_MODELS, model_for
from peers import RESULTS, peer_version, peers_python, run_contestant
from rich.console import Console
from rich.table import Table
from shape import Shape

from covey.llm.model.gguf import EMBEDDED
from covey.llm.model.loading import find_model
from covey.runtime.device import choose_precision, environment, set_threads

Numbers = dict[str, float]

PEERS = ("torch", "generate", "plain", "trl")


def main(options: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py language", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=[EMBEDDED, *RANDOM_MODELS], default=EMBEDDED)
    parser.add_argument("--tokenizer", default="", help="a folder, for a model with random weights")
    parser.add_argument("--peers-python", default="", help="an interpreter; default: one made from peers.lock")
    parser.add_argument(
        "--output", type=Path, default=None, help="a JSON file; default: benchmarks/results/<date>.json"
    )
    arguments = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="covey-models-") as folder:
        compare(arguments, find_model(model_for(arguments.model, Path(folder), arguments.tokenizer)))


def compare(arguments: argparse.Namespace, model: str) -> None:
    """Run the rounds; print and write the results."""
    threads = set_threads(0)
    device = torch.device(arguments.device)
    precision = choose_precision("auto", device)
    shape = Shape(
        model,
        arguments.prompts,
        arguments.group_size,
        arguments.prompt_tokens,
        arguments.new_tokens,
        threads,
        arguments.device,
        str(precision).removeprefix("torch."),
    )
    interpreters = {"trl": arguments.peers_python or peers_python()} if "trl" in arguments.peers else {}
    rounds: list[dict[str, Numbers]] = []
    for number in range(1, arguments.rounds + 1):
        results: dict[str, Numbers] = {}
        if (arguments.device, arguments.model) == ("cpu", EMBEDDED):  # whose products `update_flops` counts
            results["machine"] = {"matmul_flops": matmul_rate(precision)}
        for name in ["covey", *arguments.peers]:
            print(f"round {number} of {arguments.rounds}: {name} ...", end=" ", flush=True)
            script, switches = ("covey", {"COVEY_NATIVE": "0"}) if name == "torch" else (name, {})
            python = interpreters.get(name, sys.executable)
            results[name] = run_contestant(script, python, asdict(shape), **switches)
            seconds = {key: value for key, value in results[name].items() if key.endswith("_seconds")}
            print(", ".join(f"{key.removesuffix('_seconds')} {value:.1f} s" for key, value in seconds.items()))
        rounds.append(results)
    summary = summarise(rounds, shape)
    show(rounds, summary, shape, arguments.model)
    versions = {"transformers": version("transformers")}
    if "trl" in arguments.peers:
        versions["trl"] = peer_version("trl")
    record = {
        **summary,
        "shape": asdict(shape) | {"model": arguments.model},
        "rounds": rounds,
        "environment": environment(device, precision),
        "peers": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    output = arguments.output or RESULTS / f"{arguments.device}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {output}")


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of the model's own shape, on this machine, now."""
    a, b = torch.randn(4096, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    for _ in range(5):
        a @ b
    rates = []
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        rates.append(2 * 4096 * 576 * 1536 / (time.perf_counter() - began))
    return median(rates)


def update_flops(shape: Shape) -> float:
    """Products that an update with shared prompts cannot avoid: 6 per weight and token, the head at completions only.

    SmolLM2-135M has 106.2 M weights in its layers and 28.3 M in the (tied) head.
    """
    tokens = shape.prompts * shape.prompt_tokens + shape.rows * (shape.new_tokens - 1)
    return 6 * 106.2e6 * tokens + 6 * 28.3e6 * shape.sampled_tokens


def summarise(rounds: list[dict[str, Numbers]], shape: Shape) -> dict[str, Any]:
    """Ratios within each round, as median, lowest and highest."""

    def spread(values: list[float]) -> Numbers:
        return {"median": median(values), "low": min(values), "high": max(values)}

    def ratios(peer: str, key: str, ours: str = "covey") -> Numbers:
        return spread([r[peer][key] / r[ours][key] for r in rounds])

    summary: dict[str, Any] = {}
    if "machine" in rounds[0]:
        summary["share_of_matmul_rate"] = spread(
            [update_flops(shape) / r["covey"]["update_seconds"] / r["machine"]["matmul_flops"] for r in rounds]
        )
    if "generate" in rounds[0]:
        summary["sampling_ratio_vs_generate"] = ratios("generate", "sampling_seconds")
        if "torch" in rounds[0]:
            summary["sampling_ratio_vs_generate_without_kernels"] = ratios("generate", "sampling_seconds", "torch")
    if "torch" in rounds[0]:
        summary["step_ratio_vs_no_kernels"] = ratios("torch", "step_seconds")
    if "plain" in rounds[0]:
        summary["update_ratio_vs_plain"] = ratios("plain", "update_seconds")
    if "trl" in rounds[0]:
        summary["step_ratio_vs_trl"] = ratios("trl", "step_seconds")
        summary["sampling_ratio_vs_trl"] = ratios("trl", "sampling_seconds")
        summary["update_ratio_vs_trl"] = ratios("trl", "update_seconds")
        summary["peak_memory_ratio_vs_trl"] = ratios("trl", "peak_memory_bytes")
    return summary


def show(rounds: list[dict[str, Numbers]], summary: dict[str, Any], shape: Shape, model: str) -> None:
    """Two tables: what was measured (medians), and the ratios."""
    console = Console()
    title = (
        f"{model}, {shape.prompts} prompts x {shape.group_size} completions, {shape.prompt_tokens} + "
        f"{shape.new_tokens} tokens, {shape.threads} threads, median of {len(rounds)}"
    )
    table = Table(title=title)
    for column in ("", "sampling", "tokens/s", "update", "step", "peak memory"):
        table.add_column(column, justify="right" if column else "left")
    for name in (name for name in rounds[0] if name != "machine"):
        middle = {key: median(r[name][key] for r in rounds) for key in rounds[0][name]}
        seconds = [f"{middle[key]:.1f} s" if key in middle else "" for key in ("update_seconds", "step_seconds")]
        sampling = middle.get("sampling_seconds")
        sampled = ["", ""] if sampling is None else [f"{sampling:.1f} s", f"{shape.sampled_tokens / sampling:,.0f}"]
        peak = f"{middle['peak_memory_bytes'] / 2**30:.1f} GiB"
        table.add_row(name, *sampled, *seconds, peak)
    console.print(table)
    ratios = Table(title="how many times covey is better (lowest to highest round)")
    ratios.add_column("")
    ratios.add_column("median", justify="right")
    ratios.add_column("spread", justify="right")
    for name, values in summary.items():
        ratios.add_row(name, f"{values['median']:.2f}", f"{values['low']:.2f} to {values['high']:.2f}")
    console.print(ratios)
