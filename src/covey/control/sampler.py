"""Task, samplers and grader of environments: whole episodes, fragments that go on in the next step, branches from
the middle of an episode.

Shape legend: N slots (environments stepped together), T steps, D numbers in an observation, S starts,
G branches from one state.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.control.envs.vector_env import Environments
from covey.control.memory import RememberingEnvironments
from covey.control.mlp import RunningMeanStd
from covey.control.policy import ControlPolicy
from covey.control.rollout_buffer import (
    ActionRng,
    RolloutBuffer,
    Trajectories,
    TrajectorySlice,
    check_episode_ends,
    collect_episodes,
    end_of,
    refuse_failures,
)
from covey.data import EndReason, Group, Rollout, Start, Stateless
from covey.runtime.rng import BRANCHING, EVALUATING, SAMPLING, STARTING, uniforms

# ---- scales of rewards, so that one learning rate and critic suit every environment ----

LIMIT = 10.0  # standard deviations


class RewardScale(Stateless):
    """Scales the environment's rewards for training; this one leaves them as they are. Scores keep the environment's
    units.
    """

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Scale the rewards of a training step, given the ends of returns and a mask of the entries that are decisions.

        The other entries (finished slots, resets) have no reward and do not count in the statistics.
        """
        return rewards_NT

    def metrics(self) -> dict[str, float]:
        """Metrics of the running state; may be empty."""
        return {}


class ClipReward(RewardScale):
    """Rewards clipped to -1..1: Mnih et al. (2015), 'Human-level control'. It may change the optimal policy."""

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        return np.clip(rewards_NT, -1.0, 1.0)


