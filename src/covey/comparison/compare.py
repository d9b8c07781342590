"""`covey compare`: recipes x seeds, trained side by side, and a report of the differences.

runs/compare-cartpole_grpo-cartpole_ppo/
  settings.json                        the resolved recipes; a folder belongs to one comparison
  cartpole_grpo/seed_003/              a run folder like any other, and output.log
  report.md, report.json               the results as text and as numbers
  learning_curves.png, metrics.png, final_scores.png
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.comparison.estimates import read_seed_run
from covey.comparison.parallel_runs import ParallelRunner, SeedJob
from covey.comparison.report import (
    CURVES_PICTURE,
    FINAL_PICTURE,
    LEAST_SEEDS,
    METRICS_PICTURE,
    Comparison,
    findings,
    markdown_report,
    summarise,
    terminal_table,
)
from covey.config import ConfigError, ControlConfig, RunConfig, RunError
from covey.config.fields import plural
from covey.config.files import faults_of, read_below, shortened, user_path
from covey.config.machine import check_threads, processors
from covey.config.recipe import config_to_dict, find_recipe, first_difference, read_recipe, split_overrides, task_name
from covey.experiment.advice import Launch
from covey.tracking.output import plain_console
from covey.tracking.run_folder import LOCK_FILE, FolderLock, check_run_dir, holds_run, write_atomically
from covey.tracking.run_store import SUMMARY_FILE, encode

SETTINGS_FILE, REPORT_FILE, NUMBERS_FILE = "settings.json", "report.md", "report.json"
MOST_SEEDS = 10_000
CHOSEN_HERE = ("seed", "run_dir")


@dataclass(frozen=True)
class ComparedRecipe:
    """One recipe of a comparison."""

    label: str  # 'cartpole_grpo', or 'cartpole_grpo --group-size 16'
    recipe: str  # the recipe without its fields, as typed
    config: RunConfig | ControlConfig
    fields: tuple[str, ...] = ()  # its `--field value` words

    @property
    def folder(self) -> str:
        """The label as the name of a folder."""
        return re.sub(r"[^\w.=,-]+", "_", self.label).strip("_")


def compare(
    recipes: Sequence[str],
    *,
    seeds: int = 10,
    output: Path | None = None,
    jobs: int = 0,
    threshold: float | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Train every recipe over the seeds 0 to `seeds` - 1, report the differences, and print the main numbers.

    Runs in the folder are not repeated: a finished run is read, a stopped one is continued. So the same call continues
    an interrupted comparison, and a call with more seeds extends it.

    A script must call this below `if __name__ == "__main__":`, because each process of a run imports the script again.

    Args:
        recipes: files or names of packaged recipes, each with optional fields of its own: 'cartpole_grpo --epochs 2'.
        output: the folder; None names it after the recipes, in runs/.
        jobs: runs at the same time; 0: as many as the cores allow.
        threshold: the score that counts as solved; None is the largest expected_return of the recipes.
        overrides: `--field value` words for every recipe.

    Raises:
        ConfigError: for a mistake, before training if possible.
        RunError: if a run could not be finished; the report of the others is written first.
    """
    if not 1 <= seeds <= MOST_SEEDS or jobs < 0:
        raise ConfigError(f"--seeds must be from 1 to {MOST_SEEDS} and --jobs at least 0 (are {seeds} and {jobs})")
    check_threads(jobs, "--jobs")
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"--threshold must be a finite number (is {threshold})")
    contestants = read_contestants(recipes, overrides)
    folder = output or Path("runs") / "-".join(["compare", *(one.folder for one in contestants)])
    command = command_line(recipes, seeds, threshold, overrides)
    with open_folder(folder, contestants):
        _train_and_report(contestants, folder, seeds, jobs or runs_at_once(contestants), threshold, command)


