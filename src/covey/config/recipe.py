"""Reads recipes, TOML and command-line overrides, to a RunConfig or a ControlConfig, and writes configs as TOML."""

import copy
import difflib
import json
import logging
import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from covey.config import TASK_CONFIGS, ConfigError, ControlConfig, RewardConfig, RunConfig
from covey.config.common import Default
from covey.config.fields import (
    check_fields,
    command,
    describe_type,
    did_you_mean,
    did_you_mean_file,
    get_type_hints,
    plain_type,
    toml_repr,
)
from covey.config.files import read_toml, unusual_kind, user_path
from covey.config.rules import default, faults, get, put, validate, validate_sft
from covey.config.sft import REWARD_MODEL_ALGORITHM, SFT_ALGORITHM, SFT_TABLE, RewardModelTraining

# ---- fields that follow a change ----

# The fields of a recipe fit each other: a warm-up is shorter than the run, a changing group size begins at
# `group_size`, a threshold belongs to its environment. If the command line changes one of them, the dependent fields
# that it does not set are adjusted, so that a recipe works with every single change that is possible: those of `SCALED`
# by their rule, and those that would contradict the new values (`covey.config.rules.faults`) as the contradiction says.

Config = RunConfig | ControlConfig

# Tasks in which many answers are right, so that no reward can compare with a column of right answers.
OTHER_ANSWERS = ("countdown", "code_functions", "human_eval", "guess_number", "maze")


def follow(recipe: Config, config: Config, given: Collection[str]) -> tuple[Config, str]:
    """Adjust the fields that depend on the given fields.

    Args:
        recipe: the config in the recipe's file.
        config: the same with the fields that the command line gave.
        given: dotted names of these fields.

    Returns:
        The adjusted config, and one line that lists the changes; empty if there are none.
    """
    try:  # the rules need values of the right type; others are refused later
        check_fields(recipe)
        check_fields(config)
    except (ConfigError, TypeError):
        return config, ""
    changes = _changes(recipe, config, given)
    if not changes:
        return config, ""
    causes = [
        name
        for name in given
        if _changes(recipe, put(config, name, _value_of(recipe, config, name)), {*given} - {name}) != changes
    ]
    said = [f"{name} = {_written(value)} (was {_written(get(config, name))})" for name, value in changes.items()]
    for name, value in changes.items():
        config = put(config, name, value)
    return config, f"{', '.join(map(_option, sorted({*causes} or {*given})))}: so the recipe's {', '.join(said)}"


def _changes(recipe: Config, config: Config, given: Collection[str]) -> dict[str, Any]:
    """Field -> new value of the fields that follow the given ones."""
    known = {tuple(fault.mends) for fault in faults(recipe)}  # contradictions of the recipe's own, which are refused
    before, changed = config, dict[str, Any]()
    for name, causes, value in SCALED[type(config)]:
        if name in given or {*changed, *given}.isdisjoint(causes):
            continue
        if (after := value(recipe, config, name)) != get(config, name):
            changed[name] = after
            config = put(config, name, after)
    mended: set[str] = set()
    while True:
        mends = (
            (name, default(config, name) if value is Default else value)
            for fault in faults(config)
            if tuple(fault.mends) not in known and not {*fault.subject} & {*given}
            for name, value in fault.mends.items()
        )
        mend = next(((name, value) for name, value in mends if name not in mended and name not in given), None)
        if mend is None:
            return {name: value for name, value in changed.items() if value != get(before, name)}
        mended.add(mend[0])
        changed[mend[0]] = mend[1]
        config = put(config, *mend)


def _option(name: str) -> str:
    """The short command-line option of a field."""
    return f"--{name.removesuffix('.id').rpartition('.')[2].replace('_', '-')}"


def _value_of(recipe: Config, config: Config, name: str) -> Any:
    """The recipe's value of a field, the default if its task does not have the field."""
    try:
        return get(recipe, name)
    except AttributeError:
        return default(config, name)