class RunningStdScaling(RewardScale):
    """Rewards divided by the running standard deviation of the discounted return, then clipped to +-10.

    The return is summed forward, g_t = gamma g_{t-1} + r_t, as in OpenAI's baselines: Engstrom et al.
    (arXiv 2005.12729), section 2. The mean is not subtracted, because that would reward or penalise longer episodes.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMeanStd(1)
        self.return_N: NDArray[np.float64] = np.zeros(0)

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        if len(self.return_N) != len(rewards_NT):
            self.return_N = np.zeros(len(rewards_NT))
        returns_TN = np.empty(rewards_NT.T.shape)
        for t in range(len(returns_TN)):
            self.return_N = self.gamma * self.return_N + rewards_NT[:, t]
            returns_TN[t] = self.return_N
            self.return_N = np.where(ended_NT[:, t], 0.0, self.return_N)
        self.moments.update(returns_TN[counted_NT.T][:, None])
        return np.clip(rewards_NT / self.std, -LIMIT, LIMIT)

    @property
    def std(self) -> float:
        """Standard deviation of the discounted return, over the run so far."""
        return float(np.sqrt(self.moments.var_D[0] + 1e-8))

    def metrics(self) -> dict[str, float]:
        return {"reward_scale": self.std}

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "return_N": torch.from_numpy(self.return_N.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.return_N = state["return_N"].numpy().copy()


class ControlSampler:
    """Base of control's samplers: counters, reward scaling, and the observations for the normaliser's next update.
    Implements `covey.data.Sampler` with the `sample` of a subclass.
    """

    def __init__(
        self, policy: ControlPolicy, environments: Environments, seed: int, reward_scale: RewardScale, gamma: float
    ) -> None:
        self.policy, self.environments, self.seed = policy, policy.remembering(environments), seed
        self._bare = environments  # whose observations have no state of a memory
        self.reward_scale, self.gamma = reward_scale, gamma
        self.version = 0
        self.environment_steps = 0
        self.episodes = 0
        self._seen: list[NDArray[np.float32]] = []  # observations since the normaliser's last update

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """Episodes and environment steps since the beginning of the run."""
        return {"environment/steps": float(self.environment_steps), "environment/episodes": float(self.episodes)}

    def metrics(self) -> dict[str, float]:
        """The counters, and the metrics of policy and reward scaling."""
        return self.counters() | self.policy.metrics() | self.reward_scale.metrics()

    def refresh(self, version: int) -> None:
        """Update the normaliser with the observations of the step; the weights are shared with the trainer.

        Within a step the normaliser must not change, because sampler and trainer must use the same policy.
        """
        self.version = version
        if self._seen and self.policy.normaliser is not None:
            self.policy.normaliser.update(np.concatenate(self._seen)[:, : self.policy.observation_size])
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """Counters and running scales."""
        normaliser = self.policy.normaliser
        return {
            "environment_steps": self.environment_steps,
            "episodes": self.episodes,
            "reward_scale": self.reward_scale.state_dict(),
            "normaliser": {} if normaliser is None else normaliser.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters and running scales."""
        self.environment_steps, self.episodes = state["environment_steps"], state["episodes"]
        self.reward_scale.load_state_dict(state["reward_scale"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(state["normaliser"])

    def _draws(self, step: int, names: Sequence[tuple[int, int]], stream: int = SAMPLING) -> ActionRng:
        """The policy's random numbers of a training step, one for each number in an action.

        Args:
            names: the (group, rollout) with which each slot begins.
        """
        return ActionRng(self.seed, step, names, self.policy.actions.size, stream)

    def _discounted(self, rewards_L: NDArray[np.float64]) -> float:
        """The discounted return of these rewards."""
        return float(rewards_L @ self.gamma ** np.arange(len(rewards_L)))

    def _rewarded(
        self, buffer: Trajectories, segments: Sequence[TrajectorySlice], *, go_on: bool = False
    ) -> list[Rollout]:
        """The slices as rollouts with their rewards; updates the reward scaling and stores the observations.

        With `go_on` the episodes of unfinished slices continue in the next training step.
        """
        refuse_failures(segments)
        ended_NT, counted_NT = np.zeros((2, *buffer.rewards_NT.shape), dtype=np.bool_)
        for segment in segments:
            counted_NT[segment.slot, segment.start : segment.stop] = True
            ended_NT[segment.slot, segment.stop - 1] = segment.end is not EndReason.CUT or not go_on
        scaled_NT = self.reward_scale.scale(buffer.rewards_NT, ended_NT, counted_NT)
        self.environment_steps += buffer.raw_steps
        rollouts = []
        for segment in segments:
            rollout = buffer.rollout(segment, self.version)
            rewards_L = scaled_NT[segment.slot, segment.start : segment.stop]
            rollout.step_rewards = rewards_L
            rollout.reward = None if segment.failed else self._discounted(rewards_L)
            if self.policy.normaliser is not None:
                self._seen.append(rollout.context)
            rollouts.append(rollout)
        return rollouts


class EpisodeSampler(ControlSampler):
    """Samples G whole episodes from every start, with the same reset seed, so that siblings begin in the same state."""

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Sample groups of episodes. A rollout's reward is its discounted return, its score the undiscounted one."""
        seeds = [start.prompt for start in starts for _ in range(group_size)]
        names = [(start.index, first_rollout + number) for start in starts for number in range(group_size)]
        draws = self._draws(step, [names[min(slot, len(names) - 1)] for slot in range(self.environments.count)])
        segments, buffer = collect_episodes(self.environments, self.policy, seeds, draws, names)
        rollouts = self._rewarded(buffer, segments)
        for rollout, segment in zip(rollouts, segments, strict=True):
            rollout.score = None if segment.failed else float(buffer.rewards(segment).sum())
        self.episodes += len(rollouts)
        return [Group(start, rollouts[i * group_size : (i + 1) * group_size]) for i, start in enumerate(starts)]


class FragmentSampler(ControlSampler):
    """Samples a fixed number of steps in every slot; an unfinished episode continues in the next training step.

    Each slot is a group of its own. Its rollouts are the parts of episodes in the step, one for each episode.
    """

    def __init__(
        self,
        policy: ControlPolicy,
        environments: Environments,
        seed: int,
        reward_scale: RewardScale,
        gamma: float,
        *,
        steps: int,
    ) -> None:
        super().__init__(policy, environments, seed, reward_scale, gamma)
        self.steps = steps
        self._observation_ND: NDArray[np.float32] | None = None
        self._return_N = np.zeros(environments.count)  # return of the episode so far
        self._reset_seed_N = np.zeros(environments.count, dtype=np.int64)
        # Actions since the reset, [L] or [L, A], with which the episode can be replayed
        self._actions: list[list[NDArray[Any]]] = [[] for _ in range(environments.count)]

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Sample fragments. A rollout whose episode ended in this step has the whole episode's return as its score.

        The seeds of the starts are used in the first step only; later ones only identify the slots.
        """
        slots = self.environments.count
        if len(starts) != slots or group_size != 1 or first_rollout:
            raise ValueError(f"fragments need one start a slot ({slots}) and groups of 1, sampled once")
        if self._observation_ND is None:
            self._begin([start.prompt for start in starts])
        assert self._observation_ND is not None
        draws = self._draws(step, [(slot, 0) for slot in range(slots)])
        buffer, segments = RolloutBuffer(), []
        began_N = np.zeros(slots, dtype=np.int64)
        for t in range(self.steps):
            observation_ND = self._observation_ND
            actions, logprobs_N = self.policy.act(observation_ND, draws.next())
            result = self.environments.step(actions)
            buffer.add(observation_ND, actions, logprobs_N, result)
            self._observation_ND = result.observation_ND
            ended_N = result.terminated_N | result.truncated_N
            if not ended_N.any():
                continue
            ended = np.flatnonzero(ended_N)
            for slot in ended.tolist():
                segments.append(TrajectorySlice(slot, int(began_N[slot]), t + 1, *end_of(result, slot)))
            began_N[ended] = t + 1
            self._begin_again(ended, step, t)
        segments += [
            TrajectorySlice(slot, int(began_N[slot]), self.steps, EndReason.CUT)
            for slot in range(slots)
            if began_N[slot] < self.steps
        ]
        return self._grouped(starts, buffer.finish(), segments)

    def _grouped(self, starts: Sequence[Start], buffer: Trajectories, segments: list[TrajectorySlice]) -> list[Group]:
        groups = [Group(start, []) for start in starts]
        for segment, rollout in zip(segments, self._rewarded(buffer, segments, go_on=True), strict=True):
            slot = segment.slot
            self._return_N[slot] += buffer.rewards(segment).sum()
            self._actions[slot].append(rollout.actions)
            if segment.end is not EndReason.CUT:
                rollout.score = None if segment.failed else float(self._return_N[slot])
                self.episodes += 1
                self._return_N[slot] = 0.0
                self._actions[slot].clear()
            groups[slot].rollouts.append(rollout)
        return groups

    def _begin(self, seeds: Sequence[int]) -> None:
        self._reset_seed_N[:] = seeds
        self._observation_ND = self.environments.reset(seeds)

    def _begin_again(self, slots: NDArray[np.int64], step: int, t: int) -> None:
        """Begin the next episode in these slots, after step t (positions count from 1; 0 is the run's first start)."""
        assert self._observation_ND is not None
        seeds = reset_seeds(self.seed, step, slots, t + 1)
        self._observation_ND = self._observation_ND.copy()  # the buffer keeps the episode's last observation
        self._observation_ND[slots] = self.environments.reset_slots(slots, seeds)
        self._reset_seed_N[slots] = seeds

    def state_dict(self) -> dict[str, Any]:
        """Counters, running scales, and for replaying unfinished episodes their reset seeds and actions."""
        state = super().state_dict()
        if self._observation_ND is not None:
            state["episodes_going_on"] = {
                "seeds": self._reset_seed_N.tolist(),
                "returns": self._return_N.tolist(),
                "actions": {
                    str(slot): torch.from_numpy(np.concatenate(pieces))
                    for slot, pieces in enumerate(self._actions)
                    if pieces
                },
            }
            if self.policy.memory:
                state["episodes_going_on"]["memory"] = torch.from_numpy(
                    self._observation_ND[:, -self.policy.memory :].copy()
                )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state and replay unfinished episodes; exact if the environment is reproducible."""
        super().load_state_dict(state)
        saved = state.get("episodes_going_on")
        if saved is None:
            return
        self._begin(saved["seeds"])
        self._return_N[:] = saved["returns"]
        played = {int(slot): actions.numpy().copy() for slot, actions in saved["actions"].items()}
        self._actions = [[played[slot]] if slot in played else [] for slot in range(self.environments.count)]
        self._observation_ND = replay(self._bare, saved["seeds"], played)
        if isinstance(self.environments, RememberingEnvironments):
            self._observation_ND = self.environments.resume(self._observation_ND, saved["memory"].numpy())


def replay(environments: Environments, seeds: Sequence[int], played: dict[int, NDArray[Any]]) -> NDArray[np.float32]:
    """Replay these actions from the seed of every slot; returns the last observations [N, D].

    Slots step together, so those with fewer actions are reset later and all end at the same step.
    """
    observation_ND = environments.reset(seeds)
    longest = max((len(actions) for actions in played.values()), default=0)
    if not longest:
        return observation_ND
    for t in range(longest + 1):
        beginning = [slot for slot in range(environments.count) if longest - len(played.get(slot, ())) == t]
        if beginning:
            observation_ND = observation_ND.copy()
            observation_ND[beginning] = environments.reset_slots(
                np.array(beginning), [seeds[slot] for slot in beginning]
            )
        if t == longest:
            break
        actions_N = environments.random_actions(t)  # of slots that are reset later; a mask may forbid action 0
        for slot, actions in played.items():
            late = longest - len(actions)
            if t >= late:
                actions_N[slot] = actions[t - late]
        observation_ND = environments.step(actions_N).observation_ND
    return observation_ND


def reset_seeds(seed: int, step: int, group: object, position: object, *, stream: int = STARTING) -> list[int]:
    """Seeds for `reset`, from 0 to 2^31 - 1, one for each (group, position); a function of the arguments alone."""
    drawn_N = uniforms(seed, step, group, 0, position, stream=stream)  # type: ignore[arg-type]
    return (drawn_N * 2.0**31).astype(np.int64).tolist()


class ResetSeeds:
    """Task of reset seeds; implements `covey.data.Task`. A start's prompt is its seed."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` reset seeds of one step; `before` is ignored."""
        drawn = reset_seeds(seed, step, np.arange(first, first + count), 0)
        return [Start(index, prompt) for index, prompt in enumerate(drawn, start=first)]

    def held_out(self, count: int) -> list[Start]:
        """The same `count` seeds for every run, so that runs are evaluated on the same episodes."""
        drawn = reset_seeds(0, 0, np.arange(count), 0, stream=EVALUATING)
        return [Start(index, prompt) for index, prompt in enumerate(drawn)]


class EnvironmentReward:
    """A no-op grader, because rollouts already have the environment's rewards; implements `covey.data.Grader`."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups."""
        return groups


# ---- branches ----

# Groups that begin in the middle of an episode: one state, several actions, each followed by the policy.


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
