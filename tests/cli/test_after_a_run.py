"""What the commands say of a run, its size, its step and its limits; the commands that torchrun started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import main, parse
from covey.cli.sample import _config_of, _run_of
from covey.config import RunConfig
from covey.config.recipe import config_from_dict, read_tables
from covey.experiment import advice
from covey.experiment.advice import Launch
from covey.tracking.console import cost_line
from covey.tracking.wording import RETURN
from helpers.run_helpers import write_recipe
from helpers.tiny_models import tiny_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run of two steps is runs/tiny-001."""
    folder = tmp_path_factory.mktemp("after")
    recipe = write_recipe(folder, tiny_folder(folder / "model"), steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", str(recipe), "--checkpoint.every", "1"]) == 0
    return folder


@pytest.fixture(autouse=True)
def there(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "step"), [("runs/tiny-001", 2), ("runs/tiny-001@1", 1), ("model", 0)])
def test_the_answers_of_an_evaluation_have_the_step_of_their_weights(model: str, step: int) -> None:
    words = ["eval", model, "--problems", "2", "--max-new-tokens", "2", "--output", f"{step}.jsonl"]
    assert main([*words, *(("--task", "arithmetic") if not step else ())]) == 0
    assert {json.loads(line)["step"] for line in Path(f"{step}.jsonl").read_text().splitlines()} == {step}


@pytest.mark.parametrize(
    ("words", "limit"),
    [(["runs/tiny-001"], 6), (["runs/tiny-001", "--max-new-tokens", "9"], 9), (["model"], 64)],
)
def test_samples_of_a_run_have_its_token_limit(words: list[str], limit: int) -> None:
    arguments, _ = parse(["sample", *words, "1 + 1"])
    assert int(_config_of(arguments, _run_of(arguments), "").sampling.max_new_tokens) == limit


def test_the_evaluation_of_a_run_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/nothing"]) == 2
    assert "there is no folder runs/nothing" in capsys.readouterr().err


def test_the_size_of_large_checkpoints_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = json.loads(Path("runs/tiny-001/summary.json").read_text())
    assert cost_line(summary).endswith("Everything is in runs/tiny-001")
    monkeypatch.setattr("covey.tracking.console.LARGE_CHECKPOINTS", 1000)
    assert " checkpoints: covey runs prune keeps the newest)" in cost_line(summary)


@pytest.mark.parametrize(
    ("machines", "started"),
    [
        (1, "torchrun --nproc-per-node 2 -m "),
        (2, "torchrun --nproc-per-node 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 -m "),
    ],
)
def test_the_advice_of_several_ranks_starts_as_many(
    machines: int, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch("my.toml", ("--seed", "1"))
    assert advice.go_on(launch, "runs/a") == "covey train --resume runs/a"
    variables = {"RANK": "0", "WORLD_SIZE": str(2 * machines), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                 "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = config_from_dict(read_tables("runs/tiny-001/config.toml"))
    assert isinstance(config, RunConfig)
    assert advice.go_on(launch, "runs/a") == f"{started}covey train --resume runs/a"
    assert advice.start(launch, config, {"steps": 4}) == f"{started}covey train my.toml --seed 1 --steps 4"


def test_equal_scores_have_no_interval() -> None:
    equal = RETURN.estimate([500.0, 500.0, 500.0])
    assert RETURN.write_interval(equal) == "500.0 (no interval)"
    assert RETURN.name_interval(equal) == "no interval from equal scores"
    assert RETURN.write_interval(RETURN.estimate([1.0, 2.0, 3.0])) == "2.00 (-0.48 to 4.48)"


@pytest.mark.slow
def test_a_mistake_in_a_notebook_is_one_line() -> None:
    cell = "import covey; from covey.config.rules import validate; validate(covey.RunConfig(steps=0))"
    shell = f"from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell({cell!r})"
    said = subprocess.run([sys.executable, "-c", shell], capture_output=True, text=True, check=True).stdout
    assert len(said.strip().splitlines()) == 1, said
    assert said.startswith("ConfigError: ")
