"""The checks over a run, step by step and afterwards; what a run says of them."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from covey.cli.main import main
from covey.config import ConfigError
from covey.data import StepRecord
from covey.tracking.console import Display
from covey.tracking.diagnosis import CHECKS, STRIDE, Diagnosis, brief, conclusion, diagnose, diagnose_run, sentence
from covey.tracking.diagnosis.history import SETTLED
from helpers.calls import count_calls

CONFIG = {
    "algorithm": "grpo",
    "steps": 60,
    "sampling": {"group_size": 8},
    "update": {"learning_rate": 1e-5, "epochs": 1},
}


def records(steps: int, **columns: Any) -> list[dict[str, Any]]:
    """Records whose columns are numbers or functions of the step; `__` is a slash."""
    return [
        {"step": step}
        | {name.replace("__", "/"): column(step) if callable(column) else column for name, column in columns.items()}
        for step in range(1, steps + 1)
    ]


SICK = records(60, kl__behavior=lambda step: 0.15 if 20 < step <= 40 else 0.0)


def test_step_by_step_and_afterwards_are_the_same():
    live = Diagnosis(CONFIG)
    said = [finding for record in SICK for finding in live.add(record["step"], record)]
    assert live.findings() == diagnose(SICK, CONFIG)
    assert [finding.check for finding in said] == ["large updates"], "it is said once"
    assert said[0].first_step == said[0].last_step == 30, "at the first step that is checked with a median of 0.15"


def test_it_is_checked_every_few_steps_and_at_the_end():
    steps = 2 * STRIDE + 2
    (finding,) = diagnose(records(steps, kl__behavior=lambda step: 0.2 if step > STRIDE - 2 else 0.0), CONFIG)
    assert (finding.first_step, finding.last_step) == (2 * STRIDE, steps)


def test_a_skipped_update_is_said_at_once():
    """A run may end before the next check."""
    (finding,) = Diagnosis(CONFIG).add(1, {"update/skipped_steps": 1.0})
    assert (finding.check, finding.first_step) == ("skipped updates", 1)


def test_problems_come_before_warnings():
    both = records(30, kl__behavior=0.2, update__skipped_steps=lambda step: float(step > 20))
    assert [(f.check, f.severity) for f in diagnose(both, CONFIG)] == [
        ("skipped updates", "problem"),
        ("large updates", "warning"),
    ]


def test_saturation_keeps_its_first_evidence():
    config = CONFIG | {"steps": 100}
    rising = records(60, reward__mean=lambda step: float(step > 10), reward__std=lambda step: 0.5 * (step <= 10))
    (finding,) = [f for f in diagnose(rising, config) if f.check == "reward saturation"]
    assert (finding.first_step, finding.last_step) == (20, 60)
    assert "steps 11 to 20" in finding.evidence
    assert "80% of the steps to go" in finding.evidence
    assert "steps = 20 (now 100)" in finding.remedy


def test_held_out_scores_before_and_after_count():
    steps = records(30, reward__mean=lambda step: 0.1 if step <= 5 else 0.9, reward__std=0.3)
    worse = {
        "before": {"score": 0.8, "low": 0.7216, "high": 0.8784},
        "after": {"score": 0.5, "low": 0.402, "high": 0.598},
    }
    (finding,) = diagnose(steps, CONFIG, [worse])
    assert finding.check == "reward hacking"
    assert "since step 0" in finding.evidence
    slightly = worse | {"after": {"score": 0.62, "low": 0.525, "high": 0.715}}
    assert not diagnose(steps, CONFIG, [slightly])
    assert not diagnose(steps, CONFIG, [worse | {"after": {"score": 0.1, "low": None, "high": None}}])
    assert not diagnose(steps, CONFIG, [{"before": worse["before"]}]), "a run that was stopped"


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_short_runs_are_left_alone(steps):
    wild = records(steps, reward__mean=math.nan, kl=100.0, kl__behavior=9.0, entropy=0.0, clip__low=1.0, clip__high=0.0)
    assert not diagnose(wild, CONFIG)
    assert not diagnose(wild, {})


def test_the_config_may_lack_any_field():
    for config in ({}, {"environment": {}}, {"sampling": None, "update": 3, "algorithm": 5}):
        assert diagnose(SICK, config)


@pytest.mark.slow
def test_the_cost_of_a_step_is_bounded():
    """Steps of a long run make as many calls as those of a short one."""

    def calls(first: int, last: int) -> int:
        diagnosis = Diagnosis(CONFIG)
        every = records(last, **{name.replace("/", "__"): 0.5 for check in CHECKS for name in check.metrics})

        def add(some: list[dict[str, Any]]) -> None:
            for record in some:
                diagnosis.add(record["step"], record)

        add(every[:first])
        return count_calls(lambda: add(every[first:]))

    early, late = calls(100, 150), calls(3000, 3050)
    assert late <= early
    assert late / 50 < 3000, "calls per step; a step of CartPole makes over a hundred thousand"


def test_it_needs_neither_torch_nor_numpy():
    code = "import sys, covey.tracking.diagnosis; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_conclusion_names_every_finding():
    findings = diagnose(SICK, CONFIG)
    summary = {"findings": brief(findings), "steps": 60, "run_dir": "runs/a b"}
    assert conclusion(summary) == (
        "Diagnosis: large updates (steps 30 to 40). Evidence and remedies: covey diagnose 'runs/a b'"
    )
    assert conclusion(summary | {"steps": 40}).startswith("Diagnosis: large updates (from step 30). ")
    assert conclusion(summary | {"findings": [], "steps": 60}) == (
        f"Diagnosis: none of {len(CHECKS)} checks found a fault in 60 steps."
    )
    assert conclusion(summary | {"findings": [], "steps": 1}).endswith(
        f"found a fault in 1 step; most of them need {SETTLED} steps."
    )
    json.dumps(brief(findings))


def test_a_display_says_a_finding_once():
    console = Console(record=True, force_terminal=False, width=400)
    display = Display(60, console=console, diagnosis=Diagnosis(CONFIG))
    for record in SICK:
        metrics = {name: value for name, value in record.items() if name != "step"}
        display.record(StepRecord(record["step"], metrics, [], []))
    text = console.export_text()
    assert text.count("large updates") == 1
    assert "warning at step 30: large updates: the updates of the last 10 steps moved" in text


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'algorithm = "grpo"\nsteps = 60\n[update]\nlearning_rate = 1e-5\nepochs = 1\nminibatches = 1\n'
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in SICK))
    return folder


def test_the_command_prints_findings(run_dir, capsys):
    assert main(["diagnose", str(run_dir)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "60 steps, 1 finding" in printed
    assert "warning: large updates (steps 30 to 40)" in printed
    assert "update.learning_rate = 3.33e-06 (now 1e-05)" in printed
    assert "a loss near 0" in printed, "one optimizer step a batch"


def test_the_command_says_that_nothing_was_found(run_dir, capsys):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records(12, kl=0.0)))
    assert main(["diagnose", str(run_dir), str(run_dir)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"12 steps, none of {len(CHECKS)} checks found a fault. Most of them need {SETTLED}") == 2


def test_a_folder_without_a_run_is_a_mistake(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("summary", ["", "[]", '{"evaluations": 3}', '{"evaluations": [4]}', "{}"])
def test_a_damaged_summary_is_no_obstacle(run_dir, summary):
    (run_dir / "summary.json").write_text(summary)
    assert [finding.check for finding in diagnose_run(run_dir)] == ["large updates"]


def test_damaged_metrics_are_a_mistake(run_dir):
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        diagnose_run(run_dir)


@pytest.mark.parametrize("end", [".", "?", "!", ""])
def test_a_sentence_has_one_mark_at_its_end(end):
    assert sentence(f" does it pay{end}") == f"Does it pay{end or '.'}"
