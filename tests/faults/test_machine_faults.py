"""Faults of the machine as they are: a disk that is small or becomes read-only, limits, missing permissions, a run
folder that is taken away. One line with the way on, exit code 3.
"""

import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import covey.experiment.control
import covey.experiment.job
import covey.experiment.llm
import covey.experiment.models
import covey.experiment.run
import covey.train.prepare
import covey.train.update
from covey.cli.main import main
from covey.config import RunConfig
from covey.config.files import MemoryFault, machine_error
from covey.config.recipe import write_config
from covey.experiment.advice import less_memory
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.trial import Trial
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.optimizer import AdamW
from covey.tracking.run_store import RunStore
from covey.train.learners import PolicyLearner
from helpers import toy_envs
from helpers.run_helpers import files, reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

STEPS = 8
CONTROL = {
    "algorithm": "ppo",
    "steps": STEPS,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 30},
    "rollouts": {"kind": "fragments", "environments": 2, "fragment_steps": 20},
    "policy": {"hidden": [32]},
    "evaluation": {"episodes": 2},
    "checkpoint": {"every": 2},
    "update": {"minibatches": 2},
}


@dataclass
class Outcome:
    code: int
    output: str
    errors: str


def command(words: list[object], folder: Path, prepare: Callable[[], object] = lambda: None) -> Outcome:
    """`covey` in a fork of this process, in which `prepare` is called first."""
    names = [folder / name for name in ("output", "errors")]
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, name in enumerate(names, start=1):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            prepare()
            code = main([str(word) for word in words])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(code, *(name.read_text() for name in names))


def way_on(outcome: Outcome, place: str, run_dir: Path, words: list[object]) -> list[object]:
    """The command that the line of the error names."""
    assert outcome.code == 3, outcome
    (line,) = outcome.errors.splitlines()
    assert re.match(rf"error: .*{re.escape(place)}.*; then (go on with|start again with): covey ", line), line
    _, _, resume = line.partition("; then go on with: covey ")
    if resume:
        assert shlex.split(resume) == ["train", "--resume", str(run_dir)]
    return shlex.split(resume) or words


def assert_same(run_dir: Path, whole: Path) -> None:
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole)
    for part in ("model", "rollouts"):
        assert files(run_dir / part) == files(whole / part)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a run of it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("machine")
    write_config(toy_envs.read(CONTROL), folder / "recipe.toml")
    outcome = command(["train", folder / "recipe.toml", "--run-dir", folder / "whole"], folder)
    assert outcome.code == 0, outcome
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a disk of so many bytes at tmp_path/disk, or gives the one there another size or mode."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> None:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")

    yield mount
    subprocess.run(["umount", str(disk)], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [12, 120])
def test_a_real_disk_that_is_full(
    kilobytes: int, place: Path, tmp_path: Path, small_disk: Callable[[str], None]
) -> None:
    small_disk(f"size={kilobytes}k")
    run_dir = tmp_path / "disk" / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    outcome = command(words, place)
    again = way_on(outcome, "free some space on that disk", run_dir, words)
    small_disk("remount,size=50m")
    outcome = command(again, place)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [1, 8])
def test_a_limit_on_the_size_of_files(kilobytes: int, place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    size = kilobytes * 1024
    outcome = command(words, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    outcome = command(way_on(outcome, "ulimit -f", run_dir, words), tmp_path)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


def when_called(owner: Any, name: str, times: int, act: Callable[[], object]) -> None:
    """Act in this process when a function is called for the `times`-th time, just before it does anything."""
    function, calls = getattr(owner, name), count(1)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == times:
            act()
        return function(*arguments, **options)

    setattr(owner, name, called)


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "a step": (RunStore, "record", 3),
    "the beginning of a checkpoint": (CheckpointFolder, "_save", 2),
    "the end of a checkpoint": (CheckpointFolder, "_publish", 2),
    "the model": (covey.experiment.job, "write_folders", 1),
    "the curve": (covey.experiment.job, "draw_curve", 1),
}
USUAL = ("a step", "the beginning of a checkpoint")  # the others are slow tests
at_every_moment = pytest.mark.parametrize(
    "moment",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in MOMENTS],
)


@pytest.mark.slow
@at_every_moment
def test_a_file_system_that_becomes_read_only(moment: str, place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]

    def remount() -> None:
        for options in (["--bind", run_dir], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *options, run_dir], check=True, capture_output=True)

    try:
        outcome = command(words, tmp_path, lambda: when_called(*MOMENTS[moment], remount))
        if "mount" in outcome.errors:
            pytest.skip(f"nothing can be mounted here: {outcome.errors}")
        again = way_on(outcome, "make the file system writable", run_dir, words)
        assert "--resume" in again
        outcome = command(again, tmp_path)
        assert outcome.code == 3, "still read-only"
    finally:
        subprocess.run(["umount", run_dir], check=False, capture_output=True)
    outcome = command(again, tmp_path)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


