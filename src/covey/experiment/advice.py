"""Advice after a run: a command, or a Python call, that works as it stands and keeps the run's own settings.

The way a run was started is recorded (`Launch`, in its origin.json). For a run of the command line, advice is commands
with the same recipe and `--field value` words; for a run of `covey.run`, Python calls with their import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from covey.config import ControlConfig, ConversationConfig, RunConfig
from covey.config.fields import command
from covey.config.files import MemoryFault, read_below
from covey.config.model_sources import CONFIG_FILE, MODEL_FOLDER
from covey.config.recipe import config_from_dict, read_tables, split_overrides, training_command
from covey.config.rules import put
from covey.config.sft import RewardModelKind, RewardModelTraining
from covey.tracking.console import verdict
from covey.tracking.run_folder import ORIGIN_FILE, resuming_command
from covey.tracking.wording import ACCURACY, LOSS, find_wording

if TYPE_CHECKING:  # it imports torch, and `covey compare` reports a mistake before that
    from covey.algorithms import Algorithm

Config = RunConfig | ControlConfig | RewardModelTraining

ADAPTER_RANK = 16  # of the adapter that is proposed if the weights of a model are too large
LOWER = 3  # divisor of the learning rate if a policy got worse
SAMPLES = 16  # answers to each problem in an advised evaluation
LAST_SEED = 2**32 - 1
PYTHON_NAME = "run"  # default name of a run from Python


@dataclass(frozen=True)
class Launch:
    """The way a run was started."""

    recipe: str = ""  # as typed after `covey train`; empty: the run was started by `covey.run`
    fields: tuple[str, ...] = ()  # its `--field value` words
    recipe_steps: int = 0  # steps of the recipe without those words; 0: there is no recipe
    name: str = PYTHON_NAME  # from Python: the run's name
    own_task: bool = False  # from Python: the task is an argument
    own_rewards: tuple[str, ...] = ()  # from Python: names of its reward functions, built-in ones quoted
    own_observers: bool = False  # from Python: it has observers
    own_conversation: bool = False  # from Python: the conversation is an argument
    own_algorithm: str = ""  # from Python: name of the algorithm that is an argument

    @classmethod
    def of_command(cls, recipe: str, fields: Sequence[str]) -> Launch:
        """The launch of `covey train RECIPE --field value ...`, whose words are valid."""
        steps = config_from_dict(read_tables(recipe)).steps
        return cls(recipe, tuple(fields), steps if isinstance(steps, int) else 0)

    @classmethod
    def from_python(
        cls,
        name: str,
        task: object,
        rewards: Sequence[object],
        observers: Sequence[object] = (),
        conversation: object = None,
        algorithm: Algorithm | None = None,
    ) -> Launch:
        """The launch of a call of `covey.run`."""
        names = tuple(repr(one) if isinstance(one, str) else str(getattr(one, "__name__", "")) for one in rewards)
        return cls(
            name=name, own_task=task is not None, own_rewards=names, own_observers=bool(observers),
            own_conversation=conversation is not None, own_algorithm="" if algorithm is None else algorithm.name,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Launch:
        """The launch from its `vars`, read from JSON."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
        launch = cls(**values)
        words = launch.recipe, launch.name, launch.own_algorithm, *launch.fields, *launch.own_rewards
        if not all(isinstance(word, str) for word in words):
            raise TypeError("words are texts")
        return launch

    def with_fields(self, changes: Mapping[str, Any]) -> Launch:
        """The launch with other values of some fields: of a field that is named twice the last value counts."""
        return replace(self, fields=(*self.fields, *_options(changes))) if self.recipe else self

    @property
    def title(self) -> str:
        """The recipe, or the name of a run from Python."""
        return self.recipe or self.name


@dataclass(frozen=True)
class Finished:
    """A finished run, as far as advice depends on it."""

    launch: Launch
    config: Config
    run_dir: str
    drawable: bool  # the environment can be rendered here
    ended_early: bool = False  # because the score was not exceeded for `evaluation.patience` evaluations


