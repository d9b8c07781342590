"""What commands print about one step, prompt, episode, problem or seed: no "1 steps"."""

import re
from collections.abc import Sequence
from pathlib import Path

import gymnasium  # noqa: F401 -- before the tests: it changes the environment when it is first imported
import pytest

from covey.cli.main import main
from helpers.tiny_models import tiny_folder

PLURAL = re.compile(r"(?<!number )(?<![\d.,@])\b1 (?:[a-z-]+ ){0,2}?(?!times\b|is\b|as\b|was\b|has\b|this\b)[a-z]+s\b")
ONE = {
    "language": "--steps 1 --prompts-per-step 1 --group-size 1 --max-new-tokens 1 --evaluation.problems 1 --threads 1",
    "agent": "--steps 1 --environments 1 --fragment-steps 2 --minibatches 1 --evaluation.episodes 1",
    "branch": "--steps 1 --starts-per-step 1 --evaluation.episodes 1",
}
RECIPE = """
model = "{model}"
algorithm = "ppo"
[task]
name = "dataset"
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:length"
"""


def commands() -> list[str]:
    language = f"mine.toml {ONE['language']}"
    return [
        f"check {language}",
        f"train {language} --run-dir runs/mine",
        "eval runs/mine --samples 1",
        "eval runs/mine --samples 2",
        "sample runs/mine name --n 1 --max-new-tokens 1",
        f"plan model --algorithm ppo --microbatch-tokens 1 {ONE['language'].replace('--evaluation.problems 1', '')}",
        f"train cartpole_ppo {ONE['agent']} --run-dir runs/agent",
        "eval runs/agent --episodes 1",
        f"train cartpole_grpo {ONE['branch']}",
        f"compare cartpole_ppo {ONE['agent']} --seeds 1 --output compared",
    ]


def said(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main(list(words))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out + err


@pytest.mark.slow
def test_nothing_is_told_of_1_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "other"}\n')
    Path("rewards.py").write_text(
        "def length(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    Path("mine.toml").write_text(RECIPE.format(model="model"))
    for command in commands():
        text = said(command.split(), capsys)
        assert not PLURAL.findall(text), f"{command}: {PLURAL.search(text)[0]!r} in\n{text}"
    for name in ("report.md",):
        text = Path("compared", name).read_text()
        assert not PLURAL.findall(text), PLURAL.search(text)
