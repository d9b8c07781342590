"""`covey sft`: a training from the command line, its folder, its resume after SIGKILL, its mistakes."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from covey.cli.report import advice_on
from covey.watch.answers import verdict
from covey.watch.library import Run
from helpers import guessing
from helpers.examples import SFT_RECIPE, write_examples, write_rows
from helpers.run_helpers import Moment, covey, files
from helpers.tiny_models import tiny_folder

STEPS = 10  # of two epochs over 18 examples
CLOCKED = {"metrics.jsonl", "summary.json", "covey.lock", "origin.json", "config.toml"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tiny_folder(folder / "tiny")
    write_examples(folder, "tiny")
    return folder


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in found]


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Path, str]:
    """A training that was not interrupted, and what it said."""
    code, said = covey("sft", "sums.toml", cwd=place)
    assert code == 0, said
    return place / "runs" / "sums_sft-001", said


@pytest.mark.slow
def test_a_training_lowers_the_held_out_loss_and_leaves_a_run_that_others_start_from(whole, place):
    run_dir, said = whole
    metrics = metrics_of(run_dir)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert [line["step"] for line in metrics if "sft/held_out_loss" in line] == [5, 10]
    assert metrics[0]["learning_rate"] == pytest.approx(5e-3)
    assert metrics[-1]["sft/epoch"] == 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["examples"] == {"training": 18, "held_out": 2}
    assert summary["decisions_trained"] == sum(line["sft/decisions"] for line in metrics)
    [held_out] = summary["evaluations"]
    assert held_out["after"]["score"] == metrics[-1]["sft/held_out_loss"] < held_out["before"]["score"] / 1.5
    before, after = (f"{held_out[when]['score']:.4f}" for when in ("before", "after"))
    assert (summary["score_kind"], held_out["after"]["count"], held_out["after"]["low"]) == ("loss", 2, None)
    page = verdict(Run(run_dir, "sums"))
    assert page == {"outcome": "unclear", "text": f"Held-out loss: from {before} to {after}."}
    assert advice_on(run_dir)["next"].startswith("covey train RECIPE --model")
    _, info = AutoModelForCausalLM.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert said.splitlines()[-1] == "Next: covey train RECIPE --model runs/sums_sft-001/model"
    for words, shown in (
        (["runs"], f"sums_sft-001  finished  10/10  {before} -> {after} "),
        (["report", run_dir], "has the report"),
        (["sample", run_dir, "1+1=", "--n", "1", "--max-new-tokens", "2"], ""),
        (["export", run_dir, place / "exported"], ""),
    ):
        code, printed = covey(*words, cwd=place)
        assert code == 0, printed
        assert shown in printed


@pytest.mark.slow
def test_a_recipe_with_a_task_gives_the_whole_command_that_goes_on(place):
    task = '[task]\nname = "arithmetic"\n[[rewards]]\nname = "numeric"\n[sampling]\ngroup_size = 2\n'
    (place / "both.toml").write_text(SFT_RECIPE.format(model="tiny") + task)
    words = ["--epochs", "1", "--learning-rate", "1e-3", "--batch-size", "20", "--held-out-fraction", "0"]
    code, said = covey("sft", "both.toml", *words, "--run-dir", "warm", cwd=place)
    assert code == 0, said
    assert said.splitlines()[-1] == "Next: covey train both.toml --model warm/model"
    [line] = metrics_of(place / "warm")
    assert line["learning_rate"] == pytest.approx(5e-4)  # of a warm-up of two steps
    assert json.loads((place / "warm" / "summary.json").read_text())["evaluations"] == []
    short = ["--steps", "1", "--prompts-per-step", "2", "--evaluation.problems", "2", "--max-new-tokens", "2"]
    code, said = covey("train", "both.toml", "--model", "warm/model", *short, "--run-dir", "trained", cwd=place)
    assert code == 0, said


def assert_same(run_dir: Path, expected: Path) -> None:
    """The same bits, but for clocks and paths."""
    assert metrics_of(run_dir) == metrics_of(expected)
    made, wanted = files(run_dir), files(expected)
    assert made.keys() == wanted.keys()
    assert "model/model.safetensors" in made
    for name in wanted.keys() - CLOCKED:
        if not name.endswith("manifest.json"):
            assert made[name] == wanted[name], name
    [one, other] = (json.loads((folder / "summary.json").read_text()) for folder in (run_dir, expected))
    for each in (one, other):
        each["held out"] = [[found[when]["score"] for when in ("before", "after")] for found in each["evaluations"]]
    for key in ("steps", "loss", "held out", "decisions_trained"):
        assert one[key] == other[key]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        ([], [], "bad.jsonl is empty"),
        ([{"prompt": "1"}], [], "bad.jsonl line 1: there is no 'completion'"),
        ([{"text": "1", "completion": "2"}], [], "bad.jsonl line 1: there is no 'prompt'"),
        ([{"prompt": "1", "completion": " "}], [], "bad.jsonl line 1: 'completion' is empty"),
        ([{"prompt": "1", "completion": "2"}], [], "bad.jsonl has only one prompt"),
        ([{"prompt": "1", "completion": "2" * 300}, {"prompt": "2", "completion": "2"}], [], "at most 256 are trained"),
        ([{"messages": [{"role": "user", "content": "1"}]}], [], "no message of the role 'assistant'"),
        ([{"messages": [{"role": "assistant", "content": "1"}]}], [], "begins with the role 'assistant'"),
        ([{"messages": "1"}], [], "'messages' must be a list of chat messages"),
        ([{"prompt": "1", "completion": "2"}], ["--data", "absent.jsonl"], "there is no file absent.jsonl"),
        ([{"prompt": "1", "completion": "2"}], ["--data", "data.py:rows"], "there is no file data.py"),
        ([{"prompt": "1", "completion": "2"}], ["--data", ""], "no examples: set data"),
        ([{"prompt": "1", "completion": "2"}], ["--lora.rank", "4"], "covey sft trains all weights"),
        ([{"prompt": "1", "completion": "2"}], ["--epochs", "0"], "sft.epochs must be at least 1"),
        ([{"prompt": "1", "completion": "2"}], ["--prompt-column", "completion"], "another field of [sft] names too"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(rows, words, told, place):
    write_rows(place / "bad.jsonl", rows)
    weights = place / "tiny" / "model.safetensors"
    content = weights.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:begin] + b"\xff" * (len(content) - begin))  # NaN, which is refused when it is loaded
    before = {*(place / "runs").glob("*")}
    try:
        code, said = covey("sft", "sums.toml", "--data", "bad.jsonl", *words, cwd=place)
    finally:
        weights.write_bytes(content)
    assert code == 2, said
    [line] = said.strip().splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert {*(place / "runs").glob("*")} == before


SAMPLES = """
model = "tiny"
precision = "fp32"
threads = 1

