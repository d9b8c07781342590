"""Supervised trainings: the [sft] table of `covey sft`, and the config of `covey reward-model train`; reward models by
name.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any

from covey.config.common import (
    TRACKERS,
    ClusterConfig,
    ConfigError,
    Table,
    check_shards,
    check_trackers,
    config_field,
    restarts_field,
    table,
)
from covey.config.fields import check_fields, command
from covey.config.files import read_json, user_path
from covey.config.hub import HubData
from covey.config.machine import DEVICES
from covey.config.model_sources import (
    CONFIG_FILE,
    MODEL_CONFIG_FILE,
    MODEL_FOLDER,
    ModelKind,
    ModelSource,
    locate_model,
)
from covey.config.named_modules import check_data, check_function_name

SFT_ALGORITHM = "sft"  # the algorithm in the config.toml of a run of `covey sft`
SFT_TABLE = "sft"
SAMPLES = "samples"  # sft.data: the model's own samples
EXAMPLES_BY_NAME = ("calculator", SAMPLES)  # examples that are made, by their name in sft.data


def is_function(data: str) -> bool:
    """True if the examples are those of a Python function, `file.py:function` or `module:function`."""
    return ":" in data and HubData.read(data) is None and not user_path(data, "sft.data: ").exists()


def is_run(data: str) -> bool:
    """True if the examples are rollouts of a run, named by its folder."""
    path = user_path(data, "sft.data: ")
    return path.is_dir() and (path / CONFIG_FILE).is_file()


def is_sampled(data: str) -> bool:
    """True if the examples are the model's own samples, of this training or of a run."""
    return data == SAMPLES or is_run(data)


