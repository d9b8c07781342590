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
        self.has_critic = self.algorithm == "ppo"

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field, by the name that it has for language models; `default` if it is unset."""
        table: Any = self.config
        for key in self._name(field).split("."):
            if not isinstance(table, Mapping) or key not in table:
                return default
            table = table[key]
        return table

    def number(self, field: str, default: float) -> float:
        """The value of a field if it is a number, else `default`."""
        value = self.get(field)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def change(self, field: str, value: float | str | bool) -> str:
        """A field with a value to try, and its present value: "update.learning_rate = 1e-05 (now 3e-05)"."""
        now = self.get(field)
        return f"{self._name(field)} = {_text(value)} ({'unset now' if now is None else f'now {_text(now)}'})"

    def scaled(self, field: str, factor: float, default: float) -> str:
        """`change` of a number by a factor."""
        value = self.number(field, default) * factor
        return self.change(field, round(value) if isinstance(self.get(field), int) and value >= 1 else value)

    def _name(self, field: str) -> str:
        return IN_CONTROL.get(field, field) if self.is_control else field

    @property
    def steps(self) -> int:
        """Training steps of the recipe; 0 if unknown."""
        return int(self.number("steps", 0))

    @property
    def optimizer_steps(self) -> int:
        """Most optimizer steps of the policy for one batch of rollouts."""
        return int(self.number("update.epochs", 1) * self.number("update.minibatches", 1))

    @property
    def max_resamples(self) -> int:
        """Rounds in which a step may replace groups without signal."""
        return int(self.number("sampling.max_resamples", 3 if self.algorithm == "dapo" else 0))

    @property
    def goal(self) -> float | None:
        """The return that the recipe expects; None if it names none."""
        value = self.number("evaluation.expected_return", float("nan"))
        return None if value != value else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.3g}" if isinstance(value, float) else str(value)
