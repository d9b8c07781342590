"""Configs of runs: frozen dataclasses and the rules that their values obey.

`RunConfig` is a run on a language model, `ControlConfig` one on a Gymnasium environment. `covey.config.recipe` fills
them from TOML and the command line, `covey.config.rules` refuses what cannot work. Importing this package loads
neither torch nor transformers, so that a mistake is reported at once. The second argument of `config_field` is the
field's `--help`.
"""

from covey.config.common import (
    ALGORITHM_NAMES,
    CRITIC_FREE,
    TRACKERS,
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    LossBase,
    MachineError,
    ReplayConfig,
    RunBase,
    RunError,
    SamplerLost,
    UpdateBase,
    config_field,
)
from covey.config.control import (
    ControlConfig,
    ControlEvaluationConfig,
    ControlLossConfig,
    ControlUpdateConfig,
    EnvironmentConfig,
    PolicyConfig,
    RolloutsConfig,
)
from covey.config.conversation import Conversation, ConversationConfig
from covey.config.llm import (
    ChatConfig,
    CriticConfig,
    EvaluationConfig,
    IterationConfig,
    LossConfig,
    ProcessConfig,
    RecordConfig,
    ReferenceConfig,
    RunConfig,
    SamplingConfig,
    SelectionConfig,
    TeacherConfig,
    UpdateConfig,
)
from covey.config.model_sources import EMBEDDED_MODELS, LoRAConfig
from covey.config.rewards import RewardConfig
from covey.config.servers import SamplerConfig
from covey.config.sft import SFTConfig
from covey.config.tasks import (
    TASK_CONFIGS,
    ArithmeticConfig,
    CodeFunctionsConfig,
    CountdownConfig,
    DatasetConfig,
    EnvironmentTaskConfig,
    GuessNumberConfig,
    HumanEvalConfig,
    LookupConfig,
    MazeConfig,
    ReasoningGymConfig,
    RunningTotalConfig,
    WordProblemsConfig,
)

__all__ = [
    "ALGORITHM_NAMES", "CRITIC_FREE", "EMBEDDED_MODELS", "TASK_CONFIGS", "TRACKERS", "ArithmeticConfig", "ChatConfig",
    "CheckpointConfig", "ClusterConfig", "CodeFunctionsConfig", "ConfigError", "ControlConfig",
    "ControlEvaluationConfig", "ControlLossConfig", "ControlUpdateConfig", "Conversation", "ConversationConfig",
    "CountdownConfig", "CriticConfig", "DatasetConfig", "EnvironmentConfig", "EnvironmentTaskConfig",
    "EvaluationConfig", "GuessNumberConfig", "HumanEvalConfig", "IterationConfig", "LoRAConfig", "LookupConfig",
    "LossBase", "LossConfig", "MachineError", "MazeConfig", "PolicyConfig", "ProcessConfig", "ReasoningGymConfig",
    "RecordConfig", "ReferenceConfig", "ReplayConfig", "RewardConfig", "RolloutsConfig", "RunBase", "RunConfig",
    "RunError", "RunningTotalConfig", "SFTConfig", "SamplerConfig", "SamplerLost", "SamplingConfig", "SelectionConfig",
    "TeacherConfig", "UpdateBase", "UpdateConfig", "WordProblemsConfig", "config_field",
]  # fmt: skip