def _written(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple) and all(isinstance(item, RewardConfig) for item in value):
        words = (reward.name or reward.function or reward.judge or reward.model for reward in value)
        return f"[{', '.join(words)}]"
    return toml_repr(value)


def _unset(recipe: Config, config: Config, name: str) -> Any:
    return default(config, name)


def _scaled_steps(recipe: Config, config: Config, name: str) -> int:
    """Scale a number of steps with the length of the run if it no longer fits."""
    value, interval = int(get(config, name)), name.endswith("every")
    fits = value <= config.steps if interval else value < config.steps
    if fits or value >= recipe.steps or value == default(config, name):
        return value
    return max(int(interval), min(config.steps - 1, round(value * config.steps / recipe.steps)))


def _scaled_budget(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the token budget with the number of steps of a longer run."""
    return max(config.token_budget, round(config.token_budget * config.steps / recipe.steps))


def _scaled_tokens(recipe: RunConfig, config: RunConfig, name: str) -> int | None:
    tokens, limit = config.sampling.overlong_tokens, config.sampling.max_new_tokens
    return tokens if tokens is None or tokens <= limit else round(tokens * limit / recipe.sampling.max_new_tokens)


def _minimum_length(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the minimum length with the limit if it no longer fits."""
    minimum, limit = config.sampling.min_new_tokens, config.sampling.max_new_tokens
    return minimum if minimum < limit else minimum * limit // recipe.sampling.max_new_tokens


def _token_limits(recipe: RunConfig, config: RunConfig, name: str) -> tuple[int, ...]:
    """Keep the token limit of training among those of evaluations."""
    old, new = recipe.sampling.max_new_tokens, config.sampling.max_new_tokens
    return tuple(dict.fromkeys(new if limit == old else limit for limit in config.evaluation.token_limits))


def _rewards(recipe: RunConfig, config: RunConfig, name: str) -> tuple[RewardConfig, ...]:
    """The rewards that can grade the new task; if there are none, the task's own reward is used."""
    if recipe.task is None or config.task is None or type(recipe.task) is type(config.task):
        return config.rewards
    task = next((task for task, kind in TASK_CONFIGS.items() if kind is type(config.task)), "")
    kept = []
    for reward in config.rewards:
        tasks = reward.built_in.tasks if reward.built_in is not None else ()
        compares = not tasks and reward.built_in is not None and reward.uses("answer_column")
        if task in (*(tasks or (task,)), "dataset") and not (task in OTHER_ANSWERS and compares):
            kept.append(reward)
    return tuple(kept)


_STEPS = (
    *("update.warmup_steps", "update.critic_warmup_steps", "loss.kl_warmup_steps"),
    *("checkpoint.every", "evaluation.every"),
)
_LENGTH = ("model", "task", "task.digits", "chat.examples", "chat.system_prompt")  # change the length of answers

# (field, the fields whose change it follows, the rule), in the order in which one change may cause the next.
Rule = tuple[str, tuple[str, ...], Callable[[Any, Any, str], Any]]
SCALED: dict[type, list[Rule]] = {
    RunConfig: [
        *((name, ("steps",), _scaled_steps) for name in (*_STEPS, "reference.refresh_every")),
        ("rewards", ("task",), _rewards),
        ("token_budget", ("steps",), _scaled_budget),
        ("sampling.final_group_size", ("sampling.group_size",), _unset),
        ("sampling.overlong_tokens", ("sampling.max_new_tokens",), _scaled_tokens),
        ("sampling.min_new_tokens", _LENGTH, _unset),
        ("sampling.min_new_tokens", ("sampling.max_new_tokens",), _minimum_length),
        ("evaluation.token_limits", ("sampling.max_new_tokens",), _token_limits),
    ],
    ControlConfig: [
        *((name, ("steps",), _scaled_steps) for name in _STEPS),
        ("evaluation.expected_return", ("environment.id", "environment.max_episode_steps"), _unset),
    ],
}


_log = logging.getLogger(__name__)


# Fields that covey no longer has, which run folders hold at the value that is now fixed.
FORMER = {"beta1": 0.9, "beta2": 0.999, "critic_hidden": [], "held_out_digits": [], "judge_max_tokens": 256}
WORLDS: dict[type, str] = {RunConfig: "language models", ControlConfig: "control"}


class FieldHelp(NamedTuple):
    """The entry of one field in `--help`."""

    section: str  # '' at the top level, 'sampling', 'task (arithmetic)', 'rewards'
    name: str
    type: str  # in words
    default: str  # in TOML syntax; '' if unset
    text: str
    advanced: bool  # shown by `--help-all` only


def read_recipe(path: str | Path, overrides: Sequence[str] = (), *, labels: bool = False) -> Config:
    """Read and check a recipe, given by its path or its packaged name, with `--field value` overrides.

    A field is named by its dotted name (`--sampling.group_size 8`) or, if only one table has it, by its last part
    (`--group-size 8`); dashes and underscores are the same. Lists are written with commas: `--digits 1,2`.
    `--task NAME` changes the task and drops the recipe's fields of the other one. Recipe fields that depend on an
    override are adjusted (`covey.config.recipe`) and logged in one line. A recipe with an [environment]
    table is a ControlConfig, any other a RunConfig.

    Args:
        labels: the recipe is for labels, not for training (`validate`).

    Raises:
        ConfigError: one line that names the mistake and the fix.
    """
    tables = read_tables(path)
    written = copy.deepcopy(tables)
    given = apply_overrides(tables, split_overrides(overrides))
    config = config_from_dict(tables)
    if given:
        config = _with_dependents(written, config, given)
    validate(config, labels=labels)
    return config


def read_sft_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a recipe for supervised fine-tuning, as `read_recipe`; it needs no task.

    A field that another table has too is that of [sft]: `--epochs 3`.

    Raises:
        ConfigError: one line that names the mistake and the fix.
    """
    tables = read_tables(path)
    apply_overrides(tables, split_overrides(overrides), sft=True)
    config = config_from_dict(tables)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path} is a recipe for control, and {command('sft')} trains language models: name another")
    validate_sft(config)
    return config


def _with_dependents(written: dict[str, Any], config: Config, given: list[str]) -> Config:
    """Adjust the recipe fields that depend on fields given on the command line, and log them in one line."""
    try:
        recipe = config_from_dict(written)
    except ConfigError:  # the recipe is invalid, but not with the overrides
        return config
    if type(recipe) is not type(config):
        return config
    config, changes = follow(recipe, config, given)
    if changes:
        _log.info(changes)
    return config


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a recipe file, unchecked.

    Raises:
        ConfigError: if the file is missing, unreadable, or no TOML.
    """
    return read_toml(find_recipe(path))


def split_overrides(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """['--steps', '5', '--seed=1'] as [('steps', '5'), ('seed', '1')]. A value may begin with a minus."""
    pairs, position = [], 0
    while position < len(tokens):
        token = tokens[position]
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"{token!r} is neither a field nor its value: fields are given as --field value")
        name, equals, value = token[2:].partition("=")
        if not equals:
            position += 1
            if position == len(tokens):
                raise ConfigError(f"{token} needs a value")
            value = tokens[position]
        pairs.append((name, value))
        position += 1
    return pairs


def apply_overrides(tables: dict[str, Any], pairs: Sequence[tuple[str, str]], *, sft: bool = False) -> list[str]:
    """Write command-line values into a recipe's tables, in place; returns the dotted names of their fields.

    A name without its table is a field of [sft] only with `sft`, also if another table has it.

    Raises:
        ConfigError: for a field that does not exist, is ambiguous, or whose value cannot be read as its type.
    """
    root, given = root_of(tables), list[str]()
    sections = dict(sections_of(root))
    pairs = [(name.replace("-", "_"), value) for name, value in pairs]
    if root is RunConfig:
        task = _task_table(tables.setdefault("task", {}))
        for name, value in pairs:
            if name in ("task", "task.name"):
                given.append("task")
                if task.get("name") != value:
                    task.clear()
                    task["name"] = value
        sections["task"] = TASK_CONFIGS.get(str(task.get("name")))
    hints = {name: hint for name, hint in get_type_hints(root).items() if name not in (*sections, "rewards")}
    for section, kind in sections.items():
        hints |= {f"{section}.{name}": hint for name, hint in get_type_hints(kind).items()} if kind else {}
    for name, value in pairs:
        if root is RunConfig and name in ("task", "task.name"):
            continue
        dotted = _resolve(name, hints, root, tables, sft=sft)
        section, _, leaf = dotted.rpartition(".")
        table = tables.setdefault(section, {}) if section else tables
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table: write [{section}] and its fields below it")
        table[leaf] = parse_value(value, hints[dotted], f"--{name}".replace("_", "-"))
        given.append(dotted)
    return given


def _task_table(task: Any) -> dict[str, Any]:
    if not isinstance(task, dict):
        raise ConfigError('task must be a table: [task] with name = "arithmetic" below it')
    return task


def parse_value(text: str, hint: Any, where: str) -> Any:
    """Convert a command-line value to the type of its field; 'none' unsets a field that may be unset.

    Raises:
        ConfigError: if the text cannot be read as that type.
    """
    kind, is_list, optional = plain_type(hint)
    read: Any = (lambda word: {"true": True, "false": False}[word.lower()]) if kind is bool else kind
    if optional and text.lower() == "none":
        return None
    try:
        if is_list:
            return [read(part.strip()) for part in text.split(",")] if text else []
        return read(text)
    except (ValueError, KeyError):
        hint_text = " separated by commas" if is_list else ""
        raise ConfigError(f"{where} must be {describe_type(hint)}{hint_text} (is {text!r})") from None


def root_of(tables: dict[str, Any]) -> type:
    """The config class of a recipe's tables."""
    if tables.get("algorithm") == REWARD_MODEL_ALGORITHM:
        return RewardModelTraining  # of a run folder
    return ControlConfig if "environment" in tables else RunConfig


@cache
def sections_of(root: type) -> dict[str, Any]:
    """Name -> dataclass of the tables of a recipe, except [task] and [[rewards]]."""
    return {name: hint for name, hint in get_type_hints(root).items() if is_dataclass(hint)}


def _resolve(name: str, hints: dict[str, Any], root: type, tables: dict[str, Any], *, sft: bool) -> str:
    """The dotted name of the field that a command-line name refers to."""
    if name in hints:
        return name
    if f"{name}.id" in hints:  # --environment NAME, as --task NAME
        return f"{name}.id"
    if name == "sampler" and root is RunConfig:
        return "sampler.kind"
    shown = f"--{name.replace('_', '-')}"
    matches = [dotted for dotted in hints if dotted.rpartition(".")[2] == name]
    of_sft = [dotted for dotted in matches if dotted.startswith(f"{SFT_TABLE}.")]
    matches = of_sft if sft and of_sft else [dotted for dotted in matches if dotted not in of_sft]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{shown} is ambiguous: write --{' or --'.join(matches)}".replace("_", "-"))
    task = str(tables["task"].get("name")) if root is RunConfig else ""
    others = [other for other, kind in TASK_CONFIGS.items() if name in get_type_hints(kind)]
    if others and task in TASK_CONFIGS:
        raise ConfigError(f"{shown} belongs to the task {others[0]}, and this run's task is {task}")
    advice = _elsewhere(name, root)
    if not advice:
        words = [*hints, *(dotted.rpartition(".")[2] for dotted in hints)]
        near = difflib.get_close_matches(name, words, n=1, cutoff=0.6)
        advice = f" (did you mean --{near[0].replace('_', '-')}?)" if near else ""
    raise ConfigError(f"unknown field {shown}{advice}")


def _places(key: str, root: type) -> list[str]:
    """The tables of a kind of recipe that have a field of this name; '' is the top level."""
    sections = sections_of(root)
    top = [""] if key in get_type_hints(root) and key not in sections else []
    return [*top, *(section for section, kind in sections.items() if key in get_type_hints(kind))]


def _elsewhere(name: str, root: type) -> str:
    """Advice about a name that this kind of recipe does not have, but the other kind or another library; '' else."""
    table, dot, _ = name.partition(".")
    for kind, words in WORLDS.items() if table not in get_type_hints(root) else ():
        if table in get_type_hints(kind) or (not dot and {*_places(name, kind)} - {SFT_TABLE}):
            return f": it is for {words}; a table [environment] makes a recipe one for control"
    return _foreign(name, root)


def _foreign(name: str, root: type) -> str:
    """covey's name for another library's, or why there is none; '' if no other library has the name."""
    last = name.replace("-", "_").lower().rpartition(".")[2]
    found = foreign_names().get(last)
    if found is None:
        return ""
    whose, note = f": {found.libraries}: {last}", f"; {found.note}" if found.note else ""
    if not found.fields:
        return f"{whose} has no counterpart{note}"
    known = {f"{row.section.split()[0]}.{row.name}" if row.section else row.name for row in describe_fields(root)}
    here = " and ".join(field for field in found.fields if field in known)
    other = next(words for kind, words in WORLDS.items() if kind is not root)
    return f"{whose} is covey's {here or ' and '.join(found.fields) + f', in recipes for {other}'}{note}"


class ForeignName(NamedTuple):
    """covey's counterpart of another library's name.

    Attributes:
        libraries: the libraries that have the name.
        fields: dotted names of covey's fields for it.
        note: the difference from covey's field, or the reason why there is none.
    """

    libraries: str
    fields: tuple[str, ...]
    note: str


@cache
def foreign_names() -> dict[str, ForeignName]:
    """Name of another library -> covey's counterpart, from `foreign_names.toml`."""
    table = tomllib.loads(Path(__file__).with_name("foreign_names.toml").read_text(encoding="utf-8"))
    return {
        name: ForeignName(libraries, tuple(fields.split()), "".join(note))
        for name, (libraries, fields, *note) in table.items()
    }


def training_command(config: Config | RewardModelTraining) -> str:
    """The command that trains with this config: "train", "iterate", "sft" or "reward-model train"."""
    if isinstance(config, RewardModelTraining):
        return "reward-model train"
    if config.algorithm == SFT_ALGORITHM:
        return "sft"
    return "iterate" if isinstance(config, RunConfig) and config.iteration.steps else "train"


def config_from_dict(tables: dict[str, Any]) -> Config:
    """Build a config from the tables of a recipe, not yet checked by `validate`.

    Raises:
        ConfigError: for an unknown field, an unknown task, or a value in place of a table.
    """
    root: Any = root_of(tables)
    hints, sections = get_type_hints(root), sections_of(root)
    _refuse_unknown(tables, hints, "at the top level", root)
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if name == "task":
            values[name] = _read_task(_task_table(value))
        elif name == "rewards":
            if not isinstance(value, list):
                raise ConfigError("rewards must be a list of tables: write [[rewards]] with two brackets on each side")
            values[name] = tuple(_table(item, RewardConfig, "[[rewards]]", root) for item in value)
        elif name in sections:
            values[name] = _table(value, sections[name], f"[{name}]", root)
        else:
            values[name] = _normalise(value, hints[name], name)
    return root(**values)


def _read_task(table: dict[str, Any]) -> Any:
    """The config of the task that a [task] table names; None for an empty table."""
    if not table:
        return None
    name = table.get("name")
    if not isinstance(name, str) or name not in TASK_CONFIGS:
        wrong = f"unknown task {name!r}{did_you_mean(str(name), list(TASK_CONFIGS))}" if "name" in table else "no name"
        raise ConfigError(f"[task]: {wrong}; tasks are {', '.join(TASK_CONFIGS)}")
    rest = {key: value for key, value in table.items() if key != "name"}
    return _table(rest, TASK_CONFIGS[name], f"[task] of {name}", RunConfig)


def _table(table: Any, kind: type, where: str, root: type) -> Any:
    """One table of a recipe as its dataclass."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table with fields below it (is {table!r})")
    hints = get_type_hints(kind)
    table = _current(table)
    _refuse_unknown(table, hints, f"in {where}", root)
    return kind(**{name: _normalise(value, hints[name], f"{where} {name}") for name, value in table.items()})


def _current(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in FORMER or value != FORMER[name]}


def _normalise(value: Any, hint: Any, where: str) -> Any:
    """A TOML value as the config's type: a list becomes a tuple, an integer in a float field a float."""
    if isinstance(value, list):
        return tuple(value)
    if plain_type(hint)[0] is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} must be a finite number (is {value})") from None
    return value