@pytest.mark.slow
@at_every_moment
def test_a_run_folder_that_is_moved_can_be_put_back(moment: str, place: Path, tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    outcome = command(words, tmp_path, lambda: when_called(*MOMENTS[moment], lambda: run_dir.rename(elsewhere)))
    again = way_on(outcome, "was deleted or moved while the run wrote to it: put it back", run_dir, words)
    assert "--resume" in again
    assert not run_dir.exists(), "nothing is written where the folder was"
    elsewhere.rename(run_dir)
    outcome = command(again, tmp_path)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


@pytest.mark.slow
@at_every_moment
def test_a_run_folder_that_is_replaced_ends_the_run(moment: str, place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]

    def replace() -> None:
        shutil.rmtree(run_dir)
        run_dir.mkdir()

    outcome = command(words, tmp_path, lambda: when_called(*MOMENTS[moment], replace))
    way_on(outcome, "was deleted or moved while the run wrote to it", run_dir, words)


def without_privileges() -> None:
    """Root may read and write everything; from now on this process may do what the owner of its files may."""
    if os.geteuid() == 0 and sys.platform == "linux":
        version_3, this_process, none = 0x20080522, 0, [0] * 6
        header, data = (ctypes.c_uint32 * 2)(version_3, this_process), (ctypes.c_uint32 * 6)(*none)
        assert ctypes.CDLL(None).capset(header, data) == 0


def forbid(path: Path) -> Callable[[], None]:
    """Take a file or folder from its owner, for a process without privileges; returns what undoes it."""
    before = path.stat()
    if os.geteuid() == 0:
        os.chown(path, before.st_uid + 1, -1)
    path.chmod(0o700 if os.geteuid() == 0 else 0)

    def undo() -> None:
        os.chown(path, before.st_uid, -1)
        path.chmod(before.st_mode)

    return undo


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with files of the user's own: data, a reward function, a model."""
    folder = tmp_path_factory.mktemp("inputs")
    recipe = write_recipe(folder, tiny_folder(folder / "model"), steps=2)
    for name in ("data", "held_out"):
        rows = [{"prompt": [{"role": "user", "content": f"{number}+1 {name}"}], "answer": "1"} for number in range(6)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'name = "dataset"\npath = "{folder}/data.jsonl"\nheld_out_path = "{folder}/held_out.jsonl"'
    recipe.write_text(recipe.read_text().replace('name = "arithmetic"\ndigits = [1]', task))
    outcome = command(["check", recipe], folder)
    assert outcome.code == 0, outcome
    return folder


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name",
    ["tiny.toml", "data.jsonl", "held_out.jsonl", "rewards.py", "model", "model/config.json", "model/tokenizer.json",
     "model/tokenizer_config.json", "model/generation_config.json", "model/model.safetensors"],
)  # fmt: skip
def test_inputs_without_permission_are_faults_of_the_machine(name: str, inputs: Path, tmp_path: Path) -> None:
    undo = forbid(inputs / name)
    try:
        outcome = command(["check", inputs / "tiny.toml"], tmp_path, without_privileges)
    finally:
        undo()
    assert outcome.code == 3, outcome
    assert re.fullmatch(
        rf"error: cannot use {inputs / name}\S* \(Permission denied\): give yourself permission to it\n", outcome.errors
    )


@pytest.mark.parametrize("name", ["cache", "runs"])
def test_places_to_write_to_without_permission(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("COVEY_CACHE", str(folder))
    words = {
        "cache": ["sample", "smollm2-135m", "hello"],
        "runs": ["check", inputs / "tiny.toml", "--run-dir", folder / "1"],
    }
    undo = forbid(folder)
    try:
        outcome = command(words[name], tmp_path, without_privileges)
    finally:
        undo()
    assert outcome.code == 3, outcome
    (line,) = outcome.errors.splitlines()
    assert line.startswith(f"error: cannot use {folder}")
    assert "(Permission denied): give yourself permission to it" in line
    assert ("or set COVEY_CACHE to another folder" in line) == (name == "cache")


PARTS_OF_A_RUN = (
    ".", "config.toml", "origin.json", "metrics.jsonl", "covey.lock", "rollouts", "rollouts/step_000002.jsonl",
    "checkpoints",
    *(f"checkpoints/step-00000006{name}" for name in ("", "/manifest.json", "/state.json", "/tensors.safetensors")),
)  # fmt: skip


@pytest.mark.slow
def test_a_run_folder_without_permission(place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    outcome = command(words, tmp_path, lambda: when_called(RunStore, "record", STEPS, lambda: os._exit(0)))
    for name in PARTS_OF_A_RUN:
        undo = forbid(run_dir / name)
        try:
            outcome = command(["train", "--resume", run_dir], tmp_path, without_privileges)
        finally:
            undo()
        assert outcome.code == 3, (name, outcome)
        assert re.match(rf"error: cannot use {run_dir / name}\S* \(Permission denied\): give", outcome.errors), name
    outcome = command(["train", "--resume", run_dir], tmp_path, without_privileges)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


def spare_files(number: int) -> None:
    """This process may open so many files more."""
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = next(islice((descriptor for descriptor in count() if descriptor not in taken), number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
@pytest.mark.parametrize("spare", [3, 5])
def test_too_many_open_files(spare: int, place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    outcome = command(words, tmp_path, lambda: spare_files(spare))
    remedy = "raise the limit on open files (ulimit -n)"
    assert (outcome.code, outcome.errors.count("\n")) == (3, 1), outcome
    assert remedy in outcome.errors
    begun = (run_dir / "config.toml").exists()  # else the folder could not be opened: the same command starts it
    outcome = command(way_on(outcome, remedy, run_dir, words) if begun else words, tmp_path)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
)
ROWS = "set sampling.rows_at_once = 4 (is 0, chosen by memory)"
TOKENS = "lower update.microbatch_tokens (is 200) or set update.recompute = true (is false)"
STATE = "set update.eight_bit_moments = true (is false) or set lora.rank = 16 (is 0), in a new run"
# Moment -> the function that finds too little memory and at which call; the phase, and what to change.
TOO_LITTLE: dict[str, tuple[tuple[Any, str, int], str, str]] = {
    "the model": ((covey.experiment.models, "load_model", 1), "while the model is loaded", STATE),
    "its trial": ((Trial, "_packs", 1), "while the model is loaded", STATE),
    "the first evaluation": ((LocalGenerator, "generate", 1), "in an evaluation", ROWS),
    "sampling": ((LocalGenerator, "generate", 4), "while sampling", ROWS),
    "old log-probabilities": ((covey.train.prepare, "score_rows", 7), "in the update", TOKENS),
    "a backward pass": ((PolicyLearner, "backward", 13), "in the update", TOKENS),
    "the first moments": ((AdamW, "step", 1), "in the optimizer", STATE),
    "a checkpoint": ((CheckpointFolder, "_save", 2), "in a checkpoint", STATE),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny language model."""
    folder = tmp_path_factory.mktemp("memory")
    return write_recipe(folder, tiny_folder(folder / "model"), steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("moment", TOO_LITTLE)
def test_too_little_memory_names_the_phase_and_what_to_change(moment: str, tiny: Path, tmp_path: Path) -> None:
    """A run that has begun goes on with a smaller setting."""
    function, phase, changes = TOO_LITTLE[moment]
    error = OUT_OF_MEMORY[list(TOO_LITTLE).index(moment) % len(OUT_OF_MEMORY)]

    def fail() -> None:
        raise error

    run_dir = tmp_path / "run"
    words: list[object] = ["train", tiny, "--run-dir", run_dir]
    outcome = command(words, tmp_path, lambda: when_called(*function, fail))
    again = way_on(outcome, f"there is not enough memory {phase} (", run_dir, words)
    settings = run_dir / "config.toml"
    place = f" in {settings};" if "--resume" in again and changes is not STATE else ";"
    assert f"): close other programs, or {changes}{place}" in outcome.errors
    if changes is TOKENS:
        settings.write_text(settings.read_text().replace("microbatch_tokens = 200", "microbatch_tokens = 100"))
    outcome = command(again, tmp_path)
    assert outcome.code == 0, outcome
    note = "update.microbatch_tokens was 200 and is 100: the last bits may differ"
    assert (note in outcome.output) == (changes is TOKENS)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_the_phase_of_every_librarys_lack_of_memory_is_read_from_its_traceback(error: RuntimeError) -> None:
    class Learner:
        def coefficients(self, step: int) -> dict[str, float]:
            raise error

    with pytest.raises(RuntimeError) as raised:
        covey.train.update.update([Learner()], None, seed=0, step=1)  # type: ignore[list-item, arg-type]
    fault = machine_error(raised.value)
    assert isinstance(fault, MemoryFault)
    config = RunConfig(model="mine")
    told = str(less_memory(fault, raised.value, config, "config.toml"))
    assert told.startswith("there is not enough memory in the update (")
    assert told.endswith(f"or {TOKENS.replace('200', '4096')} in config.toml")
    smallest = replace(config, update=replace(config.update, microbatch_tokens=1, recompute=True))
    assert str(less_memory(fault, raised.value, smallest)).endswith("(covey plan shows what takes memory)")
    assert "in the" not in str(less_memory(fault, error.with_traceback(None), config))


def test_errors_of_libraries_are_faults_of_the_machine_by_their_number(tmp_path: Path) -> None:
    """torch and safetensors raise errors without an errno; their text or their kind says it."""
    nowhere = str(tmp_path / "nowhere")
    for call in (
        lambda: torch.from_file(nowhere, size=1),
        lambda: safetensors.torch.load_file(nowhere),
        lambda: safetensors.torch.save_file({"a": torch.zeros(1)}, f"{nowhere}/file"),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 -- whatever they raise
            call()
        assert "(No such file or directory)" in str(machine_error(caught.value, nowhere))
    text = "unable to open file </x> in read-only mode: Permission denied (13)"
    assert "(Permission denied): give yourself permission to it" in str(machine_error(RuntimeError(text)))
    assert machine_error(RuntimeError("a shape (13) of another kind")) is None
