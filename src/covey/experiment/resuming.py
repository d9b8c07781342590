"""Resumes runs from their config, the record of their beginning, and their checkpoints."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.algorithms import Algorithm
from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.common import last_restart
from covey.config.conversation import ConversationConfig, with_conversation
from covey.config.fields import command, plural
from covey.config.files import faults_of, machine_error, read_below
from covey.config.model_sources import CHECKPOINTS_FOLDER, CONFIG_FILE
from covey.config.recipe import (
    apply_overrides,
    config_from_dict,
    config_to_dict,
    first_difference,
    read_tables,
    write_config,
)
from covey.config.rules import get
from covey.config.sft import SFT_ALGORITHM, RewardModelTraining
from covey.experiment.advice import MEMORY_FIELDS, Config, Launch, go_on
from covey.runtime.checkpoint import CheckpointError, CheckpointFolder
from covey.runtime.distributed import exchange_json
from covey.tracking.console import Display
from covey.tracking.run_folder import METRICS_FILE, ORIGIN_FILE, RESUMED_BY, SUMMARY_FILE
from covey.tracking.run_store import RunStore, read_metrics
from covey.train.pace import METRIC, training_seconds
from covey.train.state import Progress, Trainable, load_checkpoint, progress_of

Origin = dict[str, Any]

_MEASURED = {"score", "low", "high", "count", "seconds"}  # keys of every evaluation of a policy in origin.json


def read_beginning(run_dir: Path) -> tuple[Origin | None, Config, list[str]]:
    """The origin of a run (None if it is lost), its settings, and notes on what is lost.

    Raises:
        ConfigError: if config.toml is damaged, or has changed since the run began; names the first difference.
        MachineError: if a file cannot be read.
    """
    origin, lost = read_origin(run_dir)
    config, notes = _read_config(run_dir, origin)
    return origin, config, [*notes, *([lost] if lost else [])]


def read_origin(run_dir: Path) -> tuple[Origin | None, str]:
    """The origin of a run, or None and a note that it is lost."""
    path = run_dir / ORIGIN_FILE
    origin: Any = None
    try:
        with faults_of(path), suppress(FileNotFoundError):
            origin = json.loads(read_below(run_dir, ORIGIN_FILE))
    except (ValueError, RecursionError):
        origin = "damaged"
    if _is_origin(origin):
        return origin, ""
    return None, (
        f"{ORIGIN_FILE} is {'missing' if origin is None else 'damaged'}: the evaluation before training is repeated; "
        f"whether {CONFIG_FILE}, the files that it names and this machine are those of its beginning is not known"
    )


def _is_origin(origin: Any) -> bool:
    return (
        isinstance(origin, dict)
        and isinstance(origin.get("recipe"), str)
        and isinstance(origin.get("config"), dict)
        and isinstance(origin.get("inputs"), dict)
        and isinstance(origin.get("environment"), dict)
        and isinstance(origin.get("before"), list)
        and (bool(origin["before"]) or origin["config"].get("algorithm") in RESUMED_BY)
        and all(isinstance(one, dict) and ("loss" in one or one.keys() >= _MEASURED) for one in origin["before"])
    )


def _read_config(run_dir: Path, origin: Origin | None) -> tuple[Config, list[str]]:
    path, notes = run_dir / CONFIG_FILE, []
    if origin is not None and not path.exists():
        config = config_from_dict(origin["config"])
        with faults_of(path):
            write_config(replace(config, run_dir=str(run_dir)), path)
        notes.append(f"{CONFIG_FILE} was missing; it is written again from {ORIGIN_FILE}")
    try:
        config = config_from_dict(read_tables(path))
    except ConfigError as error:
        if origin is None:
            raise
        raise ConfigError(f"{error}; delete {path}, and the run takes its settings from {ORIGIN_FILE}") from error
    if origin is not None:
        notes += _refuse_changed(config, origin, run_dir)
    return replace(config, run_dir=str(run_dir)), notes


def _refuse_changed(config: Config, origin: Origin, run_dir: Path) -> list[str]:
    """Notes on settings that may have changed since the run began.

    Raises:
        ConfigError: for the first other one.
    """
    began, now, notes = copy.deepcopy(origin["config"]) | {"run_dir": ""}, plain_config(config), []
    with suppress(ConfigError, TypeError, ValueError, AttributeError):  # a run of an older version has not all fields
        began = plain_config(config_from_dict(began))
    for name in MEMORY_FIELDS:
        (before, key), (after, _) = _table_of(began, name), _table_of(now, name)
        if key in before and key in after and before[key] != after[key]:
            notes.append(f"{name} was {_value(began, name)} and is {_value(now, name)}: the last bits may differ")
            before[key] = after[key]
    kept = {"trackers": now["trackers"]}  # a resumed run may change them
    if isinstance(config, RewardModelTraining):
        kept["weights"] = config.weights
    elif isinstance(config, RunConfig):  # the division of the weights changes no bit
        kept["cluster"] = began.get("cluster", {}) | {"weights": config.cluster.weights}
    began |= kept
    name = first_difference(began, now)
    if not name:
        return notes
    raise ConfigError(
        f"{run_dir / CONFIG_FILE} has changed since the run began: {name} was {_value(began, name)} and is "
        f"{_value(now, name)}; a resumed run keeps its settings, so put it back, or {_anew(config, run_dir)}"
    )


# The limits beyond which a finished run can go on, by the command that trains it.
LIMITS = {
    "train": ("steps", "token_budget", "time_budget", "evaluation.patience"),
    "sft": ("sft.epochs", "time_budget", "sft.patience"),
    "reward-model train": ("epochs", "patience"),
}


def beyond(config: Config, origin: Origin | None, limits: Mapping[str, Any], run_dir: Path, kind: str) -> Config:
    """The config of a finished run that goes on until other limits. Its schedules begin again after its last step.

    Args:
        config: of the run.
        origin: the record of its beginning.
        limits: names of fields, as on the command line, and their values.
        run_dir: its folder.
        kind: the command that trains it, a key of `LIMITS`.

    Raises:
        ConfigError: for another field, a run that is not finished, or a limit that is reached already.
    """
    tables, pairs = config_to_dict(config), [(name, str(value)) for name, value in limits.items()]
    for (typed, _), name in zip(pairs, apply_overrides(tables, pairs, sft=kind == "sft"), strict=True):
        if name not in LIMITS[kind]:
            raise ConfigError(
                "a resumed run keeps the settings that it began with; a finished one can go on beyond its limits "
                f"({', '.join(LIMITS[kind])}): leave out --{typed}"
            )
    if not (run_dir / SUMMARY_FILE).is_file():
        words = command(*kind.split(), "--resume", run_dir)
        raise ConfigError(
            f"the run in {run_dir} is not finished, so it keeps its limits: first let it end with {words}"
        )
    checkpoints = CheckpointFolder(run_dir / CHECKPOINTS_FOLDER)
    if not (saved := checkpoints.steps()):
        raise ConfigError(f"the run in {run_dir} cannot go on, because {checkpoints.path} has no checkpoint")
    progress, changed = progress_of(checkpoints.document(saved[-1])), config_from_dict(tables)
    for epochs in {"epochs", "sft.epochs"} & {*LIMITS[kind]}:  # the steps follow from them
        changed = replace(changed, steps=config.steps // get(config, epochs) * get(changed, epochs))
    for name in LIMITS[kind]:
        if reached := _reached(changed, name, progress, origin, run_dir):
            option = f"--{name.rpartition('.')[2].replace('_', '-')}"
            raise ConfigError(f"{name} of the run in {run_dir} is reached already: {reached}; give a higher {option}")
    return replace(changed, schedule_restarts=(*config.schedule_restarts, progress.step))


def _reached(config: Any, name: str, progress: Progress, origin: Origin | None, run_dir: Path) -> str:
    """How a limit of the config is reached; empty if it is not."""
    if name in ("steps", "sft.epochs", "epochs"):
        return f"{progress.step:,} steps are done" if progress.step >= config.steps else ""
    if name.endswith("patience"):
        since, most = progress.evaluations_since_best, get(config, name)
        return f"the last {since} evaluations were not better than the best" if most and since >= most else ""
    if name == "token_budget":
        budget = config.token_budget if isinstance(config, RunConfig) else 0
        return f"{progress.decisions:,} tokens are sampled" if budget and progress.decisions >= budget else ""
    if config.time_budget is None:
        return ""
    (elapsed,), before = elapsed_after(run_dir, progress.step), origin["before"] if origin else ()
    available = training_seconds(config.budget_seconds, 2 * sum(one["seconds"] for one in before))
    return f"{elapsed:.0f} s of training are used" if elapsed >= available else ""


def elapsed_after(run_dir: Path, *steps: int) -> list[float]:
    """The seconds of a training after each of these steps: by the clock of its time budget, else the sum over its
    steps.
    """
    metrics, found = read_metrics(run_dir), []
    for step in steps:
        lines = [line for line in metrics if line["step"] <= step]
        recorded = [line[METRIC] for line in lines[-1:] if METRIC in line]
        found.append(float(recorded[0] if recorded else sum(line.get("time/step", 0.0) for line in lines)))
    return found


def describe_restart(config: Config) -> list[str]:
    """What begins again in a run that goes on, one line each."""
    done = last_restart(config)
    added = plural(config.steps - done, "step")
    rates: Any = config
    if not isinstance(config, RewardModelTraining):
        rates = config.sft if isinstance(config, RunConfig) and _is_sft(config) else config.update
    lines = [f"the finished run goes on after step {done:,} with {added} more"]
    if rates.schedule != "constant":
        lines.append(
            f"the {rates.schedule} schedule of the learning rate begins again: it falls from {rates.learning_rate:g}, "
            f"without warm-up, over the added {added}"
        )
    if isinstance(config, RunConfig) and config.sampling.final_group_size is not None:
        sizes = config.sampling.group_size, config.sampling.final_group_size
        lines.append(f"the group size begins again too: from {sizes[0]} to {sizes[1]} over the added {added}")
    return lines


def same_arguments(
    launch: Launch, run_dir: str | Path, task: object, rewards: Sequence[object], algorithm: Algorithm | None
) -> None:
    """Refuse to resume a run from Python without the arguments that its config does not have.

    Raises:
        ConfigError: with the call.
    """
    given = "" if algorithm is None else algorithm.name
    if given and given != launch.own_algorithm:
        began = repr(launch.own_algorithm) if launch.own_algorithm else "the one that its config names"
        raise ConfigError(f"algorithm is {given!r}, and the run began with {began}: pass what it began with")
    needed = {
        "task": launch.own_task and task is None,
        "rewards": bool(launch.own_rewards) and not rewards,
        "algorithm": bool(launch.own_algorithm) and not given,
    }
    if missing := [f"{name}=" for name, lacks in needed.items() if lacks]:
        raise ConfigError(
            f"{run_dir} was started from Python with {' and '.join(missing)}, which its folder does not hold: resume "
            f"it in the program that started it, with {go_on(launch, run_dir)}"
        )


def same_conversation(config: Config, conversation: ConversationConfig | None) -> tuple[Config, Any]:
    """The config of a resumed run, and the environment that the Python program gives again; None if it is named.

    Raises:
        ConfigError: if `conversation` has other settings than the run.
    """
    given, environment = with_conversation(config, conversation)
    before, now = plain_config(config), plain_config(given)
    if name := first_difference(before, now):
        raise ConfigError(
            f"{name} was {_value(before, name)} when the run began and is {_value(now, name)} in the conversation: a "
            "resumed run keeps its settings, so pass the conversation that it began with"
        )
    return config, environment


def refuse_changed_inputs(origin: Origin | None, inputs: dict[str, str], config: Config, run_dir: Path) -> None:
    """Refuse data and functions that have changed since the run began, because its results would differ.

    Raises:
        ConfigError: with the first changed file.
    """
    if origin is None or inputs == origin["inputs"]:
        return
    names = [name for name in inputs if inputs[name] != origin["inputs"].get(name)]
    first = f"{config.sft.data} (sft.data)" if isinstance(config, RunConfig) and _is_sft(config) else names[0]
    raise ConfigError(
        f"{first} has changed since the run began; a resumed run reads what it read before, so put it back, or "
        f"{_anew(config, run_dir)}"
    )


def _anew(config: Config, run_dir: Path) -> str:
    """Command that begins a new run with the changed inputs."""
    steps = CheckpointFolder(run_dir / CHECKPOINTS_FOLDER).steps()
    if isinstance(config, RewardModelTraining):
        words = ["reward-model", "train", config.data, *(["--held-out", config.held_out] if config.held_out else [])]
        return f"start a new run: {command(*words, '--model', config.model, '--run-dir', f'{run_dir}-changed')}"
    trains = "sft" if _is_sft(config) else "train"
    words = [trains, str(run_dir / CONFIG_FILE), "--run-dir", f"{run_dir}-changed"]
    if not isinstance(config, RunConfig) or not steps:
        return f"start a new run: {command(*words)}"
    words += ["--model", str(run_dir / CHECKPOINTS_FOLDER / f"step-{steps[-1]:08d}")]
    return f"start a new run from its last checkpoint: {command(*words)}"


def _is_sft(config: RunConfig | ControlConfig) -> bool:
    return config.algorithm == SFT_ALGORITHM


def plain_config(config: Config) -> dict[str, Any]:
    """A config in JSON's types, without its folder, which may have moved."""
    tables: dict[str, Any] = json.loads(json.dumps(config_to_dict(replace(config, run_dir=""))))
    return tables


