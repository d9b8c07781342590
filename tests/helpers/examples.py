"""Examples to train on, written as lines of JSON, and a recipe of `covey sft` on some of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SFT_RECIPE = """
model = "{model}"
precision = "fp32"
threads = 1

[sft]
data = "sums.jsonl"
epochs = 2
batch_size = 4
learning_rate = 1e-2
warmup_steps = 2

[checkpoint]
every = 2
"""


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_examples(folder: Path, model: str) -> None:
    """sums.toml, a recipe of `covey sft` with its data, and data of reward models: 20 examples of each kind."""
    (folder / "sums.toml").write_text(SFT_RECIPE.format(model=model))
    sums = [(a, b) for a in range(1, 6) for b in range(4)]
    tables = {
        "sums": [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums],
        "pairs": [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums],
        "grades": [{"prompt": f"{a}+{b}=", "completion": str(a + b + b % 2), "grade": b % 2 == 0} for a, b in sums],
        "steps": [
            {"prompt": f"{a}+{b}=", "completions": ["add", str(a + b + b % 2)], "labels": [True, b % 2 == 0]}
            for a, b in sums
        ],
    }
    for name, rows in tables.items():
        write_rows(folder / f"{name}.jsonl", rows)
