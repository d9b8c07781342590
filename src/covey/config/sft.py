"""The [sft] table: supervised fine-tuning on given completions, which `covey sft` does before `covey train`."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import ConfigError, Table, config_field
from covey.config.data_paths import check_data
from covey.config.files import user_path
from covey.config.model_sources import CONFIG_FILE
from covey.config.named_modules import check_function_name

SFT_ALGORITHM = "sft"  # the algorithm in the config.toml of a run of `covey sft`
SFT_TABLE = "sft"
SAMPLES = "samples"  # sft.data: the model's own samples
EXAMPLES_BY_NAME = ("calculator", SAMPLES)  # examples that are made, by their name in sft.data


def is_function(data: str) -> bool:
    """True if the examples are those of a Python function, `file.py:function` or `module:function`."""
    return ":" in data and not user_path(data, "sft.data: ").exists()


def is_run(data: str) -> bool:
    """True if the examples are rollouts of a run, named by its folder."""
    path = user_path(data, "sft.data: ")
    return path.is_dir() and (path / CONFIG_FILE).is_file()


def is_sampled(data: str) -> bool:
    """True if the examples are the model's own samples, of this training or of a run."""
    return data == SAMPLES or is_run(data)


@dataclass(frozen=True)
class SFTConfig(Table):
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
    epochs: int = config_field(1, "passes over the examples", min=1, max=1000)
    patience: int = config_field(
        0, "end the training after this number of epochs without a lower held-out loss; 0: never", min=0
    )
    batch_size: int = config_field(32, "examples of an optimizer step", min=1)
    learning_rate: float = config_field(2e-5, "peak learning rate of AdamW", above=0)
    schedule: str = config_field("linear", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = config_field(0, "optimizer steps over which the learning rate rises from 0", min=0)
    max_tokens: int = config_field(0, "longest prompt with its completion, in tokens; 0: the model's limit", min=0)
    long_examples: str = config_field(
        "refuse", "an example that is longer: refuse the data, or drop the example", choices=("refuse", "drop")
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
