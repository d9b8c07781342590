"""An iterative run that is killed at any moment ends with the same bits: policy, reward model, history, records."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from helpers.iterative_runs import STEPS, WAYS, write_iterative_recipes
from helpers.run_helpers import CALLS_OF_A_STEP, Moment, covey, files, reproducible_metrics

SOME = [way if way in ("pairs", "steps") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("iteration")
    write_iterative_recipes(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[[str], Path]:
    """Runs that were never stopped, each made at its first use."""

    @cache
    def made(way: str) -> Path:
        code, output = covey("iterate", f"{way}.toml", "--run-dir", folder / f"{way}-whole", cwd=folder)
        assert code == 0, output
        return folder / f"{way}-whole"

    return made


def records_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "iterations.jsonl").read_text().splitlines()]


def check_same(killed: Path, expected: Path) -> None:
    assert reproducible_metrics(killed) == reproducible_metrics(expected)
    assert records_of(killed) == records_of(expected)
    for name in ("rollouts", "model", "reward_model"):
        assert files(killed / name) == files(expected / name), name
    last = f"checkpoints/step-{STEPS:08d}"
    for name in ("tensors.safetensors", "state.json"):
        assert files(killed / last)[name] == files(expected / last)[name]


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
def test_each_way_trains_measures_and_writes_what_it_promises(way: str, whole: Callable[[str], Path]) -> None:
    records = records_of(whole(way))
    assert [(record["iteration"], record["step"]) for record in records] == [(1, 2), (2, 4), (3, 6)]
    assert (whole(way) / "iterations.png").stat().st_size > 10_000
    for record in records:
        assert {"proxy_reward", "accuracy", "auc"} <= record["before"].keys() & record["after"].keys()
        assert (record["before"] == record["after"]) == (way == "frozen")
        assert (record["optimizer_steps"] == 0) == (way == "frozen")
    assert records[0]["replayed"] == 0
    assert all((record["replayed"] > 0) == (way != "frozen") for record in records[1:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_killed_once_and_resumed_ends_with_the_same_bits(way: str, folder: Path, whole: Callable[[str], Path]) -> None:
    """Killed after step 4: while the reward model is measured or trained."""
    killed = folder / f"{way}-killed"
    command: list[object] = ["iterate", f"{way}.toml", "--run-dir", killed]
    code, output = covey(*command, cwd=folder, moment=Moment(4, 3 * CALLS_OF_A_STEP))
    assert code == -signal.SIGKILL, output
    code, output = covey("iterate", "--resume", killed, cwd=folder)
    assert code == 0, output
    check_same(killed, whole(way))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_twenty_moments_ends_with_the_same_bits(way: str, folder: Path, whole: Callable[[str], Path]) -> None:
    source = random.Random(way)
    for number in range(20):
        killed = folder / f"{way}-killed-{number}"
        moment = Moment(source.randint(1, STEPS), source.randint(0, 8 * CALLS_OF_A_STEP))
        code, output = covey("iterate", f"{way}.toml", "--run-dir", killed, cwd=folder, moment=moment)
        if code == -signal.SIGKILL:
            code, output = covey("train", "--resume", killed, cwd=folder)
        assert code == 0, (moment, output)
        check_same(killed, whole(way))


@pytest.mark.slow
def test_the_reference_of_an_iteration_is_the_policy_at_its_beginning(whole: Callable[[str], Path]) -> None:
    kl = {line["step"]: line["kl"] for line in reproducible_metrics(whole("pairs"))}
    assert max(kl[step] for step in (1, 3, 5)) < 1e-6 < min(kl[step] for step in (2, 4, 6))
