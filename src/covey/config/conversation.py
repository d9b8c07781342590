"""The [conversation] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.builtin_environments import BUILT_IN_ENVIRONMENTS
from covey.config.common import config_field


@dataclass(frozen=True)
class ConversationConfig:
    environment: str = config_field(
        "",
        "environment that answers the model, so that a rollout has several turns: a built-in one, or your own "
        "file.py:Class or module:Class; empty: rollouts are single completions",
    )
    options: tuple[str, ...] = config_field(
        (),
        'keyword arguments of the environment\'s class, each as in a TOML file: [\'folder = "texts"\', "results = 2"]',
        advanced=True,
    )
    turns: int = config_field(8, "most turns of the model in a conversation", min=1, max=10_000)
    total_tokens: int = config_field(
        512,
        "most tokens of a conversation after its prompt, replies included; sampling.max_new_tokens is the limit of one "
        "turn",
        min=1,
        max=1_000_000,
    )
    reply_characters: int = config_field(
        4000,
        "longest reply of the environment that the model reads, in characters; the rest is left out",
        min=1,
        max=10_000_000,
        advanced=True,
    )
    timeout_seconds: float = config_field(
        10.0,
        "deadline of a call of the environment; importing its file has the same, at least 60 s",
        above=0,
        max=86_400,
        advanced=True,
    )

    @property
    def source(self) -> str:
        """The class of the environment as file.py:Class or module:Class."""
        return BUILT_IN_ENVIRONMENTS.get(self.environment, self.environment)
