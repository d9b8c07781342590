"""`covey runs`, `covey show` and `covey report` on run folders of all kinds and states."""

import json
import os
import re
from pathlib import Path

import pytest

from covey.cli.main import main, parse
from covey.tracking.run_folder import FolderLock
from helpers.conversation_records import conversation
from helpers.run_folders import answer, control_run, language_run, rollout

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u200b\r\x08[red]bold[/red]:smile:"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with four runs below runs/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    answers = [answer(step, problem, float(problem == step)) for step in (0, 2, 4) for problem in range(6)]
    language_run(tmp_path / "runs" / "a", answers=answers, checkpoints=(2, 4))
    language_run(tmp_path / "runs" / "b", state="stopped")
    control_run(tmp_path / "runs" / "c")
    language_run(tmp_path / "runs" / "d", state="crashed", rollouts=())
    return tmp_path


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.err if code else captured.out


# ---- covey runs ----


def test_the_list_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of(capsys, "runs", "--sort", "name")
    assert [re.split(r"  +", line)[:4] for line in shown.splitlines()[1:]] == [
        ["runs/a", "finished", "4/4", "25.0% -> 75.0% (60.0 to 90.0)"],
        ["runs/b", "stopped", "4/4", "25.0% -> 50.0% so far"],
        ["runs/c", "finished", "4/4", "9.00 -> 500.0 (490.0 to 500.0)"],
        ["runs/d", "crashed", "4/4", "25.0% -> 50.0% so far"],
    ]
    assert len({len(line.rstrip()) for line in shown.splitlines()[1:]}) == 1


def test_filters_and_orders_of_the_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> list[str]:
        return [run["run"] for run in json.loads(output_of(capsys, "runs", *words, "--json"))]

    assert listed("--state", "stopped,crashed", "--sort", "name") == ["runs/b", "runs/d"]
    assert listed("--sort", "name", "--reverse") == ["runs/d", "runs/c", "runs/b", "runs/a"]
    assert listed("runs", "--name", "/c") == ["runs/c"]
    assert listed("--seed", "7", "--sort=name") == ["runs/a", "runs/b", "runs/d"]
    assert listed("runs/a", "--algorithm", "ppo") == []
    assert "none of the 4 runs is like that" in output_of(capsys, "runs", "--state", "running")
    with FolderLock(runs / "runs" / "a"):
        assert listed("--state", "running") == ["runs/a"]