def _train_and_report(
    contestants: Sequence[ComparedRecipe], folder: Path, seeds: int, at_once: int, threshold: float | None, command: str
) -> None:
    """`compare` in a folder that is locked."""
    planned = plan(contestants, seeds, folder)
    missing = [job for job in planned if not (job.run_dir / SUMMARY_FILE).is_file()]
    console = plain_console()
    done = f", {len(planned) - len(missing)} of them finished already" if len(missing) < len(planned) else ""
    _say(
        console,
        f"{plural(len(planned), 'run')}{done}; {min(at_once, len(missing))} at a time; everything goes to {folder}",
    )
    if seeds < LEAST_SEEDS:
        _say(console, f"fewer than {LEAST_SEEDS} seeds: the curves will be drawn, but no difference will be claimed")
    domain = "control" if isinstance(contestants[0].config, ControlConfig) else "llm"
    needed = ("covey.experiment.run", f"covey.experiment.{domain}")
    side_by_side = ParallelRunner(train_seed, at_once, preload=needed, console=console)
    try:
        failures = side_by_side.run(missing)
    except KeyboardInterrupt:
        _say(console, "stopped; the same command continues it")
        raise

    failed = "; ".join(f"{name}: {why}" for name, why in failures.items())
    runs = {
        one.label: [
            read_seed_run(job.run_dir, job.seed)
            for job in planned
            if job.label == one.label and job.name not in failures
        ]
        for one in contestants
    }
    if not all(runs.values()):
        raise RunError(f"no seed of {next(label for label, found in runs.items() if not found)} finished: {failed}")
    comparison = Comparison(
        subject=subject(contestants[0].config),
        runs=runs,
        threshold=find_goal(contestants) if threshold is None else threshold,
        failures=failures,
        command=command,
        machine=f"{plural(os.cpu_count() or 1, 'core')}, {platform.machine()}, {plural(at_once, 'run')} at a time",
    )
    _say(console, write_report(comparison, folder, console))
    if failures:
        raise RunError(f"{len(failures)} of {len(planned)} runs failed and are missing in the report: {failed}")


def read_contestants(recipes: Sequence[str], overrides: Sequence[str] = ()) -> list[ComparedRecipe]:
    """Read and check the recipes: each can be trained, and they can be compared.

    Raises:
        ConfigError: one line that names the mistake and the fix.
    """
    contestants = []
    for recipe in recipes:
        words = words_of(recipe)
        if not words:
            raise ConfigError("a recipe's name is empty: give a file, or the name of a packaged recipe")
        fields = [*overrides, *words[1:]]
        for name, _ in split_overrides(fields):
            if name.replace("-", "_") in CHOSEN_HERE:
                raise ConfigError(f"a comparison gives every run its own --{name}: use --seeds N and --output DIR")
        label = shlex.join([find_recipe(words[0]).stem, *words[1:]])
        contestants.append(ComparedRecipe(label, words[0], read_recipe(words[0], fields), tuple(fields)))
    folders = [one.folder for one in contestants]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"two recipes are called {folder}: rename one of the files")
    subjects = {subject(one.config): one for one in contestants}
    if len(subjects) > 1:
        both = " and ".join(f"{one.label} trains on {name}" for name, one in list(subjects.items())[:2])
        raise ConfigError(f"{both}: their scores cannot be compared, so compare recipes on the same problem")
    kinds = {score_kind(one.config): one for one in contestants}
    if len(kinds) > 1:
        both = " and ".join(f"{one.label} by its {name}" for name, one in kinds.items())
        raise ConfigError(f"{both} is measured: give all recipes the same reward with score = true")
    return contestants


def words_of(recipe: str) -> list[str]:
    """Split a recipe from its fields; the name of an existing file is not split.

    Raises:
        ConfigError: if a quotation mark is not closed.
    """
    with suppress(ConfigError):
        if user_path(recipe).is_file():
            return [recipe]
    try:
        return shlex.split(recipe)
    except ValueError as error:
        raise ConfigError(
            f"{shortened(recipe)} cannot be split into words ({error}): close its quotation marks"
        ) from error


def subject(config: RunConfig | ControlConfig) -> str:
    """Task or environment of a recipe; scores of different ones cannot be compared."""
    return config.environment.id if isinstance(config, ControlConfig) else task_name(config.task)


def score_kind(config: RunConfig | ControlConfig) -> str:
    """The score kind of a run's evaluations; a task's default reward gives accuracies."""
    if isinstance(config, ControlConfig):
        return "return"
    scored = min(config.rewards, key=lambda reward: (not reward.score, reward.is_per_step), default=None)
    return "accuracy" if scored is None or scored.is_binary else "score"


