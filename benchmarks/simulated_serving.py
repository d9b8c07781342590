"""Compares the simulation of `covey plan --cluster` with real servers: `covey serve`, one and two processes.

    .venv/bin/python benchmarks/simulated_serving.py                  about three minutes on two cores
    .venv/bin/python benchmarks/simulated_serving.py --repetitions 1 --output FILE

The servers have a random model, in which every token is about as likely as any other. A share of the token ids ends a
completion, so lengths are geometric up to a limit, and a function of the seed: they are known before, and the same in
every repetition. Every repetition measures the seconds of a token by the number of completions, with completions of one
length, and then the groups with their stragglers; the simulation gets the former and predicts the latter.

Seconds are processor seconds of each server, which has one thread on a core of its own. Wall time would include other
programs on that core; it is in the file too. The step of two servers takes the longer of both.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from memory import model_for
from peers import RESULTS

from covey.config import RunConfig
from covey.config.servers import SamplerConfig
from covey_cluster.lengths import LogNormalLengths
from covey_cluster.servers import MeasuredSpeed
from covey_cluster.simulation import SYNCHRONOUS, Cluster, Workload, simulate

MODEL = "llama-small"  # 57 million random weights
GROUP_SIZE, ROWS = 8, 24  # completions of a request, and of a server at a time
CALIBRATED_ROWS = (1, 2, 4, 8, 16, 24)
CALIBRATION_TOKENS, PROMPT_TOKENS = 64, 16
LIMIT, MEAN_TOKENS = 256, 60
GROUPS = 16
TOLERANCE = 0.15


@dataclass(frozen=True)
class Groups(Workload):
    """Groups with known lengths."""

    known: tuple[tuple[int, ...], ...] = ()

    def group(self, number: int) -> list[int]:
        return list(self.known[number])


@dataclass(frozen=True)
class Spent:
    """What some requests cost."""

    lengths: tuple[tuple[int, ...], ...]  # of the completions of each request
    processor_seconds: float  # of the server that needed most
    wall_seconds: float


class Servers:
    """Running servers, and a client that has given them its weights."""

    def __init__(self, model: str, processes: Sequence[subprocess.Popen[str]], addresses: Sequence[str]) -> None:
        import torch

        from covey.llm.model.loading import load_model
        from covey.llm.policy import LanguagePolicy
        from covey.llm.remote.generator import build_generator

        self.processes = processes
        self.policy = LanguagePolicy(
            load_model(model, dtype=torch.bfloat16, device=torch.device("cpu")).module.requires_grad_(False)
        )
        config = RunConfig(sampler=SamplerConfig(kind="covey", servers=tuple(addresses), max_mismatch=1e9))
        self.generator, _ = build_generator(config, self.policy)

    def spend(self, requests: int, completions: int, max_new_tokens: int, end_ids: frozenset[int], step: int) -> Spent:
        """Generate requests, of which each server gets as many."""
        from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey

        self.generator.refresh(step)
        settings = GenerationSettings(max_new_tokens, 1.0, end_ids, step)
        asked = [
            GenerationRequest(
                tuple(range(100 + group, 100 + group + PROMPT_TOKENS)),
                completions,
                RandomKey(1, 0, group, 0, 0),
                settings,
            )
            for group in range(requests)
        ]
        before, began = [processor_seconds(one.pid) for one in self.processes], time.monotonic()
        results = self.generator.generate(asked)
        wall = time.monotonic() - began
        spent = [processor_seconds(one.pid) - then for one, then in zip(self.processes, before, strict=True)]
        lengths = tuple(tuple(len(one.tokens) for one in result) for result in results)  # type: ignore[union-attr]
        return Spent(lengths, max(spent), wall)

    def calibrate(self) -> MeasuredSpeed:
        """Seconds of a token by the number of completions of a server."""
        seconds = []
        for rows in CALIBRATED_ROWS:
            completions = min(rows, GROUP_SIZE)
            requests = rows // completions * len(self.processes)
            spent = self.spend(requests, completions, CALIBRATION_TOKENS, frozenset(), 1)
            seconds.append(spent.processor_seconds / CALIBRATION_TOKENS)
        return MeasuredSpeed(CALIBRATED_ROWS, tuple(seconds))


def processor_seconds(process: int) -> float:
    """Processor time of a process and its threads, in user and kernel mode."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: str, count: int) -> Iterator[Servers]:
    """`covey serve` in `count` processes, each on a core of its own."""
    processes, addresses = [], []
    cores = sorted(os.sched_getaffinity(0))
    try:
        for number in range(count):
            words = [sys.executable, "-m", "covey", "serve", model, "--port", "0", "--threads", "1"]
            words += ["--rows", str(ROWS), "--precision", "bf16", "--device", "cpu"]
            pinned = ["taskset", "-c", str(cores[number % len(cores)]), *words]
            processes.append(subprocess.Popen(pinned, stdout=subprocess.PIPE, text=True))
        for process in processes:
            assert process.stdout is not None
            line = next(line for line in process.stdout if " at http://" in line)
            addresses.append(re.search(r"http://\S+", line)[0])  # type: ignore[index]
        yield Servers(model, processes, addresses)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def predicted_seconds(lengths: Sequence[Sequence[int]], servers: int, speed: MeasuredSpeed) -> float:
    """Seconds of one step according to the simulation."""
    workload = Groups(LogNormalLengths(1, 0, 1), len(lengths), GROUP_SIZE, steps=1, known=tuple(map(tuple, lengths)))
    cluster = Cluster(servers, ROWS, speed, trained_tokens_per_second=float("inf"), whole_requests=True)
    return simulate(workload, cluster, SYNCHRONOUS).seconds


