"""Runs with and without samplers in other processes."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from covey.tracking.metrics import is_reproducible

RECIPE = """
model = "{model}"
steps = {steps}
seed = 3
threads = 1
precision = "{precision}"
show_rollouts_every = 0

[task]
name = "arithmetic"
digits = [1]

[[rewards]]
name = "digits"
[[rewards]]
name = "length"
length_limit = 8
weight = 0.5

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6
stop = ["7", "+", "e"]

[chat]
system_prompt = "Add."

[loss]
kl_coefficient = 0.02

[update]
learning_rate = 1e-3
epochs = 2

[evaluation]
problems = 6
every = 2

[checkpoint]
every = 20
"""


def write_recipe(
    folder: Path, name: str, model: Path, steps: int = 3, sampler: str = "", precision: str = "fp32"
) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(model=model, steps=steps, precision=precision) + sampler)
    return path


def sampler_table(servers: Sequence[str], token_file: Path, **fields: object) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    addresses = json.dumps(list(servers))
    return "\n".join(
        ["[sampler]", 'kind = "covey"', f"servers = {addresses}", f'token_file = "{token_file}"', *lines, ""]
    )


def files_of(run: Path) -> dict[str, str]:
    """Everything that a run leaves and that its seed determines: file -> hash, metrics apart from times."""
    found = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("model", "adapter", "checkpoints", "rollouts", "held_out")
        for path in sorted((run / folder).rglob("*"))
        if (path.is_file() and "checkpoints" not in path.parts) or path.name.endswith(".safetensors")
    }
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        kept = {name: value for name, value in line.items() if name == "step" or is_reproducible(name)}
        found[f"metrics of step {line['step']}"] = json.dumps(kept, sort_keys=True)
    return found
