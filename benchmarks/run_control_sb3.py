"""stable-baselines3's PPO on CartPole-v1, with its defaults or its tuned settings. Runs in the peers' environment.

Asked for threads or collection instead: environment steps a second with 1 and 2 torch threads, or of collection alone.
"""

import time
from statistics import median
from typing import Any

import torch
from shape import report
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from trial import Trial, read_work

STEPS = 100_000  # of training at most; the tuned schedules fall to 0 over them
COLLECTIONS_TIMED = 3
CHUNKS = 4  # of each number of threads, in turn
TUNED: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": LinearSchedule(1e-3, 0.0, 1.0),
    "clip_range": LinearSchedule(0.2, 0.0, 1.0),
}


def make_agent(tuned: bool, seed: int, environments: int | None = None) -> PPO:
    """PPO as its documentation makes it (one environment), or as rl-baselines3-zoo tuned it (8 environments)."""
    count = environments or (8 if tuned else 1)
    return PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=count), seed=seed, device="cpu", **(TUNED if tuned else {})
    )


class Testing(BaseCallback):
    """Takes the test after every update: a rollout begins when the update before is complete."""

    def _init_callback(self) -> None:
        policy = self.model.policy
        self.trial = Trial(lambda observation_N4: policy.predict(observation_N4, deterministic=True)[0])

    def _on_rollout_start(self) -> None:
        if self.trial.running:
            self.trial.update_done(self.num_timesteps)
        else:
            self.trial.begin()

    def _on_training_end(self) -> None:
        self.trial.update_done(self.num_timesteps)

    def _on_step(self) -> bool:
        return not self.trial.over


def reach(tuned: bool, seed: int) -> dict[str, float]:
    """Train until the test is passed, or for 100,000 steps."""
    make_agent(tuned, seed + 1000).learn(256)  # warm-up: at least one update
    testing = Testing()
    make_agent(tuned, seed).learn(STEPS, callback=testing)
    return testing.trial.numbers()


def training_rates(tuned: bool) -> dict[str, float]:
    """Environment steps a second of training, with 1 and 2 torch threads in turn."""
    steps = 2048  # a whole number of updates either way
    agent = make_agent(tuned, 0)
    agent.learn(steps)  # warm-up
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(CHUNKS):
        for threads, found in rates.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            agent.learn(steps)
            found.append(steps / (time.perf_counter() - began))
    return {str(threads): median(found) for threads, found in rates.items()}


def collection_seconds(environments: int) -> float:
    """Of one `collect_rollouts` with the tuned settings, values and advantages included; the median of a few."""
    agent = make_agent(True, 0, environments)
    _, callback = agent._setup_learn(STEPS, None)
    seconds = []
    for _ in range(1 + COLLECTIONS_TIMED):
        began = time.perf_counter()
        agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.n_steps)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def main() -> None:
    work = read_work()
    if work["measure"] == "threads":
        report(default=training_rates(False), tuned=training_rates(True))
        return
    torch.set_num_threads(work["threads"])
    if work["measure"] == "collection":
        report(seconds=[collection_seconds(count) for count in work["counts"]], steps=TUNED["n_steps"])
    else:
        report(**reach(work["tuned"], work["seed"]))


if __name__ == "__main__":
    main()
