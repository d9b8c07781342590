"""In a notebook a run is one output, drawn again in its place: IPython's own shell and publisher, and a real kernel."""

import base64
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from covey.tracking.console import RunResult
from covey.tracking.output import in_notebook
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


@pytest.mark.slow
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
def test_a_run_that_cannot_go_on_leaves_its_output_and_one_line(folder: Path) -> None:
    published, printed = outputs_of(FAILS, folder)
    assert "told: " in printed
    assert "no luck" in printed
    assert len({output["id"] for output in published}) == 1
    assert "step 0/3" in published[-1]["data"]["text/plain"]


@pytest.mark.slow
def test_elsewhere_there_is_no_notebook() -> None:
    assert not in_notebook()
    done = subprocess.run(
        [sys.executable, "-c", "import IPython; from covey.tracking.output import in_notebook; print(in_notebook())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


KERNEL_RUN = """
from covey import run
from covey.config.recipe import read_recipe
from covey.tracking import console

readable = console.readable
console.readable = lambda text: readable({hostile!r}) if text else ""
run(read_recipe("tiny.toml", ["--show-rollouts-every", "1"]))
"""
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> &lt;"
KERNEL_FIGURE = """
import sys
result = Out[1]
assert "matplotlib.pyplot" not in sys.modules
result.figure()
"""
KERNEL_DICT = """
import json
print(json.dumps(result) == json.dumps(json.load(open(result.run_dir / "summary.json"))), isinstance(result, dict))
"""


@pytest.mark.slow
def test_in_a_kernel_the_cell_has_one_panel_then_a_table_and_a_figure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nbclient runs a notebook in a process of ipykernel, and applies the updates of outputs as a front end does."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    spec = tmp_path / "jupyter_data_dir/kernels/own"
    spec.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": launch, "display_name": "own", "language": "python"}))
    cells = [KERNEL_RUN.format(hostile=HOSTILE), KERNEL_FIGURE, KERNEL_DICT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="own", resources={"metadata": {"path": folder}}
    ).execute()

    trained, drawn, compared = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in trained] == ["display_data", "execute_result"], trained[0]
    panel, table = (output.data for output in trained)
    assert "step 3/3" in panel["text/plain"]
    assert "Held-out" in panel["text/plain"]
    assert HOSTILE in panel["text/plain"]
    assert html.escape(HOSTILE, quote=False) in panel["text/html"]
    assert table["text/html"].startswith("<table>")
    assert "Held-out score on 6 problems" in table["text/html"]
    for shown in (panel, table):
        assert set(re.findall(r"<\s*/?\s*(\w+)", shown["text/html"])) <= {
            "pre", "span", "table", "caption", "b", "tr", "th", "td", "code",
        }  # fmt: skip
    assert [output.output_type for output in drawn] == ["execute_result"]
    assert base64.b64decode(drawn[0].data["image/png"]).startswith(b"\x89PNG")
    assert compared[0].text == "True True\n"


def test_the_table_of_a_result_has_text_only() -> None:
    score = {"score": 0.25, "low": 0.2, "high": 0.3, "count": 1200, "seconds": 1.0}
    result = RunResult(
        domain="language", score_kind="accuracy", run_dir="runs/<b>x</b>", recipe="<script>", algorithm="grpo", seed=3,
        steps=1200, seconds=65.0, decisions_sampled=5, peak_memory_bytes=2**31,
        evaluations=[{"max_new_tokens": 12, "before": score, "after": score | {"score": 0.75}}],
    )  # fmt: skip
    shown = result._repr_mimebundle_()
    assert shown["text/plain"] == repr(dict(result))
    cells = [html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", shown["text/html"])]
    assert cells[:8] == ["", "before", "after", "change", "token limit: 12", "25.0% (20.0 to 30.0)",
                         "75.0% (20.0 to 30.0)", "+50.0 points"]  # fmt: skip
    assert cells[8:] == ["recipe", "<script>, grpo, seed 3", "training", "1,200 steps in 1:05, 5 tokens sampled",
                         "peak memory", "2,048 MiB", "folder", "runs/<b>x</b>"]  # fmt: skip
    assert "<script>" not in shown["text/html"]
    assert result.run_dir == Path("runs/<b>x</b>")
    assert json.loads(json.dumps(result)) == dict(result)
