"""The command line on its own: the overview, the list of recipes, misspelt words, completion with Tab."""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.evaluate import truncation_of
from covey.cli.main import OVERVIEW, main, parse
from covey.config import ConfigError
from covey.config.llm import SamplingConfig
from covey.config.recipe import packaged_recipes, read_recipe

COVEY = Path(sys.executable).with_name("covey")


@pytest.mark.parametrize("words", [[], ["--debug"]])
def test_covey_alone_prints_an_overview(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == OVERVIEW + "\n"


@pytest.mark.slow
def test_every_command_of_the_overview_exists() -> None:
    for line in OVERVIEW.splitlines():
        if line.startswith("  covey "):
            words = shlex.split(line.split("   ")[0].split(" > ")[0])[1:]
            arguments, fields = parse(words)
            assert (arguments.command, fields) == (words[0], [])


def test_recipes_lists_every_packaged_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    described = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert sorted(described) == packaged_recipes()
    assert described["acrobot_ppo"] == "Acrobot-v1 with PPO: swing the tip above the line"
    assert described["arithmetic_grpo"] == "SmolLM2-135M-Instruct learns to add two-digit numbers"
    assert all(20 < len(text) < 150 for text in described.values())
    agents = lines[: lines.index("Language models:")]
    assert {line.split()[0] for line in agents if line.startswith("  ")} >= {"cartpole_grpo", "pendulum_ppo"}
    assert not [line for line in agents if "family" in line]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_the_list_of_recipes_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes"])
    words = capsys.readouterr().out.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["recipes"])
    narrow = capsys.readouterr().out
    assert narrow.split() == words  # no word is broken
    if columns >= 80:
        assert max(map(len, narrow.splitlines())) <= columns


def test_a_printed_recipe_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes", "cartpole_grpo"]) == 0
    (tmp_path / "my.toml").write_text(capsys.readouterr().out)
    assert read_recipe(tmp_path / "my.toml") == read_recipe("cartpole_grpo")


@pytest.mark.parametrize("command", ["sft", "reward-model train", "eval", "sample"])
def test_help_names_an_option_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The fields of two tables may have one name: checkpoint.keep and sft.keep."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert len(named) == len(set(named)) > 5


def test_a_field_is_no_misspelt_option() -> None:
    _, fields = parse(["compare", "a", "b", "--seed", "3", "--threads", "2"])
    assert fields == ["--seed", "3", "--threads", "2"]
    with pytest.raises(ConfigError, match="did you mean '--seeds'"):
        parse(["compare", "a", "b", "--seedz", "3"])


# ---- completion, by a real shell ----

ASK = """
eval "$({covey} completion bash)"
COMP_LINE='{line}' COMP_POINT={point} COMP_TYPE=9 COMP_WORDS=({line}) COMP_CWORD=1
_python_argcomplete {covey}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completions(typed: str, folder: Path) -> set[str]:
    """The words that bash offers after `covey TYPED`."""
    line = f"{COVEY} {typed}"
    script = ASK.format(covey=COVEY, line=line, point=len(line))
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, cwd=folder, check=True)
    assert not done.stderr, done.stderr
    return {word.rstrip() for word in done.stdout.splitlines()} - {""}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_recipes_fields_and_choices(tmp_path: Path) -> None:
    (tmp_path / "cartoon.toml").write_text("")
    assert {"train", "check", "plan", "eval", "compare", "sample", "recipes"} <= completions("", tmp_path)
    assert completions("tr", tmp_path) == {"train"}
    assert completions("train cart", tmp_path) == {
        "cartoon.toml", *(name for name in packaged_recipes() if name.startswith("cart"))
    }  # fmt: skip
    assert "--group-size" in completions("train cartpole_grpo --group-s", tmp_path)
    assert completions("train arithmetic_grpo --algorithm gs", tmp_path) == {"gspo"}
    assert completions("check arithmetic_grpo --steps 3 --prec", tmp_path) == {"--precision"}
    assert completions("eval smol", tmp_path) == {"smollm2-135m"}
    assert completions("eval smollm2-135m --task ari", tmp_path) == {"arithmetic"}
    assert completions("completion z", tmp_path) == {"zsh"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_text_for_each_shell_names_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "covey" in capsys.readouterr().out


def options(**given: float) -> argparse.Namespace:
    return argparse.Namespace(**{"top_k": None, "top_p": None, "min_p": None, "min_new_tokens": None, **given})


def test_a_limit_below_the_minimum_of_the_run_names_the_option_that_takes_it_out() -> None:
    sampling = SamplingConfig(max_new_tokens=5, min_new_tokens=9)
    with pytest.raises(ConfigError, match=r"the run's minimum length, 9 .is 5.: raise it, or add --min-new-tokens 0"):
        truncation_of(options(), 0.0, sampling)
    assert truncation_of(options(min_new_tokens=0), 0.0, sampling) == {"min_new_tokens": 0}
    with pytest.raises(ConfigError, match=r"--min-new-tokens must be below --max-new-tokens, 5 .is 6."):
        truncation_of(options(min_new_tokens=6), 0.0, sampling)