@table(frozen=True)
class SupervisedBase(Table):
    """Fields that trainings on given examples share."""

    epochs: int = config_field(1, "passes over the examples", min=1, max=1000)
    batch_size: int = config_field(32, "examples of an optimizer step", min=1)
    learning_rate: float = config_field(2e-5, "peak learning rate of AdamW", above=0)
    schedule: str = config_field("linear", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = config_field(0, "optimizer steps over which the learning rate rises from 0", min=0)
    patience: int = config_field(
        0, "end the training after this number of epochs without a lower held-out loss; 0: never", min=0
    )
    max_tokens: int = config_field(0, "longest prompt with its completion, in tokens; 0: the model's limit", min=0)
    long_examples: str = config_field(
        "refuse", "an example that is longer: refuse the data, or drop the example", choices=("refuse", "drop")
    )


@table(frozen=True)
class SFTConfig(SupervisedBase):
    data: str = config_field(
        "",
        "covey sft: examples: a JSONL, Parquet or Arrow file, file.py:function (your function returns the rows), "
        "calculator (conversations that call a calculator), samples (the model's own that earn enough reward), or the "
        "folder of a run with record.tokens (its rollouts that did)",
    )
    count: int = config_field(200, "examples of calculator; prompts of samples", min=2, max=1_000_000)
    samples_per_prompt: int = config_field(8, "samples of each prompt, for data = samples", min=1, max=100_000)
    min_reward: float = config_field(1.0, "least reward of a sample or rollout that becomes an example")
    keep: str = config_field(
        "best",
        "which samples of a prompt become examples: the best one, or all different ones with enough reward",
        choices=("best", "all"),
    )
    prompt_column: str = config_field("prompt", "column of the prompts: texts or chat messages", advanced=True)
    completion_column: str = config_field(
        "completion", "column of the completions: texts, or the chat messages after the prompt", advanced=True
    )
    messages_column: str = config_field("messages", "column of whole conversations, as chat messages", advanced=True)
    tools_column: str = config_field(
        "tools", "column of the tools' JSON schemas, for the chat template; rows may leave it out", advanced=True
    )
    held_out_path: str = config_field("", "file of held-out examples; empty: a fraction of the examples is held out")
    held_out_fraction: float = config_field(
        0.1, "fraction of the different prompts that is held out, at least one; 0: none", min=0, below=1
    )
    overlap: str = config_field(
        "refuse",
        "an example whose prompt is in sft.held_out_path too: refuse the data, or drop the example from training",
        choices=("refuse", "drop"),
        advanced=True,
    )

    def check_source(self) -> None:
        """Refuse examples that do not exist, and columns without a name of their own.

        Raises:
            ConfigError: one line that names the field and the remedy.
        """
        names = ("prompt_column", "completion_column", "messages_column", "tools_column")
        columns = [getattr(self, name) for name in names]
        for name, column in zip(names, columns, strict=True):
            if not column:
                raise ConfigError(f"sft.{name} is empty: name a column")
            if columns.count(column) > 1:
                raise ConfigError(f"sft.{name} is {column!r}, which another field of [sft] names too: name two columns")
        if not self.data:
            raise ConfigError(
                'no examples: set data = "examples.jsonl" in [sft], or give --data; the rows have a prompt and a '
                "completion, or messages"
            )
        if is_sampled(self.data) and self.held_out_path:
            raise ConfigError(
                "sft.held_out_path is set, and of samples a fraction is held out: remove it (sft.held_out_fraction)"
            )
        if is_function(self.data):
            check_function_name(self.data, "sft.data")
        elif self.data not in EXAMPLES_BY_NAME and not is_run(self.data):
            check_data(self.data, "sft.data", EXAMPLES_BY_NAME)


REWARD_MODEL_FILE = "covey_reward_model.json"  # beside config.json: what covey knows of a reward model that it trained
TRAINING_FILE = "reward_model.json"  # in run folders of older versions: how `covey reward-model train` was called
DEFAULT_SEPARATOR = "\n"
REWARD_MODEL_ALGORITHM = "reward_model"  # the algorithm in the config.toml of a run of `covey reward-model train`


class RewardModelKind(StrEnum):
    """What a reward model scores; the value is the ending of its class in transformers."""

    OUTCOME = "ForSequenceClassification"  # one score for a completion
    PROCESS = "ForTokenClassification"  # one score for each step

    @property
    def noun(self) -> str:
        """'outcome reward model' or 'process reward model'."""
        return f"{self.name.lower()} reward model"

    @property
    def with_article(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun.startswith('o') else 'a'} {self.noun}"


@table(frozen=True)
class RewardModelConfig(SupervisedBase):
    """Training of a reward model."""

    model: str = config_field(
        "smollm2-135m",
        "model that training begins with: a language model, whose output layer is replaced by a score, or a reward "
        "model; names as in a recipe",
    )
    weight_decay: float = config_field(0.0, "AdamW's decoupled weight decay", min=0)
    max_grad_norm: float = config_field(1.0, "largest norm of the gradient; a longer one is scaled down", above=0)
    center: float = config_field(
        0.0,
        "preference pairs: weight of the squared sum of both scores, which keeps scores near 0; 0.01 is usual",
        min=0,
    )
    grade_loss: str = config_field(
        "auto",
        "grades: cross_entropy (a grade is a probability) or squared_error; auto: cross_entropy if all are 0 or 1",
        choices=("auto", "cross_entropy", "squared_error"),
    )
    grade_column: str = config_field("grade", "column of the grades")
    held_out_fraction: float = config_field(
        0.1, "fraction of the different prompts that is held out for evaluation, at least one", above=0, below=1
    )
    overlap: str = config_field(
        "refuse",
        "an example whose prompt is in the file of held-out examples too: refuse the data, or drop the example from "
        "training",
        choices=("refuse", "drop"),
    )
    step_separator: str = config_field(DEFAULT_SEPARATOR, "text after each step, at whose last token its score is read")
    microbatch_tokens: int = config_field(
        4096, "tokens in one backward pass; a smaller number takes less memory, with the same gradient", min=1
    )
    checkpoint_every: int = config_field(50, "optimizer steps between checkpoints", min=1)
    seed: int = config_field(0, "seed of the order of the examples", min=0, max=2**32 - 1)
    device: str = config_field("auto", "device", choices=DEVICES)
    precision: str = config_field(
        "auto", "precision of matrix products; bf16 keeps fp32 master weights", choices=("auto", "bf16", "fp32")
    )
    threads: int = config_field(0, "CPU threads; 0: one per core", min=0)


@table(frozen=True)
class RewardModelTraining(ClusterConfig, RewardModelConfig):
    """The config of a run of `covey reward-model train`; the fields of [cluster] are among its own."""

    data: str = config_field("", "file of the training data")
    held_out: str = config_field("", "file of the held-out examples; empty: a fraction of the data is held out")
    run_dir: str = config_field("", "folder of the run; empty: runs/reward_model-<number>")
    checkpoint_keep: int = config_field(2, "checkpoints kept, at least 2", min=2)
    checkpoint_best: bool = config_field(False, "also keep the checkpoint with the lowest held-out loss, RUN@best")
    trackers: tuple[str, ...] = config_field(
        (), "experiment trackers that receive the metrics as well; each needs its extra", choices=TRACKERS
    )
    algorithm: str = config_field(REWARD_MODEL_ALGORITHM, "always reward_model", choices=(REWARD_MODEL_ALGORITHM,))
    steps: int = config_field(0, "optimizer steps, which follow from the data", min=0)
    schedule_restarts: tuple[int, ...] = restarts_field()


def check_training(config: RewardModelConfig) -> None:
    """Refuse values that cannot work, before anything heavy is loaded.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    check_fields(config)
    if isinstance(config, RewardModelTraining):
        check_trackers(config.trackers)
        check_shards(config.shards, config.batch_size, "batch_size")
    if not config.step_separator:
        raise ConfigError("step_separator is empty, but a step's score is read at its last token: give a text")
    if not config.grade_column or config.grade_column in ("prompt", "completion"):
        raise ConfigError(f"grade_column is {config.grade_column!r}: name the column that holds the grades")
    locate_reward_model(config.model)


def locate_reward_model(name: str) -> ModelSource:
    """The source of a reward model, or of a language model, by its name.

    Args:
        name: as in a recipe; the folder of a run of `covey reward-model train` names the model in it.

    Raises:
        ConfigError: if there is no such model, or that run is not finished.
    """
    folder = user_path(name, "model: ")
    if (folder / TRAINING_FILE).is_file() and not (folder / MODEL_CONFIG_FILE).is_file():
        if not (folder / MODEL_FOLDER / MODEL_CONFIG_FILE).is_file():
            raise ConfigError(
                f"model: the training of the reward model in {name} is not finished: continue it with "
                f"{command('reward-model', 'train', '--resume', name)}"
            )
        folder = folder / MODEL_FOLDER
        return ModelSource(ModelKind.FOLDER, str(folder.resolve()))
    return locate_model(name)


def kind_of(source: ModelSource) -> RewardModelKind | None:
    """The kind of a reward model; None for a language model, and for a hub's model that is not in a folder.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    if source.kind is not ModelKind.FOLDER:
        return None
    return kind_of_class(read_json(Path(source.name) / MODEL_CONFIG_FILE))


def kind_of_class(model_config: Any) -> RewardModelKind | None:
    """The kind of the reward model with this `config.json`; None for any other model."""
    names = _classes_of(model_config)
    return next((kind for kind in RewardModelKind for name in names if name.endswith(kind.value)), None)


def _classes_of(model_config: Any) -> list[str]:
    """The classes of transformers that a `config.json` names."""
    listed = model_config.get("architectures") if isinstance(model_config, dict) else None
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def no_reward_model(name: str, model_config: Any = None) -> str:
    """Message for a model of another kind; `model_config` is the content of its `config.json`."""
    classes = _classes_of(model_config)
    if not classes or any(one.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for one in classes):
        train = command("reward-model", "train", "DATA.jsonl", "--model", name)
        return f"model {name} is a language model, no reward model: train one with {train}"
    return (
        f"model {name} has the class {classes[0]}, which is not a sequence or token classifier of transformers: choose "
        f"another reward model, or train one with {command('reward-model', 'train', 'DATA.jsonl')}"
    )


def reward_model_fault(name: str, *, per_step: bool) -> str:
    """The reason why a model cannot be a reward, as far as it is known without a download; "" if there is none.

    Raises:
        ConfigError: if there is no such model.
    """
    source = locate_reward_model(name)
    kind = kind_of(source)
    if kind is None and source.kind is not ModelKind.HUB:
        is_folder = source.kind is ModelKind.FOLDER
        return no_reward_model(name, read_json(Path(source.name) / MODEL_CONFIG_FILE) if is_folder else None)
    if kind is RewardModelKind.OUTCOME and per_step:
        return f"per_step = true, but {name} is an outcome reward model, which scores whole completions: remove it"
    return ""


def model_files(source: ModelSource) -> list[str]:
    """The files of a model on which its numbers depend; none for a hub's model, whose name has its version, and for a
    checkpoint, which has checksums.
    """
    if source.kind is ModelKind.GGUF:
        return [source.name]
    if source.kind is not ModelKind.FOLDER:
        return []
    folder = Path(source.name)
    return sorted(str(path) for pattern in ("*.json", "*.safetensors", "*.jinja") for path in folder.glob(pattern))
