"""covey: reinforcement learning by comparing each attempt with its siblings, or with a critic.

>>> from covey import RunConfig, run
>>> from covey.llm.tasks import Arithmetic
>>> run(RunConfig(steps=20), task=Arithmetic(digits=(2,)), rewards=[my_reward])

>>> from covey import ControlConfig, EnvironmentConfig
>>> run(ControlConfig(environment=EnvironmentConfig("CartPole-v1")))
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
