"""The walk of a newcomer: 12 prompts and a reward function of their own, from `check` to `sample`."""

import json
import re
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.tracking.statistics import mean_score
from covey.tracking.wording import number
from helpers.tiny_models import tiny_folder

THINGS = ["fruit", "colour", "animal", "planet", "river", "city", "tree", "tool", "metal", "sport", "month", "bird"]

REWARD = """
def short(completions, topic, **columns):
    return [-float(len(completion[0]["content"])) for completion in completions]
"""

RECIPE = """
model = "{model}"
steps = {steps}
threads = 1
precision = "fp32"
[task]
name = "dataset"
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:short"
[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = {tokens}
"""


def walk(folder: Path, model: str, steps: int, tokens: int, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    rows = [{"prompt": [{"role": "user", "content": f"Name a {thing}."}], "topic": thing} for thing in THINGS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "mine.toml").write_text(RECIPE.format(model=model, steps=steps, tokens=tokens))

    def covey(*words: str) -> str:
        assert main(list(words)) == 0, capsys.readouterr()
        out = capsys.readouterr().out
        assert "accuracy" not in out
        assert "pass@" not in out
        return out

    out = covey("check", "mine.toml")
    assert "prompts.jsonl: 11 different prompts to train on, 1 held out" in out
    assert "evaluation: 1 held-out problem, all that there are" in out

    out = covey("train", "mine.toml")
    run = folder / "runs" / "mine-001"
    assert f"step {steps}/{steps}  reward -" in out
    assert "Held-out score on 1 problem" in out
    assert "(no interval)" in out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["score_kind"] == "score"
    (evaluation,) = summary["evaluations"]
    for when, step in (("before", 0), ("after", steps)):
        [answer] = answers_of(run / "held_out" / f"step_{step:06d}.jsonl")
        assert answer["columns"] == {"topic": answer["prompt"][0]["content"].removeprefix("Name a ").rstrip(".")}
        assert answer["score"] == answer["reward_parts"]["short"] == scored([answer])[0] == evaluation[when]["score"]
        assert answer["step"] == step
        assert answer["tokens"] == tokens if answer["truncated"] else answer["tokens"] <= tokens
        assert evaluation[when]["count"] == 1
        assert evaluation[when]["low"] is evaluation[when]["high"] is None
    trained = {line["columns"]["topic"] for path in run.glob("rollouts/*") for line in answers_of(path)}
    assert answer["columns"]["topic"] not in trained
    assert trained < set(THINGS)

    out = covey("eval", "runs/mine-001", "--problems", "5", "--output", "after.jsonl")
    assert "evaluation: 1 held-out problem, all that there are (--problems is 5)" in out
    assert re.search(r"score -[0-9.]+ \(no interval from one problem\), mean of 1 problem\n", out)
    assert [line["text"] for line in answers_of(folder / "after.jsonl")] == [answer["text"]], "the run's own answer"
    out = covey("eval", "runs/mine-001", "--held-out-fraction", "0.5", "--output", "half.jsonl")
    half = answers_of(folder / "half.jsonl")
    assert [line["score"] for line in half] == scored(half)
    found = mean_score(scored(half))
    assert found["count"] == 6
    assert found["score"] == sum(-len(line["text"]) for line in half) / 6
    assert (
        f"score {number(found['score'])} (95 % interval {number(found['low'])} to {number(found['high'])}), mean of 6"
        in out
    )
    assert "best@4" in covey("eval", "runs/mine-001", "--samples", "4")
    assert covey("sample", "runs/mine-001", "Name a fruit.", "--n", "2", "--max-new-tokens", "4").count("[") >= 2


def scored(answers: list[dict]) -> list[float]:
    """What the newcomer's function says of answers that a run has written down."""
    names: dict = {}
    exec(REWARD, names)
    completions = [[{"role": "assistant", "content": answer["text"]}] for answer in answers]
    return names["short"](completions, topic=[answer["columns"]["topic"] for answer in answers])


def answers_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_twelve_prompts_and_an_own_reward(tmp_path, monkeypatch, capsys):
    walk(tmp_path, str(tiny_folder(tmp_path / "model")), 2, 6, monkeypatch, capsys)


@pytest.mark.slow
def test_twelve_prompts_and_an_own_reward_on_the_embedded_model(tmp_path, monkeypatch, capsys):
    walk(tmp_path, "smollm2-135m", 2, 12, monkeypatch, capsys)
