"""`covey reward-model`: a training from the command line, its folder, its resume after SIGKILL, its mistakes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from helpers.run_helpers import covey
from helpers.tiny_models import tiny_folder

WORDS = ["--precision", "fp32", "--threads", "1", "--batch-size", "4", "--learning-rate", "1e-3"]


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_data(folder: Path) -> None:
    source = random.Random(0)
    pairs, grades, steps = [], [], []
    for _ in range(24):
        a, b = source.randint(1, 9), source.randint(1, 9)
        prompt, wrong = [{"role": "user", "content": f"{a}+{b}="}], str(a + b + source.choice((1, 2)))
        pairs.append({"prompt": prompt, "chosen": str(a + b), "rejected": wrong})
        grades.append({"prompt": prompt, "completion": wrong, "grade": source.random() < 0.5})
        steps.append({"prompt": f"{a}+{b}=", "completions": ["add", wrong], "labels": [True, source.random() < 0.5]})
    lines(folder / "pairs.jsonl", *pairs)
    lines(folder / "grades.jsonl", *grades)
    lines(folder / "numbers.jsonl", *[record | {"grade": 3.0 * record["grade"]} for record in grades])
    lines(folder / "steps.jsonl", *steps)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    tiny_folder(folder / "tiny")
    make_data(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("data", ["pairs", "grades", "numbers", "steps"])
def test_a_training_writes_a_model_that_transformers_loads_and_says_what_to_do_next(data: str, place: Path) -> None:
    run_dir = place / f"run-{data}"
    words = ["reward-model", "train", f"{data}.jsonl", "--model", "tiny", "--run-dir", run_dir, *WORDS]
    code, said = covey(*words, cwd=place)
    assert code == 0, said
    last = said.strip().splitlines()[-1]
    per_step = "per_step = true and " if data == "steps" else ""
    assert last == f'Next: use it as a reward in a recipe: [[rewards]] with {per_step}model = "{run_dir}"'
    names = {entry.name for entry in run_dir.iterdir()}
    picture = set() if data == "numbers" else {"reliability.png"}
    assert names == picture | {
        "config.toml", "origin.json", "metrics.jsonl", "model", "summary.json", "covey.lock", "checkpoints", "rollouts"
    }  # fmt: skip
    auto: Any = AutoModelForTokenClassification if data == "steps" else AutoModelForSequenceClassification
    _, info = auto.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    scale = json.loads((run_dir / "model" / "covey_reward_model.json").read_text())
    assert (scale["mean"] is None) == (data == "steps")
    assert scale["reads_end"] is (data == "steps")
    assert data == "steps" or (scale["deviation"] > 0 and scale["count"] > 20)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "reward_model/loss" in line] == list(range(1, 7))
    assert [line["step"] for line in metrics if "reward_model/held_out_loss" in line] == [6]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["held_out"]["loss"] > 0
    for other, told in (
        (["eval", run_dir], "is a reward model, which writes no answers: measure it with covey reward-model eval"),
        (["sample", run_dir, "1+1="], "reward model, which writes no text: choose a causal language model, or name it"),
        (["export", run_dir, place / "exported"], "reward model, which writes no text"),
        (["show", run_dir], "has no rollouts: a training on examples samples none"),
    ):
        code, printed = covey(*other, cwd=place)
        assert code == 2
        assert told in printed.strip().splitlines()[-1]

    picture_file = place / f"{data}.png"
    code, said = covey(
        "reward-model", "eval", run_dir, f"{data}.jsonl", "--picture", picture_file, "--precision", "fp32", cwd=place
    )
    assert code == 0, said
    assert picture_file.exists() == (data != "numbers")
    assert "  loss " in said

    code, said = covey("reward-model", "train", "--resume", run_dir, cwd=place)
    assert code == 2
    assert "is finished" in said
    code, said = covey(*words, cwd=place)
    assert code == 2
    assert f"continue it with covey reward-model train --resume {run_dir}" in said


@pytest.mark.slow
def test_examples_with_held_out_prompts_are_dropped_if_the_user_says_so(place: Path) -> None:
    records = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    held_out = [record for record in records if record["prompt"] == records[0]["prompt"]]
    lines(place / "held_out.jsonl", {**held_out[0], "rejected": "another"})
    words = ["reward-model", "train", "pairs.jsonl", "--held-out", "held_out.jsonl", "--model", "tiny", *WORDS]
    code, said = covey(*words, "--overlap", "drop", "--run-dir", place / "overlap", cwd=place)
    assert code == 0, said
    assert f"{24 - len(held_out)} examples to train on, 1 held out" in " ".join(said.split())
    count = "1 example" if len(held_out) == 1 else f"{len(held_out)} examples"
    assert f"{count} left out of training because their prompts are held out" in said


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "name the data, such as: covey reward-model train pairs.jsonl"),
        (["train", "nothing.jsonl"], "nothing.jsonl"),
        (["train", "pairs.jsonl", "--model", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["train", "pairs.jsonl", "--batch-size", "0"], "batch-size must be at least 1"),
        (["train", "pairs.jsonl", "--batch-size", "many"], "--batch-size must be an integer"),
        (["train", "pairs.jsonl", "--batchsize", "4"], "did you mean '--batch-size'?"),
        (["train", "pairs.jsonl", "--held-out", "steps.jsonl"], "has another kind of data"),
        (["train", "pairs.jsonl", "--held-out", "pairs.jsonl"], "(24 such lines): add --overlap drop"),
        (["train", "pairs.jsonl", "--held-out", "pairs.jsonl", "--overlap", "drop"], "none is left for training"),
        (["train", "pairs.jsonl", "--run-dir", "tiny"], "tiny is not empty"),
        (["train", "pairs.jsonl", "--resume", "tiny"], "leave out pairs.jsonl"),
        (["train", "--resume", "tiny"], "there is no run to resume in tiny"),
        (["train", "grades.jsonl", "--center", "0.1"], "center is for preference pairs"),
        (["train", "pairs.jsonl", "--step-separator", ""], "step_separator is empty"),
        (["train", "pairs.jsonl", "--model", "tiny", "--max-tokens", "3"], "set --long-examples drop"),
        (["eval", "tiny", "pairs.jsonl"], "is a language model, no reward model: train one with"),
        (["eval", "tiny", "pairs.jsonl", "--picture", "x.gif"], "no reward model"),
        (["judge"], "invalid choice: 'judge'"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, place: Path) -> None:
    code, said = covey("reward-model", *words, cwd=place)
    assert code == 2, said
    assert message in said
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "Traceback" not in said
    assert not list((place / "runs").glob("*"))  # no folder is left
