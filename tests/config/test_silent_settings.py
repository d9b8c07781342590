"""Settings that a run would not have used or survived are refused; lists from Python are as good as tuples."""

import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import covey.config as config_package
from covey.config import (
    ArithmeticConfig,
    ChatConfig,
    ConfigError,
    ConversationConfig,
    ReasoningGymConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
)
from covey.config.common import Table
from covey.config.rules import validate
from covey.experiment.llm import LLMBuilder
from covey.llm.tasks import Arithmetic
from covey.trainers.base import TrainerOptions
from helpers import guessing
from helpers.tiny_models import tiny_folder

ARITHMETIC = '[task]\nname = "arithmetic"\n'


def config_classes() -> list[Any]:
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith(f"{config_package.__name__}.")]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return sorted((kind for kind in found | {TrainerOptions} if is_dataclass(kind)), key=str)


def test_a_list_is_as_good_as_a_tuple_in_every_field_of_every_table() -> None:
    tried = 0
    for kind in config_classes():
        listed = [item.name for item in fields(kind) if isinstance(item.default, tuple) and "help" in item.metadata]
        assert not listed or issubclass(kind, Table), f"{kind.__name__} must be a Table, because it has {listed}"
        for name in listed:
            assert kind(**{name: ["a", "b"]}) == kind(**{name: ("a", "b")})
            assert hash(getattr(kind(**{name: ["a"]}), name))
            tried += 1
    assert tried > 30


def test_a_run_and_a_task_take_lists() -> None:
    validate(
        RunConfig(
            task=ArithmeticConfig(digits=[1, 2], operators=["+"]),  # type: ignore[arg-type]
            sampling=SamplingConfig(stop=["."]),  # type: ignore[arg-type]
            rewards=[RewardConfig(name="numeric"), RewardConfig(name="tags", tags=["a", "b"])],  # type: ignore[arg-type]
        )
    )
    assert Arithmetic(digits=[1]).draw(0, 1, 3) == Arithmetic(digits=(1,)).draw(0, 1, 3)
    with pytest.raises(ConfigError, match=r"sampling.stop must be a list of texts \(is \[1\]\)"):
        validate(RunConfig(task=ArithmeticConfig(), sampling=SamplingConfig(stop=[1])))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampling.group_size must be an integer"):
        validate(RunConfig(task=ArithmeticConfig(), sampling=SamplingConfig(group_size=[2])))  # type: ignore[arg-type]


DEEP = [
    "a = " + "[" * 4000,
    "a = " + "[" * 100 + "]" * 100,
    "a = " + "{b = " * 900 + "1" + "}" * 900,
    "a" + ".b" * 3000 + " = 1",
]


@pytest.mark.parametrize("option", DEEP, ids=range(len(DEEP)))
def test_options_that_are_nested_too_deeply_are_one_line(option: str) -> None:
    for changes in (
        {"conversation": ConversationConfig(environment="calculator", options=(option,))},
        {"chat": ChatConfig(template_options=(option,))},
        {"task": ReasoningGymConfig(options=(option,))},
    ):
        with pytest.raises(ConfigError, match=r"options has .*nested too deeply") as caught:
            validate(RunConfig(**{"task": ArithmeticConfig(), **changes}))
        assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_more_tokens_than_the_model_has_positions_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    few = {"steps": 1, "model": str(model), "task": ArithmeticConfig(digits=(1,))}
    with pytest.raises(ConfigError, match=r"a limit of 256 new tokens leaves no room .* 256 positions: lower max_new"):
        LLMBuilder(RunConfig(**few, sampling=SamplingConfig(max_new_tokens=256)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens and max_new_tokens = 250 exceed"):
        LLMBuilder(RunConfig(**few, sampling=SamplingConfig(max_new_tokens=250)))  # type: ignore[arg-type]
    LLMBuilder(RunConfig(**few)).close()  # type: ignore[arg-type]
    conversation = ConversationConfig(environment=f"{guessing.__file__}:Guess", total_tokens=300)
    with pytest.raises(ConfigError, match=r"a limit of 300 new tokens .*: lower conversation.total_tokens"):
        LLMBuilder(RunConfig(**few, conversation=conversation))  # type: ignore[arg-type]
