"""The [task] tables of a recipe for a language model."""

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from covey.config.common import ConfigError, Fault, Table, config_field, table
from covey.config.files import read_assignments
from covey.config.hub import DATA, HubData
from covey.config.named_modules import check_data
from covey.config.rewards import BUILT_IN_REWARDS


@table(frozen=True)
class ArithmeticConfig(Table):
    digits: tuple[int, ...] = config_field((2,), "digits of an operand, drawn evenly from this list", min=1, max=12)
    operators: tuple[str, ...] = config_field(
        ("+", "-"), "drawn evenly from this list of + - *", choices=("+", "-", "*")
    )
    terms: tuple[int, ...] = config_field(
        (2,), "numbers in an expression, drawn evenly from this list", min=2, max=100, advanced=True
    )
    negative: bool = config_field(False, "allow answers below 0, such as that of 17 - 45", advanced=True)
    instruction: str = config_field("Reply with the number only.", "sentence added to the question", advanced=True)


@table(frozen=True)
class CountdownConfig(Table):
    numbers: int = config_field(3, "given numbers", min=2, max=6)
    largest: int = config_field(20, "largest given number", min=2, advanced=True)
    operators: tuple[str, ...] = config_field(
        ("+", "-", "*"), "operators that a solution may use, of + - * /", choices=("+", "-", "*", "/")
    )


@table(frozen=True)
class WordProblemsConfig(Table):
    steps: tuple[int, ...] = config_field(
        (2,), "reasoning steps of a problem, drawn evenly from this list (1 to 4)", min=1, max=4
    )
    largest: int = config_field(20, "largest number in a problem", min=2, advanced=True)


@table(frozen=True)
class RunningTotalConfig(Table):
    steps: tuple[int, ...] = config_field(
        (3,), "additions and subtractions, drawn evenly from this list", min=1, max=12
    )
    largest: int = config_field(5, "largest number in a problem", min=2, advanced=True)
    examples: int = config_field(3, "solved examples before the problem", min=0, max=3, advanced=True)


@table(frozen=True)
class CodeFunctionsConfig(Table):
    cases: int = config_field(6, "hidden cases of a function", min=2, max=100, advanced=True)
    steps: tuple[int, ...] = config_field(
        (1,), "operations that a function combines, drawn evenly from this list (1 or 2)", min=1, max=2
    )
    examples: int = config_field(2, "solved examples before the problem", min=0, max=2, advanced=True)


@table(frozen=True)
class GuessNumberConfig(Table):
    highest: int = config_field(100, "numbers are from 1 to this one", min=20, max=1_000_000)
    guesses: int = config_field(7, "guesses of a game", min=1, max=100)


@table(frozen=True)
class MazeConfig(Table):
    size: int = config_field(4, "a maze has this many rows and columns", min=3, max=20)
    moves: int = config_field(10, "moves of a walk; at least the size", min=3, max=200)


@table(frozen=True)
class LookupConfig(Table):
    documents: int = config_field(10, "texts of a row, one of which has the answer", min=1, max=200)
    instruction: str = config_field("Search the texts.", "sentence added to the question", advanced=True)


@table(frozen=True)
class EnvironmentTaskConfig(Table):
    instruction: str = config_field("", "text of the prompt before the first observation of the environment")
    held_out_fraction: float = config_field(
        0.1,
        "fraction of the prompts that an environment brings that is held out, if it brings no held-out ones",
        above=0,
        below=1,
        advanced=True,
    )


@table(frozen=True)
class HumanEvalConfig(Table):
    held_out_fraction: float = config_field(
        0.5,
        "fraction of the 164 problems that is held out for evaluation; the others are for training",
        above=0,
        below=1,
    )


