"""covey: reinforcement learning by comparing each attempt with its siblings (GRPO), or with a critic (PPO).

A language model, with a reward of your own:

>>> from covey import RunConfig, run
>>> from covey.llm.tasks import Arithmetic
>>> run(RunConfig(steps=20), task=Arithmetic(digits=(2,)), rewards=[my_reward])

An agent in a Gymnasium environment, which pays its own rewards:

>>> from covey import ControlConfig, EnvironmentConfig, RolloutsConfig
>>> run(ControlConfig(environment=EnvironmentConfig("CartPole-v1"), rollouts=RolloutsConfig(groups="reward_to_go")))

Either returns what the run's summary.json holds, or None where Ctrl-C stopped it; `covey.resume` then goes on with it.
"""

from typing import Any

from covey.config import (
    CheckpointConfig,
    ConfigError,
    ControlConfig,
    ControlEvaluationConfig,
    ControlLossConfig,
    ControlUpdateConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LossConfig,
    PolicyConfig,
    RewardConfig,
    RolloutsConfig,
    RunConfig,
    RunError,
    SamplingConfig,
    UpdateConfig,
)

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "ControlConfig",
    "ControlEvaluationConfig",
    "ControlLossConfig",
    "ControlUpdateConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LossConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutsConfig",
    "RunConfig",
    "RunError",
    "SamplingConfig",
    "UpdateConfig",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    """`run` and `resume` bring torch with them, which the command line must not wait for to report a mistake."""
    if name in ("run", "resume"):
        from covey.recipes import run as module

        return getattr(module, name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")