@dataclass(frozen=True)
class Advice:
    """One possible next action: its description, its command or Python call, and its condition."""

    words: str
    command: Callable[[Finished], str]
    possible: Callable[[Finished], bool] = lambda run: True


def start(launch: Launch, config: Config, changes: Mapping[str, Any], *, keep_folder: bool = False) -> str:
    """The command or call that trains again with some fields changed.

    Args:
        launch: the way the run was started.
        config: the config of the run.
        changes: dotted name of a field -> new value; None: the recipe's value.
        keep_folder: keep a run_dir that the user chose; otherwise the run gets a new folder.
    """
    if not launch.recipe:
        for name, value in ({} if keep_folder else {"run_dir": ""} | dict(changes)).items():
            config = config if value is None else put(config, name, value)
        if launch.own_conversation and isinstance(config, RunConfig):
            config = replace(config, conversation=ConversationConfig())
        return _call("run", python_of(config), launch)
    dropped = {*changes, *(() if keep_folder else ("run_dir",))}
    kept = [pair for pair in split_overrides(launch.fields) if not any(_names(pair[0], field) for field in dropped)]
    words = [word for name, value in kept for word in (f"--{name}", value)]
    if Path(launch.recipe).name == CONFIG_FILE and not keep_folder:
        words += ["--run-dir", ""]  # the run's own config has its folder
    words += _options({name.rpartition(".")[2]: value for name, value in changes.items() if value is not None})
    return command(*training_command(config).split(), launch.recipe, *words)


def _options(changes: Mapping[str, Any]) -> list[str]:
    """Fields as options on the command line."""
    return [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def start_again(launch: Launch, config: Config, run_dir: Path) -> str:
    """The command that trains again in a new folder, with the settings of the run in `run_dir`."""
    recipe, fields = launch.recipe, launch.fields
    if not isinstance(config, RewardModelTraining):
        recipe, fields = str(run_dir / CONFIG_FILE), ()
    words = [
        word for name, value in split_overrides(fields) if not _names(name, "run_dir") for word in (f"--{name}", value)
    ]
    return command(*training_command(config).split(), recipe, *words, "--run-dir", f"{run_dir}-again")


# Memory and time depend on these settings, and results in their last bits alone: a resumed run may change them.
_UPDATE, _SAMPLING = ("update.microbatch_tokens", "update.recompute", "microbatch_tokens"), ("sampling.rows_at_once",)
MEMORY_FIELDS = (*_UPDATE, *_SAMPLING)
_STATE = ("update.eight_bit_moments", "lora.rank")  # these belong to a run
# Phase of a run -> modules in whose functions it is, innermost first, and the settings that need less memory there.
_PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "in the optimizer": (("covey.runtime.optimizer",), _STATE),
    "in a checkpoint": (("covey.runtime.checkpoint", "covey.experiment.resuming"), _STATE),
    "in an evaluation": (("covey.experiment.evaluation",), _SAMPLING),
    "while grading": (("covey.llm.grader",), ()),
    "while sampling": (("covey.train.collect",), _SAMPLING),
    "in the update": (("covey.train.prepare", "covey.train.update", "covey.train.supervised"), _UPDATE),
    "while the model is loaded": (("covey.llm.model.loading", "covey.experiment.models"), _STATE),
}


def less_memory(fault: MemoryFault, error: BaseException, config: Config | None, where: str = "") -> MemoryFault:
    """The fault with the phase of the run in which it was raised, and what to change, with today's values.

    Args:
        fault: made of `error`.
        error: whose traceback names the phase.
        config: of the run, if there is one.
        where: the file in which settings are changed before the run is resumed; empty: the run has not begun.
    """
    modules = {frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)}
    found = (one for one in _PHASES.items() if not modules.isdisjoint(one[1][0]))
    phase, (_, names) = next(found, ("", ((), ())))
    changes = " or ".join(change for name in names if (change := _smaller(config, name)))
    if not changes:
        return MemoryFault(fault.reason, phase and f" {phase}")
    place = ", in a new run" if names is _STATE else f" in {where}" if where else ""
    return MemoryFault(fault.reason, f" {phase}", f"close other programs, or {changes}{place}")


