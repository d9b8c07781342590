"""A run grades sampled groups while it samples others. The tests see the order of events, not their times."""

import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey import ArithmeticConfig, EvaluationConfig, RewardConfig, RunConfig, SamplingConfig, UpdateConfig, run
from covey.llm.generation.batch import ContinuousBatch
from helpers.tiny_models import tiny_folder

STEPS, PROMPTS, GROUP_SIZE = 2, 4, 4
LIMIT_SECONDS = 60.0  # for a call that should have been made

# Each call is a line of the file: the version of the weights and the number of completions.
FUNCTIONS = """
    import time

    def write(completions, trainer_state):
        with open({calls!r}, "a") as file:
            file.write(f"{{trainer_state.global_step}} {{len(completions)}}\\n")
        return [float(len(completion[0]["content"]) % 3) for completion in completions]

    def of_a_file(completions, trainer_state, **columns):
        time.sleep(0.01 * len(completions))
        return write(completions, trainer_state)

    async def coroutine(completions, trainer_state, **columns):
        return write(completions, trainer_state)

    def of_this_process(completions, trainer_state, **columns):
        return write(completions, trainer_state)
"""


def config(folder: Path, rewards: tuple[RewardConfig, ...] = ()) -> RunConfig:
    return RunConfig(
        model=str(tiny_folder(folder / "model")),
        task=ArithmeticConfig(digits=(1,)),
        rewards=rewards,
        steps=STEPS,
        threads=1,
        run_dir=str(folder / "run"),
        sampling=SamplingConfig(
            prompts_per_step=PROMPTS, group_size=GROUP_SIZE, max_new_tokens=6, rows_at_once=GROUP_SIZE
        ),
        update=UpdateConfig(learning_rate=1e-3),
        evaluation=EvaluationConfig(problems=2),
    )


@pytest.fixture
def functions(tmp_path: Path) -> tuple[Path, Callable[[], list[tuple[int, int]]]]:
    """A file of reward functions, and a function that returns the calls so far: (step, completions)."""
    file, calls = tmp_path / "rewards.py", tmp_path / "calls"
    calls.touch()
    file.write_text(textwrap.dedent(FUNCTIONS).format(calls=str(calls)))

    def read() -> list[tuple[int, int]]:
        lines = [line.split() for line in calls.read_text().splitlines()]
        return [(int(version) + 1, int(count)) for version, count in lines]

    return file, read


def own(file: Path, name: str) -> Any:
    """A function of the file as an object of this process."""
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names[name]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["of_a_file", "coroutine"])
def test_groups_are_graded_before_the_last_one_has_been_sampled(
    kind: str,
    functions: tuple[Path, Callable[[], list[tuple[int, int]]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sampler waits at each token until the groups that are complete have been graded."""
    file, calls = functions
    advance, step, graded_early = ContinuousBatch.advance, 0, Counter[int]()

    def advance_when_graded(batch: ContinuousBatch) -> None:
        nonlocal step
        training = batch.drawing.temperature > 0
        step += training and not batch.admitted
        deadline = time.monotonic() + LIMIT_SECONDS
        while training and calls().count((step, GROUP_SIZE)) < len(batch.complete):
            assert time.monotonic() < deadline, f"{len(batch.complete)} groups are complete, and their grading waits"
            time.sleep(0.002)
        if training:
            graded_early[step] = max(graded_early[step], len(batch.complete))
        advance(batch)

    monkeypatch.setattr(ContinuousBatch, "advance", advance_when_graded)
    if kind == "coroutine":
        run(config(tmp_path), rewards=[own(file, kind)])
    else:
        run(config(tmp_path, (RewardConfig(function=f"{file}:{kind}", workers=2),)))
    assert graded_early == dict.fromkeys(range(1, STEPS + 1), PROMPTS - 1)
    assert Counter(calls())[1, GROUP_SIZE] == PROMPTS  # each group once


@pytest.mark.slow
def test_a_function_of_this_process_is_called_when_the_step_has_been_sampled(
    functions: tuple[Path, Callable[[], list[tuple[int, int]]]], tmp_path: Path
) -> None:
    """It would compete with the sampler for the interpreter."""
    file, calls = functions
    run(config(tmp_path), rewards=[own(file, "of_this_process")])
    of_steps = [call for call in calls() if call[1] > 2]  # without the dry run and the evaluations
    assert of_steps == [(step, PROMPTS * GROUP_SIZE) for step in range(1, STEPS + 1)]
