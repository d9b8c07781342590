"""The config of a run as the checks read it: nested tables of plain values, in which any field may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields that have other names in control.
IN_CONTROL = {
    "sampling.group_size": "rollouts.group_size",
    "sampling.prompts_per_step": "rollouts.starts_per_step",
}


class Settings:
    """Access to a config by dotted names, such as "update.learning_rate"."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.is_control = "environment" in config
        self.algorithm = str(config.get("algorithm", "grpo"))

    def name(self, field: str) -> str:
        """The name of a language model's field in this kind of run."""
        return IN_CONTROL.get(field, field) if self.is_control else field

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field; `default` if it is unset."""
        table: Any = self.config
        for key in self.name(field).split("."):
            if not isinstance(table, Mapping) or key not in table:
                return default
            table = table[key]
        return table

    def number(self, field: str, default: float) -> float:
        """The value of a field if it is a number, else `default`."""
        value = self.get(field)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def change(self, field: str, value: float | str) -> str:
        """A field with a value to try, and its present value: "update.learning_rate = 1e-05 (now 3e-05)"."""
        now = self.get(field)
        text = f'"{value}"' if isinstance(value, str) else f"{value:g}"
        return f"{self.name(field)} = {text} ({'unset now' if now is None else f'now {_text(now)}'})"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
