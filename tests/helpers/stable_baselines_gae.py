"""Prints the pieces of episodes with which tests/core/test_returns.py checks GAE. No test runs this.

    python -m venv peer && peer/bin/pip install stable-baselines3==2.9.2 && peer/bin/python stable_baselines_gae.py

A line is one piece: how it ended, rewards, values, the value after it, and the advantages and returns of
stable-baselines3's RolloutBuffer.
"""

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

STEPS, ENVIRONMENTS, GAMMA, LAMBDA = 8, 3, 0.97, 0.9

random = np.random.default_rng(3)
shape = (STEPS, ENVIRONMENTS)
rewards = random.integers(-8, 9, shape) / 4
values = random.integers(-16, 17, shape) / 8
last_values = random.integers(-16, 17, ENVIRONMENTS) / 8  # of the state after the last step
dones = random.random(shape) < 0.25
truncated = dones & (random.random(shape) < 0.5)
final_values = random.integers(-16, 17, shape) / 8  # of an episode's last state
# OnPolicyAlgorithm.collect_rollouts hands the buffer what is to come after a time limit as a part of the reward.
paid = rewards + GAMMA * np.where(truncated, final_values, 0.0)
starts = np.concatenate([np.ones((1, ENVIRONMENTS), dtype=bool), dones[:-1]])

buffer = RolloutBuffer(
    STEPS, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), gamma=GAMMA, gae_lambda=LAMBDA, n_envs=ENVIRONMENTS
)
for t in range(STEPS):
    nothing = np.zeros(ENVIRONMENTS)
    buffer.add(nothing[:, None], nothing, paid[t], starts[t], torch.tensor(values[t]), torch.zeros(ENVIRONMENTS))
buffer.compute_returns_and_advantage(torch.tensor(last_values), dones[-1])

for slot in range(ENVIRONMENTS):
    begin = 0
    for t in range(STEPS):
        if not dones[t, slot] and t < STEPS - 1:
            continue
        if not dones[t, slot]:
            end, following = "cut", last_values[slot]
        else:
            end, following = ("truncated", final_values[t, slot]) if truncated[t, slot] else ("terminated", 0.0)
        piece = slice(begin, t + 1)
        numbers = [array[piece, slot].tolist() for array in (rewards, values)]
        answers = [array[piece, slot].astype(float).round(6).tolist() for array in (buffer.advantages, buffer.returns)]
        print((end, *numbers, float(following), *answers))
        begin = t + 1