def _refuse_unknown(table: dict[str, Any], hints: dict[str, Any], where: str, root: type) -> None:
    """Refuse the first unknown key, and name the table that it may belong to."""
    for key in table:
        if key in hints:
            continue
        places = _places(key, root)
        if places[:1] == [""]:
            advice = f" ('{key}' belongs at the top, before the first [table])"
        elif places and not (places == [SFT_TABLE] and _foreign(key, root)):
            advice = f" ('{key}' belongs in [{places[0]}])"
        else:
            advice = (
                _elsewhere(key, root) or did_you_mean(key, list(hints)) or did_you_mean(key, ["environment", "task"])
            )
        raise ConfigError(f"unknown field '{key}' {where}{advice}")


def describe_fields(root: type = RunConfig) -> list[FieldHelp]:
    """Every field that a recipe can set: the top level first, then the tasks, the rewards and the other tables."""
    rows = _describe(root, "")
    if root is RunConfig:
        for name, task in TASK_CONFIGS.items():
            rows += _describe(task, f"task ({name})")
        rows += _describe(RewardConfig, "rewards")
    for name, section in sections_of(root).items():
        rows += _describe(section, name)
    return rows


def _describe(kind: Any, section: str) -> list[FieldHelp]:
    hints = get_type_hints(kind)
    rows = []
    for item in fields(kind):
        if not section and item.name in (*sections_of(kind), "task", "rewards"):
            continue
        choices = item.metadata["choices"]
        in_words = describe_type(hints[item.name])
        default = "" if item.default is None else to_toml(plain(item.default))
        kind_text = " | ".join(choices) if choices and in_words == "text" else in_words
        rows.append(FieldHelp(section, item.name, kind_text, default, item.metadata["help"], item.metadata["advanced"]))
    return rows