def _smaller(config: Config | None, name: str) -> str:
    """A change of a setting that needs less memory, with its present value; empty if there is none."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is False:
        return f"set {name} = true (is false)"
    if value == 0 and isinstance(config, RunConfig):
        adapter = name == "lora.rank"
        smallest, now = (ADAPTER_RANK, "0") if adapter else (config.sampling.group_size, "0, chosen by memory")
        return f"set {name} = {smallest} (is {now})"
    return "" if value in (None, True, 1) else f"lower {name} (is {value})"


def go_on(launch: Launch, run_dir: str | Path, limits: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The command or call that resumes a run, a finished one with higher limits."""
    if launch.recipe:
        return command(*resuming_command(Path(run_dir)).split(), "--resume", run_dir, *_options(limits))
    call = _call("resume", repr(str(run_dir)), replace(launch, name=PYTHON_NAME))
    return f"{call[:-1]}, limits={dict(limits)})" if limits else call


def after_training(run: Finished, summary: dict[str, Any]) -> str:
    """One suggestion, according to what the checks found at the end, and to the outcome of the first evaluation."""
    if summary["score_kind"] == LOSS.name:
        return f"Next: {_use(run, summary)}"
    wording, found, expected = find_wording(summary), verdict(summary), summary.get("expected_return")
    chosen = next(advice for advice in ADVICE[summary["domain"]][found] if advice.possible(run))
    parts = [FINDINGS[found], f"Next: {_remedy(summary, found) or f'{chosen.words}: {chosen.command(run)}'}"]
    if expected is not None:
        reached = "reached" if found == "reached" else "not reached"
        parts.insert(0, f"The expected return of {wording.kind.write(expected)} is {reached}.")
    return " ".join(part for part in parts if part)


def _use(run: Finished, summary: dict[str, Any]) -> str:
    """What a model that was trained on examples is for."""
    if isinstance(run.config, RewardModelTraining):
        per_step = "per_step = true and " if summary["kind"] == RewardModelKind.PROCESS.noun else ""
        return f'use it as a reward in a recipe: [[rewards]] with {per_step}model = "{run.run_dir}"'
    recipe = "RECIPE" if getattr(run.config, "task", None) is None else run.launch.recipe
    training = training_command(replace(run.config, algorithm="grpo"))
    return command(training, recipe, "--model", Path(run.run_dir) / MODEL_FOLDER)


def _remedy(summary: dict[str, Any], found: str) -> str:
    """What to change before any further run: the remedy of a finding that holds at the end, or harder problems."""
    holds = next((one for one in summary["findings"] if one["last_step"] >= summary["steps"]), None)
    all_right = summary["score_kind"] == ACCURACY.name and summary["evaluations"][0]["after"]["score"] == 1
    if found == "reached" or (all_right and not (holds and holds["severity"] == "problem")):
        return HARDER if all_right else ""
    return f"{holds['remedy'][:1].lower()}{holds['remedy'][1:]}" if holds else ""


def after_evaluation(run_dir: Path, config: Config, *, drawable: bool, drawn: bool) -> str:
    """Advice after `covey eval` of a control run; empty if its launch is unknown."""
    if drawable and not drawn:
        return f"Next: {WATCH.words}: {command('eval', run_dir, '--render')}"
    launch = read_launch(run_dir)
    if launch is None:
        return ""
    return f"Next: {OTHER_SEED.words}: {OTHER_SEED.command(Finished(launch, config, str(run_dir), drawable))}"


