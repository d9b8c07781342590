"""How many answers a second covey grades, and how long a slow grader makes a step.

    python benchmarks/grading.py [--answers N] [--workers 1 2]
    python benchmarks/grading.py --overlap [--steps 8] [--sleep 0.05]

The graders are those of a run, from a `[[rewards]]` table: plain numbers with the reward numeric and with math, which
grades them without math-verify, and LaTeX answers of which every one needs math-verify, with one worker and with two.
The last line is math-verify alone, in this process. Each figure is the median of five measurements; the time to start
the workers is not part of it. Answers per second of the processor do not depend on other work of the machine.

With --overlap: the time of a training step of the embedded model with a function that returns at once, and with one
that sleeps for each completion, in as many processes as there are prompts in a step. The two runs sample the same
completions and have the same rewards. Each figure is the median over the steps after the first, which starts the
processes.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from covey import ArithmeticConfig, EvaluationConfig, RunConfig, SamplingConfig, run
from covey.config import RewardConfig
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import build_grader

REPEATS, GROUP_SIZE = 5, 16
GRADER = """
import time

def instant(completions, **columns):
    return [float(len(completion[0]["content"]) % 7) for completion in completions]

def slow(completions, **columns):
    time.sleep({seconds} * len(completions))
    return instant(completions)
"""


def plain(number: int) -> tuple[str, list[str]]:
    """A right answer, and completions: bare numbers, and numbers at the end of a sentence, half of them wrong."""
    forms = ("{}", "The answer is {}.", "So it is\n\\boxed{{{}}}", "{:,}")
    return str(number), [forms[i % 4].format(number + i % 8 // 4) for i in range(GROUP_SIZE)]


def symbolic(number: int) -> tuple[str, list[str]]:
    """A right answer in LaTeX, and completions that are written in another way, half of them wrong."""
    forms = (
        "x + \\frac{{{}}}{{7}}",
        "\\frac{{7x + {}}}{{7}}",
        "\\frac{{{}}}{{7}} + x",
        "\\sqrt{{x^2}} + \\frac{{{}}}{{7}}",
    )
    texts = [f"So it is \\boxed{{{forms[i % 4].format(number + i % 8 // 4)}}}." for i in range(GROUP_SIZE)]
    return f"\\frac{{{number}}}{{7}}+x", texts


def groups_of(count: int, kind: object, first: int) -> list[Group]:
    made = []
    for number in range(first, first + count // GROUP_SIZE):
        answer, texts = kind(number)  # type: ignore[operator]
        rollouts = [Rollout((1,), [7] * 20, [0.0] * 20, EndReason.STOP, text) for text in texts]
        made.append(Group(Start(number, "How many?", {"answer": answer}), rollouts))
    return made


def answers_per_second(reward: RewardConfig, count: int, kind: object) -> tuple[float, float]:
    """By the clock, and by the processor time of this process, without the workers'."""
    grader = build_grader([reward], ())
    try:
        grader.grade(groups_of(2 * GROUP_SIZE * (reward.workers or 1), kind, 10**6))  # starts the workers
        times = []
        for repeat in range(REPEATS):
            groups = groups_of(count, kind, 1000 * repeat)
            began = time.perf_counter(), time.process_time()
            grader.grade(groups)
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        clock, processor = (statistics.median(column) for column in zip(*times, strict=True))
        return count / clock, count / processor
    finally:
        grader.close()


def verified_per_second(count: int) -> float:
    """Answers that math-verify compares in a second of the processor."""
    from covey.llm.rewards.math import math_equal

    rates = []
    for repeat in range(REPEATS + 1):
        groups = groups_of(count, symbolic, 1000 * repeat)
        texts = [rollout.text for group in groups for rollout in group.rollouts]
        answers = [group.start.columns["answer"] for group in groups for _ in group.rollouts]
        began = time.process_time()
        math_equal(texts, answer=answers)
        rates.append(count / (time.process_time() - began))
    return statistics.median(rates[1:])  # the first one fills SymPy's caches


def step_times(function: str, steps: int, sampling: SamplingConfig, threads: int, folder: Path) -> dict[str, float]:
    """Median seconds of the parts of a step in a run with a reward function."""
    config = RunConfig(
        task=ArithmeticConfig(),
        rewards=(RewardConfig(function=function, workers=sampling.prompts_per_step, timeout_seconds=600.0),),
        steps=steps + 1,
        threads=threads,
        run_dir=str(folder),
        sampling=sampling,
        evaluation=EvaluationConfig(problems=1),
    )
    run(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    return {part: statistics.median(line[f"time/{part}"] for line in lines) for part in ("step", "sample", "grade")}


def measure_overlap(steps: int, seconds: float, sampling: SamplingConfig, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graders.py")
        file.write_text(GRADER.format(seconds=seconds))
        times = {
            name: step_times(f"{file}:{name}", steps, sampling, threads, Path(folder, name))
            for name in ("instant", "slow")
        }
    completions = sampling.prompts_per_step * sampling.group_size
    print(f"{completions} completions a step; {1000 * seconds:g} ms each, {completions * seconds:.1f} s in all")
    for name, parts in times.items():
        print(f"{name}: " + ", ".join(f"{part} {value:.2f} s" for part, value in parts.items()))
    print(f"a step takes {times['slow']['step'] / times['instant']['step'] - 1:+.1%} with the slow grader")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=16_384, help="plain numbers in a measurement")
    parser.add_argument("--symbolic", type=int, default=512, help="LaTeX answers in a measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of math-verify's workers")
    parser.add_argument("--overlap", action="store_true", help="measure steps with a slow grader instead")
    parser.add_argument("--steps", type=int, default=8, help="overlap: steps in a median")
    parser.add_argument(
        "--sleep", type=float, default=0.05, help="overlap: seconds of the slow grader for a completion"
    )
    parser.add_argument("--prompts", type=int, default=16, help="overlap: prompts of a step")
    parser.add_argument("--group-size", type=int, default=16, help="overlap: completions of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="overlap: tokens of a completion, at most")
    parser.add_argument("--threads", type=int, default=0, help="overlap: threads of the run; 0: one per core")
    arguments = parser.parse_args()
    if arguments.overlap:
        sampling = SamplingConfig(
            prompts_per_step=arguments.prompts, group_size=arguments.group_size, max_new_tokens=arguments.max_new_tokens
        )
        measure_overlap(arguments.steps, arguments.sleep, sampling, arguments.threads)
        return
    for name in ("numeric", "math"):
        clock, processor = answers_per_second(RewardConfig(name=name), arguments.answers, plain)
        print(f"{name}, plain numbers: {clock:,.0f} answers a second, {processor:,.0f} a second of the processor")
    for workers in arguments.workers:
        clock, _ = answers_per_second(RewardConfig(name="math", workers=workers), arguments.symbolic, symbolic)
        print(f"math, LaTeX, {workers} workers: {clock:,.0f} answers a second, {clock / workers:,.0f} for each worker")
    verified = verified_per_second(arguments.symbolic)
    print(f"math-verify alone, LaTeX: {verified:,.0f} answers a second of the processor")


if __name__ == "__main__":
    main()