PACKAGED_RECIPES = Path(__file__).parents[1] / "recipes"


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe given as a path or as the name of a packaged one (also `recipes/NAME.toml`).

    Raises:
        ConfigError: if there is neither; lists the packaged recipes.
    """
    path = user_path(recipe)
    name = path.stem if path.parent == Path("recipes") and path.suffix == ".toml" else str(recipe)
    packaged = PACKAGED_RECIPES / f"{name}.toml"
    if path.is_file():
        return path
    if name == Path(name).name and packaged.is_file():
        return packaged
    if path.is_dir():
        raise ConfigError(f"{recipe} is a folder; name a recipe file, or continue a run with: covey train --resume")
    if unusual_kind(path):
        raise ConfigError(f"{recipe} is {unusual_kind(path)}; name a recipe file")
    near = did_you_mean(name, packaged_recipes()) or did_you_mean_file(path)
    raise ConfigError(f"there is no recipe {recipe}{near}; covey recipes lists the packaged ones")


def packaged_recipes() -> list[str]:
    """The names of the recipes that come with covey, sorted."""
    return sorted(file.stem for file in PACKAGED_RECIPES.glob("*.toml"))


def describe_recipe(name: str) -> str:
    """The first clause of the comment that a packaged recipe begins with."""
    lines = (PACKAGED_RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"; |\. |\.$", comment)[0]


def config_to_dict(config: RunConfig | ControlConfig | RewardModelTraining) -> dict[str, Any]:
    """The config as nested dicts of plain values, ready for TOML or JSON; unset fields are left out.

    `config_from_dict` reads it back to an equal config.
    """
    tables: dict[str, Any] = plain(config)
    if isinstance(config, RunConfig) and config.task is not None:
        tables["task"] = {"name": task_name(config.task), **plain(config.task)}
    if isinstance(config, RunConfig):
        tables["rewards"] = [_reward(reward) for reward in config.rewards]
    return tables


def first_difference(first: Any, second: Any, where: str = "") -> str:
    """The dotted name of the first value in which two nested tables differ; '' if they are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        first = _current(first)
        for key in [*first, *(key for key in second if key not in first)]:
            name = f"{where}.{key}" if where else str(key)
            if key not in first or key not in second:
                return name
            if found := first_difference(first[key], second[key], name):
                return found
        return ""
    return "" if first == second else where


