"""What waiting threads cost on cores that other programs use as well, with several settings of OpenMP.

    .venv/bin/python benchmarks/shared_cores.py                  a quarter of an hour on two cores, which must be free
    .venv/bin/python benchmarks/shared_cores.py --variants covey GOMP_SPINCOUNT=300000 OMP_WAIT_POLICY=PASSIVE

A variant is the setting of one variable; `covey` is covey's choice. The embedded model answers 16 held-out problems of
arithmetic and makes an update, with two threads. The variants take turns, first alone, then beside two programs that
compute without end. "fair" is the time in relation to that of the first variant alone; with half of each core it is 2.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

VARIANTS = ["GOMP_SPINCOUNT=300000", "covey", "GOMP_SPINCOUNT=1000", "OMP_WAIT_POLICY=PASSIVE"]
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
PROBLEMS, NEW_TOKENS, PROMPTS, GROUP_SIZE, SEED = 16, 14, 4, 8, 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.precision, options.threads)
        return
    children = {variant: start(variant, options.precision, options.threads) for variant in options.variants}
    for child in children.values():
        measure(child)  # compiles, and touches memory first
    results: dict[tuple[str, bool], list[dict[str, dict[str, float]]]] = {}
    for loaded in (False, True):
        with busy_programs(2 * loaded):
            for _ in range(options.rounds):
                for variant, child in children.items():
                    results.setdefault((variant, loaded), []).append(measure(child))
    for child in children.values():
        child.communicate()
    alone = results[options.variants[0], False]
    for (variant, loaded), found in results.items():
        words = []
        for part in ("evaluation", "update"):
            wall, cpu = (median(one[part][kind] for one in found) for kind in ("wall", "cpu"))
            ratios = sorted(now[part]["wall"] / base[part]["wall"] for now, base in zip(found, alone, strict=True))
            fair = f"{median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            words.append(f"{part} {wall:.2f} s, processor {cpu:.2f} s, fair {fair}")
        print(f"{variant}{', loaded' * loaded}: {'; '.join(words)}", flush=True)


def start(variant: str, precision: str, threads: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    name, _, value = variant.partition("=")
    command = [sys.executable, __file__, "--work", "--precision", precision, "--threads", str(threads)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment | ({name: value} if value else {}), stdin=pipe, stdout=pipe, text=True, bufsize=1
    )


def measure(child: subprocess.Popen[str]) -> dict[str, dict[str, float]]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    found: dict[str, dict[str, float]] = json.loads(child.stdout.readline())
    return found


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for program in programs:
        program.send_signal(signal.SIGKILL)
        program.wait()


def work(precision: str, threads: int) -> None:
    """For each line of standard input, compute once and print the seconds."""
    import covey  # noqa: F401 -- before torch: it chooses how OpenMP's threads wait

    evaluate, update = prepared(precision, threads)
    for _ in sys.stdin:
        print(json.dumps({"evaluation": timed(evaluate), "update": timed(update)}), flush=True)


def timed(call: Callable[[], object]) -> dict[str, float]:
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall": time.perf_counter() - wall, "cpu": cpu}


def prepared(precision: str, threads: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The evaluation and the update; the weights stay as they are."""
    import torch

    from covey.algorithms import KLPenalty, grpo
    from covey.core import schedules
    from covey.data import collate
    from covey.llm.generation.local_generator import LocalGenerator
    from covey.llm.model.gguf import EMBEDDED
    from covey.llm.model.loading import load_model
    from covey.llm.policy import LanguagePolicy
    from covey.llm.sampler import LanguageSampler
    from covey.llm.tasks import Arithmetic
    from covey.runtime.device import build_machine
    from covey.runtime.optimizer import MasterAdamW
    from covey.train.learners import Coefficient, PolicyLearner, UpdatePlan
    from covey.train.prepare import prepare_batch
    from covey.train.update import update

    machine = build_machine("cpu", precision, threads)
    loaded = load_model(EMBEDDED, dtype=machine.dtype, device=machine.device)
    policy, task = LanguagePolicy(loaded.module), Arithmetic(digits=(2,), operators=("+", "-"))
    generator = LocalGenerator(policy)
    greedy = LanguageSampler(generator, loaded.chat, SEED, NEW_TOKENS, temperature=0)
    sampler = LanguageSampler(generator, loaded.chat, SEED, NEW_TOKENS)
    groups = sampler.sample(task.draw(SEED, 1, PROMPTS), GROUP_SIZE, 1)
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number % 2)
    algorithm = grpo(kl=KLPenalty())
    batch, _ = prepare_batch(collate(groups), policy, algorithm)
    optimizer = MasterAdamW(policy.module, lr=0.0)
    coefficient = Coefficient(algorithm.kl.coefficient)
    learner = PolicyLearner(policy, optimizer, algorithm, UpdatePlan(), schedules.constant(0.0), coefficient)
    torch.set_grad_enabled(True)
    return lambda: greedy.sample(task.held_out(PROBLEMS), 1, 0), lambda: update([learner], batch, seed=SEED, step=1)


if __name__ == "__main__":
    main()
