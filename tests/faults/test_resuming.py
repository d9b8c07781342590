"""A resumed run knows its recipe and its files, and says what of its record is lost; what training needs is in the
checkpoint.
"""

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config.recipe import write_config
from helpers import toy_envs
from helpers.run_helpers import Moment, covey, files, write_recipe
from helpers.tiny_models import tiny_folder

STEPS, KILLED = 6, 5  # the copies below were killed after step 5 and have checkpoints of steps 2 and 4
CONTROL = {
    "steps": STEPS,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 30},
    "rollouts": {"starts_per_step": 2, "group_size": 3},
    "policy": {"hidden": [8]},
    "evaluation": {"episodes": 2},
    "checkpoint": {"every": 2, "keep": 3},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("resuming")
    write_config(toy_envs.read(CONTROL), folder / "recipe.toml")
    assert main(["train", str(folder / "recipe.toml"), "--run-dir", str(folder / "whole")]) == 0
    return folder / "whole"


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """The run as it was after step 5."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    for name in ("model", "summary.json", "curve.png", f"rollouts/step_{STEPS:06d}.jsonl"):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:KILLED]))
    return copy


def resume(run_dir: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(["train", "--resume", str(run_dir)]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.err.startswith("error: ")
        assert len(captured.err.splitlines()) == 1
    return captured.err if code else captured.out


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def assert_same_weights(run_dir: Path, whole: Path) -> None:
    assert files(run_dir / "model") == files(whole / "model")
    last = f"step-{STEPS:08d}"
    made, expected = (files(path / "checkpoints" / last) for path in (run_dir, whole))
    assert made == expected


CHANGES = {
    ("steps = 6", "steps = 8"): "steps was 6 and is 8",
    ("seed = 0", "seed = 1"): "seed was 0 and is 1",
    ("group_size = 3", "group_size = 4"): "rollouts.group_size was 3 and is 4",
    ("hidden = [8]", "hidden = [8, 8]"): "policy.hidden was [8] and is [8, 8]",
    ("max_episode_steps = 30", "max_episode_steps = 31"): "environment.max_episode_steps was 30 and is 31",
    ('algorithm = "grpo"', 'algorithm = "rloo"'): 'algorithm was "grpo" and is "rloo"',
    ("[update]\n", "[update]\ntarget_kl = 0.1\n"): "update.target_kl was not set and is 0.1",
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_config_is_refused_with_the_first_difference(
    change: tuple[str, str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run_dir / "config.toml", *change)
    before = files(run_dir)
    line = resume(run_dir, capsys, code=2)
    assert f"config.toml has changed since the run began: {CHANGES[change]}; a resumed run keeps its settings" in line
    assert files(run_dir) == before
    command = shlex.split(line.rpartition("start a new run: covey ")[2])
    assert command == ["train", str(run_dir / "config.toml"), "--run-dir", f"{run_dir}-changed"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--steps", "6"], "steps of the run in {run} is reached already: 6 steps are done; give a higher --steps"),
        (["--steps", "5"], "steps of the run in {run} is reached already: 6 steps are done; give a higher --steps"),
        (["--steps", "many"], "--steps must be "),
        (["--steps", "8", "--seed", "1"], "(steps, token_budget, time_budget, evaluation.patience): leave out --seed"),
        (["--steps", "8", "--time-budget", "soon"], "time_budget must be a time above 0"),
        (["--time-budget", "1h"], "steps of the run in {run} is reached already"),
        (["--step", "8"], "unknown field --step (did you mean --steps?)"),
    ],
)
def test_a_finished_run_goes_on_beyond_its_limits_only(
    words: list[str], why: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(whole, tmp_path / "run")
    before = files(copy)
    assert main(["train", "--resume", str(copy), *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert why.format(run=copy) in said
    assert {name: content for name, content in files(copy).items() if name != "covey.lock"} == {
        name: content for name, content in before.items() if name != "covey.lock"
    }


def test_a_run_that_is_not_finished_ends_before_it_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(run_dir), "--steps", "8"]) == 2
    assert f"first let it end with covey train --resume {run_dir}" in capsys.readouterr().err


def test_the_settings_of_an_older_version_are_those_of_its_defaults(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that is new since the run began is not a change."""
    origin = json.loads((run_dir / "origin.json").read_text())
    del origin["config"]["evaluation"]["every"], origin["config"]["replay"]
    (run_dir / "origin.json").write_text(json.dumps(origin))
    assert f"resuming after step {KILLED - 1}" in resume(run_dir, capsys)


@pytest.mark.slow
def test_the_command_that_is_advised_after_a_change_works(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run_dir / "config.toml", "steps = 6", "steps = 1")
    command = shlex.split(resume(run_dir, capsys, code=2).rpartition("start a new run: covey ")[2])
    assert main(command) == 0
    assert (run_dir.parent / "run-changed" / "summary.json").is_file()


