"""Environments that a script hands to `covey.run`: in every form, resumed, and mistakes in one line."""

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import covey
from covey import (
    CheckpointConfig,
    ConfigError,
    ControlConfig,
    Conversation,
    ConversationConfig,
    EvaluationConfig,
    RunConfig,
    RunError,
    SamplingConfig,
    UpdateConfig,
)
from covey.config.recipe import config_from_dict, read_tables
from covey.config.rules import validate
from covey.llm.conversation.processes import copied_environment
from helpers import guessing
from helpers.run_helpers import assert_same_run
from helpers.tiny_models import tiny_folder

ROWS = [{"prompt": f"{n} + {n} =", "seed": n} for n in range(6)]
SMALL = SamplingConfig(prompts_per_step=2, group_size=3, max_new_tokens=5)
FILE = f"{Path(guessing.__file__)}"


class Comparing:
    """Has a tool with type hints in quotes."""

    def higher(self, than: int, where: Literal["up", "down"]) -> str:
        """Compare.

        Args:
            than: a number
            where: direction
        """
        return f"{than} {where}"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number
    """
    return 2 * number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    tiny_folder(folder / "model")
    return folder


def config_of(folder: Path, run_dir: Path, steps: int = 1, **fields: Any) -> RunConfig:
    return RunConfig(
        model=str(folder / "model"), run_dir=str(run_dir), steps=steps, precision="fp32", threads=1, device="cpu",
        sampling=SMALL, evaluation=EvaluationConfig(problems=2), update=UpdateConfig(learning_rate=1e-3),
        checkpoint=CheckpointConfig(every=1), **fields,
    )  # fmt: skip


def own_class(base: type = guessing.Guess) -> type:
    """A class that only this program has, as that of a notebook."""

    class Own(base):  # type: ignore[misc, valid-type]
        pass

    return Own


@pytest.mark.slow
def test_every_form_of_an_environment_trains_the_same(folder: Path, tmp_path: Path) -> None:
    """Also one that draws from `random`, because its process is seeded."""
    limits: dict[str, Any] = {"turns": 3, "total_tokens": 60}
    forms: dict[str, Conversation | None] = {
        "config": None,
        "class": Conversation(own_class(), **limits),
        "function": Conversation(lambda: guessing.Guess(), **limits),
    }
    seen = {}
    for name, conversation in forms.items():
        config = config_of(folder, tmp_path / name)
        if conversation is None:
            config = replace(config, conversation=ConversationConfig(f"{FILE}:Guess", **limits))
        covey.run(config, task=ROWS, conversation=conversation)
        seen[name] = (tmp_path / name / "rollouts" / "step_000001.jsonl").read_text()
    assert seen["class"] == seen["function"] == seen["config"]
    assert "higher" in seen["config"]
    saved = config_from_dict(read_tables(tmp_path / "class" / "config.toml"))
    assert isinstance(saved, RunConfig)
    assert saved.conversation == ConversationConfig("Own (given in Python)", **limits)


class StopAfter:
    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, record: Any) -> None:
        if record.step == self.step:
            raise ValueError("enough")


@pytest.mark.slow
def test_a_run_with_a_class_is_resumed_with_the_same_conversation(folder: Path, tmp_path: Path) -> None:
    conversation = Conversation(own_class(guessing.Steady), turns=2, total_tokens=40)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    covey.run(config_of(folder, whole, 2), task=ROWS, conversation=conversation)
    with pytest.raises(RunError, match=r"covey.resume\(.*, task=task, conversation=conversation, observers=observers"):
        covey.run(config_of(folder, stopped, 2), task=ROWS, conversation=conversation, observers=StopAfter(1))
    for given, told in (
        (None, "the environment Own of this run was given in Python: call covey.run or covey.resume with "),
        (
            Conversation(own_class(), turns=3, total_tokens=40),
            "conversation.turns was 2 when the run began and is ",
        ),
        (Conversation(guessing.Steady, turns=2, total_tokens=40), 'conversation.environment was "Own (given in'),
    ):
        with pytest.raises(ConfigError) as caught:
            covey.resume(stopped, task=ROWS, conversation=given)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="the environment Own of this run was given in Python"):
        validate(config_from_dict(read_tables(stopped / "config.toml")), own_task=True)  # as every command does
    covey.resume(stopped, task=ROWS, conversation=conversation)
    assert_same_run(stopped, whole)


class Undescribed:
    def roll(self, sides):
        return sides


def holding_a_lock() -> type:
    lock = threading.Lock()

    class Holding(guessing.Guess):
        def step(self, message: str) -> Any:
            with lock:
                return super().step(message)

    return Holding


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("conversation", "told"),
    [
        (guessing.Guess, "conversation is Guess: give covey.Conversation(Guess)"),
        (Conversation(), "the conversation has no environment"),
        (Conversation(guessing.Guess()), "is an object of the class Guess: give the class"),
        (Conversation(5), "is an object of the class int"),
        (Conversation(guessing.Nothing), "Nothing is not an environment: it needs a method step"),
        (Conversation(lambda: guessing.Nothing()), "Nothing is not an environment"),
        (Conversation(lambda: 1 / 0), "ZeroDivisionError"),
        (Conversation(guessing.Sized), "'size'"),
        (Conversation(Undescribed), "the tool Undescribed.roll cannot be described to a model"),
        (Conversation([]), "an empty list of tools"),
        (Conversation([double, 5]), "the tools of a conversation are functions, and one is 5"),
        (Conversation([double, double]), "two tools of a conversation have the same name: double, double"),
        (Conversation([lambda number: number]), "a tool of a conversation has the name '<lambda>'"),
        (Conversation(holding_a_lock()), "Holding cannot be copied into its process (TypeError: cannot pickle"),
        (Conversation(guessing.Guess, turns=0), "conversation.turns must be at least 1"),
        (Conversation(guessing.Guess, total_tokens=4), "is above conversation.total_tokens (4)"),
        (Conversation(guessing.Guess, options=("x",)), "conversation.options has 'x'"),
        (Conversation(guessing.Guess, options=("size = 3",)), "got an unexpected keyword argument 'size'"),
        (Conversation("calculatr"), "did you mean 'calculator'?"),
    ],
)  # fmt: skip
def test_an_environment_that_is_none_is_one_line(tmp_path: Path, conversation: Any, told: str) -> None:
    config = RunConfig(run_dir=str(tmp_path / "run"), sampling=SMALL)
    with pytest.raises(ConfigError) as caught:
        covey.run(config, task=ROWS, rewards=["environment"], conversation=conversation)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists(), "before the model is loaded"


def test_an_environment_in_another_place_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"given to run\(config, conversation=covey.Conversation"):
        covey.run(RunConfig(conversation=Conversation(guessing.Guess)), task=ROWS)
    with pytest.raises(ConfigError, match="a run on a Gymnasium environment has no conversations"):
        covey.run(ControlConfig(), conversation=Conversation(guessing.Guess))
    with pytest.raises(ConfigError, match="the config is of type str"):
        covey.run("recipe", conversation=Conversation(guessing.Guess))


def opened(copied: bytes) -> Any:
    return pickle.loads(copied)


def test_tools_with_hints_in_quotes_are_described() -> None:
    """As of a script with `from __future__ import annotations`, whose names the copy does not have."""
    _, [tool] = opened(copied_environment(own_class(Comparing), "Own"))
    assert tool.name == "higher"
    assert tool.properties["where"]["enum"] == ["up", "down"]


def test_functions_are_tools() -> None:
    make, [tool] = opened(copied_environment([double], "[double]"))
    assert tool.name == "double"
    assert make().double(4) == 8
