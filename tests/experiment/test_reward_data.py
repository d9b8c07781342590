"""`covey reward-model label`: pairs and grades from graded completions. Its steps: test_continuation_labels."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from helpers.run_helpers import covey
from helpers.tiny_models import tiny_folder

RECIPE = """
model = "tiny"
threads = 1
precision = "fp32"

[task]
name = "arithmetic"
digits = [4]

[[rewards]]
function = "rewards.py:verdict"
binary = true

[sampling]
max_new_tokens = 6
"""
REWARD = """
def {name}(completions, **columns):
    return [{value} for c in completions]
"""
EVEN = 'float(len(c[0]["content"]) % 2 == 0)'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward_data")
    tiny_folder(made / "tiny")
    (made / "recipe.toml").write_text(RECIPE)
    (made / "wrong.toml").write_text(RECIPE.replace("verdict", "never"))
    (made / "rewards.py").write_text(
        REWARD.format(name="verdict", value=EVEN) + REWARD.format(name="never", value="0.0")
    )
    return made


def label(folder: Path, data: str, recipe: str = "recipe.toml") -> tuple[int, str, list[dict[str, Any]]]:
    output = folder / f"{data}.jsonl"
    words = ["--data", data, "--prompts", "20", "--completions", "6", "--output", output]
    code, said = covey("reward-model", "label", recipe, *words, cwd=folder)
    return code, said, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


@pytest.mark.slow
def test_grades_and_pairs_of_the_same_completions(folder: Path) -> None:
    code, said, grades = label(folder, "grades")
    assert code == 0, said
    assert len(grades) == 120
    right = sum(record["grade"] for record in grades)
    assert f"120 completions, {right} of them right; 120 grades; all are in" in said
    verdicts: dict[str, dict[bool, set[str]]] = defaultdict(lambda: {True: set(), False: set()})
    for record in grades:
        assert record["grade"] == (len(record["completion"]) % 2 == 0)
        verdicts[json.dumps(record["prompt"])][record["grade"]].add(record["completion"])

    code, said, pairs = label(folder, "pairs")
    assert code == 0, said
    assert f"120 completions, {right} of them right; {len(pairs)} pairs; all are in" in said
    by_prompt: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for record in pairs:
        found = verdicts[json.dumps(record["prompt"])]
        assert record["chosen"] in found[True]
        assert record["rejected"] in found[False]
        by_prompt[json.dumps(record["prompt"])].append((record["chosen"], record["rejected"]))
    for prompt, found in verdicts.items():
        assert len(set(by_prompt[prompt])) == len(by_prompt[prompt]) == min(6, len(found[True]) * len(found[False]))
    for name in ("pairs", "grades"):
        words = ["--model", "tiny", "--run-dir", f"runs/{name}", "--precision", "fp32", "--threads", "1"]
        code, said = covey("reward-model", "train", f"{name}.jsonl", *words, cwd=folder)
        assert code == 0, said


@pytest.mark.slow
def test_no_prompt_with_a_right_and_a_wrong_completion(folder: Path) -> None:
    (folder / "pairs.jsonl").unlink(missing_ok=True)
    code, said, _ = label(folder, "pairs", "wrong.toml")
    assert code == 1
    assert "no prompt has both a right and a wrong completion (0 of 120 are right)" in said
    assert "write --data grades" in said


@pytest.mark.slow
def test_a_boundary_needs_no_step_reward(folder: Path) -> None:
    """Steps are labelled, not paid, so the recipe that a training refuses is not a mistake here."""
    (folder / "ends.py").write_text("def thirds(text):\n    return list(range(3, len(text), 3))\n")
    (folder / "split.toml").write_text(RECIPE + '[process]\nboundary = "ends.py:thirds"\n')
    output = folder / "steps.jsonl"
    words = ["--prompts", "4", "--completions", "2", "--continuations", "2", "--output", output]
    code, said = covey("reward-model", "label", "split.toml", *words, cwd=folder)
    assert code == 0, said
    steps = [step for line in output.read_text().splitlines() for step in json.loads(line)["completions"][:-1]]
    assert len(steps) > 4
    assert all(len(step) % 3 == 0 for step in steps)
    code, said = covey("check", "split.toml", cwd=folder)
    assert code == 2
    assert "process.boundary is set, but no reward is paid by step" in said
