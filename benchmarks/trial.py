"""The test on CartPole-v1 that every contestant takes, and the stopwatch of its training.

Read by each contestant in its own environment, so it needs NumPy and Gymnasium and nothing of covey.

Shape legend: N test episodes, 4 numbers in an observation.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from numpy.typing import NDArray

SOLVED = 475.0  # mean return; the threshold that Gymnasium registers for CartPole-v1
EPISODES = 20
LONGEST = 500  # steps; CartPole-v1 pays 1 for each
SEED = 475  # of the test's starts
TEST_EVERY = 256  # environment steps, at least: the smallest update of PPO's tuned settings, covey's and its peer's


class Trial:
    """Seconds of training until the agent passes the test: 20 greedy episodes, always from the same starts.

    The clock stands still during tests. Everybody is tested at the same cadence: whenever an update of the weights is
    complete, if 256 environment steps or more have gone by since the last test. So nobody trains longer than it must,
    and nobody with very small updates gets more tries at a lucky moment. The first test that it passes ends the trial.
    """

    def __init__(self, best: Callable[[NDArray[np.float32]], Any], limit_seconds: float = math.inf) -> None:
        self.best = best  # the greedy actions [N] for observations [N, 4]
        self.limit_seconds = limit_seconds
        self.environments = CartPoleVectorEnv(num_envs=EPISODES, max_episode_steps=LONGEST)
        self.seconds, self.environment_steps, self.updates, self.tested_at = 0.0, 0, 0, 0
        self.running = self.reached = self.over = False

    def begin(self) -> None:
        """Training begins now."""
        self.running = True
        self.began = time.perf_counter()

    def update_done(self, environment_steps: int) -> None:
        """An update is complete, after so many steps of the environment in all."""
        if self.over:
            return
        self.seconds += time.perf_counter() - self.began
        self.updates += 1
        self.environment_steps = environment_steps
        if environment_steps - self.tested_at >= TEST_EVERY:
            self.tested_at = environment_steps
            self.reached = self.passes()
        self.over = self.reached or self.seconds > self.limit_seconds
        self.began = time.perf_counter()

    def passes(self) -> bool:
        """True where the mean return is 475 or more. Stops as soon as that has become impossible."""
        observation_N4, _ = self.environments.reset(seed=SEED)
        running_N = np.ones(EPISODES, dtype=np.bool_)
        total = 0
        for step in range(LONGEST):
            total += int(running_N.sum())
            actions_N = np.asarray(self.best(observation_N4), dtype=np.int64)
            observation_N4, _, terminated_N, truncated_N, _ = self.environments.step(actions_N)
            running_N &= ~(terminated_N | truncated_N)
            if total + int(running_N.sum()) * (LONGEST - 1 - step) < SOLVED * EPISODES:
                return False
        return True

    def numbers(self) -> dict[str, float]:
        """What the contestant reports."""
        return {
            "reached": self.reached,
            "seconds": self.seconds,
            "environment_steps": self.environment_steps,
            "updates": self.updates,
        }


def read_work() -> dict[str, Any]:
    """What a contestant is asked to do, from its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", help="JSON")
    work: dict[str, Any] = json.loads(parser.parse_args().work)
    return work
