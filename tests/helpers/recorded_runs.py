"""Stand-ins for a training run, for the processes of a comparison to find by name."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from covey.comparison.compare import SeedJob
from covey.config import ConfigError, RunError


def train_quickly(job: SeedJob) -> dict[str, Any]:
    """Four steps of a run that learns; one that repeats its actions learns less."""
    print("a word for the log")
    level = 500.0 if job.config.environment.action_repeat == 1 else 100.0  # type: ignore[union-attr]
    lines = [
        {
            "step": step,
            "environment/episodes": 40 * step,
            "environment/steps": 1000 * step,
            "time/step": 0.5 + 0.01 * job.seed,
            "score/mean": level * step / 4,
        }
        for step in range(1, 5)
    ]
    (job.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = {"score": level - job.seed, "low": 0.0, "high": 500.0, "count": 100}
    summary = {
        "domain": "control",
        "score_kind": "return",
        "peak_memory_bytes": 2**28,
        "evaluations": [{"before": after, "after": after}],
    }
    (job.run_dir / "summary.json").write_text(json.dumps(summary))
    return summary


def fail_sometimes(job: SeedJob) -> dict[str, Any]:
    """Seed 1 diverges, seed 2 breaks, seed 3 is killed."""
    if job.seed == 1:
        raise RunError("the gradient was not finite")
    if job.seed == 2:
        raise ZeroDivisionError("a bug")
    if job.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_quickly(job)


def mistake(job: SeedJob) -> None:
    """What a missing dependency looks like."""
    raise ConfigError("Box2D is not installed: pip install 'covey[box2d]'")


def measure_memory(job: SeedJob) -> dict[str, Any]:
    """Writes the peak memory of its process; seed 0 takes 300 MiB first."""
    ballast = bytearray(300 * 2**20) if job.seed == 0 else bytearray()
    ballast[::4096] = b"x" * len(ballast[::4096])
    (job.run_dir / "peak").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    return {}


def note_others(job: SeedJob) -> dict[str, Any]:
    """Writes its process, and how many runs there were while it ran; seeds 0 and 1 wait for each other."""
    folder = job.run_dir.parent
    mine = folder / f"running-{job.seed}"
    mine.write_text("")
    (folder / f"began-{job.seed}").write_text("")
    deadline = time.monotonic() + 120
    while job.seed < 2 and not (folder / f"began-{1 - job.seed}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running = len(list(folder.glob("running-*")))
    (job.run_dir / "noted").write_text(json.dumps([os.getpid(), running]))
    mine.unlink()
    return {}


def wait_for_signal(job: SeedJob) -> dict[str, Any] | None:
    """A run that goes on until it is asked to stop, as `covey.experiment.run.run` does."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    (job.run_dir / "began").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.02)
    (job.run_dir / "stopped").write_text("")
    return None


def main(folder: str) -> None:
    """Two waiting runs side by side, to be interrupted from outside."""
    from covey.comparison.compare import ParallelRunner
    from covey.config import ControlConfig

    jobs = [SeedJob("x", "x", seed, ControlConfig(), Path(folder) / str(seed)) for seed in range(2)]
    ParallelRunner(wait_for_signal, 2).run(jobs)


if __name__ == "__main__":
    import sys

    from helpers import recorded_runs  # by this name the processes find it

    recorded_runs.main(sys.argv[1])
