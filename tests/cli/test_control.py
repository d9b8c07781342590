"""The command line on recipes and runs of control: what it hands on, what it prints, what it refuses."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config import ControlConfig, ControlEvaluationConfig, EnvironmentConfig
from covey.config.recipe import describe_fields, write_config
from covey.experiment.advice import Launch

RECIPE = '[environment]\nid = "CartPole-v1"\n'
RESULT = {
    "score": 487.25, "low": 480.0, "high": 494.5, "count": 20, "returns": [], "drawable": True,
    "picture": "run/episode.gif",
}  # fmt: skip


class Behind:
    """Stands for the functions behind the commands and notes how they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []
        for module, names in (
            ("experiment.run", ["run", "check"]),
            ("experiment.control", ["evaluate_run"]),
            ("comparison.compare", ["compare"]),
        ):
            fake = types.ModuleType(f"covey.{module}")
            for name in names:
                setattr(fake, name, self._noting(name))
            monkeypatch.setitem(sys.modules, fake.__name__, fake)

    def _noting(self, name: str) -> object:
        def call(*args: object, **kwargs: object) -> object:
            self.calls.append((name, args, kwargs))
            return {key: value for key, value in RESULT.items() if key != "picture" or kwargs.get("render")}

        return call


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Behind:
    monkeypatch.chdir(tmp_path)
    Path("cart.toml").write_text(RECIPE)
    Path("run").mkdir()
    Path("run/origin.json").write_text(json.dumps({"launch": vars(Launch("cart.toml", ("--seed", "5"), 100))}))
    config = ControlConfig(
        environment=EnvironmentConfig("CartPole-v1"),
        seed=5,
        run_dir="run",
        evaluation=ControlEvaluationConfig(episodes=20, expected_return=475.0),
    )
    write_config(config, Path("run/config.toml"))
    return Behind(monkeypatch)


def test_train_and_check_take_a_recipe_for_control(behind: Behind, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cart.toml", "--group-size", "4"]) == 0
    assert main(["check", "cart.toml", "--environment", "Acrobot-v1"]) == 0
    (trained, (config,), options), (checked, (other,), _) = behind.calls
    assert options.pop("launch").recipe == "cart.toml"
    assert (trained, checked, options) == ("run", "check", {"recipe_name": "cart.toml"})
    assert config.rollouts.group_size == 4
    assert other.environment.id == "Acrobot-v1"
    out = capsys.readouterr().out
    assert 'id = "Acrobot-v1"' in out
    assert "memory" not in out
    assert out.splitlines()[-1] == "all is well. Next: covey train cart.toml --environment Acrobot-v1"


def test_eval_measures_the_agent_of_a_run(behind: Behind, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "run"]) == 0
    assert behind.calls == [("evaluate_run", (Path("run"),), {"episodes": 20, "render": False, "seed": None})]
    assert capsys.readouterr().out.splitlines() == [
        "mean return 487.2 (95 % interval 480.0 to 494.5) over 20 episodes",
        "expected 475: reached",
        "Next: watch the policy: covey eval run --render",
    ]
    assert main(["eval", "run", "--episodes", "7", "--render", "--seed", "9"]) == 0
    assert behind.calls[1][2] == {"episodes": 7, "render": True, "seed": 9}
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "a picture of one episode is in run/episode.gif"
    command = lines[-1].partition(": covey ")[2].split()
    assert command == ["train", "cart.toml", "--seed", "6"]
    assert main(command) == 0  # what is advised works
    assert behind.calls[2][1][0].seed == 6


def test_eval_says_where_the_return_is_below_the_expected(
    behind: Behind, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULT, "score", 474.9)
    assert main(["eval", "run"]) == 0
    assert "expected 475: not reached" in capsys.readouterr().out


def test_compare_hands_over_what_was_asked(behind: Behind) -> None:
    Path("other.toml").write_text(RECIPE)
    words = "compare cart.toml other.toml --seeds 3 --output out --jobs 2 --threshold -1e2 --steps 5 --gamma=0.9"
    assert main(words.split()) == 0
    assert main(["compare", "cart.toml"]) == 0
    first, second = behind.calls
    assert first[1] == (["cart.toml", "other.toml"],)
    assert first[2] == {
        "seeds": 3, "output": Path("out"), "jobs": 2, "threshold": -100.0, "overrides": ["--steps", "5", "--gamma=0.9"]
    }  # fmt: skip
    assert second[2] == {"seeds": 10, "output": None, "jobs": 0, "threshold": None, "overrides": []}


@pytest.mark.slow
def test_help_all_explains_every_field_of_control() -> None:
    words = [sys.executable, "-m", "covey.cli.main", "train", "--help-all"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    control = done.stdout.partition("(one with a table [environment])")[2]
    for row in describe_fields(ControlConfig):
        assert row.text in control
    for name in ("--kind ", "--checkpoint.every ", "--evaluation.every ", "--steps ", "--critic-epochs "):
        assert f"  {name}" in control


WITHOUT_TORCH = """
import sys
from covey.cli.main import main
code = main(sys.argv[1:])
print("heavy", sorted({"torch", "gymnasium", "transformers", "matplotlib"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [["train", "cart.toml"], ["compare", "cart.toml"]])
def test_a_mistake_is_one_line_without_torch_or_gymnasium(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "cart.toml").write_text(RECIPE)
    words = [sys.executable, "-c", WITHOUT_TORCH, *words, "--kind", "fragments"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rollouts.kind is 'fragments', but algorithm 'grpo' has no critic")
    assert done.stderr.count("\n") == 1
    assert done.stdout == "heavy []\n"
