"""Validate the settings of low-rank adapters (LoRA)."""

from __future__ import annotations

from importlib.util import find_spec

from covey.config.adapter_folder import resolved
from covey.config.common import ConfigError
from covey.config.llm import RunConfig
from covey.config.lora import LoRAConfig

INSTALL = 'LoRA needs the package peft: pip install "covey[lora]"'


def check_peft() -> None:
    """Refuse LoRA without peft.

    Raises:
        ConfigError: with the command that installs it.
    """
    if find_spec("peft") is None:
        raise ConfigError(INSTALL)


def check_adapter(lora: LoRAConfig) -> None:
    """Refuse an adapter without peft, and dropout.

    Raises:
        ConfigError: naming the fix.
    """
    check_peft()
    if lora.dropout:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g}: it must be 0, because a ratio compares two evaluations of the same "
            "tokens, and dropout would change each at random"
        )


def check_lora(config: RunConfig) -> None:
    """Refuse settings of [lora] that have no effect, or contradict others.

    Raises:
        ConfigError: naming the field and the fix.
    """
    lora, default = config.lora, LoRAConfig()
    if not lora.is_used:
        for name in ("alpha", "dropout", "targets"):
            if getattr(lora, name) != getattr(default, name):
                raise ConfigError(
                    f"lora.{name} is set, but lora.rank is 0, so there is no adapter: set lora.rank, such as 16"
                )
        if config.critic.trunk == "adapter":
            raise ConfigError(
                'critic.trunk = "adapter" is for runs with LoRA: set lora.rank, or set critic.trunk to "own" or '
                '"policy"'
            )
        return
    check_adapter(lora)
    if lora.adapter:
        for name in ("rank", "alpha", "targets"):
            if getattr(lora, name) != getattr(default, name):
                raise ConfigError(f"lora.{name} is that of lora.adapter's file: take lora.{name} out")
        resolved(lora)
    if config.algorithm == "ppo" and config.critic.trunk == "own":
        raise ConfigError(
            "with LoRA a critic with all weights of its own would take the memory that LoRA saves: set critic.trunk = "
            '"adapter" (an adapter of its own on the same weights) or "policy"'
        )