@table(frozen=True)
class DatasetConfig(Table):
    path: str = config_field(
        "",
        "JSONL or Parquet file, a folder of the package datasets (save_to_disk), or a data set of the hub, such as "
        "hub:openai/gsm8k; each row has a 'prompt' (string or chat messages) and any other columns",
    )
    subset: str = config_field("", "of a data set of the hub: its configuration; empty: its only one, or 'default'")
    split: str = config_field("train", "of a data set of the hub: the split to train on")
    held_out_split: str = config_field("", "of a data set of the hub: the split to evaluate on, in place of a fraction")
    columns: tuple[str, ...] = config_field(
        (), "columns that get the names that rewards expect, each as NEW = OLD: question = problem, answer = solution"
    )
    held_out_path: str = config_field("", "such a file of held-out prompts; empty takes held_out_fraction of `path`")
    held_out_fraction: float = config_field(
        0.1,
        "fraction of the different prompts of `path` that is held out for evaluation, at least one",
        above=0,
        below=1,
    )
    overlap: str = config_field(
        "refuse",
        "a line of `path` whose prompt is also in `held_out_path`: refuse the run, or drop the line from training",
        choices=("refuse", "drop"),
        advanced=True,
    )

    @property
    def sources(self) -> tuple[str, str]:
        """The names of the training and of the held-out data, as `data_files` reads them; empty: there is none."""
        of_hub = HubData.read(self.path)
        if of_hub is None:
            return self.path, self.held_out_path
        held_out = of_hub._replace(subset=self.subset, split=self.held_out_split).name if self.held_out_split else ""
        return of_hub._replace(subset=self.subset, split=self.split).name, held_out or self.held_out_path

    @property
    def renamed(self) -> dict[str, str]:
        """The columns that are renamed, by their new names. Raises ConfigError for an entry that is not NEW = OLD."""
        found: dict[str, str] = {}
        for entry in self.columns:
            new, equals, old = (part.strip() for part in entry.partition("="))
            if not (new and equals and old) or new in found:
                raise ConfigError(f"task.columns has {entry!r:.80}: each is NEW = OLD, such as 'question = problem'")
            found[new] = old
        return found

    def faults(self) -> Iterator[Fault]:
        if not self.path.startswith(DATA):
            for item in fields(self):
                if item.name in ("subset", "split", "held_out_split") and getattr(self, item.name) != item.default:
                    yield Fault(f'task.{item.name} is for a data set of the hub, path = "hub:NAME": remove {item.name}')
        elif ":" in self.path.removeprefix(DATA):
            yield Fault(f"task.path: write {self.path!r:.80} as hub:NAME, and the rest in task.subset and task.split")
        for name in ("split", "held_out_split"):
            if re.search(r"[\[\]:+]", split := getattr(self, name)):
                yield Fault(f"task.{name} is {split!r:.80}: only a whole split is read, so name one, such as 'train'")
        if self.held_out_split and self.held_out_path:
            yield Fault("task.held_out_split and task.held_out_path are both set: give one of them")

    def check(self) -> None:
        if not self.path:
            raise ConfigError('the dataset task needs a file: set path = "prompts.jsonl" in [task]')
        training, held_out = self.sources
        check_data(training, "task.path")
        if held_out:
            check_data(held_out, "task.held_out_path")
        _ = self.renamed


@table(frozen=True)
class ReasoningGymConfig(Table):
    source_dataset: str = config_field(
        "chain_sum", "name of a data set of the package reasoning_gym, such as chain_sum or leg_counting"
    )
    options: tuple[str, ...] = config_field(
        (), 'options of the data set, each as in a TOML file: ["max_animals = 4", "min_animals = 2"]'
    )
    instruction: str = config_field(
        "Give the final answer between <answer> and </answer>.", "sentence added to the question", advanced=True
    )
    held_out_problems: int = config_field(
        256, "problems that are held out from training; evaluation.problems of them are used", min=1, max=100_000,
        advanced=True,
    )  # fmt: skip

    @property
    def process_bytes(self) -> int:
        """Measured memory of the process that generates the problems; it is as large as that of their reward."""
        return BUILT_IN_REWARDS["reasoning_gym"].resident_mib << 20

    @property
    def assigned_options(self) -> dict[str, Any]:
        """Name -> value of `options`. Raises ConfigError for an entry that is not a TOML assignment."""
        example = '"max_animals = 4" or \'level = "easy"\''
        return read_assignments(self.options, "task.options", example=example, taken=("seed", "size"))

    def check(self) -> None:
        _ = self.assigned_options
        if find_spec("reasoning_gym") is None:
            raise ConfigError('the task reasoning_gym needs a package: pip install "covey[reasoning-gym]"')


TASK_CONFIGS: dict[str, type] = {
    "arithmetic": ArithmeticConfig,
    "countdown": CountdownConfig,
    "word_problems": WordProblemsConfig,
    "running_total": RunningTotalConfig,
    "code_functions": CodeFunctionsConfig,
    "guess_number": GuessNumberConfig,
    "maze": MazeConfig,
    "lookup": LookupConfig,
    "environment": EnvironmentTaskConfig,
    "human_eval": HumanEvalConfig,
    "dataset": DatasetConfig,
    "reasoning_gym": ReasoningGymConfig,
}