def compare(model: str, repetitions: int) -> list[dict[str, object]]:
    """Predicted and measured seconds of one and of two servers, in every repetition."""
    rows: list[dict[str, object]] = []
    vocabulary = 49152
    end_ids = frozenset(range(vocabulary - round(vocabulary / MEAN_TOKENS), vocabulary))
    with serving(model, 1) as one, serving(model, 2) as two:
        for servers in (one, two):
            servers.spend(2 * len(servers.processes), GROUP_SIZE, 8, frozenset(), 0)  # warm up
        for repetition in range(repetitions):
            for servers in (one, two):
                count = len(servers.processes)
                speed = servers.calibrate()
                spent = servers.spend(GROUPS, GROUP_SIZE, LIMIT, end_ids, 2)
                predicted = predicted_seconds(spent.lengths, count, speed)
                rows.append(
                    {
                        "servers": count,
                        "repetition": repetition,
                        "predicted_seconds": predicted,
                        "processor_seconds": spent.processor_seconds,
                        "wall_seconds": spent.wall_seconds,
                        "ratio": predicted / spent.processor_seconds,
                        "tokens": sum(map(sum, spent.lengths)),
                        "longest": max(map(max, spent.lengths)),
                        "seconds_of_a_token": dict(zip(speed.rows, speed.seconds, strict=True)),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None, help="a JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="covey-serving-") as folder:
        rows = compare(model_for(MODEL, Path(folder)), arguments.repetitions)
    medians = {
        str(count): statistics.median(float(str(row["ratio"])) for row in rows if row["servers"] == count)
        for count in (1, 2)
    }
    for count, ratio in medians.items():
        print(f"{count} server(s): predicted / measured {ratio:.3f}")
    output = arguments.output or RESULTS / f"simulated-serving-{datetime.now(UTC).strftime('%Y-%m-%d')}.json"
    output.write_text(json.dumps({"median_ratio": medians, "runs": rows}, indent=2) + "\n")
    print(f"written to {output}")
    if any(abs(ratio - 1) > TOLERANCE for ratio in medians.values()):
        sys.exit(f"the simulation is more than {TOLERANCE:.0%} off")


if __name__ == "__main__":
    main()