[task]
name = "arithmetic"
digits = [1]
[[rewards]]
name = "digits"
[sampling]
max_new_tokens = 6
[sft]
data = "samples"
count = 12
samples_per_prompt = 4
min_reward = 0.2
keep = "all"
batch_size = 1
learning_rate = 1e-2
held_out_fraction = 0.2
[checkpoint]
every = 2
best = true
"""
CONVERSATION = """
[conversation]
environment = "{file}:Guess"
turns = 2
total_tokens = 40
"""


@pytest.fixture(scope="module")
def of_samples(place):
    """A training on samples that was not interrupted, and its examples."""
    (place / "samples.toml").write_text(SAMPLES)
    code, said = covey("sft", "samples.toml", "--run-dir", "of-samples", cwd=place)
    assert code == 0, said
    assert re.search(r"examples of 48 graded samples \(mean reward 0.\d+\), each with a reward of at least 0.2", said)
    return place / "of-samples"


@pytest.mark.slow
def test_own_samples_are_recorded(of_samples):
    rows = [json.loads(line) for line in (of_samples / "examples.jsonl").read_text().splitlines()]
    assert all(row["reward"] >= 0.2 for row in rows)
    summary = json.loads((of_samples / "summary.json").read_text())
    counts = {kind: sum(row["held_out"] is (kind == "held_out") for row in rows) for kind in ("training", "held_out")}
    assert summary["examples"] == counts
    assert counts["held_out"] > 0
    assert summary["decisions_trained"] == sum(len(r["token_ids"]["completion"]) for r in rows if not r["held_out"])


@pytest.mark.slow
def test_samples_are_the_same_again_and_those_of_a_folder_are_used_as_they_are(of_samples, place):
    for name, words in {"again": [], "of-folder": ["--data", "of-samples"]}.items():
        code, said = covey("sft", "samples.toml", *words, "--run-dir", name, cwd=place)
        assert code == 0, said
        assert (place / name / "examples.jsonl").read_bytes() == (of_samples / "examples.jsonl").read_bytes()
        assert_same(place / name, of_samples)
    code, said = covey("sft", "samples.toml", "--seed", "1", "--run-dir", "other-seed", cwd=place)
    assert code == 0, said
    assert (place / "other-seed" / "examples.jsonl").read_bytes() != (of_samples / "examples.jsonl").read_bytes()


@pytest.mark.slow
def test_a_training_on_samples_is_resumed_without_its_recipe(of_samples, place):
    moment = Moment(2, 40)
    code, said = covey("sft", "samples.toml", "--run-dir", "killed-samples", cwd=place, moment=moment)
    assert code == -signal.SIGKILL, said
    task = (place / "samples.toml").read_text()
    (place / "samples.toml").write_text("")  # what is resumed is in the folder
    code, said = covey("sft", "--resume", "killed-samples", cwd=place)
    (place / "samples.toml").write_text(task)
    assert code == 0, said
    assert "sampling" not in said
    assert_same(place / "killed-samples", of_samples)


@pytest.mark.slow
def test_rollouts_of_a_run_are_examples_with_their_tokens(whole, place):
    """Of conversations, whose replies are not trained."""
    recipe = SAMPLES + CONVERSATION.format(file=guessing.__file__) + "[record]\ntokens = true\n"
    (place / "turns.toml").write_text(recipe)
    short = ["--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--evaluation.problems", "2"]
    code, said = covey("train", "turns.toml", *short, "--checkpoint.best", "false", "--run-dir", "turns", cwd=place)
    assert code == 0, said
    words = ["--data", "turns", "--min-reward", "0", "--epochs", "1"]
    code, said = covey("sft", "turns.toml", *words, "--run-dir", "of-turns", cwd=place)
    assert code == 0, said
    assert "another [chat]" not in said
    lines = [json.loads(line) for file in sorted((place / "turns" / "rollouts").glob("step_*.jsonl"))
             for line in file.read_text().splitlines()]  # fmt: skip
    sampled = {tuple(line["tokens"]["ids"]): line for line in lines}
    rows = [json.loads(line) for line in (place / "of-turns" / "examples.jsonl").read_text().splitlines()]
    assert {tuple(row["token_ids"]["completion"]) for row in rows} == sampled.keys()
    assert any(row["token_ids"]["undecided"] for row in rows)
    for row in rows:
        line = sampled[tuple(row["token_ids"]["completion"])]
        undecided = [place for span in line.get("undecided", ()) for place in range(*span)]
        assert row["token_ids"]["undecided"] == undecided
        assert (row["completion"], row["reward"]) == (line["messages"], line["reward"])
        assert row["prompt"][-1]["content"].endswith("Guess"), "the first observation is in the prompt"
    (place / "samples.toml").write_text(SAMPLES)
    for words, told in (
        (["samples.toml", "--data", "turns"], "one of the recipe and the run turns has conversations"),
        (
            ["turns.toml", "--data", "runs/sums_sft-001"],
            "no rollouts with tokens, which covey train records with --record.tokens",
        ),
        (["turns.toml", "--data", "turns", "--min-reward", "9"], "none has a reward of at least 9"),
    ):
        code, said = covey("sft", *words, "--chat.system_prompt", "", cwd=place)
        assert code == 2, said
        assert told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sums.toml", "--data", "samples"], "no task: add a [task] table"),
        (["samples.toml", "--held-out-path", "sums.jsonl"], "sft.held_out_path is set, and of samples a fraction"),
        (["samples.toml", "--keep", "worst"], "sft.keep must be best or all"),
        (["samples.toml", "--task.operators", "[]"], "task.operators"),
        *(
            pytest.param(["samples.toml", *more], told, marks=pytest.mark.slow)
            for more, told in (
                (["--min-reward", "5"], "none has a reward of at least 5 (the highest is"),
                (["--max-tokens", "5"], "tokens, and at most 5 are trained: shorten it"),
                (["--max-tokens", "5", "--long-examples", "drop"], "every example has more than 5 tokens"),
                (["--count", "2", "--samples-per-prompt", "1", "--min-reward", "0.9"], "no example: of 2 samples"),
            )
        ),
    ],
)
def test_samples_that_cannot_be_examples_are_one_line(words, told, place):
    (place / "samples.toml").write_text(SAMPLES)
    code, said = covey("sft", *words, "--run-dir", "refused", cwd=place)
    assert code == 2, said
    assert told in said.strip().splitlines()[-1]
    assert not (place / "refused").exists()


def test_examples_of_a_function_and_other_recipes(place):
    (place / "rows.py").write_text("def rows():\n    return [{'q': f'{n}+1=', 'a': str(n + 1)} for n in range(5)]\n")
    words = ["--data", "rows.py:rows", "--prompt-column", "q", "--completion-column", "a", "--epochs", "1"]
    code, said = covey("sft", "sums.toml", *words, "--run-dir", "of-function", cwd=place)
    assert code == 0, said
    code, said = covey("sft", "cartpole_grpo", cwd=place)
    assert code == 2
    assert "is a recipe for control" in said
    code, said = covey("train", "sums.toml", "--batch-size", "4", cwd=place)
    assert code == 2
    assert "unknown field --batch-size" in said, "a field of [sft] has no effect in covey train"
