"""Healthy runs, in which the diagnosis must find nothing: packaged recipes and tiny models that learn."""

from dataclasses import dataclass
from typing import Any

from covey.config.recipe import config_to_dict, read_recipe
from helpers.diagnosed_runs import (
    TINY,
    Reward,
    Tables,
    begins_with_a_digit,
    digits,
    lower_case,
    merged,
)


@dataclass(frozen=True)
class Healthy:
    """A recipe that trains as it should."""

    tables: Tables
    rewards: tuple[Reward, ...] = ()


def recipe(*words: str) -> Healthy:
    """A packaged recipe with changed fields, as on the command line."""
    return Healthy(config_to_dict(read_recipe(words[0], words[1:])))


def tiny(reward: Reward, **changes: Any) -> Healthy:
    return Healthy(merged(TINY, changes), (reward,))


ONE_EPOCH = ("--steps", "120")
HEALTHY: dict[str, Healthy] = {
    "cartpole_grpo, seed 0": recipe("cartpole_grpo"),
    "cartpole_grpo, seed 1": recipe("cartpole_grpo", "--seed", "1"),
    "cartpole_grpo, seed 2": recipe("cartpole_grpo", "--seed", "2"),
    "cartpole, dr_grpo": recipe("cartpole_grpo", "--algorithm", "dr_grpo", "--seed", "3"),
    "cartpole, rloo": recipe("cartpole_grpo", "--algorithm", "rloo", *ONE_EPOCH),
    "cartpole, reinforce_pp": recipe("cartpole_grpo", "--algorithm", "reinforce_pp", *ONE_EPOCH),
    "cartpole, cispo": recipe("cartpole_grpo", "--algorithm", "cispo", "--steps", "60"),
    "cartpole, gspo": recipe("cartpole_grpo", "--algorithm", "gspo", "--steps", "60"),
    "cartpole_branches": recipe("cartpole_branches"),
    "cartpole_reward_to_go": recipe("cartpole_reward_to_go"),
    "cartpole_ppo, seed 0": recipe("cartpole_ppo"),
    "cartpole_ppo, seed 1": recipe("cartpole_ppo", "--seed", "1"),
    "acrobot_grpo": recipe("acrobot_grpo"),
    "acrobot_ppo": recipe("acrobot_ppo"),
    "pendulum_grpo": recipe("pendulum_grpo"),
    "pendulum_ppo": recipe("pendulum_ppo"),
    "mountaincar_continuous_grpo": recipe("mountaincar_continuous_grpo"),
    "mountaincar_continuous_ppo": recipe("mountaincar_continuous_ppo"),
    "tiny digits, grpo": tiny(digits),
    "tiny digits, grpo, seed 1": tiny(digits, seed=1),
    "tiny digits, dr_grpo": tiny(digits, algorithm="dr_grpo"),
    "tiny digits, rloo": tiny(digits, algorithm="rloo", seed=2),
    "tiny digits, reinforce_pp": tiny(digits, algorithm="reinforce_pp"),
    "tiny digits, gspo, two minibatches": tiny(digits, algorithm="gspo", update={"minibatches": 2}),
    "tiny digits, cispo, two minibatches": tiny(digits, algorithm="cispo", update={"minibatches": 2}),
    "tiny digits, ppo": tiny(digits, algorithm="ppo", steps=60),
    "tiny letters, grpo, two epochs": tiny(lower_case, update={"epochs": 2, "learning_rate": 1e-3}),
    "tiny first digit, dapo": tiny(begins_with_a_digit, algorithm="dapo", sampling={"overlong_tokens": 0}, steps=30),
    "tiny first digit, grpo": tiny(begins_with_a_digit, update={"learning_rate": 1e-3}),
    "tiny first digit, KL 0.05": tiny(begins_with_a_digit, loss={"kl_coefficient": 0.05}, seed=3),
}
# Runs of the embedded model, by the commands that made them; `arithmetic_grpo` is that of before 2026-11-28
# (docs/experiments.md).
COMMANDS = {
    "arithmetic_grpo": "covey train arithmetic_grpo --steps 40 --token-limits 14 --evaluation.problems 64 "
    "--evaluation.every 20 --min-new-tokens 0",
    "family": "covey train family --token-budget 24000 --threads 1",
}