def test_pruning_lists_first_and_removes_on_request(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = runs / "runs" / "a" / "checkpoints" / "step-00000002"
    shown = output_of(capsys, "runs", "prune")
    assert "runs/a: would remove step-00000002 (1.1 kB); step-00000004 (newest) stays" in shown
    assert shown.endswith("1.1 kB would be freed; nothing is removed yet. Next: covey runs prune --yes\n")
    assert first.is_dir()
    assert "nothing to remove" in output_of(capsys, "runs", "prune", "runs/b", "runs/c")
    assert output_of(capsys, "runs", "prune", "runs/a", "--yes").endswith("1.1 kB freed\n")
    assert not first.exists()
    assert "no finished run among 4 runs has old checkpoints" in output_of(capsys, "runs", "prune", "--yes")


def test_exporting_rollouts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "t.jsonl has 48 rollouts of 4 steps, in 15 columns" in output_of(
        capsys, "runs", "export", "runs/a", "t.jsonl"
    )
    shown = output_of(capsys, "runs", "export", "runs/a", "h.csv", "--held-out")
    assert "h.csv has 18 answers of 3 steps" in shown
    assert "is there already, and is not replaced" in output_of(capsys, "runs", "export", "runs/a", "h.csv", code=2)


def test_a_folder_called_like_an_action_is_named_by_its_path(runs: Path) -> None:
    assert parse(["runs", "prune"])[0].action == "prune"
    assert parse(["runs", "./prune"])[0].folder == "./prune"
    assert parse(["runs"])[0].folder == "runs"


# ---- covey show ----


def test_the_default_is_the_most_informative_group_of_the_last_step(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output_of(capsys, "show", "runs/a").splitlines()
    assert lines[0] == "step 4, group 1 of 3, 4 rollouts (the largest spread of rewards)"
    assert lines[1:5] == [
        "  prompt     What is 1 + 4?",
        "  answer     5",
        "  rewards    mean 0.50, from 0.00 to 1.00",
        "  baseline   0.50",
    ]
    assert lines[6:8] == [
        "   2  reward 1.00 = numeric 1.00, format 0.00  advantage +0.50  5 tokens, stop",
        "      It is 1.0.",
    ]
    assert [line[:4] for line in lines if "reward " in line[4:14]] == ["   2", "   3", "   0", "   1"]
    assert output_of(capsys, "show", "runs/a", "--step", "2", "--group", "2").startswith("step 2, group 2 of 3")
    assert "  seed       12345\n" in output_of(capsys, "show", "runs/c")


def test_runs_of_older_versions_have_no_advantages(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [rollout(1, 0, reward) for reward in (0.0, 1.0)]
    for line in lines:
        del line["advantage"], line["baseline"], line["reward_parts"], line["version"]
    language_run(runs / "old", steps=1, rollouts=lines)
    shown = output_of(capsys, "show", "old")
    assert "advantage" not in shown
    assert "baseline" not in shown
    assert "   1  reward 1.00  5 tokens, stop\n" in shown


def test_searches_in_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [rollout(step, 0, reward, text=f"text {step}") for step in (1, 2, 3) for reward in (None, float(step))]
    lines += [rollout(2, 1, 7.0, end="length", text="the needle")]
    lines = [line | {"advantage": 0.0} for line in lines]
    language_run(runs / "s", steps=3, rollouts=lines)

    def heads(*words: str) -> list[str]:
        return [line for line in output_of(capsys, "show", "s", *words).splitlines() if line.startswith("step")]

    assert heads("--best", "--limit", "2") == ["step 2, group 1, rollout 0 of 1", "step 3, group 0, rollout 1 of 2"]
    assert heads("--worst", "--limit", "1") == ["step 1, group 0, rollout 1 of 2"]
    assert heads("--failed", "--step", "2") == ["step 2, group 0, rollout 0 of 2"]
    assert heads("--truncated") == heads("--text", "NEEDLE") == ["step 2, group 1, rollout 0 of 1"]
    assert heads("--no-signal", "--limit", "2") == ["step 3, group 0, 2 rollouts", "step 2, group 0, 2 rollouts"]
    assert heads("--no-signal", "--truncated", "--best") == ["step 2, group 1, rollout 0 of 1"]
    assert "no rollout is like that in step 1" in output_of(capsys, "show", "s", "--text", "needle", "--step", "1")


def test_held_out_answers_before_and_after(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of(capsys, "show", "runs/a", "--held-out", "--limit", "2")
    assert shown.startswith(
        "held-out problems, at most 8 tokens: 1 better, 1 worse, 4 the same from step 0 to step 4\n"
    )
    assert (
        "problem 0, -1\n  prompt     Problem 0?\n  before training: score 1.00  3 tokens\n      answer 0 at 0" in shown
    )
    assert "problem 4, +1\n" in shown
    best = json.loads(output_of(capsys, "show", "runs/a", "--held-out", "--best", "--json", "--limit", "1"))
    assert (best[0]["problem"], best[0]["change"], best[0]["last"]["text"]) == (4, 1.0, "answer 4 at 4")
    worst = json.loads(output_of(capsys, "show", "runs/a", "--held-out", "--worst", "--json", "--limit", "1"))
    assert worst[0]["problem"] == 0


def test_held_out_answers_by_kind_of_problem(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [answer(step, problem, float(problem < step), kind=f"[b]{problem % 2 + 1} steps")
               for step in (0, 2, 4) for problem in range(6)]  # fmt: skip
    language_run(runs / "runs" / "k", answers=answers)
    shown = output_of(capsys, "show", "runs/k", "--held-out", "--limit", "1")
    assert re.search(r"\[b\]1 steps\W+3\W+0.0%\W+66.7% \(20.8 to 93.9\)", shown), shown
    shown = output_of(capsys, "show", "runs/k", "--held-out", "--step", "2", "--limit", "1")
    assert re.search(r"\[b\]2 steps\W+3\W+0.0%\W+33.3%", shown), shown
    assert "kind of problem" not in output_of(capsys, "show", "runs/a", "--held-out")


def test_a_model_cannot_write_to_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by control characters nor by lines that look like those of covey."""
    text = f"{ESCAPES}\nstep 9, group 9 of 9\n   0  reward 9.00"
    lines = [
        rollout(1, 0, reward, text=text, prompt=[{"role": ESCAPES, "content": ESCAPES}], columns={ESCAPES: ESCAPES},
                reward_parts={ESCAPES: 1.0, "b": 2.0}, end=ESCAPES)
        for reward in (0.0, 1.0, None)
    ]  # fmt: skip
    turns = conversation(text, text, text, ESCAPES) | {"failure": text, "observation": text}
    lines += [rollout(1, 0, 0.5, **turns)]
    answers = [answer(step, 0, step / 4, text=text, prompt=ESCAPES) for step in (0, 4)]
    answers += [answer(step, 1, step / 4, **turns) for step in (0, 4)]
    language_run(runs / "h", rollouts=lines, answers=answers)
    for words in ([], ["--best"], ["--held-out"], ["--no-signal"], ["--failed"], ["--json"], ["--held-out", "--json"]):
        shown = output_of(capsys, "show", "h", *words)
        bad = {character for character in shown if not character.isprintable() and character != "\n"}
        assert not bad, (words, bad)
        if "--json" not in words:
            assert shown.isascii() or "\N{REPLACEMENT CHARACTER}" in shown
            assert not re.search(r"^step 9", shown, re.MULTILINE)
            assert not re.search(r"^ {3}0  reward 9", shown, re.MULTILINE)
    assert "[red]bold[/red]:smile:" in output_of(capsys, "show", "h")


def test_conversations_are_shown_by_their_turns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = conversation() | {"failure": "its environment failed: x"}
    answers = [answer(step, 0, 0.0, **turns) for step in (0, 1)]
    language_run(runs / "t", steps=1, rollouts=[rollout(1, 0, None, **turns)], answers=answers)
    expected = """\
      its environment failed: x
      environment
        Begin.
      assistant  reward 0.25
        I compute.
        calls calculate
          expression:
            12 +
            3
        call that could not be read
          12 +
          3}
      tool calculate
        15
      assistant  reward 0.50
        I compute. again
"""
    head = "   0  not graded = numeric none, format 0.00  baseline 0.50  5 tokens, stop\n"
    assert expected in output_of(capsys, "show", "t")
    assert output_of(capsys, "show", "t", "--held-out").count(expected) == 2
    assert output_of(capsys, "show", "t", "--text", "12 +\n3").count(head + expected) == 1


def test_a_long_conversation_is_cut_unless_it_is_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "assistant", "content": f"turn {number}"} for number in range(100)]
    messages[0]["content"] = "x" * 2**20
    language_run(runs / "long", steps=1, rollouts=[rollout(1, 0, 1.0, text="", messages=messages)])
    shown = output_of(capsys, "show", "long")
    assert len(shown) < 10_000
    assert "turn 39\n      ... 60 more turns (--full shows them)" in shown
    assert "turn 99" in output_of(capsys, "show", "long", "--full")


def test_long_texts_are_cut_unless_they_are_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    language_run(runs / "long", steps=1, rollouts=[rollout(1, 0, 1.0, text="word " * 2000)])
    assert "... 8,000 more characters (--full shows them)" in output_of(capsys, "show", "long")
    assert output_of(capsys, "show", "long", "--full").count("word") == 2000


def test_a_run_can_be_shown_while_it_is_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "runs" / "b"
    with FolderLock(run), open(run / "rollouts" / "step_000004.jsonl", "ab") as file:
        file.write(b'{"step": 4, "group": 2, "text": "being wri')
        file.flush()
        before = {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
        assert "step 4, group 1 of 3" in output_of(capsys, "show", "runs/b")
        assert "running" in output_of(capsys, "runs", "runs/b")
        output_of(capsys, "report", "runs/b", "-o", "b.html")
        assert {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))} == before
    assert b"being wri" not in (runs / "b.html").read_bytes()


# ---- covey report ----


@pytest.mark.slow
def test_the_report_of_one_run_and_of_several(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a.html has the report" in output_of(capsys, "report", "runs/a")
    page = (runs / "a.html").read_text()
    assert "covey train my.toml --steps 4" in page  # the command to repeat it
    assert "report.html has the report" in output_of(
        capsys, "report", "runs/a", "runs/c", "runs/d", "--title", "All <3>"
    )
    assert "<title>All &lt;3&gt;</title>" in (runs / "report.html").read_text()
    os.utime(runs / "a.html", (1, 1))
    output_of(capsys, "report", "runs/a", "runs/a")  # named twice is once; an older report is replaced
    assert (runs / "a.html").stat().st_mtime > 1
