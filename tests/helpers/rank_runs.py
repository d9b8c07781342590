"""Runs on several ranks, and what they leave, compared with a run on one."""

import hashlib
import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.runtime.checkpoint import CheckpointFolder, SavedParts
from covey.tracking.metrics import is_reproducible
from helpers import rank_cases
from helpers.rank_cases import start_ranks

LIMIT = 1200  # seconds; for a hang
MOMENTS = [(number % 2, random.Random(number).randrange(5, 60)) for number in range(20)]  # (rank, message or file)


def finish(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What the ranks print, after they have ended without an error."""
    said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    for rank, (out, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, out + err
    return [out + err for out, err in said]


def trained(model: Path, folder: Path, ranks: int, names: Sequence[str], weights: str = "replicate") -> Path:
    """The folder of the runs of some cases."""
    rank_cases.write_examples(folder)
    words = [rank_cases.__file__, str(folder), str(model), json.dumps(list(names)), weights]
    said = finish(start_ranks(words, ranks, folder))
    assert not any(said[1:]), "only rank 0 prints"
    for name in [name for name in names if name not in rank_cases.EXAMPLES]:
        seen = sorted(path.name for path in folder.glob(f"{name}.seen-by-*"))
        assert seen == [f"{name}.seen-by-0"], "only rank 0 calls observers"
    return folder


def files_of(run: Path) -> dict[str, str]:
    """Everything that a run leaves and that its seed determines: file -> hash, metrics apart from times."""
    found = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("model", "critic", "adapter", "rollouts", "held_out")
        for path in sorted((run / folder).rglob("*"))
        if path.is_file()
    }
    checkpoints = CheckpointFolder(run / "checkpoints")
    for step in checkpoints.steps():
        found |= {f"checkpoints/{step}{name}": value for name, value in content_of(checkpoints.load(step))}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        kept = {name: value for name, value in line.items() if name == "step" or is_reproducible(name)}
        found[f"metrics of step {line['step']}"] = json.dumps(kept, sort_keys=True)
    return found


def content_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a state; of a tensor its type and a hash, sharded or not."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from content_of(item, f"{name}/{key}")
    elif isinstance(value, (torch.Tensor, SavedParts)):
        tensor = value[:] if value.shape else value
        yield name, f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
    else:
        yield name, repr(value)


def compare(
    model: Path, tmp_path_factory: pytest.TempPathFactory, teams: Sequence[tuple[int, str]], names: Sequence[str]
) -> None:
    """Train the cases on one rank and on some teams (ranks, weights), and compare everything that they leave."""
    folders = [trained(model, tmp_path_factory.mktemp(f"ranks{team[0]}"), *_words(team, names)) for team in teams]
    whole = trained(model, tmp_path_factory.mktemp("ranks1"), 1, names)
    for name in names:
        one = files_of(whole / name)
        assert any(path.startswith("checkpoints/") for path in one)
        for team, folder in zip(teams, folders, strict=True):
            assert files_of(folder / name) == one, f"{name} on {team}"


def _words(team: tuple[int, str], names: Sequence[str]) -> tuple[int, Sequence[str], str]:
    return team[0], names, team[1]
