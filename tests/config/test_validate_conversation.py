"""Conversations that cannot work are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    ConversationConfig,
    EnvironmentTaskConfig,
    EvaluationConfig,
    LossConfig,
    ProcessConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
)
from covey.config.conversation import ADAPTERS, installed_environments
from covey.config.inputs import named_code
from covey.config.named_modules import entry_points_of
from covey.config.rules import validate
from helpers import guessing

FILE = str(Path(guessing.__file__))
GUESS = ConversationConfig(environment=f"{FILE}:Guess")
GOOD = RunConfig(task=ArithmeticConfig(digits=(1,)), conversation=GUESS)


def test_what_can_work_is_allowed():
    validate(GOOD)
    validate(replace(GOOD, algorithm="ppo", rewards=(RewardConfig(name="environment"), RewardConfig(name="numeric"))))
    validate(replace(GOOD, algorithm="dapo"))
    validate(replace(GOOD, conversation=ConversationConfig(environment="calculator")))
    validate(replace(GOOD, task=EnvironmentTaskConfig()))
    by_turn = replace(GOOD, loss=LossConfig(credit="process_by_step"))
    validate(by_turn)
    validate(replace(by_turn, rewards=(RewardConfig(name="environment"), RewardConfig(name="numeric"))))
    validate(replace(by_turn, rewards=(RewardConfig(function=f"{FILE}:by_turn", per_step=True),)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turns": 3}, "conversation.turns is set, but has no effect while conversation.environment is unset"),
        ({"environment": "calculatr"}, "there is no environment 'calculatr' (did you mean 'calculator'?)"),
        ({"environment": f"{FILE}:Gues"}, "has no class 'Gues' (did you mean 'Guess'?)"),
        ({"environment": "nothing.py:Guess"}, "conversation.environment: "),
        (
            {"environment": "calculator", "total_tokens": 63},
            "is above conversation.total_tokens (63)",
        ),
        ({"environment": "calculator", "options": ("x",)}, "conversation.options has 'x'"),
        ({"environment": "calculator", "turns": 0}, "conversation.turns must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        validate(replace(GOOD, conversation=ConversationConfig(**fields)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evaluation": EvaluationConfig(token_limits=(8, 16))}, "evaluation.token_limits is set"),
        ({"loss": LossConfig(credit="process"), "rewards": (RewardConfig(name="numeric"),)},
         "loss.credit is 'process', but no reward is paid by turn: use an environment with step(message)"),
        ({"loss": LossConfig(credit="process"), "algorithm": "ppo"}, "loss.credit is set, but not used with ppo"),
        ({"process": ProcessConfig(boundary="sentence")}, "process.boundary is set, which conversations"),
        ({"process": ProcessConfig(boundary="line")}, "process.boundary is set, which conversations"),
        ({"conversation": ConversationConfig(), "rewards": (RewardConfig(name="environment"),)},
         "the reward environment is for conversations"),
        ({"sampling": SamplingConfig(overlong_tokens=513)}, "set it to at most 512"),
    ],
)  # fmt: skip
def test_what_reads_completions_is_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        validate(replace(GOOD, **fields))
    assert message in str(refused.value)


def test_the_limit_of_a_rollout():
    assert GOOD.rollout_limit == 512
    assert replace(GOOD, conversation=ConversationConfig()).rollout_limit == 64
    assert replace(GOOD, algorithm="dapo").overlong_tokens == round(512 / 5)


def test_the_task_environment_needs_a_conversation():
    with pytest.raises(ConfigError, match=r"the task environment .*: set conversation\.environment"):
        validate(RunConfig(task=EnvironmentTaskConfig()))


def test_an_adapter_without_its_package_is_refused(monkeypatch):
    adapter = replace(GOOD, conversation=ConversationConfig(environment="gymnasium"))
    validate(adapter)
    for package, installed in (("no_such_package", installed_environments()), ("gymnasium", {})):
        monkeypatch.setitem(ADAPTERS, "gymnasium", package)
        monkeypatch.setattr("covey.config.conversation.installed_environments", lambda found=installed: found)
        with pytest.raises(
            ConfigError, match=r'the environment gymnasium needs a package: pip install "covey\[gymnasium\]"'
        ):
            validate(adapter)


def test_other_packages_have_environments_by_entry_points(monkeypatch, tmp_path):
    """A folder that is not one of installed packages, such as the working folder, cannot claim a name."""
    for folder, name in (("site-packages", "cards"), ("work", "calculator_2")):
        made = tmp_path / folder / f"{name}-1.0.dist-info"
        made.mkdir(parents=True)
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: covey\n")
        (made / "entry_points.txt").write_text(f"[covey.environments]\n{name} = {name}_module:Game\n")
        (tmp_path / folder / f"{name}_module.py").touch()
        (made / "RECORD").write_text(f"{name}_module.py,,\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    entry_points_of.cache_clear()
    try:
        cards = replace(GOOD, conversation=ConversationConfig(environment="cards"))
        validate(cards)
        assert cards.conversation.source == "cards_module:Game"
        assert named_code(cards) == [f"conversation.environment runs Game of {tmp_path}/site-packages/cards_module.py"]
        with pytest.raises(ConfigError, match=r"there is no environment 'calculator_2' .*, verifiers, cards, and"):
            validate(replace(GOOD, conversation=ConversationConfig(environment="calculator_2")))
    finally:
        entry_points_of.cache_clear()