def task_name(task: Any) -> str:
    """The name of the task with this config, as in a recipe."""
    return next(name for name, kind in TASK_CONFIGS.items() if kind is type(task))


def _reward(reward: RewardConfig) -> dict[str, Any]:
    """A [[rewards]] table without the fields of other rewards, which have their defaults."""
    unused = {
        item.name
        for item in fields(reward)
        if not reward.uses(item.name) and getattr(reward, item.name) == item.default
    }
    return {name: value for name, value in plain(reward).items() if name not in unused}


def plain(value: Any) -> Any:
    """A value of a config as TOML and JSON have it: tables as dicts without unset fields, tuples as lists."""
    if is_dataclass(value):
        pairs = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {name: plain(item) for name, item in pairs if item is not None}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def config_to_toml(config: RunConfig | ControlConfig | RewardModelTraining) -> str:
    """The config as TOML that reads back equal."""
    return _toml(config_to_dict(config))


def changes_to_toml(config: RunConfig | ControlConfig) -> str:
    """The fields whose values are not their defaults, as TOML that reads back to an equal config."""
    tables, defaults = config_to_dict(config), config_to_dict(type(config)())
    if "task" in tables:
        defaults["task"] = plain(type(config.task)())  # type: ignore[union-attr]
    rewards = [_changed(reward, plain(RewardConfig())) for reward in tables.pop("rewards", ())]
    changed = {
        name: _changed(value, defaults.get(name, {})) if isinstance(value, dict) else value
        for name, value in _changed(tables, defaults).items()
    }
    return _toml({name: value for name, value in changed.items() if value != {}} | {"rewards": rewards})


def _changed(table: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in defaults or value != defaults[name]}


def _toml(tables: dict[str, Any]) -> str:
    top = {name: value for name, value in tables.items() if not isinstance(value, dict) and name != "rewards"}
    parts = [("", top), *((f"[{name}]", value) for name, value in tables.items() if isinstance(value, dict))]
    parts += [("[[rewards]]", reward) for reward in tables.get("rewards", ())]
    lines = (["", head, *(f"{key} = {to_toml(item)}" for key, item in table.items())] for head, table in parts)
    return "\n".join(line for part in lines for line in part)[2:] + "\n"


def write_config(config: RunConfig | ControlConfig | RewardModelTraining, path: Path) -> None:
    """Write the resolved config as TOML; `read_recipe` reads it back equal."""
    path.write_text(config_to_toml(config), encoding="utf-8")


def to_toml(value: Any) -> str:
    """A plain value in TOML. JSON's string escapes are TOML's; unprintable characters are escaped too."""
    if isinstance(value, list):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
