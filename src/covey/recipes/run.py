"""A run from its config to its summary: train, resume, check. The commands and scripts call the same functions.

What the two worlds add is in `covey.recipes.language` and `covey.recipes.control`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.checks import validate
from covey.config.reader import config_from_dict, read_tables, write_config
from covey.data import Task
from covey.observe.curve import draw_curve
from covey.observe.display import Display
from covey.observe.run_store import CONFIG_FILE, RunStore, next_run_dir, read_metrics, write_atomically
from covey.recipes.build import Evaluation, World
from covey.runtime.device import differences, peak_memory_bytes
from covey.train.loop import Progress, load_checkpoint, train

ORIGIN_FILE = "origin.json"  # what a resumed run must know beside its config

Summary = dict[str, Any]
Reward = Callable[..., Any]  # TRL's signature; or a covey.llm.grader.WeightedReward


def run(
    config: RunConfig | ControlConfig,
    *,
    task: Task | None = None,
    rewards: Sequence[Reward] = (),
    recipe_name: str = "run",
) -> Summary | None:
    """Train a policy and measure it before and after.

    Args:
        config: of the run; an empty `run_dir` is numbered.
        task: of a language model: a task of your own instead of the config's.
        rewards: of a language model: reward functions of your own instead of the config's.
        recipe_name: names the run folder and the advice at the end.

    Returns:
        what `summary.json` holds, or None if the run was stopped before its end (Ctrl-C).

    Raises:
        ConfigError: for a mistake in what was asked for, before the model is loaded where that is possible.
        RunError: where training cannot go on.
    """
    validate(config, own_task=task is not None, own_rewards=bool(rewards))
    config = replace(config, run_dir=config.run_dir or str(next_run_dir(recipe_name)))
    world = open_world(config, task, rewards)
    try:
        store = RunStore(config.run_dir)
        write_config(world.config, store.run_dir / CONFIG_FILE)
        return _carry_out(world, store, recipe_name, resuming=False)
    finally:
        world.close()


def resume(run_dir: Path, *, task: Task | None = None, rewards: Sequence[Reward] = ()) -> Summary | None:
    """Go on with a run that was stopped or killed; it ends as if it had never stopped.

    A run that was started with a task or rewards of its own in Python must be given them again.

    Raises:
        ConfigError: where the folder holds no run that can be resumed.
    """
    config = replace(config_from_dict(read_tables(run_dir / CONFIG_FILE)), run_dir=str(run_dir))
    validate(config, own_task=task is not None, own_rewards=bool(rewards))
    world = open_world(config, task, rewards)
    try:
        store = RunStore(run_dir, resume=True)
        origin = json.loads((run_dir / ORIGIN_FILE).read_text())
        return _carry_out(world, store, origin["recipe"], resuming=True)
    finally:
        world.close()


def open_world(config: RunConfig | ControlConfig, task: Task | None = None, rewards: Sequence[Reward] = ()) -> World:
    """The world that a config is about, its light parts tried out.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    # Imported here, because the libraries of the other world take seconds to load.
    if isinstance(config, RunConfig):
        from covey.recipes.language import LanguageWorld

        return LanguageWorld(config, task, rewards)
    if task is not None or rewards:
        raise ConfigError("a run on an environment takes no task and no rewards of its own: the environment has both")
    from covey.recipes.control import ControlWorld

    return ControlWorld(config)


def _carry_out(world: World, store: RunStore, recipe_name: str, *, resuming: bool) -> Summary | None:
    config = world.config
    display = Display(config.steps, config.show_rollouts_every, title=f"covey: {recipe_name}", world=world.name)
    display.note(f"{world.describe()}; everything goes to {store.run_dir}")
    assembled = world.assemble(store, display)
    parts, settings = assembled.parts, assembled.settings
    now = world.machine()
    origin_path = store.run_dir / ORIGIN_FILE
    progress = Progress()
    if resuming:
        origin = json.loads(origin_path.read_text())
        for line in differences(origin["environment"], now):
            display.note(f"resuming on another footing, so the last bits may differ: {line}")
        latest = parts.checkpoints.latest()
        if latest is not None:
            progress = load_checkpoint(parts, parts.checkpoints.load(latest))
        store.rewind(progress.step)
        display.resume(progress.step, read_metrics(store.run_dir))
        display.note(f"resuming after step {progress.step}")
    with display, _ctrl_c() as stopped:
        if not resuming:
            origin = {"recipe": recipe_name, "environment": now, "before": assembled.measure("before")}
            write_atomically(origin_path, json.dumps(origin, indent=2).encode())
        train(parts, settings, progress, should_stop=stopped)
        if not settings.is_done(progress):
            display.note(f"stopped after step {progress.step}. Go on with: covey train --resume {store.run_dir}")
            return None
        after = assembled.measure("after")
    assembled.save(store.run_dir)
    summary = _summarise(world, store, progress, origin, after) | assembled.facts()
    store.write_summary(summary)
    draw_curve(store.run_dir)
    display.show_summary(summary)
    return summary


def _summarise(
    world: World,
    store: RunStore,
    progress: Progress,
    origin: dict[str, Any],
    after: list[Evaluation],
) -> Summary:
    steps = read_metrics(store.run_dir)
    measured = [*origin["before"], *after]
    return {
        "world": world.name,
        "run_dir": str(store.run_dir),
        "recipe": origin["recipe"],
        "algorithm": world.config.algorithm,
        "seed": world.config.seed,
        "steps": progress.step,
        "seconds": sum(step["time/step"] for step in steps) + sum(result["seconds"] for result in measured),
        "decisions_sampled": progress.decisions,
        "peak_memory_bytes": max([peak_memory_bytes(), *(int(step["memory/peak_bytes"]) for step in steps)]),
        "machine": origin["environment"],
        "evaluations": [
            {key: first[key] for key in ("max_new_tokens",) if key in first} | {"before": first, "after": second}
            for first, second in zip(origin["before"], after, strict=True)
        ],
    }


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C (or a polite kill) end the run after the current step; the second ends it at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are somebody else's
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(config: RunConfig | ControlConfig) -> None:
    """Try out the data and the rewards of a recipe, or its environment, without training or loading a model.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    validate(config)
    open_world(config).close()