def find_goal(contestants: Sequence[ComparedRecipe]) -> float | None:
    """The largest expected_return of the recipes; None if none has one."""
    configs = [one.config for one in contestants]
    goals = [config.evaluation.expected_return for config in configs if isinstance(config, ControlConfig)]
    return max((goal for goal in goals if goal is not None), default=None)


def runs_at_once(contestants: Sequence[ComparedRecipe]) -> int:
    """Number of parallel runs: cores divided by the threads of a run; 1 if a run uses all cores (0 threads)."""
    cores = processors()
    return max(1, cores // max(one.config.threads or cores for one in contestants))


def open_folder(folder: Path, contestants: Sequence[ComparedRecipe]) -> FolderLock:
    """Create the folder of a comparison, or check that it belongs to this one, and lock it.

    Raises:
        ConfigError: if it cannot be written, is being written by another process, or belongs to a comparison with
            other recipes or settings; names one that differs.
        MachineError: if it cannot be written because of the disk or its permissions.
    """
    resolved = {one.label: config_to_dict(replace(one.config, seed=0, run_dir="")) for one in contestants}
    settings = json.loads(encode({"covey": version("covey"), "recipes": resolved}))
    path = folder / SETTINGS_FILE
    if path.is_file():
        try:
            before = json.loads(read_below(folder, SETTINGS_FILE))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: name another folder with --output") from error
        changed = first_difference(before, settings)
        if changed:
            raise ConfigError(
                f"{folder} holds a comparison that was made with another {changed}: name another with --output"
            )
        return FolderLock(folder)
    if folder.is_dir() and any(entry.name != LOCK_FILE for entry in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no comparison: name another with --output")
    try:
        check_run_dir(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot write the folder {folder}: name another with --output ({error})") from error
    with faults_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    write_atomically(path, encode(settings, indent=2) + b"\n")
    return lock


def plan(contestants: Sequence[ComparedRecipe], seeds: int, folder: Path) -> list[SeedJob]:
    """Every run, seed by seed, so that changes in the machine's load affect all recipes alike."""
    jobs = []
    for seed in range(seeds):
        for one in contestants:
            run_dir = folder / one.folder / f"seed_{seed:03d}"
            config = replace(one.config, seed=seed, run_dir=str(run_dir))
            fields = (*one.fields, "--seed", str(seed))
            jobs.append(SeedJob(one.label, one.recipe, seed, config, run_dir, fields))
    return jobs


def train_seed(job: SeedJob) -> Any:
    """Train or continue one seed, in a process of its own."""
    from covey.experiment.run import resume, run

    if holds_run(job.run_dir):
        return resume(job.run_dir)
    return run(job.config, recipe_name=job.recipe, launch=Launch.of_command(job.recipe, job.fields))


def write_report(comparison: Comparison, folder: Path, console: Console) -> str:
    """Write the report and its pictures and print the main numbers; returns a line that names the files."""
    from covey.comparison.figure import (  # slow to import, and not needed to report a mistake
        draw_final_scores,
        draw_learning_curves,
        draw_metrics,
    )

    numbers = summarise(comparison)
    write_atomically(folder / NUMBERS_FILE, encode(numbers, indent=2) + b"\n")
    write_atomically(folder / REPORT_FILE, markdown_report(comparison, numbers).encode())
    draw_learning_curves(comparison, folder / CURVES_PICTURE)
    draw_metrics(comparison, folder / METRICS_PICTURE)
    draw_final_scores(comparison, folder / FINAL_PICTURE)
    console.print(terminal_table(numbers))
    for line in findings(numbers):
        _say(console, f"- {line.replace('**', '')}")
    return f"Next: read {folder / REPORT_FILE} and look at {folder / CURVES_PICTURE}"


def command_line(recipes: Sequence[str], seeds: int, threshold: float | None, overrides: Sequence[str]) -> str:
    """The command that repeats this comparison."""
    goal = [] if threshold is None else ["--threshold", f"{threshold:g}"]
    return shlex.join(["covey", "compare", *recipes, "--seeds", str(seeds), *goal, *overrides])


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)
