"""A writer is killed with SIGKILL at random moments; what is left must always be a complete checkpoint."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from covey.runtime.checkpoint import CheckpointFolder
from helpers.run_helpers import signal_after

KILLS = 40
CALLS = 6000  # of Python functions, before a kill at the latest: some saves


def save_until_killed(folder: Path, calls: int) -> int:
    """Save steps in a fork that is killed after so many calls of functions; the last step that it promised, or 0."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # tensors this small start no threads, so the child of a fork may use torch
        try:
            checkpoints = CheckpointFolder(folder, keep=2)
            step = checkpoints.latest() or 0
            signal_after(calls)
            while True:
                step += 1
                weights = {f"w{i}": torch.full((5000,), float(step + i)) for i in range(4)}
                checkpoints.save(step, {"step": step, "weights": weights})
                os.write(write, f"{step}\n".encode())  # promised to the reader: this one is on the disk
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as promises:
        lines = promises.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return int(lines[-1]) if lines else 0


def assert_complete(folder: CheckpointFolder, promised: int) -> int:
    """The newest step, whose content is whole; at least the promised one."""
    step = folder.latest()
    if step is None:
        assert promised == 0
        return 0
    assert step >= promised
    state = folder.load(step)
    assert state["step"] == step
    assert len(state["weights"]) == 4
    for i in range(4):
        assert state["weights"][f"w{i}"].unique().tolist() == [step + i]
    return step


@pytest.mark.slow
def test_sigkill_at_random_moments_of_saving(tmp_path):
    path = tmp_path / "checkpoints"
    chooser = random.Random(0)
    unfinished, reached, left = 0, 0, 0
    for _ in range(KILLS):
        promised = save_until_killed(path, chooser.randrange(CALLS))
        unfinished += any(entry.name.startswith(".unfinished-") for entry in path.glob("*"))
        folder = CheckpointFolder(path, keep=2)
        reached = assert_complete(folder, max(promised, reached))
        # Two kept, and one more where the kill came before the removal; where that was a run's first save, beside those
        # that the run before it left behind.
        assert len(folder.steps()) <= max(left + 1, 3)
        left = len(folder.steps())
    assert reached > KILLS  # the writer did get through many saves
    assert unfinished > KILLS // 8  # and some kills did hit the middle of one
    folder.save(reached + 1, {"step": reached + 1})
    assert sorted(entry.name for entry in path.iterdir()) == [f"step-{reached + i:08d}" for i in (0, 1)]


@pytest.mark.slow
def test_sigkill_at_every_system_call_that_matters(tmp_path):
    """Dies just before the n-th fsync, rename or removal of a save, for every n, and leaves a checkpoint each time."""
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)

    def state(step):
        return {"step": step, "weights": {f"w{i}": torch.full((100,), float(step + i)) for i in range(4)}}

    def save_and_die(step, fatal):
        calls = iter(range(1, 1000))

        def deadly(function):
            def counted(*args, **kwargs):
                if next(calls) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return counted

        os.fsync = deadly(os.fsync)
        Path.rename = deadly(Path.rename)
        shutil.rmtree = deadly(shutil.rmtree)
        folder.save(step, state(step))

    folder.save(1, state(1))
    folder.save(2, state(2))
    reached, deaths = 2, 0
    for fatal in range(1, 30):
        child = os.fork()
        if child == 0:  # tensors this small start no threads, so the child of a fork may use torch
            try:
                save_and_die(reached + 1, fatal)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        reached = assert_complete(folder, reached)
        assert len(folder.steps()) >= 2
        if not os.WIFSIGNALED(status):
            break
        deaths += 1
    assert deaths >= 8  # five fsyncs and three renames or removals at the least
    assert not os.WIFSIGNALED(status)
