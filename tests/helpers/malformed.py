"""Malformed inputs: the words of a command, the files of its folder, and how covey must answer.

`malformed_tables` has those that were picked by hand, `damage` makes others at random from a seed.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.forks import Case, Outcome

Content = bytes | str | Callable[[Path], None]  # a callable makes what is not a plain file

LANGUAGE = """
steps = 2
seed = 3
threads = 1
precision = "fp32"
[task]
name = "arithmetic"
digits = [1]
[[rewards]]
name = "numeric"
[sampling]
prompts_per_step = 2
group_size = 2
max_new_tokens = 4
[evaluation]
problems = 2
"""
CONTROL = """
steps = 2
[environment]
id = "CartPole-v1"
[rollouts]
kind = "episodes"
starts_per_step = 2
group_size = 2
[policy]
hidden = [4]
[evaluation]
episodes = 2
[checkpoint]
every = 1
"""
DATASET_RECIPE = """
[task]
name = "dataset"
path = "data.jsonl"
[[rewards]]
name = "exact"
[sampling]
prompts_per_step = 2
[evaluation]
problems = 1
"""
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]


@dataclass(frozen=True)
class Input:
    """One malformed input."""

    name: str
    words: tuple[str, ...]
    files: dict[str, Content] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    encoding: str = "utf-8"
    accepted: bool = False  # covey may also take it as it is: exit code 0
    needs_model: bool = False  # loads a model, or trains: the limit of three seconds is not for it


def jsonl(rows: Iterable[Any] = ROWS) -> str:
    """Rows as the text of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def cases(inputs: Iterable[Input], root: Path) -> Iterator[Case]:
    """Every input in a folder of its own below `root`."""
    for number, given in enumerate(inputs):
        folder = root / f"{number:05d}"
        folder.mkdir(parents=True)
        for name, content in given.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield Case(given.name, given.words, str(folder), given.environment, encoding=given.encoding)


def faults(given: Input, outcome: Outcome) -> list[str]:
    """What is wrong with the way in which covey answered; empty where it is as it should be."""
    wrong = []
    told = [line for line in outcome.errors.splitlines() if line.startswith("error: ")]
    if outcome.code == 0:
        if not given.accepted:
            wrong.append("it was accepted")
    elif outcome.code not in (1, 2, 3):
        wrong.append(f"exit code {outcome.code}")
    elif len(told) != 1 or outcome.errors.splitlines()[-1] != told[0]:
        wrong.append(f"{len(told)} lines begin with 'error: '")
    elif len(told[0]) > 2000:
        wrong.append(f"a line of {len(told[0])} characters")
    everything = outcome.output + outcome.errors
    wrong += [word for word in ("error: unexpected", "Traceback", "escaped from") if word in outcome.errors]
    controls = {c for c in everything if not c.isprintable() and c not in "\n\t"}
    if controls:
        wrong.append(f"control characters {sorted(controls)!r}")
    if outcome.left_behind and not (given.needs_model and outcome.code == 0):
        wrong.append(f"it left {', '.join(outcome.left_behind)}")
    limit = 10 if outcome.code == 0 else 3  # `covey check` loads the model once it has found no fault
    if outcome.seconds > limit and not given.needs_model:
        wrong.append(f"it took {outcome.seconds:.1f} s of the processor")
    return wrong
