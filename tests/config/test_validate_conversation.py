"""Conversations that cannot work are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    ConversationConfig,
    EvaluationConfig,
    LossConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
)
from covey.config.validate import validate
from helpers import guessing

FILE = str(Path(guessing.__file__))
GUESS = ConversationConfig(environment=f"{FILE}:Guess")
GOOD = RunConfig(task=ArithmeticConfig(digits=(1,)), conversation=GUESS)


def test_what_can_work_is_allowed():
    validate(GOOD)
    validate(replace(GOOD, algorithm="ppo", rewards=(RewardConfig(name="environment"), RewardConfig(name="numeric"))))
    validate(replace(GOOD, algorithm="dapo"))
    validate(replace(GOOD, conversation=ConversationConfig(environment="calculator")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turns": 3}, "conversation.turns is set, but conversation.environment is not"),
        ({"environment": "calculatr"}, "there is no environment 'calculatr' (did you mean 'calculator'?)"),
        ({"environment": f"{FILE}:Gues"}, "has no function 'Gues'"),
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
        ({"loss": LossConfig(credit="process"), "rewards": (RewardConfig(function=f"{FILE}:Guess", per_step=True),)},
         "loss.credit is 'process'"),
        ({"conversation": ConversationConfig(), "rewards": (RewardConfig(name="environment"),)},
         "the reward environment is that of a conversation's environment"),
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
