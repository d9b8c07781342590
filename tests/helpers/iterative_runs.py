"""Iterative runs of tiny models: their recipes, with the models and the reward function that these name."""

from pathlib import Path

from covey.config.sft import RewardModelKind
from helpers.reward_models import tiny_reward_model
from helpers.tiny_models import tiny_folder

STEPS = 6
RECIPE = """
model = "{model}"
algorithm = "{algorithm}"
steps = {steps}
seed = 3
threads = 1
precision = "fp32"

[task]
name = "arithmetic"
digits = [1]

[[rewards]]
model = "{reward_model}"
{options}

[[rewards]]
function = "{reward}:even"
binary = true
weight = 0.0
score = true

[iteration]
steps = 2
reward_model_learning_rate = 1e-3
reward_model_batch_size = 4
examples_per_group = 3
replay_fraction = 0.4
evaluation_problems = 3
{iteration}

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 5

[loss]
{loss}

[update]
learning_rate = 1e-3

[evaluation]
problems = 4

[checkpoint]
every = 100
"""

REWARD = """
def even(completions, **columns):
    return [float(len(c[0]["content"]) % 2 == 0) for c in completions]
"""

WAYS = {
    "pairs": {"options": "clip = 3.0"},
    "grades": {
        "algorithm": "ppo",
        "iteration": 'data = "grades"\nrestart_reward_model = true\nreward_model_epochs = 2',
    },
    "steps": {
        "reward_model": "process",
        "options": "per_step = true",
        "loss": 'credit = "process_return_to_go"',
        "iteration": "continuations = 2",
    },
    "frozen": {"iteration": "reward_model_epochs = 0"},
}


def write_iterative_recipes(folder: Path) -> None:
    """A recipe for each of `WAYS` in a folder that exists."""
    tiny_folder(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    for kind in RewardModelKind:
        (folder / kind.name.lower()).mkdir()
        tiny_reward_model(kind).save(folder / kind.name.lower())
    for name, changes in WAYS.items():
        values = {"algorithm": "grpo", "reward_model": "outcome", "options": "", "iteration": "", "loss": ""} | changes
        values["reward_model"] = str(folder / values["reward_model"])
        paths = {"model": folder / "model", "reward": folder / "rewards.py", "steps": STEPS}
        (folder / f"{name}.toml").write_text(RECIPE.format(**paths, **values))
