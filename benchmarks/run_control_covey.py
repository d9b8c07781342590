"""covey on CartPole-v1: a packaged recipe in the ordinary training loop with its run folder, until it passes the test.

Asked for costs instead: seconds of the phases of a training step, by the number of environments and of their steps.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from shape import report
from trial import Trial, read_work

from covey.config import ControlConfig
from covey.config.recipe import read_recipe
from covey.control.policy import ControlPolicy
from covey.experiment.control import ControlBuilder
from covey.experiment.job import Experiment
from covey.tracking.console import Display
from covey.tracking.run_store import RunStore
from covey.train.loop import train, train_step
from covey.train.state import Components, LoopConfig, Progress

RUNS = Path(__file__).resolve().parent.parent / "runs"  # on the disk where users' runs are
GROUP_SIZE = 8
STEPS_TIMED = 3


def build(recipe: str, overrides: Sequence[str], folder: str) -> Experiment:
    """A run as `covey train` puts it together, showing itself as in a log; it is not evaluated on the way."""
    config = read_recipe(recipe, overrides)
    assert isinstance(config, ControlConfig)
    config = replace(config, evaluation=replace(config.evaluation, every=0))
    builder = ControlBuilder(config)
    display = Display(config.steps, domain=builder.name, score_kind=builder.score_kind, title=recipe)
    return builder.build(RunStore(folder), display)


def policy_training(assembled: Experiment) -> tuple[Components, LoopConfig]:
    """What the training step of a policy takes."""
    assert isinstance(assembled.parts, Components)
    assert isinstance(assembled.settings, LoopConfig)
    return assembled.parts, assembled.settings


def reach(recipe: str, overrides: Sequence[str]) -> dict[str, float]:
    """Train until the test is passed, or to the recipe's end."""
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:
        assembled = build(recipe, overrides, folder)
        parts, settings = policy_training(assembled)
        assert isinstance(parts.policy, ControlPolicy)
        trial = Trial(parts.policy.greedy_action)

        def before_step() -> bool:
            """The loop asks it when the step before is complete, recorded and perhaps kept as a checkpoint."""
            if trial.running:
                trial.update_done(assembled.facts()["environment_steps"])
            else:
                trial.begin()
            return trial.over

        train(parts, settings, Progress(), should_stop=before_step)
        trial.update_done(assembled.facts()["environment_steps"])  # the recipe's last step, if it came to that
    return trial.numbers()


def cost(recipe: str, overrides: Sequence[str]) -> dict[str, float]:
    """Seconds a training step of an agent that stays untrained, so that each does the same work; medians."""
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:
        options = ["--learning-rate", "1e-12", "--steps", "1000", *overrides]
        assembled = build(recipe, options, folder)
        parts, settings = policy_training(assembled)
        progress = Progress()
        steps = [train_step(parts, settings, progress).metrics for _ in range(1 + STEPS_TIMED)][1:]
    return {
        "environment_steps": median(step["decisions/sampled"] for step in steps),
        "sampling_seconds": median(step["time/sample"] for step in steps),
        # With what a sampler with a critic does at once: values and advantages.
        "collection_seconds": median(step["time/sample"] + step["time/grade"] + step["time/prepare"] for step in steps),
        "step_seconds": median(step["time/step"] for step in steps),
    }


def costs(counts: list[int], fragment_steps: list[int], fixed_count: int) -> dict[str, Any]:
    """GRPO and PPO by the number of environments; PPO also by the steps of each, at one number of environments."""
    grpo = [
        cost("cartpole_grpo", ["--starts-per-step", str(n // GROUP_SIZE), "--group-size", str(GROUP_SIZE)])
        for n in counts
    ]
    fewest = str(fragment_steps[0])
    ppo = [cost("cartpole_ppo", ["--environments", str(n), "--fragment-steps", fewest]) for n in counts]
    steps = [
        cost("cartpole_ppo", ["--environments", str(fixed_count), "--fragment-steps", str(t)]) for t in fragment_steps
    ]
    return {"grpo_by_environments": grpo, "ppo_by_environments": ppo, "ppo_by_steps": steps}


def main() -> None:
    work = read_work()
    RUNS.mkdir(exist_ok=True)
    if work["measure"] == "costs":
        report(**costs(work["counts"], work["fragment_steps"], work["fixed_count"]))
        return
    reach(work["recipe"], ["--steps", "1", "--seed", str(work["seed"] + 1000)])  # warm-up
    report(**reach(work["recipe"], ["--seed", str(work["seed"])]))


if __name__ == "__main__":
    main()
