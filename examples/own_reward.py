"""Train on a reward function of your own, from Python.

    .venv/bin/python examples/own_reward.py

A reward function has TRL's signature: it is handed lists and returns one number (or None) per completion.
"""

from __future__ import annotations

from typing import Any

from covey import RunConfig, SamplingConfig, UpdateConfig, run
from covey.llm.tasks import WordProblems


def short(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """The fewer words, the better; an empty answer earns nothing."""
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
