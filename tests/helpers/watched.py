"""Real runs to look at, the server that shows them, and runs whose records were tampered with."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import guessing
from helpers.run_helpers import LIMIT_SECONDS, covey, start, write_recipe
from helpers.tiny_models import tiny_folder

STEPS = 6
CONVERSATIONS = f"""
model = "{{model}}"
steps = 2
seed = 3
threads = 1
precision = "fp32"
record = {{{{ tokens = true }}}}
task = {{{{ name = "arithmetic", digits = [1] }}}}
conversation = {{{{ environment = "{guessing.__file__}:Guess", turns = 3, total_tokens = 60 }}}}
sampling = {{{{ prompts_per_step = 4, group_size = 4, max_new_tokens = 8 }}}}
evaluation = {{{{ problems = 4, every = 1 }}}}
"""
EVALUATE = ("--evaluation.every", "2")


def train_runs(folder: Path) -> Path:
    """`runs` in a folder: two of a tiny language model with different seeds, one that records tokens, one of
    conversations, one of CartPole. Each has a few steps.
    """
    recipe = write_recipe(folder, tiny_folder(folder / "model"), steps=STEPS)
    conversations = folder / "conversations.toml"
    conversations.write_text(CONVERSATIONS.format(model=folder / "model"))
    trainings = {
        "language-a": (recipe, *EVALUATE),
        "language-b": (recipe, *EVALUATE, "--seed", "4", "--update.learning_rate", "3e-3"),
        "tokens": (recipe, "--steps", "3", "--record.tokens", "true"),
        "turns": (conversations,),
        "cartpole": ("cartpole_grpo", "--steps", "4", "--evaluation.episodes", "10"),
    }
    for name, words in trainings.items():
        code, output = covey("train", *words, "--run-dir", folder / "runs" / name, cwd=folder)
        assert code == 0, output
    return folder / "runs"


@contextmanager
def training(folder: Path, name: str) -> Iterator[Path]:
    """A run of the tiny model that is in progress within the block; its folder."""
    run_dir = folder / "runs" / name
    running = start("train", folder / "tiny.toml", *EVALUATE, "--steps", "5000", "--run-dir", run_dir, cwd=folder)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not steps_of(run_dir):
            assert running.poll() is None, running.ended()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield run_dir
    finally:
        running.send_signal(signal.SIGINT)
        running.ended()


def steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """`covey watch` of the runs below a folder; its address. The server has ended with the block."""
    running = start("watch", "--port", port, cwd=folder)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", running.output())):
            assert running.poll() is None, running.ended()
            assert time.monotonic() < deadline, running.output()
            time.sleep(0.05)
        yield found[0]
    finally:
        running.send_signal(signal.SIGINT)
        running.ended()


def tampered(source: Path, target: Path, change: Callable[[dict[str, Any], int], None]) -> Path:
    """A copy of a run in which `change(record, index)` was applied to every rollout and every held-out answer."""
    shutil.copytree(source, target)
    for file in [*target.glob("rollouts/*.jsonl"), *target.glob("held_out/*.jsonl")]:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for index, record in enumerate(records):
            change(record, index)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return target