def _table_of(tables: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The table of a setting with a dotted name, and its key there; an empty table if there is none."""
    table, _, key = name.rpartition(".")
    found = tables.get(table) if table else tables
    return (found if isinstance(found, dict) else {}), key


def _value(tables: dict[str, Any], name: str) -> str:
    """The text of the value with a dotted name."""
    value: Any = tables
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return "not set"
        value = value[part]
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


def restore_checkpoint(
    parts: Trainable, store: RunStore, display: Display, checkpoint_every: int, again: str, *, rollouts: bool
) -> Progress:
    """Load the newest complete checkpoint into the components, remove later records, and show the earlier ones.

    Args:
        parts: the components.
        store: the run folder.
        display: shows the earlier records.
        checkpoint_every: steps between checkpoints.
        again: the command that trains again from the beginning.
        rollouts: the run records rollouts.

    Returns:
        The progress of the run.

    Raises:
        ConfigError: if there were checkpoints and none can be used.
    """
    checkpoints: CheckpointFolder = parts.checkpoints  # type: ignore[assignment]
    latest = exchange_json(parts.team, None if parts.team.rank else checkpoints.latest())[0]
    progress = Progress()
    if latest is not None:
        progress = _loaded(parts, checkpoints, latest)
        exchange_json(parts.team, None)  # every rank has read it
        checkpoints.tidy(latest, progress.best_step)
    elif checkpoints.steps() or store.last_recorded() > checkpoint_every:
        why = "no checkpoint is whole" if checkpoints.steps() else f"{CHECKPOINTS_FOLDER}/ was deleted"
        raise CheckpointError(
            f"the run in {store.run_dir} cannot be resumed, because {why}; {METRICS_FILE} and the rollouts are "
            f"untouched. Train it again from its beginning: {again}"
        )
    for line in store.rewind(progress.step, rollouts=rollouts):
        display.note(line)
    display.resume(progress.step, read_metrics(store.run_dir))
    display.note(f"resuming after step {progress.step}")
    return progress


def keep_best(parts: Trainable, progress: Progress) -> None:
    """Name the best checkpoint at the end of training if the run keeps it.

    The best one of the evaluations between the steps stays too, because the run may go on with it.
    """
    if not parts.team.rank:
        checkpoints: CheckpointFolder = parts.checkpoints  # type: ignore[assignment]
        checkpoints.name_best(progress.best_step)


def _loaded(parts: Trainable, checkpoints: CheckpointFolder, step: int) -> Progress:
    state = checkpoints.load(step)
    try:
        progress = load_checkpoint(parts, state)
        if progress.step != step:
            raise ValueError(f"it is that of step {progress.step}")
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if fault := machine_error(error):
            raise fault from error
        raise CheckpointError(
            f"checkpoint {checkpoints.folder(step)} does not fit this run ({type(error).__name__}: {error!s:.80}): "
            "delete it, and the one before is used"
        ) from error
    return progress
