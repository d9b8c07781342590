"""Times the sandbox of the code reward: the start of a program, and programs a second with 1 and 2 workers.

python benchmarks/sandbox.py [PROGRAMS]
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from covey.config import RewardConfig
from covey.llm.rewards.code import CodeRunner
from covey.llm.rewards.sandbox.backends import CANDIDATES, find_interpreter, try_backend
from covey.llm.rewards.sandbox.session import Limits, Sandbox, SandboxFailure, Session

PROGRAM = "print(input()[::-1])"
FUNCTION = "def solve(x):\n    return x + 1"


def main() -> None:
    """Print a table of milliseconds and of programs a second."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    bare = [_time(_run_bare) for _ in range(count)]
    print(f"{'python -I':24} median {1000 * statistics.median(bare):6.1f} ms")
    for name in CANDIDATES:
        try:
            sandbox = try_backend(name)
        except SandboxFailure as error:
            print(f"{name:24} {error}")
            continue
        run = partial(_run_in, sandbox)
        mixed = [(_time(_run_bare), _time(run)) for _ in range(count)]  # in turn, because the machine's load changes
        inside = statistics.median(ours for _, ours in mixed)
        over = statistics.median(ours - python for python, ours in mixed)
        print(f"{name:24} median {1000 * inside:6.1f} ms, over python -I {1000 * over:6.1f} ms")
    tests = [{"args": [number], "expected": number + 1} for number in range(6)]
    for workers in (1, 2):
        runner = CodeRunner(RewardConfig(name="code", workers=workers))
        programs = [f"{FUNCTION}\n# {number}" for number in range(count)]  # copies of a program would run once
        batch = {"completions": programs, "tests": [tests] * count, "entry_point": ["solve"] * count}
        began = time.perf_counter()
        values = runner.call(batch, 0, 0.0).values
        seconds = time.perf_counter() - began
        runner.close()
        assert values == [1.0] * count
        print(f"{f'code reward, {workers} workers':24} {count / seconds:6.1f} programs a second, six cases each")


def _time(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _run_bare() -> None:
    command = [str(find_interpreter().executable), "-I", "-c", PROGRAM]
    subprocess.run(command, input=b"abc\n", capture_output=True, check=True)


def _run_in(sandbox: Sandbox) -> None:
    with Session(sandbox, Limits(seconds=60.0)) as session:
        assert session.run_script(PROGRAM, b"abc\n", 1000) == b"cba\n"


if __name__ == "__main__":
    main()
