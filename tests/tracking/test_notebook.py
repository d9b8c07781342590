"""In a notebook a run is one output, drawn anew in its place. IPython's own shell and publisher, without a browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from covey.tracking.notebook import in_notebook
from helpers.run_helpers import write_recipe
from helpers.tiny_models import tiny_folder

# A cell that trains, in a shell with a kernel behind it, as ipykernel's and Colab's; what is published is collected.
CELL = """
import json, sys
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Any

published = []

class Publisher(DisplayPublisher):
    def publish(self, data, metadata=None, *, transient=None, update=False, **rest):
        published.append({"data": data, "id": (transient or {}).get("display_id"), "update": update})

class Shell(InteractiveShell):
    kernel = Any()

shell = Shell.instance(display_pub_class=Publisher)
shell.display_pub = Publisher(parent=shell)
result = shell.run_cell('''CODE''')
json.dump([published, repr(result.error_in_exec)], open("published.json", "w"))
"""


def outputs_of(code: str, folder: Path) -> tuple[list[dict], str]:
    """What a cell published, and what it wrote to standard output."""
    shell = [sys.executable, "-c", CELL.replace("CODE", code)]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=True)
    published, error = json.loads((folder / "published.json").read_text())
    assert error == "None", error
    return published, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    write_recipe(folder, tiny_folder(folder / "model"), steps=3)
    return folder


RUN = """
from covey import run
from covey.config.recipe import read_recipe
summary = run(read_recipe("tiny.toml", {options}))
"""


def test_a_run_is_one_output_that_is_updated(folder: Path) -> None:
    published, printed = outputs_of(RUN.format(options=["--show-rollouts-every", "1"]), folder)
    assert len({output["id"] for output in published}) == 1
    assert published[0]["id"]
    assert [output["update"] for output in published] == [False] + [True] * (len(published) - 1)
    assert len(published) > 5
    texts = [output["data"]["text/plain"] for output in published]
    assert "step 0/3" in texts[0]
    last = texts[-1]
    assert "step 3/3" in last
    assert last.count("step 3/3") == 1, "the panel is there once"
    assert "best" in last, "sample rollouts stay"
    assert "Held-out" in last
    assert "Next: " in last.rstrip().splitlines()[-1]
    assert "<pre" in published[-1]["data"]["text/html"]
    assert "\x1b" not in last
    assert "step" not in printed, "nothing goes to the cell a second time"


FAILS = """
from covey import RunError, run
from covey.config.recipe import read_recipe

calls = []

def fails_later(completions, **columns):
    calls.append(len(completions))
    if len(calls) > 1:
        raise ValueError("no luck")
    return [0.0 for _ in completions]

try:
    run(read_recipe("tiny.toml"), rewards=[fails_later])
except RunError as error:
    print("told:", error)
"""


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_run_that_cannot_go_on_leaves_its_output_and_one_line(folder: Path) -> None:
    published, printed = outputs_of(FAILS, folder)
    assert "told: " in printed
    assert "no luck" in printed
    assert len({output["id"] for output in published}) == 1
    assert "step 0/3" in published[-1]["data"]["text/plain"]


def test_elsewhere_there_is_no_notebook() -> None:
    assert not in_notebook()
    done = subprocess.run(
        [sys.executable, "-c", "import IPython; from covey.tracking.notebook import in_notebook; print(in_notebook())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
