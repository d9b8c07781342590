"""`covey compare`: recipes x seeds, trained side by side, and a report of the differences.

runs/compare-cartpole_grpo-cartpole_ppo/
  settings.json                        the resolved recipes; a folder belongs to one comparison
  cartpole_grpo/seed_003/              a run folder like any other, and output.log
  report.md, report.json               the results as text and as numbers
  learning_curves.png, metrics.png, final_scores.png

Each run has a process of its own, so that no state leaks between runs, and their peak memory and their failures are
separate. Importing torch takes seconds, so on Linux it is imported once, in a server that is then forked.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from covey.comparison.estimates import read_seed_run
from covey.config import ConfigError, ControlConfig, MachineError, RunConfig, RunError
from covey.config.fields import plural
from covey.config.files import faults_of, machine_error, read_below, shortened, user_path
from covey.config.machine import check_threads, may_fork, processors
from covey.config.recipe import config_to_dict, find_recipe, first_difference, read_recipe, split_overrides, task_name
from covey.experiment.advice import Launch
from covey.runtime.variables import leave_safe_path, safe_path, variable
from covey.tracking.output import plain_console
from covey.tracking.run_folder import (
    LOCK_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    FolderLock,
    check_run_dir,
    holds_run,
    last_step,
    write_atomically,
)
from covey.tracking.run_store import encode

if TYPE_CHECKING:  # it imports matplotlib, and a mistake is reported before that
    from covey.comparison.report import Comparison

SETTINGS_FILE, REPORT_FILE, NUMBERS_FILE = "settings.json", "report.md", "report.json"
LONGEST_NAME = 140  # bytes of the name of a folder
MOST_SEEDS = 10_000
CHOSEN_HERE = ("seed", "run_dir")
STOP_SECONDS = 60.0  # deadline of a run that was asked to stop; it ends after its step, or is killed
LOOK_SECONDS = 0.5  # interval of polling the runs' progress


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
        return short_name(re.sub(r"[^\w.=,-]+", "_", self.label).strip("_"))


def short_name(name: str) -> str:
    """The name, if a file may have it (255 bytes, some file systems fewer); else its beginning and a checksum."""
    return name if len(name.encode()) <= LONGEST_NAME else f"{name[:60].rstrip('_-')}-{crc32(name.encode()):08x}"


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
    folder = output or Path("runs") / short_name("-".join(["compare", *(one.folder for one in contestants)]))
    command = command_line(recipes, seeds, threshold, overrides)
    with open_folder(folder, contestants):
        _train_and_report(contestants, folder, seeds, jobs or runs_at_once(contestants), threshold, command)


def _train_and_report(
    contestants: Sequence[ComparedRecipe], folder: Path, seeds: int, at_once: int, threshold: float | None, command: str
) -> None:
    """`compare` in a folder that is locked."""
    from covey.comparison.report import LEAST_SEEDS, Comparison

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
    from covey.comparison import report

    numbers = report.summarise(comparison)
    write_atomically(folder / NUMBERS_FILE, encode(numbers, indent=2) + b"\n")
    write_atomically(folder / REPORT_FILE, report.markdown_report(comparison, numbers).encode())
    report.draw_learning_curves(comparison, folder / report.CURVES_PICTURE)
    report.draw_metrics(comparison, folder / report.METRICS_PICTURE)
    report.draw_final_scores(comparison, folder / report.FINAL_PICTURE)
    console.print(report.terminal_table(numbers))
    for line in report.findings(numbers):
        _say(console, f"- {line.replace('**', '')}")
    return f"Next: read {folder / REPORT_FILE} and look at {folder / report.CURVES_PICTURE}"


def command_line(recipes: Sequence[str], seeds: int, threshold: float | None, overrides: Sequence[str]) -> str:
    """The command that repeats this comparison."""
    goal = [] if threshold is None else ["--threshold", f"{threshold:g}"]
    return shlex.join(["covey", "compare", *recipes, "--seeds", str(seeds), *goal, *overrides])


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


@dataclass(frozen=True)
class SeedJob:
    """One run of a comparison."""

    label: str  # of its recipe
    recipe: str  # as typed, for the run's advice, like `fields`
    seed: int
    config: RunConfig | ControlConfig  # with the seed and the folder
    run_dir: Path
    fields: tuple[str, ...] = ()  # the `--field value` words

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.label}, seed {self.seed}"


@dataclass
class _Running:
    job: SeedJob
    process: Any
    outcome: Connection
    bar: TaskID
    step: int = 0


@dataclass
class ParallelRunner:
    """Runs jobs in processes. `work` must be a module's top-level function, because the processes import it by name.

    It raises ConfigError for a mistake and RunError for a run that cannot continue, and returns None if it was stopped.
    """

    work: Callable[[SeedJob], Any]
    at_once: int
    preload: Sequence[str] = ()  # modules that every process needs
    console: Console = field(default_factory=plain_console)

    def run(self, jobs: Sequence[SeedJob]) -> dict[str, str]:
        """Run every job; returns name -> reason of those that failed.

        Raises:
            ConfigError: for a mistake that one of them reported, which affects all of them.
            MachineError: for a fault of the machine, which affects all of them too.
            KeyboardInterrupt: after Ctrl-C, when the runs have written their checkpoints.
        """
        failures: dict[str, str] = {}
        waiting = list(jobs)
        running: list[_Running] = []
        # Runs that share the cores multiply with one thread each; a process reads this when it loads NumPy.
        one_thread_each = variable("OPENBLAS_NUM_THREADS", "1") if self.at_once > 1 else nullcontext()
        with self._progress() as progress, one_thread_each, safe_path(), _terminated_as_interrupted():
            total = progress.add_task("all runs", total=sum(job.config.steps for job in jobs))
            try:
                while waiting or running:
                    while waiting and len(running) < self.at_once:
                        self._start(waiting.pop(0), progress, running)
                    wait([one.process.sentinel for one in running], timeout=LOOK_SECONDS)
                    self._look(running, progress, total)
                    for one in [one for one in running if one.process.exitcode is not None]:
                        running.remove(one)
                        self._finish(one, progress, failures)
            except BaseException:
                self._stop(running)
                raise
        return failures

    def _progress(self) -> Progress:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def _start(self, job: SeedJob, progress: Progress, running: list[_Running]) -> None:
        context: Any = multiprocessing.get_context("forkserver" if may_fork() else "spawn")
        if may_fork():
            context.set_forkserver_preload(list(self.preload))
        job.run_dir.mkdir(parents=True, exist_ok=True)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(self.work, job, there), name=job.name)
        # Before the process starts, because after Ctrl-C only the runs in this list are asked to stop.
        running.append(_Running(job, process, here, progress.add_task(f"  {job.name}", total=job.config.steps)))
        process.start()
        there.close()

    def _look(self, running: Sequence[_Running], progress: Progress, total: TaskID) -> None:
        for one in running:
            step = last_step(one.job.run_dir)
            progress.update(one.bar, completed=step)
            progress.advance(total, step - one.step)
            one.step = step

    def _finish(self, one: _Running, progress: Progress, failures: dict[str, str]) -> None:
        progress.remove_task(one.bar)
        log = one.job.run_dir / LOG_FILE
        try:
            kind, text = one.outcome.recv()
        except EOFError:
            kind, text = "failed", f"its process ended with code {one.process.exitcode}; see {log}"
        if kind == "mistake":
            raise ConfigError(f"{one.job.name}: {text}")
        if kind == "machine":
            raise MachineError(f"{one.job.name}: {text}")
        if kind == "stopped":
            raise KeyboardInterrupt
        if kind == "failed":
            failures[one.job.name] = text
        if kind == "failed" or not self.console.is_terminal:
            self.console.print(f"{one.job.name}: {text}", soft_wrap=True)

    def _stop(self, running: Sequence[_Running]) -> None:
        """Terminate the runs: each writes a checkpoint after its step; those that do not end in time are killed."""
        started = [one for one in running if one.process.pid is not None]
        for one in started:
            one.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for one in started:
            one.process.join(max(0.0, deadline - time.monotonic()))
            if one.process.exitcode is None:
                one.process.kill()
                one.process.join()


def _child(work: Callable[[SeedJob], Any], job: SeedJob, outcome: Connection) -> None:
    """Main function of a run's process: output goes to its log, the outcome to the parent."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent alone, which asks its processes to stop
    leave_safe_path()
    log = os.open(job.run_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        finished = work(job) is not None
        outcome.send(("done", "done") if finished else ("stopped", "stopped"))
    except ConfigError as error:
        outcome.send(("mistake", str(error)))
    except KeyboardInterrupt:
        outcome.send(("stopped", "stopped"))
    except RunError as error:
        outcome.send(("failed", str(error)))
    except Exception as error:
        if fault := machine_error(error):
            outcome.send(("machine", str(fault)))
            return
        outcome.send(("failed", f"unexpected {type(error).__name__}: {error}; see {job.run_dir / LOG_FILE}"))
        raise


def _end_with_parent() -> None:
    """Wait for the parent's end, then stop this run as after Ctrl-C, so that it does not outlive its comparison."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Context manager in which SIGTERM stops a comparison like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
