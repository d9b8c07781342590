"""Several ranks end with the bits of one: weights, moments, metrics, rollouts and held-out answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from covey.tracking.metrics import is_reproducible
from helpers import rank_cases
from helpers.rank_cases import CASES, QUICK, start_ranks
from helpers.tiny_models import tiny_folder

LIMIT = 400  # seconds; for a hang

pytestmark = pytest.mark.timeout(900)
Ranks = Callable[[int], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def finish(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What the ranks print, after they have ended without an error."""
    said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    for rank, (out, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, out + err
    return [out + err for out, err in said]


def trained(model: Path, folder: Path, ranks: int, names: Sequence[str]) -> Path:
    """The folder of the runs of some cases."""
    words = [rank_cases.__file__, str(folder), str(model), json.dumps(list(names))]
    said = finish(start_ranks(words, ranks, folder))
    assert not any(said[1:]), "only rank 0 prints"
    return folder


def files_of(run: Path) -> dict[str, str]:
    """Everything that a run leaves and that its seed determines: file -> hash, metrics apart from times."""
    found = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("model", "critic", "checkpoints", "rollouts", "held_out")
        for path in sorted((run / folder).rglob("*"))
        if path.is_file()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        kept = {name: value for name, value in line.items() if name == "step" or is_reproducible(name)}
        found[f"metrics of step {line['step']}"] = json.dumps(kept, sort_keys=True)
    return found


def compare(model: Path, tmp_path_factory: pytest.TempPathFactory, sizes: Sequence[int], names: Sequence[str]) -> None:
    folders = [trained(model, tmp_path_factory.mktemp(f"ranks{size}"), size, names) for size in (1, *sizes)]
    for name in names:
        one, *several = (files_of(folder / name) for folder in folders)
        assert any(path.startswith("checkpoints/") for path in one)
        for size, found in zip(sizes, several, strict=True):
            assert found == one, f"{name} on {size} ranks"


def test_two_ranks_have_the_bits_of_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    compare(model, tmp_path_factory, (2,), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ci_sample), 4])
def test_every_algorithm_and_every_collector_has_the_bits_of_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    compare(model, tmp_path_factory, (size,), list(CASES))


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_killed_rank_ends_the_run_which_goes_on_with_another_number_of_ranks(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = trained(model, tmp_path_factory.mktemp("whole"), 1, ["grpo"]) / "grpo"
    folder = tmp_path_factory.mktemp("killed")
    words = [rank_cases.__file__, str(folder), str(model), '["grpo"]']
    ranks = start_ranks(words, 2, folder)
    metrics = folder / "grpo" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGKILL)
    _, err = ranks[0].communicate(timeout=LIMIT)
    ranks[1].communicate(timeout=LIMIT)
    if ranks[0].returncode:  # else the run had ended before
        assert "rank 0 has lost another rank" in err
        resumed = ["-m", "covey", "train", "--resume", str(folder / "grpo")]
        finish(start_ranks(resumed, 4, folder))
    found = files_of(folder / "grpo")
    assert found == files_of(whole)


DISAGREEING = """
import os
from covey import run
from covey.config import ClusterConfig
from helpers.rank_cases import BASE
from dataclasses import replace
import sys

task = [{"question": f"What is {n} + {os.environ['RANK']}?", "answer": "1"} for n in range(40)]
run(replace(BASE, model=sys.argv[1], run_dir="run", task=None, cluster=ClusterConfig(2)), task=task)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_ranks_with_other_prompts_are_found_in_the_first_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "disagree.py").write_text(DISAGREEING)
    path = os.pathsep.join(sys.path)
    ranks = start_ranks(["disagree.py", str(model)], 2, tmp_path, PYTHONPATH=path)
    for rank in ranks:
        _, err = rank.communicate(timeout=LIMIT)
        assert rank.returncode
        assert "rank 1 has drawn other prompts than rank 0 in step 1" in err


RECIPE = """
model = "{model}"
steps = 1
[task]
name = "arithmetic"
[sampling]
prompts_per_step = 4
{more}
"""


@pytest.mark.parametrize(
    ("ranks", "more", "words", "message"),
    [
        (3, "", ["train", "recipe.toml"], "the number of ranks must be a power of two, got 3"),
        (2, "[cluster]\nshards = 1", ["train", "recipe.toml"], "2 ranks cannot divide cluster.shards = 1"),
        (8, "", ["train", "recipe.toml"], "8 shards are more than sampling.prompts_per_step = 4"),
        (2, "", ["train", "cartpole_grpo"], "an agent is trained by one process"),
        (2, "", ["eval", "smollm2-135m", "--task", "arithmetic"], "torchrun is for covey train"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(
    model: Path, tmp_path: Path, ranks: int, more: str, words: list[str], message: str
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, more=more))
    variables = rank_cases.environment(0, ranks, 1)
    for rank in (0, 1):  # the other ranks are not started: the mistake is found before they meet
        found = subprocess.run(
            [sys.executable, "-m", "covey", *words],
            cwd=tmp_path,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert found.returncode == 2
        assert found.stdout == ""
        assert len(found.stderr.splitlines()) == (0 if rank else 1), found.stderr
        assert rank or f"error: rank 0: {message}" in found.stderr


@pytest.mark.slow
@pytest.mark.ci_sample
def test_torchrun_trains_as_it_is_documented(model: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, more="[evaluation]\nproblems = 8"))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "covey", "train", "recipe.toml"]
    found = subprocess.run(
        [sys.executable, *words, "--run-dir", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "2 ranks, 2 shards" in found.stdout
    assert len(re.findall("step 1/1", found.stdout)) == 1
    assert (tmp_path / "run" / "summary.json").is_file()


SUMS = """
import hashlib, sys
import torch
from covey.runtime.distributed import joined_ranks, team_of

with joined_ranks():
    team = team_of(4)
    generator = torch.Generator().manual_seed(team.rank)
    tensors = [torch.randn(size, generator=generator) * 10.0**team.rank for size in (1, 7, 1000, 1 << 15)]
    team.sum(tensors)
    lengths = [len(one) for one in team.exchange(b"x" * team.rank)]
    print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest(), lengths)
"""


def test_the_processes_of_a_team_add_in_the_order_of_a_tree(tmp_path: Path) -> None:
    """gloo's sums and messages, beside the same tensors added here."""
    (tmp_path / "sums.py").write_text(SUMS)
    said = finish(start_ranks(["sums.py"], 4, tmp_path))
    parts = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        parts.append([torch.randn(size, generator=generator) * 10.0**rank for size in (1, 7, 1000, 1 << 15)])
    sums = [(a + b) + (c + d) for a, b, c, d in zip(*parts, strict=True)]
    expected = hashlib.sha256(b"".join(one.numpy().tobytes() for one in sums)).hexdigest()
    assert said == [f"{expected} [0, 1, 2, 3]\n"] * 4