@pytest.mark.slow
def test_a_run_folder_may_move(run_dir: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = run_dir.rename(run_dir.with_name("elsewhere"))
    resume(moved, capsys)
    assert_same_weights(moved, whole)


@pytest.mark.slow
def test_a_missing_config_is_written_anew(run_dir: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "config.toml").unlink()
    assert "config.toml was missing; it is written again from origin.json" in resume(run_dir, capsys)
    assert_same_weights(run_dir, whole)
    assert (run_dir / "config.toml").is_file()


@pytest.mark.parametrize("text", ["steps = ", "stepz = 5", "", "\0"])
def test_a_damaged_config_says_where_the_settings_are(
    text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "config.toml").write_text(text)
    line = resume(run_dir, capsys, code=2)
    assert "config.toml" in line
    if text:
        assert f"delete {run_dir / 'config.toml'}, and the run takes its settings from origin.json" in line


ORIGINS: dict[str, Callable[[dict], object]] = {
    "missing": lambda origin: None,
    "empty": lambda origin: "",
    "cut": lambda origin: json.dumps(origin)[:-20],
    "a list": lambda origin: [],
    "a number": lambda origin: 5,
    "nested": lambda origin: "[" * 100_000,
    "without settings": lambda origin: {**origin, "config": None},
    "without an evaluation": lambda origin: {**origin, "before": []},
    "without checksums": lambda origin: {**origin, "inputs": None},
    "with half an evaluation": lambda origin: {**origin, "before": [{"score": 1}]},
    "with a recipe that is none": lambda origin: {**origin, "recipe": 5},
}


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ORIGINS)
def test_a_lost_origin_is_one_line(name: str, run_dir: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "origin.json"
    content = ORIGINS[name](json.loads(path.read_text()))
    path.unlink()
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    output = resume(run_dir, capsys)
    how = "missing" if content is None else "damaged"
    assert f"origin.json is {how}: the evaluation before training is repeated; whether config.toml, the" in output
    assert_same_weights(run_dir, whole)
    before, expected = (json.loads((path / "origin.json").read_text())["before"][0] for path in (run_dir, whole))
    assert {**before, "seconds": 0} == {**expected, "seconds": 0}
    assert "origin.json" not in resume(run_dir, capsys)


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, reward functions and a run on them that was stopped after step 1."""
    folder = tmp_path_factory.mktemp("own_files")
    recipe = write_recipe(folder, tiny_folder(folder / "model"), steps=3)
    for name in ("data", "held_out"):
        rows = [{"prompt": [{"role": "user", "content": f"{i}+1 {name}"}], "answer": str(i + 1)} for i in range(6)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'name = "dataset"\npath = "{folder}/data.jsonl"\nheld_out_path = "{folder}/held_out.jsonl"'
    recipe.write_text(
        recipe.read_text().replace('name = "arithmetic"\ndigits = [1]', task).replace("every = 2", "every = 1")
    )
    code, output = covey("train", recipe, "--run-dir", folder / "run", cwd=folder, moment=Moment(2, 0))
    assert code == -signal.SIGKILL, output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.jsonl", "held_out.jsonl", "rewards.py"])
def test_a_changed_file_is_refused(name: str, own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run_dir = own_files / name, own_files / "run"
    (run_dir / "covey.lock").unlink(missing_ok=True)  # names the last process
    before, recorded = path.read_text(), files(run_dir)
    path.write_text(before + "\n")
    try:
        line = resume(run_dir, capsys, code=2)
    finally:
        path.write_text(before)
    assert f"{path} has changed since the run began; a resumed run reads what it read before, so put it back" in line
    command = shlex.split(line.rpartition("start a new run from its last checkpoint: covey ")[2])
    checkpoint = run_dir / "checkpoints" / "step-00000001"
    assert command == [
        "train",
        str(run_dir / "config.toml"),
        "--run-dir",
        f"{run_dir}-changed",
        "--model",
        str(checkpoint),
    ]
    (run_dir / "covey.lock").unlink()
    assert files(run_dir) == recorded


@pytest.mark.slow
def test_another_backend_is_told(own_files: Path, tmp_path: Path) -> None:
    """The data and the functions are as they were, so the run goes on; without the kernels its last bits may differ."""
    run_dir = tmp_path / "run"
    shutil.copytree(own_files / "run", run_dir)
    machine = json.loads((run_dir / "origin.json").read_text())["environment"]
    assert machine["update"] == "packed"
    edit(run_dir / "origin.json", f'"sampling": "{machine["sampling"]}"', '"sampling": "padded cache"')
    code, output = covey("train", "--resume", run_dir, cwd=tmp_path)
    assert code == 0, output
    changed = f"so results may not be bitwise equal: sampling was padded cache, is {machine['sampling']}"
    assert changed in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["metrics.jsonl", "rollouts", "both"])
def test_a_lost_record_is_one_line_each(
    what: str, run_dir: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what != "rollouts":
        (run_dir / "metrics.jsonl").unlink()
    if what != "metrics.jsonl":
        shutil.rmtree(run_dir / "rollouts")
    output = resume(run_dir, capsys)
    assert ("metrics.jsonl has lost the numbers of steps 1 to 4; training" in output) == (what != "rollouts")
    assert ("rollouts/ has lost those of steps 1 to 4; training" in output) == (what != "metrics.jsonl")
    assert_same_weights(run_dir, whole)


@pytest.mark.parametrize("harm", ["all damaged", "deleted", "emptied"])
def test_a_run_without_a_checkpoint_forgets_nothing(
    harm: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_dir / "checkpoints"
    if harm == "all damaged":
        for path in checkpoints.glob("*/tensors.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    else:
        shutil.rmtree(checkpoints)
        if harm == "emptied":
            checkpoints.mkdir()
    before = {name: data for name, data in files(run_dir).items() if name != "covey.lock"}
    assert main(["train", "--resume", str(run_dir)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    why = "no checkpoint is whole" if harm == "all damaged" else "checkpoints/ was deleted"
    assert f"cannot be resumed, because {why}; metrics.jsonl and the rollouts are untouched. Train it again" in line
    assert {name: data for name, data in files(run_dir).items() if name != "covey.lock"} == before
