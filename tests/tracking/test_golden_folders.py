"""Run folders of November 2026, one of each kind, are read by every command that reads records.

`golden/` holds the records of small runs, without weights and pictures. Its files stay as they are: a reader that no
longer takes them breaks the runs that users have.
"""

import shutil
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.comparison.estimates import read_seed_run
from covey.tracking.curve import run_figure
from covey.tracking.run_folder import RunState, last_step, run_state
from covey.tracking.run_reader import RunReader
from covey.tracking.run_store import read_metrics

GOLDEN = Path(__file__).parent / "golden"
SEEDS = [f"comparison/cartpole_ppo/seed_00{seed}" for seed in (0, 1)]
STEPS = {"language": 2, "control": 2, "sft": 1, **dict.fromkeys(SEEDS, 2)}
COMMANDS = ("show {run}", "runs {root}", "diagnose {run}", "runs export {run} {root}/out.jsonl")
WITHOUT_ROLLOUTS = {"sft": {"show", "runs export"}}


@pytest.fixture(params=STEPS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_records_are_read(kind: str) -> None:
    reader, steps = RunReader(GOLDEN / kind), STEPS[kind]
    summary = reader.summary()
    assert summary is not None
    assert summary["steps"] == steps == last_step(reader.run_dir) == len(read_metrics(reader.run_dir))
    assert reader.config() is not None
    assert reader.origin()["launch"]
    assert run_state(reader.run_dir) is RunState.FINISHED
    assert reader.rollout_steps() == ([] if kind == "sft" else [1, 2])
    assert all(reader.groups(step)[1] == 0 for step in reader.rollout_steps())
    assert reader.held_out_steps() == ([0, 1, 2] if kind == "language" else [])


def test_the_commands_read_them(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(GOLDEN / kind, tmp_path / "run")
    for words in COMMANDS:
        if words.partition(" {")[0] in WITHOUT_ROLLOUTS.get(kind, ()):
            continue
        code = main(words.format(run=run, root=tmp_path).split())
        assert (code, capsys.readouterr().err) == (0, ""), words


@pytest.mark.parametrize("kind", ["language", "control"])
def test_the_curve_is_drawn(kind: str) -> None:
    assert run_figure(GOLDEN / kind).axes


@pytest.mark.parametrize("folder", SEEDS)
def test_the_seeds_of_a_comparison_are_read(folder: str) -> None:
    assert read_seed_run(GOLDEN / folder, int(folder[-1])).final > 0
