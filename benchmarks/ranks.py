"""Times the training step on two ranks with one thread each beside one rank with two threads, in turn.

    .venv/bin/python benchmarks/ranks.py                  some minutes on two cores
    .venv/bin/python benchmarks/ranks.py --weights fsdp   the weights of the two ranks are sharded

Each run trains a packaged recipe for a few steps; the first step of each is left out. The ratio is that of the medians.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

PHASES = ("sample", "grade", "prepare", "update", "refresh", "step")
ONE, TWO = "1 rank x 2 threads", "2 ranks x 1 thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="arithmetic_grpo")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", default="replicate", choices=("replicate", "fsdp"))
    options = parser.parse_args()
    seconds: dict[str, list[dict[str, float]]] = {ONE: [], TWO: []}
    peaks: dict[str, float] = {}
    for number in range(options.rounds):
        for name in (ONE, TWO):
            steps = train(options, 1 + (name == TWO))
            seconds[name] += [{phase: step.get(f"time/{phase}", 0.0) for phase in PHASES} for step in steps]
            peaks[name] = max(step["memory/peak_bytes"] for step in steps) / 2**30
            print(f"round {number + 1}, {name}: {median(step['time/step'] for step in steps):.2f} s a step", flush=True)
    print(f"\nmedians in seconds, {options.recipe}, weights of two ranks: {options.weights}")
    print(f"{'':22}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'rank 0':>12}")
    medians = {
        name: {phase: median(step[phase] for step in steps) for phase in PHASES} for name, steps in seconds.items()
    }
    for name, found in medians.items():
        print(f"{name:22}" + "".join(f"{found[phase]:10.2f}" for phase in PHASES) + f"{peaks[name]:8.1f} GiB")
    print(f"{'ratio':22}" + "".join(f"{medians[TWO][p] / (medians[ONE][p] or 1):10.2f}" for p in PHASES))


def train(options: argparse.Namespace, ranks: int) -> list[dict[str, float]]:
    """The metrics of every step but the first."""
    words = ["-m", "covey", "train", options.recipe, "--steps", str(options.steps), "--evaluation.problems", "2"]
    words += ["--evaluation.every", "0", "--token-limits", "14", "--shards", "2", "--group-size", "16"]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        words = [*launcher, *words, "--weights", options.weights]
    threads = str(2 // ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, *words, "--threads", threads, "--run-dir", "run"],
            cwd=folder, env=os.environ | {"OMP_NUM_THREADS": threads}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if found.returncode:
            raise SystemExit(found.stdout + found.stderr)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


if __name__ == "__main__":
    main()
