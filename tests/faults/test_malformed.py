"""Malformed inputs of every kind: one line that names the mistake, exit code 2, nothing left behind, within seconds.

Each is a command in a fork of one process that has imported everything (`helpers.forks`).
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from covey.llm.model.gguf import converted, embedded_file
from helpers import damage
from helpers import malformed_tables as tables
from helpers.forks import LIGHT, Forks
from helpers.malformed import Input, cases, faults
from helpers.tiny_models import tiny_folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    converted(embedded_file())  # once, and not in every fork
    with Forks() as started:
        yield started


def check(forks: Forks, inputs: Sequence[Input], folder: Path) -> None:
    """Every input is answered as it should be."""
    wrong = {
        given.name: (found, outcome.errors[-400:])
        for given, outcome in zip(inputs, forks.run(list(cases(inputs, folder))), strict=True)
        if (found := faults(given, outcome))
    }
    assert not wrong, f"{len(wrong)} of {len(inputs)}"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("table", [tables.data, tables.reward_files])
def test_mistakes_in_data_and_reward_files_are_told_before_torch_is_loaded(table, tmp_path: Path) -> None:
    given = [one for one in table() if not one.accepted]
    given += [replace(one, words=("train", *one.words[1:])) for one in given]
    with Forks(LIGHT) as light:
        outcomes = light.run(list(cases(given, tmp_path)))
    wrong = {
        one.name: (found, outcome.modules, outcome.errors[-400:])
        for one, outcome in zip(given, outcomes, strict=True)
        if (found := faults(one, outcome)) or outcome.modules
    }
    assert not wrong


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def of(model: Path, inputs: Iterable[Input]) -> list[Input]:
    """Recipes with this model, because `covey check` loads the model of a recipe in which it has found no fault, and
    the default one takes ten times as long."""
    return [replace(one, words=(*one.words, "--model", str(model))) for one in inputs]


TABLES = [tables.recipes, tables.failing_rewards, tables.commands]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_malformed_inputs_are_one_line_each(table, forks: Forks, tiny: Path, tmp_path: Path) -> None:
    inputs = list(table())
    recipes = [one for one in inputs if one.accepted and not one.needs_model]
    check(forks, [*(one for one in inputs if one not in recipes), *of(tiny, recipes)], tmp_path)


@pytest.mark.slow
def test_patterns_of_every_kind_are_answered(forks: Forks, tiny: Path, tmp_path: Path) -> None:
    check(forks, of(tiny, tables.patterns()), tmp_path)


@pytest.mark.slow
def test_names_that_are_no_path_are_one_line_each_wherever_one_is_named(forks: Forks, tmp_path: Path) -> None:
    check(forks, list(tables.paths()), tmp_path)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> damage.Samples:
    return damage.make_samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.slow
@pytest.mark.parametrize("generator", damage.GENERATORS)
def test_damaged_inputs_are_one_line_each(
    generator: str, samples: damage.Samples, forks: Forks, tiny: Path, tmp_path: Path
) -> None:
    given = list(damage.GENERATORS[generator](samples, random.Random(20), 25))
    check(forks, of(tiny, given) if generator == "data" else given, tmp_path)


@pytest.mark.slow
def test_what_is_whole_or_can_be_read_is_accepted(
    samples: damage.Samples, forks: Forks, tiny: Path, tmp_path: Path
) -> None:
    given = [*damage.undamaged(samples), *of(tiny, (one for one in tables.data() if one.accepted))]
    outcomes = forks.run(list(cases(given, tmp_path)))
    assert {
        case.name: (outcome.code, outcome.errors) for case, outcome in zip(given, outcomes, strict=True) if outcome.code
    } == {}
