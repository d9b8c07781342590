"""What `covey check` prints: the fields that are not at their defaults, and the verdict."""

import io
import sys
import tomllib
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config.fields import iter_fields
from covey.config.recipe import changes_to_toml, config_from_dict, packaged_recipes, read_recipe
from covey.config.terminal import say


def test_the_settings_that_are_not_defaults_describe_every_packaged_recipe() -> None:
    for name in packaged_recipes():
        config = read_recipe(name)
        text = changes_to_toml(config)
        assert config_from_dict(tomllib.loads(text)) == config
        changed = [where for where, item, _, value in iter_fields(config) if value != item.default]
        fields = [line for line in text.splitlines() if " = " in line]
        assert len(fields) <= len(changed) + 8, text  # the task's own, and the names of rewards


def test_check_prints_what_differs_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cartpole_grpo", "--steps", "5"]) == 0
    printed = capsys.readouterr().out
    shown, verdict = printed.rstrip().rsplit("\n\n", 1)
    assert tomllib.loads(shown) == {
        "steps": 5,
        "environment": {"id": "CartPole-v1"},
        "update": {"learning_rate": 0.0025, "schedule": "linear", "max_grad_norm": 0.2, "epochs": 3},
        "evaluation": {"every": 1, "expected_return": 475.0},
    }
    assert verdict == "all is well. Next: covey train cartpole_grpo --steps 5"


class Closed(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize(
    "words", [["check", "cartpole_grpo"], ["recipes"], ["recipes", "cartpole_grpo"], ["train", "cartpole_grpo"]]
)
def test_a_command_that_only_prints_says_nothing_of_a_reader_that_has_ended(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in `covey check cartpole_grpo | head -1`. A training goes on, and says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    trains = words[0] == "train"
    monkeypatch.setattr("covey.experiment.run.run", lambda *arguments, **named: say("begun"))
    assert main(words) in (0, 130)
    assert ("cannot be written any more" in caplog.text) == trains
