"""Validate a recipe for supervised fine-tuning, before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import replace

from covey.config.chat import check_chat
from covey.config.common import ConfigError
from covey.config.data_paths import check_data
from covey.config.fields import check_fields
from covey.config.files import user_path
from covey.config.function_source import check_function_name
from covey.config.llm import RunConfig
from covey.config.model_sources import CONFIG_FILE, locate_model
from covey.config.sft import EXAMPLES_BY_NAME, SAMPLES, SFT_ALGORITHM, SFTConfig
from covey.config.validate import validate
from covey.config.validate_conversation import check_conversation
from covey.config.validate_size import check_threads
from covey.config.validate_trackers import check_trackers


def validate_sft(config: RunConfig, *, resuming: bool = False) -> None:
    """Refuse a supervised training that cannot work.

    Args:
        resuming: its examples are recorded.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    if config.algorithm == SFT_ALGORITHM:  # the config of a run of covey sft
        config = replace(config, algorithm="grpo")
    check_fields(config)
    check_chat(config.chat)
    check_threads(config.threads)
    check_trackers(config.trackers)
    if not (config.sft.held_out_fraction or config.sft.held_out_path):
        for name, given in (("sft.patience", config.sft.patience), ("checkpoint.best", config.checkpoint.best)):
            if given:
                raise ConfigError(f"{name} needs held-out examples: raise sft.held_out_fraction above 0")
    if config.lora.is_used:
        raise ConfigError(
            "covey sft trains all weights, and [lora] asks for an adapter: give --lora.rank 0 (and take lora.adapter "
            "out); covey train can begin an adapter on the trained model"
        )
    check_conversation(config, own_environment=False)
    _check_columns(config.sft)
    if not resuming:
        _check_source(config)
    if config.sft.held_out_path:
        check_data(config.sft.held_out_path, "sft.held_out_path", EXAMPLES_BY_NAME)
    locate_model(config.model)


def is_function(data: str) -> bool:
    """True if the examples are those of a Python function, `file.py:function` or `module:function`."""
    return ":" in data and not user_path(data, "sft.data: ").exists()


def _check_columns(sft: SFTConfig) -> None:
    names = {
        name: getattr(sft, name) for name in ("prompt_column", "completion_column", "messages_column", "tools_column")
    }
    for name, column in names.items():
        if not column:
            raise ConfigError(f"sft.{name} is empty: name a column")
        if list(names.values()).count(column) > 1:
            raise ConfigError(f"sft.{name} is {column!r}, which another field of [sft] names too: name two columns")


def is_run(data: str) -> bool:
    """True if the examples are rollouts of a run, named by its folder."""
    path = user_path(data, "sft.data: ")
    return path.is_dir() and (path / CONFIG_FILE).is_file()


def is_sampled(data: str) -> bool:
    """True if the examples are the model's own samples, of this training or of a run."""
    return data == SAMPLES or is_run(data)


def _check_source(config: RunConfig) -> None:
    data = config.sft.data
    if not data:
        raise ConfigError(
            'no examples: set data = "examples.jsonl" in [sft], or give --data; the rows have a prompt and a '
            "completion, or messages"
        )
    if is_sampled(data):
        if config.sft.held_out_path:
            raise ConfigError(
                "sft.held_out_path is set, and of samples a fraction is held out: take it out (sft.held_out_fraction)"
            )
        if data == SAMPLES:
            validate(config)
        return
    if data in EXAMPLES_BY_NAME:
        return
    if is_function(data):
        check_function_name(data, "sft.data")
    else:
        check_data(data, "sft.data", EXAMPLES_BY_NAME)
