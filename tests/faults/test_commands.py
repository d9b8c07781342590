"""The commands from end to end, on a tiny model: what they leave behind, and what they say of a mistake."""

import json
import re
import shutil
from pathlib import Path

import pytest

from helpers.run_helpers import covey, write_recipe
from helpers.tiny_models import tiny_folder

# With covey's kernels, if a compiler is found.
CHOICE = r"LlamaForCausalLM: update: (packed); sampling: (native|shared prefix); kernels: (covey's, [\w-]+|torch's);"


def words_of(output: str) -> str:
    """Without line breaks."""
    return " ".join(output.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    write_recipe(folder, tiny_folder(folder / "model"), steps=4)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Path, str]:
    code, output = covey("train", "tiny.toml", "--token-limits", "6,9", "--evaluation.every", "2", cwd=folder)
    assert code == 0, output
    return folder / "runs" / "tiny-001", output


def test_training_is_shown_line_by_line_where_there_is_no_terminal(trained):
    _, output = trained
    assert "step 1/4" in output
    assert "step 4/4" in output
    assert "held-out" in output
    assert "Held-out score on 6 problems" in output
    assert "best" in output, "rollouts are shown"
    assert "\x1b[" not in output, "no control codes in a log"
    last = output.splitlines()[-1]
    assert "Next:" in last
    assert "covey train --resume runs/tiny-001 --steps 8" in last or "covey eval" in last, (
        "what it advises must work as it stands"
    )
    assert "model shards" not in output, "other libraries' progress bars are not ours"


@pytest.mark.slow
def test_eval_counts_with_intervals(trained, folder):
    run_dir, _ = trained
    code, output = covey("eval", run_dir, "--problems", 5, "--reward", "numeric", cwd=folder)
    assert code == 0, output
    assert "of 5 problems right" in output
    words = ("--problems", 4, "--samples", 4, "--reward", "numeric", "--output", "answers.jsonl")
    code, output = covey("eval", run_dir, *words, cwd=folder)
    assert code == 0, output
    assert "pass@1" in output
    assert "pass@4" in output
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [line["problem"] for line in answers] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    share = sum(line["score"] for line in answers) / 16
    assert f"pass@1    {share:.1%}" in output
    code, output = covey("eval", run_dir, *words, cwd=folder)
    assert (code, len(output.splitlines())) == (2, 1)
    assert "answers.jsonl: the file is there already" in output


def test_sample_answers_and_repeats_itself(folder):
    words = ("sample", folder / "model", "1+1", "--n", 3, "--max-new-tokens", 8)
    code, output = covey(*words, cwd=folder)
    assert code == 0, output
    assert output.count("[") >= 3
    assert covey(*words, cwd=folder)[1] == output


def test_check_says_that_the_code_for_a_model_of_the_hub_is_chosen_later(folder):
    code, output = covey("check", "tiny.toml", "--model", "someone/absent", cwd=folder)
    assert code == 0, output
    assert "someone/absent is not on this machine yet: the code that computes it is chosen when" in words_of(output)


def test_check_loads_no_model_whose_run_is_too_large(folder):
    large = shutil.copytree(folder / "model", folder / "large")
    described = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 2**30}))
    limits = "--max-new-tokens", 10**6, "--microbatch-tokens", 10**9
    code, output = covey("check", "tiny.toml", "--model", large, *limits, cwd=folder)
    assert code == 0, output
    assert "was not loaded, because a run needs more memory than this machine has" in words_of(output)


def test_a_run_prints_and_stores_the_code_that_runs(folder):
    code, output = covey("train", "tiny.toml", "--steps", 1, "--run-dir", "printed", cwd=folder)
    assert code == 0, output
    assert (chosen := re.search(CHOICE, words_of(output).partition("1/1")[0])), output
    machine = json.loads((folder / "printed" / "summary.json").read_text())["machine"]
    assert tuple(machine[key] for key in ("update", "sampling", "kernels")) == chosen.groups()


def test_a_reward_that_breaks_while_training_stops_with_one_line(folder):
    (folder / "late.py").write_text(
        "from pathlib import Path\n"
        "def reward(completions, **columns):\n"
        "    calls = Path('calls')  # a failed call is made again in a new process\n"
        "    calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "    if calls.stat().st_size > 3:\n"
        "        raise RuntimeError('the service is gone')\n"
        "    return [float(i) for i, _ in enumerate(completions)]\n"
    )
    recipe = folder / "late.toml"
    text = (folder / "tiny.toml").read_text()
    recipe.write_text(text.replace(f'function = "{folder}/rewards.py:count_digits"', 'function = "late.py:reward"'))
    code, output = covey("train", recipe, "--run-dir", "late", cwd=folder)
    assert code == 1, output
    assert "the service is gone" in output.splitlines()[-1]
    assert "Traceback" not in output
