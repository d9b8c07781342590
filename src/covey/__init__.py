"""covey: reinforcement learning by comparing each attempt with its siblings (GRPO), or with a critic (PPO).

A language model, with a reward of your own:

>>> from covey import RunConfig, run
>>> from covey.llm.tasks import Arithmetic
>>> run(RunConfig(steps=20), task=Arithmetic(digits=(2,)), rewards=[my_reward])

With an environment of your own, which answers the model for several turns (docs/conversations.md):

>>> from covey import Conversation
>>> run(RunConfig(steps=20), task=rows, rewards=[my_reward], conversation=Conversation(MyEnvironment, turns=4))

An agent in a Gymnasium environment, which pays its own rewards:

>>> from covey import ControlConfig, EnvironmentConfig, RolloutsConfig
>>> run(ControlConfig(environment=EnvironmentConfig("CartPole-v1"), loss=ControlLossConfig(credit="reward_to_go")))

Either returns the content of summary.json, a table in a notebook, with the curves in `figure()`. It is None if
Ctrl-C stopped the run; `covey.resume` then continues it.

The classes of articles on GRPO and PPO, over the same parts (docs/articles.md):

>>> from covey import GRPOTrainer
>>> GRPOTrainer("smollm2-135m", reward_function=my_reward, prompts=["Name a fruit."]).train()
"""

import importlib
import sys

_START = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ["-m"] and not sys.flags.safe_path else ""
if _START.removeprefix("-m") == "covey":
    del sys.path[0]  # `python -m` puts the working folder there, whose files would be imported as modules

from typing import Any  # noqa: E402

from covey.config import (  # noqa: E402
    ArithmeticConfig,
    ChatConfig,
    CheckpointConfig,
    ClusterConfig,
    CodeFunctionsConfig,
    ConfigError,
    ControlConfig,
    ControlEvaluationConfig,
    ControlLossConfig,
    ControlUpdateConfig,
    Conversation,
    ConversationConfig,
    CountdownConfig,
    CriticConfig,
    DatasetConfig,
    EnvironmentConfig,
    EnvironmentTaskConfig,
    EvaluationConfig,
    GuessNumberConfig,
    HumanEvalConfig,
    IterationConfig,
    LookupConfig,
    LoRAConfig,
    LossConfig,
    MazeConfig,
    PolicyConfig,
    ProcessConfig,
    ReasoningGymConfig,
    RecordConfig,
    ReferenceConfig,
    ReplayConfig,
    RewardConfig,
    RolloutsConfig,
    RunConfig,
    RunError,
    RunningTotalConfig,
    SamplerConfig,
    SamplingConfig,
    SelectionConfig,
    TeacherConfig,
    UpdateConfig,
    WordProblemsConfig,
)  # fmt: skip
from covey.config.machine import wait_briefly  # noqa: E402

__all__ = [
    "ArithmeticConfig", "ChatConfig", "CheckpointConfig", "ClusterConfig", "CodeFunctionsConfig", "ConfigError",
    "ControlConfig", "ControlEvaluationConfig", "ControlLossConfig", "ControlUpdateConfig", "Conversation",
    "ConversationConfig", "CountdownConfig", "CriticConfig", "DatasetConfig", "EnvironmentConfig",
    "EnvironmentTaskConfig", "EvaluationConfig", "GRPOLoss", "GRPOTrainer", "GuessNumberConfig", "HumanEvalConfig",
    "IterationConfig", "LoRAConfig", "LookupConfig", "LossConfig", "MazeConfig", "Observer", "PPOLoss", "PPOTrainer",
    "PolicyConfig", "ProcessConfig", "ReasoningGymConfig", "RecordConfig", "ReferenceConfig", "ReplayConfig",
    "RewardConfig", "RolloutsConfig", "RunConfig", "RunError", "RunningTotalConfig", "SamplerConfig", "SamplingConfig",
    "SelectionConfig", "StepRecord", "TeacherConfig", "UpdateConfig", "WordProblemsConfig", "compute_gae",
    "evaluate_run", "resume", "run",
]  # fmt: skip


wait_briefly()

# They bring torch with them, which the command line must not wait for to report a mistake.
_LOADED_WHEN_ASKED_FOR = {
    "GRPOLoss": "covey.functional",
    "GRPOTrainer": "covey.trainers.grpo",
    "Observer": "covey.data",
    "PPOLoss": "covey.functional",
    "PPOTrainer": "covey.trainers.ppo",
    "StepRecord": "covey.data",
    "compute_gae": "covey.functional",
    "evaluate_run": "covey.experiment.control",
    "resume": "covey.experiment.run",
    "run": "covey.experiment.run",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_ASKED_FOR:
        return getattr(importlib.import_module(_LOADED_WHEN_ASKED_FOR[name]), name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")
