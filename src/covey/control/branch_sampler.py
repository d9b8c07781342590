"""Samples groups that begin in the middle of an episode: one state, several actions, each followed by the policy.

Shape legend: N slots, S starts, G branches from one state, D numbers in an observation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.control.envs.vector_env import Environments
from covey.control.policy import ControlPolicy
from covey.control.reward_scaling import RewardScale
from covey.control.rollout_buffer import ActionRng, RolloutBuffer, TrajectorySlice, check_episode_ends, end_of
from covey.control.sampler import ControlSampler
from covey.data import EndReason, Group, Start
from covey.runtime.rng import BRANCHING


def refuse_uncopyable(environments: Environments) -> None:
    """Refuse an environment whose states cannot be copied; call it before a run begins.

    Raises:
        ConfigError: for such an environment.
    """
    if not environments.snapshots:
        raise ConfigError(
            "rollouts.kind = 'branches' needs an environment whose state can be copied, and this one's cannot: use "
            "'episodes', with loss.credit = 'reward_to_go_by_step'"
        )


class BranchSampler(ControlSampler):
    """Samples one episode from every start, and G branches from a uniformly drawn state of it.

    A branch is an action sampled by the policy and `horizon - 1` further decisions; its reward is their discounted
    return. Rewards beyond the horizon are ignored: choose it long enough for a mistake to have an effect.

    Args:
        environments: S * G slots, for the branches.
        trunks: S slots, for the episodes in which branches begin.
        horizon: number of decisions of a branch.
        decisions: number of decisions of a rollout, the first ones of its branch; the last of them gets the discounted
            return of the rest. 1 if branches are compared by their outcomes, because only the first action was taken
            in a state that all siblings share.
    """

    def __init__(
        self,
        policy: ControlPolicy,
        environments: Environments,
        seed: int,
        reward_scale: RewardScale,
        gamma: float,
        *,
        trunks: Environments,
        horizon: int,
        decisions: int,
    ) -> None:
        super().__init__(policy, environments, seed, reward_scale, gamma)
        self.trunks, self.horizon, self.decisions = policy.remembering(trunks), horizon, decisions

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Sample G branches from one state of an episode from every start.

        The score of the group's first branch is the return of this episode, which the policy played to its end.
        """
        if first_rollout:
            raise ValueError("branches of one state are sampled at once: a second time its episode would count twice")
        states, returns = self._play_trunks(starts, step)
        observation_ND = np.stack(
            [self.environments.restore(slot, states[slot // group_size]) for slot in range(len(starts) * group_size)]
        )
        segments, buffer = self._play_branches(observation_ND, group_size, step)
        groups = [Group(start, []) for start in starts]
        for index, (segment, whole) in enumerate(zip(segments, self._rewarded(buffer, segments), strict=True)):
            kept = min(self.decisions, segment.stop)
            rollout = buffer.rollout(TrajectorySlice(segment.slot, 0, kept, segment.end), self.version)
            rollout.step_rewards = whole.step_rewards[:kept].copy()
            rollout.step_rewards[-1] = self._discounted(whole.step_rewards[kept - 1 :])
            rollout.reward = whole.reward
            rollout.text = whole.text if whole.reward is None else f"{whole.text}, reward {whole.reward:g}"
            groups[index // group_size].rollouts.append(rollout)
        for group, trunk_return in zip(groups, returns, strict=True):
            group.rollouts[0].score = trunk_return
        self.episodes += len(starts)
        return groups

    def _play_trunks(self, starts: Sequence[Start], step: int) -> tuple[list[Any], list[float]]:
        """Play the episodes; returns the states at which branches begin, and the returns of the episodes.

        Reservoir sampling (Vitter 1985): the t-th state replaces the stored one with probability 1/t, so every state of
        an episode of any length has the same probability.
        """
        slots = len(starts)
        draws = self._draws(step, [(slot, 0) for slot in range(slots)], BRANCHING)
        keep = ActionRng(self.seed, step, [(slot, 1) for slot in range(slots)], 1, BRANCHING)
        observation_ND = self.trunks.reset([start.prompt for start in starts])
        states: list[Any] = [None] * slots
        return_N = np.zeros(slots)
        going_N = np.ones(slots, dtype=np.bool_)
        t = 0
        while going_N.any():
            t += 1
            check_episode_ends(t)
            for slot in np.flatnonzero(going_N & (keep.next()[:, 0] * t < 1)).tolist():
                states[slot] = self.trunks.snapshot(slot)
            actions, _ = self.policy.act(observation_ND, draws.next())
            result = self.trunks.step(actions)
            return_N += result.reward_N * going_N
            self.environment_steps += int(result.steps_N.sum())
            going_N &= ~(result.terminated_N | result.truncated_N)
            observation_ND = result.observation_ND
        return states, return_N.tolist()

    def _play_branches(
        self, observation_ND: NDArray[np.float32], group_size: int, step: int
    ) -> tuple[list[TrajectorySlice], Any]:
        slots = len(observation_ND)
        draws = self._draws(step, [divmod(slot, group_size) for slot in range(slots)])
        segments = [TrajectorySlice(slot, 0, self.horizon, EndReason.CUT) for slot in range(slots)]
        buffer = RolloutBuffer()
        going_N = np.ones(slots, dtype=np.bool_)
        while going_N.any() and len(buffer) < self.horizon:
            actions, logprobs_N = self.policy.act(observation_ND, draws.next())
            result = self.environments.step(actions)
            buffer.add(observation_ND, actions, logprobs_N, result)
            observation_ND = result.observation_ND
            ended_N = (result.terminated_N | result.truncated_N) & going_N
            for slot in np.flatnonzero(ended_N).tolist():
                segments[slot] = TrajectorySlice(slot, 0, len(buffer), *end_of(result, slot))
            going_N &= ~ended_N
        return segments, buffer.finish()
