"""Commands in a stranger's folder, whose files have the names of Python's modules and of covey: none is imported."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.llm.sft.function_rows import read_function
from helpers.page_server import Client
from helpers.run_helpers import LIMIT_SECONDS, covey, start
from helpers.tiny_models import tiny_folder

RAN = "RAN"  # the file in which a module of the folder notes that it was imported
NEVER_FIRST = {"sys", "builtins"}
RECIPE = """
model = "model"
steps = 1
threads = 1
precision = "fp32"
[task]
name = "arithmetic"
digits = [1]
[[rewards]]
function = "mine.py:length"
[[rewards]]
function = "own_module:length"
[[rewards]]
name = "numeric"
[sampling]
prompts_per_step = 1
group_size = 2
max_new_tokens = 2
[evaluation]
problems = 1
"""
REWARD = """
import random  # Python's own

def length(completions, **columns):
    return [random.Random(0).random() * len(text[0]["content"]) for text in completions]

def rows():
    return [{"prompt": str(random.Random(n).random()), "completion": "1"} for n in range(4)]
"""
SAMPLER = '[sampler]\nkind = "covey"\nstart = 1\ntoken_file = "{}"\n'
CONVERSATION = """
[conversation]
environment = "game.py:Game"
total_tokens = 40
"""
GAME = """
import random

class Game:
    def reset(self, **columns):
        return "go"

    def step(self, message):
        return "done", random.Random(0).random(), True
"""
AGENT = [
    "--steps",
    "1",
    "--environments",
    "1",
    "--fragment-steps",
    "2",
    "--minibatches",
    "1",
    "--evaluation.episodes",
    "1",
]
COMMANDS = [
    ["check", "mine.toml"],
    ["train", "mine.toml", "--run-dir", "runs/mine"],
    ["train", "served.toml", "--run-dir", "runs/served"],
    ["train", "talk.toml", "--run-dir", "runs/talk"],
    ["train", "cartpole_ppo", *AGENT, "--vectorization", "async", "--run-dir", "runs/agent"],
    ["compare", "cartpole_ppo", *AGENT, "--seeds", "2", "--output", "compared"],
    ["sft", "mine.toml", "--data", "mine.py:rows", "--run-dir", "runs/sft"],
    ["eval", "runs/mine", "--problems", "1"],
    ["sample", "runs/mine", "1", "--n", "1", "--max-new-tokens", "1"],
    ["diagnose", "runs/mine"],
    ["report", "runs/mine"],
    ["show", "runs/mine"],
    ["runs"],
    ["plan", "model"],
    ["export", "runs/mine", "exported"],
    ["recipes"],
]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with the modules, which end the process that imports them, and a recipe."""
    folder = tmp_path / "unpacked"
    (folder / "covey").mkdir(parents=True)
    for name in {*sys.stdlib_module_names} - NEVER_FIRST:
        trap = f"open({str(tmp_path / RAN)!r}, 'a').write('{name} ')\nraise SystemExit('hostile {name}')\n"
        (folder / f"{name}.py").write_text(trap)
    (folder / "covey" / "__init__.py").write_text(trap)
    (folder / "mine.py").write_text(REWARD)
    (folder / "own_module.py").write_text(REWARD)
    return folder


def imported(folder: Path) -> str:
    """Names of the folder's modules that were imported."""
    ran = folder.parent / RAN
    return ran.read_text() if ran.exists() else ""


@pytest.mark.slow
def test_no_command_imports_modules_of_its_folder(hostile: Path) -> None:
    token = hostile.parent / "token"
    token.write_text("a" * 40)
    token.chmod(0o600)
    tiny_folder(hostile / "model")
    (hostile / "mine.toml").write_text(RECIPE)
    (hostile / "served.toml").write_text(RECIPE + SAMPLER.format(token))
    (hostile / "talk.toml").write_text(re.sub(r"(?s)\[\[rewards.*(?=\[sampling)", "", RECIPE) + CONVERSATION)
    (hostile / "game.py").write_text(GAME)
    for words in COMMANDS:
        code, output = covey(*words, cwd=hostile)
        assert (imported(hostile), code) == ("", 0), f"{words}: {output}"


def test_the_indexer_of_watch_does_not(hostile: Path) -> None:
    cache = hostile.parent / "cache"
    (hostile / "runs" / "a").mkdir(parents=True)
    (hostile / "runs" / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (hostile / "runs" / "a" / "config.toml").write_text(RECIPE)
    running = start("watch", "--port", "0", cwd=hostile, COVEY_CACHE=str(cache))
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/\n\Z", running.output())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while not (imported(hostile) or [*cache.rglob("*.sqlite")]):
        assert Client(int(found[1])).of_run(hostile / "runs" / "a").status == 200
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert (imported(hostile), running.ended()[0]) == ("", 0)


def test_a_function_of_sft_sees_pythons_modules(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile)
    assert len(read_function("mine.py:rows")) == len(read_function("own_module:rows")) == 4
    assert not imported(hostile)


@pytest.mark.slow
def test_python_m_covey_forgets_the_folder(hostile: Path) -> None:
    """But for the modules that Python itself imports before any code of covey."""
    for module in hostile.glob("*.py"):
        if module.stem not in ("random", "tomllib", "shlex", "argparse"):
            module.unlink()
    (hostile / "covey" / "__init__.py").unlink()
    (hostile / "covey").rmdir()
    words = [sys.executable, "-m", "covey", "recipes", "nowhere"]
    done = subprocess.run(words, cwd=hostile, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (imported(hostile), done.returncode) == ("", 2), done.stderr
