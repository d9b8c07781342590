"""Count the findings of the diagnosis in healthy runs, which should have none, and in runs made sick on purpose.

.venv/bin/python benchmarks/false_alarms.py train runs/healthy      # trains those that the folder lacks, some hours
.venv/bin/python benchmarks/false_alarms.py keep runs/healthy       # writes tests/data/healthy_runs.jsonl.xz
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

SHORT_FAMILY = "--token-budget 24000 --threads 1"
HEALTHY = {
    "cartpole_grpo-0": "cartpole_grpo --seed 0",
    "cartpole_grpo-1": "cartpole_grpo --seed 1",
    "cartpole_dr_grpo-0": "cartpole_grpo --algorithm dr_grpo --seed 0",
    "cartpole_rloo-0": "cartpole_grpo --algorithm rloo --seed 0",
    "cartpole_reinforce-0": "cartpole_grpo --algorithm reinforce --seed 0",
    "cartpole_gspo-0": "cartpole_grpo --algorithm gspo --seed 0",
    "cartpole_cispo-0": "cartpole_grpo --algorithm cispo --seed 0",
    "cartpole_dapo-0": "cartpole_grpo --algorithm dapo --seed 0",
    "cartpole_branches-0": "cartpole_branches --seed 0",
    "cartpole_reward_to_go-0": "cartpole_reward_to_go --seed 0",
    "cartpole_articles-0": "cartpole_articles --seed 0",
    "cartpole_ppo-0": "cartpole_ppo --seed 0",
    "cartpole_ppo-1": "cartpole_ppo --seed 1",
    "acrobot_grpo-0": "acrobot_grpo --seed 0",
    "acrobot_grpo-1": "acrobot_grpo --seed 1",
    "acrobot_ppo-0": "acrobot_ppo --seed 0",
    "pendulum_grpo-0": "pendulum_grpo --seed 0",
    "pendulum_ppo-0": "pendulum_ppo --seed 0",
    "pendulum_ppo-1": "pendulum_ppo --seed 1",
    "mountaincar_continuous_grpo-0": "mountaincar_continuous_grpo --seed 0",
    "mountaincar_continuous_ppo-0": "mountaincar_continuous_ppo --seed 0",
    "lunarlander_grpo-0": "lunarlander_grpo --seed 0",
    "lunarlander_ppo-0": "lunarlander_ppo --seed 0",
    "family_grpo-0": f"family --seed 0 {SHORT_FAMILY}",
    "arithmetic_grpo-0": "arithmetic_grpo --seed 0 --token-limits 14 --show-rollouts-every 0",
    "family_ppo-0": f"family --algorithm ppo --critic-learning-rate 1e-4 --seed 0 {SHORT_FAMILY}",
    "family_gspo-0": f"family --algorithm gspo --seed 0 {SHORT_FAMILY}",
    "family_dapo-0": f"family --algorithm dapo --overlong-tokens 0 --seed 0 {SHORT_FAMILY}",
    "process_grpo-0": "process_grpo --seed 0 --threads 1",
    "family_rloo-1": f"family --algorithm rloo --seed 1 {SHORT_FAMILY}",
    "family_reinforce_pp-0": f"family --algorithm reinforce_pp --seed 0 {SHORT_FAMILY}",
    "code_functions-0": "code_functions --seed 0 --threads 1 --show-rollouts-every 0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train",))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="some of the runs")
    arguments = parser.parse_args()
    train(arguments.folder, arguments.names or list(HEALTHY))


def train(folder: Path, names: list[str]) -> None:
    """Train the healthy runs that `folder` lacks, one after the other."""
    for name in names:
        if not (folder / name / "summary.json").exists():
            words = [*HEALTHY[name].split(), "--run-dir", str(folder / name)]
            subprocess.run([sys.executable, "-m", "covey", "train", *words], check=True, stdout=subprocess.DEVNULL)
            print(name, flush=True)


if __name__ == "__main__":
    main()
