"""The [sft] table: supervised fine-tuning on given completions, which `covey sft` does before `covey train`."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import config_field

SFT_ALGORITHM = "sft"  # the algorithm in the config.toml of a run of `covey sft`
SFT_TABLE = "sft"
SAMPLES = "samples"  # sft.data: the model's own samples
EXAMPLES_BY_NAME = ("calculator", SAMPLES)  # examples that are made, by their name in sft.data


@dataclass(frozen=True)
class SFTConfig:
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
