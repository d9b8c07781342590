"""A made-up run of 10,000 steps and 100,000 rollouts: how long the server takes, and how much memory.

    python -m pytest -s tests/watch/test_large_run.py

prints the figures. The limits are compared with the processor's time of the server, which does not depend on the load
of the machine; on an idle one the two are about equal.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.large_run import NEEDLE, write_run
from helpers.page_server import Answer, Client, children_of

STEPS, ROLLOUTS = 10_000, 100_000
TICKS = os.sysconf("SC_CLK_TCK")
FIRST_CURVE_SECONDS, ROLLOUT_SECONDS, SEARCH_SECONDS, MEMORY_MIB = 1.0, 0.3, 2.0, 300
PATIENCE_SECONDS = 500.0


class Measured:
    """A server in a process of its own, with its times and memory."""

    def __init__(self, folder: Path) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "covey", "watch", "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"COVEY_CACHE": str(folder / "cache")},
        )  # fmt: skip
        assert self.process.stdout is not None
        address = next(line for line in self.process.stdout if line.startswith("http"))
        self.client = Client(int(re.findall(r"\d+", address)[-1]))
        print(f"\nstart: {time.monotonic() - began:.2f} s, of the processor {self.processor_seconds():.2f} s")

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mib(self) -> dict[str, int]:
        """The peak memory of the server and of its indexer."""
        names = dict(zip(["server", "indexer"], [self.process.pid, *children_of(self.process.pid)], strict=True))
        status = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in names.items()}
        return {name: int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) >> 10 for name, text in status.items()}

    def get(self, what: str, target: str, limit: float) -> Answer:
        """An answer that must take less than the limit of the processor's time."""
        began, used = time.monotonic(), self.processor_seconds()
        answer = self.client.get(target)
        seconds, used = time.monotonic() - began, self.processor_seconds() - used
        print(
            f"{what}: {1000 * seconds:.0f} ms, of the processor {1000 * used:.0f} ms, {len(answer.body) / 1e3:.0f} kB"
        )
        assert answer.status == 200
        assert used < limit, what
        return answer

    def wait_for_index(self, run: str, name: str) -> None:
        began = time.monotonic()
        while (found := self.client.get(run).json["index"])[name] < STEPS:
            assert time.monotonic() - began < PATIENCE_SECONDS, found
            time.sleep(1.0)
        print(f"index ({name}): {time.monotonic() - began:.1f} s")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_a_large_run_stays_quick(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "large", STEPS, ROLLOUTS)
    server = Measured(tmp_path)
    search = f"rollouts?text={NEEDLE.replace(' ', '%20')}"
    try:
        (run,) = server.get("runs", "/api/runs", FIRST_CURVE_SECONDS).json["runs"]
        run = f"/api/runs/{run['id']}"
        curve = server.get("first curve", f"{run}/metrics?names=score/mean", FIRST_CURVE_SECONDS).json
        assert (curve["last_step"], len(curve["steps"])) == (STEPS, 600)
        server.get("the run", run, FIRST_CURVE_SECONDS)
        curves = server.get("61 curves", f"{run}/metrics", FIRST_CURVE_SECONDS).json
        assert len(curves["series"]) == 61
        server.get("groups of a step", f"{run}/steps/5000/groups", ROLLOUT_SECONDS)
        group = server.get("a group", f"{run}/steps/9000/groups/1", ROLLOUT_SECONDS).json
        assert len(group["rollouts"]) == 5
        server.get("search before there is an index", f"{run}/{search}", SEARCH_SECONDS)
        server.wait_for_index(run, "indexed")
        found = server.get("best", f"{run}/rollouts?filter=best", ROLLOUT_SECONDS).json
        assert (found["total"], len(found["rollouts"])) == (ROLLOUTS, 50)
        server.get("search without an index of texts", f"{run}/{search}", SEARCH_SECONDS)
        server.wait_for_index(run, "texts")
        found = server.get("search for 20 rollouts", f"{run}/{search}", SEARCH_SECONDS).json
        assert (found["total"], found["next_offset"]) == (STEPS // 500, None)
        server.get("search for what many have", f"{run}/rollouts?text=question", SEARCH_SECONDS)
        server.get("search for what none has", f"{run}/rollouts?text=nothing%20like%20it", SEARCH_SECONDS)
        server.get("diagnosis", f"{run}/diagnosis", SEARCH_SECONDS)
        server.get("a group again", f"{run}/steps/9001/groups/0", ROLLOUT_SECONDS)
        memory = server.memory_mib()
        size = sum(file.stat().st_size for file in (tmp_path / "cache" / "watch").iterdir())
        print(f"memory: {memory} MiB; index: {size / 1e6:.0f} MB")
        assert sum(memory.values()) < MEMORY_MIB
    finally:
        server.end()