def read_launch(run_dir: Path) -> Launch | None:
    """The launch of the run in a folder; None if the folder does not say."""
    try:
        return Launch.from_dict(json.loads(read_below(run_dir, ORIGIN_FILE))["launch"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _names(typed: str, field: str) -> bool:
    """True if `--typed` on a command line is the field with this dotted name."""
    return typed.replace("-", "_") in (field, field.rpartition(".")[2])


def _call(function: str, first: str, launch: Launch) -> str:
    """A call of `covey.run` or `covey.resume` with the script's own task and rewards, by their names in the script."""
    arguments = [first]
    if launch.own_task:
        arguments.append("task=task")
    if launch.own_rewards:
        named = all(name.isidentifier() or name[:1] in ("'", '"') for name in launch.own_rewards)
        arguments.append(f"rewards=[{', '.join(launch.own_rewards)}]" if named else "rewards=rewards")
    if launch.own_conversation:
        arguments.append("conversation=conversation")
    if launch.own_algorithm:
        arguments.append("algorithm=algorithm")
    if launch.own_observers:
        arguments.append("observers=observers")
    if launch.name != PYTHON_NAME:
        arguments.append(f"recipe_name={launch.name!r}")
    return f"import covey; covey.{function}({', '.join(arguments)})"


def python_of(config: Any) -> str:
    """A config as a Python expression, without the fields that have their default."""
    if isinstance(config, tuple):
        items = [python_of(item) for item in config]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if not is_dataclass(config):
        return repr(config)
    values = ((item, getattr(config, item.name)) for item in fields(config))
    given = [f"{item.name}={python_of(value)}" for item, value in values if value != item.default]
    return f"covey.{type(config).__name__}({', '.join(given)})"


def _longer(run: Finished) -> str:
    """Advice to go on until the run is twice as long, or as long as the recipe if that is longer."""
    config = run.config
    limits: dict[str, Any] = {"steps": max(2 * config.steps, run.launch.recipe_steps)}
    if isinstance(config, RunConfig) and config.token_budget:
        limits["token_budget"] = 2 * config.token_budget
    if isinstance(config, RunConfig | ControlConfig) and config.time_budget:
        limits["time_budget"] = f"{2 * config.budget_seconds:.0f}s"
    return go_on(run.launch, run.run_dir, limits)


def _more_slowly(run: Finished) -> str:
    assert not isinstance(run.config, RewardModelTraining)  # it is a policy
    lower = float(f"{run.config.update.learning_rate / LOWER:.1g}")
    return start(run.launch, run.config, {"update.learning_rate": lower})


def _another_seed(run: Finished) -> str:
    return start(run.launch, run.config, {"seed": run.config.seed + 1 if run.config.seed < LAST_SEED else 0})


def _watch(run: Finished) -> str:
    if run.launch.recipe:
        return command("eval", run.run_dir, "--render")
    return f"import covey; covey.evaluate_run({run.run_dir!r}, render=True)"


WATCH = Advice("watch the policy", _watch, lambda run: run.drawable)
LONGER = Advice("train for longer", _longer, lambda run: not run.ended_early)
MORE_SLOWLY = Advice("lower the learning rate", _more_slowly)
OTHER_SEED = Advice("try another seed", _another_seed)
MEASURE = Advice(
    "sample several answers to each problem",
    lambda run: command("eval", run.run_dir, "--samples", SAMPLES),
    lambda run: bool(run.launch.recipe),  # a script's task and rewards are not in the run folder
)
HARDER = "harder problems, or more of them: all held-out answers are right, and no training can raise that"

# Outcome of `covey.tracking.console.verdict` -> advice, of which the first possible one is used.
FINDINGS: dict[str, str] = {
    "reached": "",
    "short": "The policy got better.",
    "better": "The policy got better.",
    "worse": "The policy got worse.",
    "unclear": "The change is within the uncertainty of the evaluations.",
}
ADVICE: dict[str, dict[str, tuple[Advice, ...]]] = {
    "language": {
        "better": (MEASURE, LONGER, MORE_SLOWLY),
        "worse": (MORE_SLOWLY,),
        "unclear": (LONGER, MORE_SLOWLY),
    },
    "control": {
        "reached": (WATCH, OTHER_SEED),
        "short": (LONGER, MORE_SLOWLY),
        "better": (WATCH, OTHER_SEED),
        "worse": (MORE_SLOWLY,),
        "unclear": (OTHER_SEED,),
    },
}
