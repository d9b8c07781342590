"""Ctrl-C at any moment, and a reader of the output that goes away."""

import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.run_helpers import Interrupt, covey, write_recipe
from helpers.tiny_models import tiny_folder

IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *more):
        if name == "covey.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from covey.__main__ import main
main()
"""
MOMENTS = {
    "reading the recipe": Interrupt("covey.cli.train", "read_recipe"),
    "opening the experiment": Interrupt("covey.experiment.run", "open_builder"),
    "compiling": Interrupt("covey.experiment.models", "find_kernels"),
    "loading the model": Interrupt("covey.experiment.models", "load_model"),
    "the first evaluation": Interrupt("covey.experiment.evaluation", "HeldOut._measure"),
    "the first step": Interrupt("covey.train.loop", "collect", times=2),  # there the first only asks
    "saving the model": Interrupt("covey.experiment.job", "write_folders"),
    "the curve": Interrupt("covey.experiment.job", "draw_curve"),
}
BEGUN = ("saving the model", "the curve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupts") / "a folder"
    folder.mkdir()
    write_recipe(folder, tiny_folder(folder / "model"), steps=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_at_any_moment_with_a_command_that_works(moment: str, folder: Path) -> None:
    run_dir = f"run {list(MOMENTS).index(moment)}"
    code, output = covey("train", "tiny.toml", "--run-dir", run_dir, cwd=folder, moment=MOMENTS[moment])
    assert code == 130, output
    assert "Traceback" not in output
    advised = re.findall(r"covey (train .*)", output)[-1]
    assert ("--resume" in advised) == (moment in BEGUN), output
    code, output = covey(*shlex.split(advised), cwd=folder)
    assert code == 0, output
    assert (folder / run_dir / "summary.json").is_file()


@pytest.mark.slow
def test_a_call_that_no_signal_reaches_is_ended_by_a_thread(folder: Path) -> None:
    stuck = replace(MOMENTS["loading the model"], stuck=True)
    code, output = covey("train", "tiny.toml", "--run-dir", "stuck", cwd=folder, moment=stuck)
    assert code == 130, output
    advised = re.findall(r"covey (train .*)", output)[-1]
    assert covey(*shlex.split(advised), cwd=folder)[0] == 0


def test_ctrl_c_while_covey_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING, "recipes"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("errors_too", [False, True])
def test_a_run_outlives_the_reader_of_its_output(errors_too: bool, folder: Path) -> None:
    """As in `covey train ... | head -1`. What it leaves can be read by whom the umask lets."""
    run_dir = f"unread {errors_too}"
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "covey", "train", "tiny.toml", "--run-dir", run_dir],
        cwd=folder, stdout=writer, stderr=writer if errors_too else subprocess.PIPE, text=True, umask=0o027,
    )  # fmt: skip
    os.close(writer)
    assert os.read(reader, 10)
    os.close(reader)
    said = process.communicate(timeout=300)[1] or ""
    assert process.returncode == 0, said
    assert (folder / run_dir / "summary.json").is_file()
    assert errors_too or "cannot be written any more (Broken pipe): the command goes on without it" in said
    assert "\r" not in said, "no progress bar of another library"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / run_dir).rglob("*") if path.is_file()} == {0o640}
