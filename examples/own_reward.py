"""Train on a reward function of your own, from Python.

    .venv/bin/python examples/own_reward.py

A reward function has TRL's signature: its arguments are lists with one entry for each completion, and it returns one
number (or None) for each.
"""

from __future__ import annotations

from typing import Any

from covey import RunConfig, SamplingConfig, UpdateConfig, run
from covey.llm.tasks import WordProblems


def short(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """A higher reward for fewer words; 0 for an empty answer."""
    counts = [len(completion[0]["content"].split()) for completion in completions]
    return [1 / count if count else 0.0 for count in counts]


if __name__ == "__main__":
    config = RunConfig(
        model="smollm2-135m",
        steps=15,
        sampling=SamplingConfig(prompts_per_step=8, group_size=8, max_new_tokens=48),
        update=UpdateConfig(learning_rate=2e-5),
    )
    task = WordProblems(steps=(2,))
    run(config, task=task, rewards=[short], recipe_name="own_reward")
