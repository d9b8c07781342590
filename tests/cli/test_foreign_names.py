"""Names in a stranger's run folder reach the terminal as they are: no markup, no control characters, no errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from helpers.run_folders import answer, language_run, rollout

NAMES = {
    "event": "@click",
    "formula": "=1+1",
    "event in markup": "[@click=run()]x[/]",
    "end of markup": "[/bold]",
    "markup": "[blink]x[/blink]",
    "emoji": ":smile:",
    "other direction": "\u202egnp.exe\u2066",
    "escape sequence": "\x1b]0;title\x07\x1b[2J",
    "carriage return": "a\rb",
}
COMMANDS = [
    "runs", "runs prune", "runs prune --yes", "show {run}", "show {run} --best", "show {run} --held-out",
    "show {run} --held-out --json", "diagnose {run}", "report {run} -o report.html", "runs export {run} rows.csv",
    "show {run} --step 99", "eval {run} --problems 1", "sample {run}/nothing x",
]  # fmt: skip
CONTROL = re.compile("[^\n\t -~\u0080-\U0010ffff]|[\u0080-\u009f\u202a-\u202e\u2066-\u2069]")
KEPT = {"version", "step", "group", "state", "run_dir"}  # what the folder needs to be a run at all


def renamed(value: Any, name: str) -> Any:
    """A record in which every text is the name, and the tables have keys that are."""
    if isinstance(value, dict):
        own = {name: name} if value.keys() & {"answer", "numeric"} or not value else {}
        return {key: part if key in KEPT else renamed(part, name) for key, part in value.items()} | own
    if isinstance(value, list):
        return [renamed(part, name) for part in value]
    return name if isinstance(value, str) else value


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_of_a_run_are_shown_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = language_run(
        Path("runs", f"a {name.replace('/', '')}"), checkpoints=(1, 2, 3, 4),
        rollouts=[renamed(rollout(4, 0, reward), name) for reward in (0.0, 1.0)],
        answers=[renamed(answer(step, problem, step / 4, kind=name + str(problem), columns={"answer": "1"}), name)
                 for step in (0, 4) for problem in (0, 1)],
    )  # fmt: skip
    for file in ("summary.json", "origin.json"):
        if (run / file).exists():
            (run / file).write_text(json.dumps(renamed(json.loads((run / file).read_text()), name)))
    for words in COMMANDS:
        code = main([word.format(run=run) for word in words.split()])
        said = "".join(capsys.readouterr())
        assert "unexpected" not in said, f"{words}: {said}"
        assert not CONTROL.search(said), f"{words}: {said!r}"
        assert code == 0 or "error: " in said
