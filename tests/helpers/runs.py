"""Runs of the command on tiny models, each in a process of its own, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from covey.observe.metrics import is_reproducible

RECIPE = """
model = "{model}"
steps = {steps}
seed = 3
threads = 1
precision = "fp32"
show_rollouts_every = 2

[task]
name = "arithmetic"
digits = [1]

[[rewards]]
name = "digits"
[[rewards]]
function = "{reward}:count_digits"
weight = 0.5

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6

[loss]
kl_coefficient = 0.02

[update]
learning_rate = 1e-3
schedule = "linear"
epochs = 2
minibatches = 2
microbatch_tokens = 200

[evaluation]
problems = 6

[checkpoint]
every = 2
"""

REWARD = """
import re

def count_digits(completions, **columns):
    return [float(len(re.findall("[0-9]", c[0]["content"]))) for c in completions]
"""


def write_recipe(folder: Path, model: Path, steps: int = 8) -> Path:
    """A recipe and its reward function in `folder`."""
    (folder / "rewards.py").write_text(REWARD)
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE.format(model=model, steps=steps, reward=folder / "rewards.py"))
    return recipe


def start(*words: object, cwd: Path, program: str = "covey.cli", **variables: str) -> subprocess.Popen[str]:
    """`covey`, or another module that takes its words, in the background, with these environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", program, *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | variables,
    )


def wait_for_steps(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until a run has recorded so many steps."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def covey(*words: object, cwd: Path, **started: str) -> tuple[int, str]:
    """Exit code and output of `covey` with these words; `started` as `start` takes it."""
    process = start(*words, cwd=cwd, **started)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def reproducible_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What a run measured, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k == "step" or is_reproducible(k)} for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
