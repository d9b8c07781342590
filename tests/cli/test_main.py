"""The command line: what it hands to the functions behind it, and what it prints of their answers."""

import errno
import json
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest

from covey.cli.evaluate import score_report
from covey.cli.main import main, parse
from covey.config import (
    TASK_CONFIGS,
    ArithmeticConfig,
    ConfigError,
    ConversationConfig,
    CountdownConfig,
    MachineError,
    RewardConfig,
    RunConfig,
    RunError,
    SamplingConfig,
)
from covey.config.recipe import describe_fields, write_config
from covey.experiment.advice import Launch
from covey.llm.generation.token_sampling import Truncation
from covey.tracking.run_store import RunStore
from covey.tracking.statistics import mean_score, wilson_interval
from covey.tracking.wording import ACCURACY, SCORE
from helpers.step_records import step_record

RECIPE = '[task]\nname = "arithmetic"\n[sampling]\nmax_new_tokens = 12\n'


class Build(types.ModuleType):
    """Stands for covey.experiment.run and covey.experiment.llm, and notes how they were called."""

    def __init__(self) -> None:
        super().__init__("covey.experiment.run")
        self.calls: list[tuple[str, tuple, dict]] = []
        self.scores: list[list[int]] = [[1], [0], [1], [1]]
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> object:
        if name not in ("run", "resume", "evaluate_model", "sample_model", "sample_groups", "check"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> object:
            self.calls.append((name, args, kwargs))
            if self.error:
                raise self.error
            answers = [{"text": "t", "score": score} for scores in self.scores for score in scores]
            evaluation = types.SimpleNamespace(
                scores=self.scores, kind=ACCURACY, by_kind={}, notes=["a note"], records=lambda: answers
            )
            record = {"prompt": "2+2=", "text": "4\x1b[2J", "reward": 1.0, "reward_parts": {"numeric": 1.0}}
            sampled = types.SimpleNamespace(notes=["a note"], records=lambda: [record])
            results = {
                "sample_groups": sampled,
                "evaluate_model": evaluation,
                "sample_model": ["one", "t\x1b[2Jwo\nlines"],
                "check": [],
            }
            return results.get(name, {"run_dir": "runs/x"})

        return call


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    fake = Build()
    monkeypatch.setitem(sys.modules, "covey.experiment.run", fake)
    for name in ("llm", "evaluation"):
        monkeypatch.setitem(sys.modules, f"covey.experiment.{name}", fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_recipe.toml").write_text(RECIPE)
    return fake


def test_train_reads_the_recipe_and_runs_it(build: Build) -> None:
    assert main(["train", "--operators", "-,+", "my_recipe.toml", "--group_size=4"]) == 0
    [(name, (config,), kwargs)] = build.calls
    launch = kwargs.pop("launch")
    assert (name, kwargs) == ("run", {"recipe_name": "my_recipe.toml"})
    assert (launch.recipe, launch.fields) == ("my_recipe.toml", ("--operators", "-,+", "--group_size=4"))
    assert config.task == ArithmeticConfig(operators=("-", "+"))
    assert config.sampling.group_size == 4
    assert config.sampling.max_new_tokens == 12


def test_resume_takes_the_folder_and_fields(build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore(tmp_path / "run") as store:
        (tmp_path / "run" / "config.toml").write_text(RECIPE)
        store.record(step_record(1))
    assert main(["train", "--resume", "run"]) == 0
    assert main(["train", "--resume", "run", "--steps", "5"]) == 0
    assert build.calls == [("resume", (Path("run"),), {"limits": limits}) for limits in ({}, {"steps": "5"})]
    assert main(["train", "my_recipe.toml", "--run-dir", "run"]) == 2
    assert "covey train --resume run" in capsys.readouterr().err
    assert len(build.calls) == 2


def test_exit_codes_and_one_line(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (ConfigError("the reward\nhangs"), 2, "error: the reward hangs\n"),
        (RunError("five bad steps"), 1, "error: five bad steps\n"),
        (MachineError("the disk\nis full"), 3, "error: the disk is full\n"),
        (
            MemoryError(),
            3,
            "error: there is not enough memory (MemoryError): close other programs, or make the run "
            "smaller (covey plan shows what takes memory)\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "run/x"),
            3,
            "error: cannot use run/x (No space left on device): free some space on that disk\n",
        ),
        (ZeroDivisionError("oh"), 1, "error: unexpected ZeroDivisionError: oh (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted. Start again with: covey train my_recipe.toml\n"),
    ]
    for error, code, text in cases:
        build.error = error
        assert main(["train", "my_recipe.toml"]) == code
        assert capsys.readouterr().err == text
    build.error = RunError("five bad steps")
    with pytest.raises(RunError):
        main(["train", "my_recipe.toml", "--debug"])


def test_eval_hands_over_what_was_asked(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "smollm2-135m", "--task", "arithmetic", "--digits", "1,3", "--problems", "4", "--seed", "7",
             "--max-new-tokens", "9", "--reward", "exact", "--device", "cpu"]  # fmt: skip
    assert main(words) == 0
    [(name, (config,), kwargs)] = build.calls
    assert name == "evaluate_model"
    assert config.task == ArithmeticConfig(digits=(1, 3))
    assert (config.model, config.rewards) == ("smollm2-135m", (RewardConfig(name="exact"),))
    assert (config.evaluation.problems, config.sampling.max_new_tokens) == (4, 9)
    assert (config.seed, config.device, config.precision, config.threads) == (7, "cpu", "auto", 0)
    assert kwargs == {"samples": 1, "temperature": 0.0, "truncation": Truncation()}
    low, high = wilson_interval(3, 4)
    expected = f"a note\naccuracy 75.0% (95 % interval {low:.1%} to {high:.1%}), 3 of 4 problems right\n"
    assert capsys.readouterr().out == expected


def test_eval_of_a_run_folder_takes_its_task_rewards_and_model(build: Build, tmp_path: Path) -> None:
    rewards = (RewardConfig(name="exact"),)
    run = tmp_path / "run"
    run.mkdir()
    write_config(RunConfig(task=ArithmeticConfig(digits=(3,)), rewards=rewards), run / "config.toml")
    assert main(["eval", "run"]) == 2  # no model yet
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert main(["eval", "run", "--terms", "3"]) == 0
    assert main(["eval", "run", "--task", "countdown"]) == 0
    assert main(["eval", "run", "--samples", "4"]) == 0
    asked = [(config.model, config.task, config.rewards) for _, (config,), _ in build.calls]
    assert asked[0] == ("run", ArithmeticConfig(digits=(3,), terms=(3,)), rewards)
    assert asked[1] == ("run", CountdownConfig(), ())  # the rewards belonged to the other task
    assert build.calls[2][2]["temperature"] == 1.0


def test_eval_does_not_replace_the_rewards_and_the_task_that_a_run_was_given_in_python(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(completions: list[str], **_: object) -> list[float]:
        return [0.0] * len(completions)

    for name, task, rewards in (("own task", object(), ()), ("own rewards", None, (short,))):
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        config = RunConfig(model="m", task=None if task else ArithmeticConfig(), run_dir=str(folder))
        write_config(config, folder / "config.toml")
        launch = Launch.from_python("run", task, rewards)
        (folder / "origin.json").write_text(json.dumps({"launch": vars(launch)}))
        assert main(["eval", str(folder)]) == 2
        assert ("its task in Python" if task else "its rewards in Python (short)") in capsys.readouterr().err
        assert main(["eval", str(folder), "--task", "arithmetic", "--reward", "digits"]) == 0
    assert [call[0] for call in build.calls] == ["evaluate_model"] * 2


def test_pass_at_k_is_reported_for_powers_of_two_and_the_whole() -> None:
    lines = score_report([[1, 0, 0, 0, 0, 0]] * 3 + [[0] * 6], ACCURACY).splitlines()
    assert lines[0] == "4 problems, 6 answers each (95 % interval over problems)"
    assert [line.split()[0] for line in lines[1:]] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert [line.split()[1] for line in lines[1:]] == ["12.5%", "25.0%", "50.0%", "75.0%"]
    with pytest.raises(RunError, match="no problem was scored"):
        score_report([], ACCURACY)


def test_what_is_not_right_or_wrong_is_reported_as_a_score() -> None:
    scores = [[1.5], [2.5], [3.5], []]  # of the last problem no answer could be graded
    found = mean_score([1.5, 2.5, 3.5])
    assert (round(found["low"], 2), round(found["high"], 2)) == (0.02, 4.98)
    expected = "score 2.50 (95 % interval 0.016 to 4.98), mean of 3 problems"
    assert score_report(scores, SCORE) == expected
    assert score_report([[3900.0]], SCORE) == "score 3,900.0 (no interval from one problem), mean of 1 problem"
    lines = score_report([[0.0, -1.0, 4.0], [2.0, 2.0, 2.0]], SCORE).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["best@1", "1.50"], ["best@2", "2.33"], ["best@3", "3.00"]]


def test_sample_prints_every_answer_safely(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "smollm2-135m", "--n", "2", "What is 2 + 2?", "--temperature=0.5"]) == 0
    config = RunConfig(model="smollm2-135m", sampling=SamplingConfig(max_new_tokens=64))
    assert build.calls == [
        ("sample_model", (config, "What is 2 + 2?", 2, 0.5), {"truncation": Truncation(), "images": []})
    ]
    assert capsys.readouterr().out == "[1] one\n[2] t�[2Jwo\nlines\n"
    assert main(["sample", "smollm2-135m", "x", "--top-a", "0.9"]) == 2
    assert "unknown option '--top-a'" in capsys.readouterr().err
    assert main(["sample", "smollm2-135m", "x", "--n", "0"]) == 2
    assert main(["sample", "smollm2-135m", "x", "--image", "a.png", "--image", "b.png"]) == 0
    assert build.calls[-1][2]["images"] == [Path("a.png"), Path("b.png")]


def test_sample_converses_with_an_environment(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", "smollm2-135m", "Find it.", "--environment", "guess_number", "--columns", '{"secret": 7}']
    assert main([*words, "--max-new-tokens", "9", "--n", "3"]) == 0
    [(name, (config, *rest), given)] = build.calls
    assert (name, rest) == ("sample_groups", [3, 1.0, Truncation()])
    assert given == {"prompt": "Find it.", "columns": {"secret": 7}, "problem": 0}
    assert config.conversation == ConversationConfig("guess_number")
    assert config.sampling.max_new_tokens == 9
    shown = capsys.readouterr().out
    assert "reward 1.00" in shown
    assert "\x1b" not in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == "4\x1b[2J"


def test_sample_answers_a_held_out_problem_of_a_recipe(build: Build) -> None:
    assert main(["sample", "smollm2-135m", "--recipe", "guess_number_grpo", "--problem", "3"]) == 0
    [(_, (config, *_), given)] = build.calls
    assert given == {"prompt": None, "columns": {}, "problem": 3}
    assert config.has_conversations
    assert config.task is not None
    assert config.evaluation.problems > 3


def test_check_prints_the_config_the_memory_and_what_to_do_next(
    build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "my_recipe.toml", "--operators", "-,+", "--instruction", "Just say it."]) == 0
    assert [name for name, _, _ in build.calls] == ["check"]
    out = capsys.readouterr().out
    assert 'operators = ["-", "+"]' in out
    assert "estimated memory: " in out
    assert "  activations  " in out
    assert out.splitlines()[-1].endswith("covey train my_recipe.toml --operators -,+ --instruction 'Just say it.'")


def test_a_value_may_begin_with_a_minus_and_a_double_dash_ends_the_options() -> None:
    arguments, fields = parse(["train", "r.toml", "--learning-rate", "-1e-5"])
    assert (arguments.recipe, fields) == ("r.toml", ["--learning-rate", "-1e-5"])
    arguments, fields = parse(["sample", "m", "--", "--what?"])
    assert (arguments.prompt, fields) == ("--what?", [])


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_explains_the_fields(option: str) -> None:
    words = [sys.executable, "-m", "covey.cli.main", "train", option]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    for row in describe_fields():
        assert (row.text in done.stdout) == (option == "--help-all" or not row.advanced), row.name
    assert ("--help-all shows the other fields" in done.stdout) == (option == "--help")
    for name in ("--group-size ", "--max-new-tokens ", "--checkpoint.every ", "--task.steps ", "--steps "):
        assert f"  {name}" in done.stdout


def test_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in ("train", "eval"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown[command] = capsys.readouterr().out
    assert all(f"[task ({name})]" in shown["train"] for name in TASK_CONFIGS)
    assert ",".join(TASK_CONFIGS) in "".join(shown["eval"].split())
    (task,) = (field for field in fields(RunConfig) if field.name == "task")
    assert task.metadata["help"].endswith(", ".join(TASK_CONFIGS))


def test_sampling_options_reach_the_sampler(build: Build) -> None:
    words = ["--stop", "</answer>", "--stop", "\n\n", "--system-prompt", "Be brief.", "--top-k", "5", "--top-p", "0.9"]
    assert main(["sample", "smollm2-135m", "x", *words, "--min-p", "0.1", "--min-new-tokens", "3"]) == 0
    [(_, (config, *_), kwargs)] = build.calls
    assert config.sampling.stop == ("</answer>", "\n\n")
    assert config.chat.system_prompt == "Be brief."
    assert kwargs == {"truncation": Truncation(top_k=5, top_p=0.9, min_p=0.1, min_new_tokens=3), "images": []}
    build.calls.clear()
    words = ["--samples", "2", "--top-p", "0.9", "--stop", "a,b", "--system-prompt", "Be brief."]
    assert main(["eval", "smollm2-135m", "--task", "arithmetic", *words]) == 0
    [(_, (config,), kwargs)] = build.calls
    assert (config.sampling.stop, config.chat.system_prompt) == (("a", "b"), "Be brief.")
    assert kwargs["truncation"] == Truncation(top_p=0.9)
