"""Runs with the real package of each tracker, which writes locally, read back with the package's own reader."""

import json
import math
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from covey.config.recipe import write_config
from covey.runtime.variables import cache_folder
from covey.tracking.run_store import read_metrics
from covey.tracking.trackers import CHARACTERS, COLUMNS, NEW, MLflowTracker, Position, TrackedRun
from helpers import toy_envs
from helpers.iterative_runs import STEPS as ITERATIVE_STEPS
from helpers.iterative_runs import write_iterative_recipes
from helpers.rank_cases import start_ranks
from helpers.run_helpers import LIMIT_SECONDS, covey, write_recipe
from helpers.tiny_models import tiny_folder
from helpers.tracked_runs import HOSTILE, LOCAL, READERS, HostileCompletions, WhenTracked, break_mlflow, end_wandb

STEPS = 12
AGENT = {
    "steps": STEPS,
    "seed": 3,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 60},
    "rollouts": {"starts_per_step": 3, "group_size": 3},
    "evaluation": {"episodes": 3, "every": 5},
    "checkpoint": {"every": 4},
}
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # MLflow's client
TRACKERS = [
    pytest.param(name, marks=pytest.mark.slow if name == "tensorboard" else pytest.mark.trackers) for name in READERS
]


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, because trackio, the reader too, keeps the first."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture
def variables(trackio_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    project = {"TRACKIO_DIR": str(trackio_folder), "TRACKIO_PROJECT": tmp_path.name}
    own = LOCAL | project | {"HOME": str(tmp_path / "home"), "COVEY_CACHE": str(cache_folder())}  # kernels are there
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def agent(folder: Path, name: str) -> str:
    write_config(toy_envs.read(AGENT, trackers=[name]), folder / "agent.toml")
    return "agent.toml"


def check_complete(name: str, folder: Path, run_dir: Path) -> Any:
    """The tracker has every step once, with the numbers of the run folder; returns what it has."""
    found = READERS[name](folder, run_dir)
    assert found.runs == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    expected: dict[str, list[tuple[int, float]]] = {"eval/score": [(0, summary["evaluations"][0]["before"]["score"])]}
    for record in read_metrics(run_dir):
        for metric, value in record.items():
            if metric != "step" and value is not None:
                expected.setdefault(metric, []).append((record["step"], value))
    if expected["eval/score"][-1][0] != summary["steps"]:
        expected["eval/score"].append((summary["steps"], summary["evaluations"][0]["after"]["score"]))
    assert found.curves.keys() == expected.keys()
    for metric, points in expected.items():
        assert [step for step, _ in found.curves[metric]] == [step for step, _ in points], metric
        measured_anew = metric.startswith(("time/", "memory/")) or "per_second" in metric  # steps that were repeated
        if not measured_anew:
            for (_, value), (_, known) in zip(found.curves[metric], points, strict=True):
                assert math.isclose(value, known, rel_tol=1e-6, abs_tol=1e-30), metric
    assert str(summary["decisions_sampled"]) in found.summary
    return found


@pytest.mark.parametrize("name", TRACKERS)
def test_a_run_that_was_killed_is_in_its_tracker_once_and_whole(
    name: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    recipe = agent(tmp_path, name)
    run_dir = tmp_path / "run"
    killed, output = covey(
        "train", recipe, "--run-dir", "run", cwd=tmp_path, moment=WhenTracked(name=name, step=10, has=6), **variables
    )
    assert killed == -9, output
    before = json.loads((run_dir / f"trackers/{name}.json").read_text())
    assert before["step"] >= 6
    code, output = covey("train", "--resume", "run", cwd=tmp_path, **variables)
    assert code == 0, output
    assert "warning" not in output
    assert json.loads((run_dir / f"trackers/{name}.json").read_text())["id"] == before["id"]
    found = check_complete(name, tmp_path, run_dir)
    assert sorted(found.tables) == list(range(1, STEPS + 1))
    assert tuple(found.tables[1][0]) == COLUMNS
    assert all(0 < len(rows) <= 6 for rows in found.tables.values())
    config = found.config.get("environment.id") or found.config["environment"]["id"]
    assert config == "CartPole-v1"


@pytest.mark.trackers
@pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes")  # MLflow's tables, of pandas
@pytest.mark.parametrize("damaged", [False, True])
def test_mlflow_has_the_rows_of_a_step_once_if_the_process_was_killed_between_table_and_metrics(
    damaged: bool, tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `damaged`, while MLflow copied the table: the rows before are lost, and the tracker goes on."""
    for name in ("MLFLOW_LOGGING_LEVEL", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        monkeypatch.setenv(name, "")  # restored afterwards
        os.environ.pop(name)
    monkeypatch.chdir(tmp_path)
    run = TrackedRun(tmp_path, "run", "recipe", {"seed": 1})
    position, steps = None, {step: [(step, 0, "prompt", "completion", 1.0, None, 3, "end")] * 2 for step in range(1, 5)}
    for first in (1, 3):
        tracker = MLflowTracker()
        begun = tracker.start(run, position)
        position = Position(begun.id)
        assert begun.step == (first - 1 if first > 1 else NEW)
        for step in range(first, first + 2):
            tracker.log(step, {"time/step": 0.5}, steps[step])
        if first == 1:  # step 3 as it is if the process was killed in the middle
            tracker._client.log_batch = None
            with pytest.raises(TypeError):
                tracker.log(3, {"time/step": 0.5}, steps[3])
            if damaged:
                next(Path("mlruns").rglob("rollouts.json")).write_text('{"columns": [')
    tracker.finish({})
    found = READERS["mlflow"](tmp_path, tmp_path)
    assert found.curves == {"time/step": [(step, 0.5) for step in steps]}
    assert {step: len(rows) for step, rows in found.tables.items()} == dict.fromkeys([3, 4] if damaged else steps, 2)


@pytest.mark.parametrize("name", TRACKERS)
def test_completions_are_in_the_table_as_text(name: str, tmp_path: Path, variables: dict[str, str]) -> None:
    write_recipe(tmp_path, tiny_folder(tmp_path / "model"), steps=2)
    words = ("train", "tiny.toml", "--trackers", name, "--run-dir", "run")
    code, output = covey(*words, cwd=tmp_path, moment=HostileCompletions("", ""), **variables)
    assert code == 0, output
    assert "warning" not in output
    found = check_complete(name, tmp_path, tmp_path / "run")
    clean = HOSTILE.replace("\x1b", "�").replace("\u202e", "�")
    for row in found.tables[2]:
        assert row["completion"].startswith(clean)
        assert len(row["completion"]) == CHARACTERS
        assert float(row["reward"]) >= 0


@pytest.mark.parametrize("name", TRACKERS)
def test_an_iterative_run_killed_in_the_training_of_its_reward_model_and_in_a_step_is_tracked_once_and_whole(
    name: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    write_iterative_recipes(tmp_path)
    words = ["iterate", "pairs.toml", "--trackers", name, "--run-dir", "run"]
    for step, has, reward_model in ((4, 4, True), (6, 5, False)):  # the second time the tracker is ahead of step 4
        moment = WhenTracked(name=name, step=step, has=has, reward_model=reward_model)
        killed, output = covey(*words, cwd=tmp_path, moment=moment, **variables)
        assert killed == -signal.SIGKILL, output
        words = ["iterate", "--resume", "run"]
    code, output = covey(*words, cwd=tmp_path, **variables)
    assert code == 0, output
    assert "resuming after step 4" in output
    assert "warning" not in output
    found = check_complete(name, tmp_path, tmp_path / "run")
    assert sorted(found.tables) == list(range(1, ITERATIVE_STEPS + 1))


RECIPE = """
model = "{model}"
steps = 8
threads = 1
[task]
name = "arithmetic"
[[rewards]]
name = "digits"
[sampling]
prompts_per_step = 4
group_size = 2
max_new_tokens = 6
[evaluation]
problems = 4
[checkpoint]
every = 2
"""
KILLED = """
import sys
from covey.cli.main import main
from covey.runtime.variables import own_rank
from helpers.tracked_runs import WhenTracked

if not own_rank():
    WhenTracked(name=sys.argv[1], step=6, has=5).prepare()  # the checkpoint is of step 4
sys.exit(main(["train", "ranks.toml", "--trackers", sys.argv[1], "--run-dir", "run"]))
"""


@pytest.mark.slow
def test_of_two_ranks_rank_0_alone_tracks_also_after_a_kill(tmp_path: Path, variables: dict[str, str]) -> None:
    name = "tensorboard"  # no adapter knows of ranks
    (tmp_path / "ranks.toml").write_text(RECIPE.format(model=tiny_folder(tmp_path / "model")))
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "tmp").mkdir()
    own = variables | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "tmp")}
    began = start_ranks(["killed.py", name], 2, tmp_path, **own)
    said = [rank.communicate(timeout=LIMIT_SECONDS) for rank in began]
    assert began[0].returncode == -signal.SIGKILL, said
    assert "rank 1 has lost another rank" in said[1][1]
    resumed = start_ranks(["-m", "covey", "train", "--resume", "run"], 2, tmp_path, **own)
    said = [rank.communicate(timeout=LIMIT_SECONDS) for rank in resumed]
    assert [rank.returncode for rank in resumed] == [0, 0], said
    assert said[1] == ("", ""), "only rank 0 prints"
    assert "resuming after step 4" in said[0][0]
    assert "warning" not in said[0][0]
    found = check_complete(name, tmp_path, tmp_path / "run")
    assert sorted(found.tables) == list(range(1, 9))
    writers = {int(path.name.split(".")[-2]) for path in tmp_path.rglob("events.out.tfevents.*")}
    assert writers == {began[0].pid, resumed[0].pid}, "the names of the files have the process"


SABOTAGE = {"wandb": end_wandb, "mlflow": break_mlflow}


@pytest.mark.trackers
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_tracker_that_fails_in_the_middle_is_reported_once_and_the_run_ends_whole(
    name: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    moment = WhenTracked(name=name, step=6, has=3, then=SABOTAGE[name])
    recipe = agent(tmp_path, name)
    code, output = covey("train", recipe, "--run-dir", "run", cwd=tmp_path, moment=moment, **variables)
    assert code == 0, output
    assert output.count("warning: the tracker") == 1, output
    assert "Traceback" not in output
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert (tmp_path / "run/summary.json").is_file()


@pytest.mark.trackers
def test_without_a_server_mlflow_is_reported_once(tmp_path: Path, variables: dict[str, str]) -> None:
    gone = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    code, output = covey("train", agent(tmp_path, "mlflow"), "--run-dir", "run", cwd=tmp_path, **variables | gone)
    assert code == 0, output
    assert output.count("warning: the tracker mlflow failed") == 1, output


@pytest.mark.slow
def test_a_tensorboard_that_cannot_write_is_reported_once(tmp_path: Path, variables: dict[str, str]) -> None:
    recipe = agent(tmp_path, "tensorboard")

    (tmp_path / "run/trackers").mkdir(parents=True)
    (tmp_path / "run/trackers/tensorboard").write_text("")
    (tmp_path / "run/covey.lock").write_text("")
    code, output = covey("train", recipe, "--run-dir", "run", cwd=tmp_path, **variables)
    assert code == 0, output
    assert output.count("warning: the tracker tensorboard failed") == 1, output
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


@pytest.mark.trackers
def test_without_a_key_wandb_is_refused_before_the_run(tmp_path: Path, variables: dict[str, str]) -> None:
    online = variables | {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    code, output = covey("train", agent(tmp_path, "wandb"), "--run-dir", "run", cwd=tmp_path, **online)
    assert code == 2, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: trackers: wandb has no API key")
    assert "WANDB_MODE=offline" in last
    assert not (tmp_path / "run").exists()


@pytest.mark.trackers
@pytest.mark.parametrize("name", list(READERS))
def test_nothing_is_sent(name: str, tmp_path: Path, variables: dict[str, str]) -> None:
    """All clients honour these proxies, wandb's Go process too; the listener counts connections."""
    seen: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                try:
                    connection, peer = listener.accept()
                except TimeoutError:
                    continue
                seen.append((peer, connection.recv(200)))
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxies = {
            key: address for word in ("http", "https", "all") for key in (f"{word}_proxy", f"{word.upper()}_PROXY")
        }
        telemetry = {key: value for key, value in variables.items() if key not in ("MLFLOW_DISABLE_TELEMETRY",)}
        code, output = covey("train", agent(tmp_path, name), "--run-dir", "run", cwd=tmp_path, **telemetry, **proxies)
        done.set()
        thread.join()
    assert code == 0, output
    assert not seen
