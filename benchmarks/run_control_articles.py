"""GRPO on CartPole-v1 as the articles explain it: one environment, one step at a time in torch, one episode an update.

Written for this benchmark from a description: the discounted returns of an episode, normalised within it, are the
advantages; a network of 128-128 units, Adam at 3e-4, clip 0.2, KL(old || new) with weight 0.01, gamma 0.99. The
description leaves open how often an episode is gone over; `EPOCHS` is what served best of 1, 4 and 10.
"""

import gymnasium as gym
import numpy as np
import torch
from shape import report
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from trial import Trial, read_work

EPOCHS = 4
GAMMA, CLIP, KL_WEIGHT, LEARNING_RATE, UNITS = 0.99, 0.2, 0.01, 3e-4, 128


class Agent:
    """The policy, its optimizer and its environment."""

    def __init__(self, seed: int, epochs: int) -> None:
        torch.manual_seed(seed)
        self.epochs = epochs
        self.environment = gym.make("CartPole-v1")
        self.environment.reset(seed=seed)
        self.policy = nn.Sequential(
            nn.Linear(4, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 2)
        )
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)

    def best(self, observation_N4: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.policy(torch.from_numpy(observation_N4)).argmax(-1).numpy()

    def train_on_episode(self) -> int:
        """Play one episode and learn from it; returns its steps."""
        observations, actions, rewards = [], [], []
        observation, _ = self.environment.reset()
        over = False
        while not over:
            state = torch.from_numpy(observation)
            with torch.no_grad():
                action = Categorical(logits=self.policy(state)).sample()
            observation, reward, terminated, truncated, _ = self.environment.step(action.item())
            over = terminated or truncated
            observations.append(state)
            actions.append(action)
            rewards.append(float(reward))
        self._update(torch.stack(observations), torch.stack(actions), rewards)
        return len(rewards)

    def _update(self, observation_T4: Tensor, action_T: Tensor, rewards: list[float]) -> None:
        to_go, returns = 0.0, []
        for reward in reversed(rewards):
            to_go = reward + GAMMA * to_go
            returns.append(to_go)
        return_T = torch.tensor(returns[::-1])
        advantage_T = (return_T - return_T.mean()) / (return_T.std() + 1e-8)
        with torch.no_grad():
            old = Categorical(logits=self.policy(observation_T4))
            old_logprob_T = old.log_prob(action_T)
        for _ in range(self.epochs):
            new = Categorical(logits=self.policy(observation_T4))
            ratio_T = (new.log_prob(action_T) - old_logprob_T).exp()
            surrogate_T = torch.min(ratio_T * advantage_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage_T)
            loss = -surrogate_T.mean() + KL_WEIGHT * kl_divergence(old, new).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def main() -> None:
    work = read_work()
    torch.set_num_threads(1)  # the fastest for one observation at a time
    epochs = work.get("epochs", EPOCHS)
    Agent(work["seed"] + 1000, epochs).train_on_episode()  # warm-up
    agent = Agent(work["seed"], epochs)
    trial = Trial(agent.best, work["limit_seconds"])
    environment_steps = 0
    trial.begin()
    while not trial.over and trial.updates < work["limit_episodes"]:
        environment_steps += agent.train_on_episode()
        trial.update_done(environment_steps)
    report(**trial.numbers())


if __name__ == "__main__":
    main()
