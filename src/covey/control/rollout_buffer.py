"""Rollout buffer: the steps of a policy in its environments, and the rollouts as slices of them.

Shape legend: T steps, N slots (environments stepped together), L decisions of a rollout, D numbers in an observation,
A numbers in an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.config.fields import plural
from covey.control.envs.checked import EnvironmentFault
from covey.control.envs.vector_env import LONGEST_WAIT, Environments, Step
from covey.control.policy import ControlPolicy
from covey.data import EndReason, Rollout
from covey.runtime.rng import uniforms

FAILURES_ALLOWED = 0.2  # of the episodes of a step or an evaluation
DRAWN_AHEAD = 64  # positions whose random numbers are computed at once


class ActionRng:
    """Random numbers of the decisions of N slots, each a function of (seed, step, group, rollout, position)."""

    def __init__(self, seed: int, step: int, names: Sequence[tuple[int, int]], numbers: int, stream: int) -> None:
        slots = len(names)
        self.seed, self.step, self.stream = seed, step, stream
        self.numbers = numbers  # per decision
        self._group_N, self._rollout_N = np.array(names, dtype=np.int64).T
        self._position_N = np.full(slots, -DRAWN_AHEAD)  # position of the first stored number
        self._used_N = np.full(slots, DRAWN_AHEAD)
        self._store_NPA = np.empty((slots, DRAWN_AHEAD, numbers))
        self._all_N = np.arange(slots)

    def begin(self, slot: int, group: int, rollout: int) -> None:
        """Begin another rollout in a slot."""
        self._group_N[slot], self._rollout_N[slot], self._position_N[slot] = group, rollout, -DRAWN_AHEAD
        self._used_N[slot] = DRAWN_AHEAD

    def next(self) -> NDArray[np.float64]:
        """uniform_NA for one decision of every slot."""
        if self._used_N.max() == DRAWN_AHEAD:
            self._fill(np.flatnonzero(self._used_N == DRAWN_AHEAD))
        drawn_NA = self._store_NPA[self._all_N, self._used_N]
        self._used_N += 1
        return drawn_NA

    def _fill(self, slots: NDArray[np.int64]) -> None:
        self._position_N[slots] += DRAWN_AHEAD
        ahead = DRAWN_AHEAD * self.numbers
        position_KP = self._position_N[slots, None] * self.numbers + np.arange(ahead)
        drawn = uniforms(
            self.seed,
            self.step,
            np.repeat(self._group_N[slots], ahead),
            np.repeat(self._rollout_N[slots], ahead),
            position_KP.reshape(-1),
            stream=self.stream,
        )
        self._store_NPA[slots] = drawn.reshape(len(slots), DRAWN_AHEAD, self.numbers)
        self._used_N[slots] = 0


@dataclass(slots=True)
class TrajectorySlice:
    """Steps `start` to `stop` of a slot: an episode, or the sampled part of one."""

    slot: int
    start: int
    stop: int
    end: EndReason
    failed: bool = False  # True if its environment died or did not answer


@dataclass(slots=True)
class RolloutBuffer:
    """All steps of N slots, one entry per step; the arrays are stored without a copy."""

    before: list[NDArray[np.float32]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    actions: list[NDArray[Any]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def add(
        self, observation_ND: NDArray[np.float32], actions: NDArray[Any], logprobs_N: NDArray[np.float32], step: Step
    ) -> None:
        """Add one step of all slots."""
        self.before.append(observation_ND)
        self.actions.append(actions)
        self.logprobs.append(logprobs_N)
        self.steps.append(step)

    def finish(self) -> Trajectories:
        """Return the steps ordered by slot, so that a rollout is a slice."""
        return Trajectories(
            before_NTD=_by_slot(self.before),
            after_NTD=_by_slot([step.observation_ND for step in self.steps]),
            actions_NT=_by_slot(self.actions),
            logprobs_NT=_by_slot(self.logprobs),
            rewards_NT=_by_slot([step.reward_N for step in self.steps]),
            raw_steps=int(sum(step.steps_N.sum() for step in self.steps)),
        )


@dataclass(frozen=True, slots=True)
class Trajectories:
    before_NTD: NDArray[np.float32]
    after_NTD: NDArray[np.float32]
    actions_NT: NDArray[Any]  # [N, T], or [N, T, A]
    logprobs_NT: NDArray[np.float32]
    rewards_NT: NDArray[np.float64]
    raw_steps: int  # environment steps of all slots together

    def rewards(self, segment: TrajectorySlice) -> NDArray[np.float64]:
        """Reward of each decision of the slice, [L]."""
        return self.rewards_NT[segment.slot, segment.start : segment.stop]

    def rollout(self, segment: TrajectorySlice, version: int) -> Rollout:
        """The slice as a Rollout without its reward."""
        slot, start, stop = segment.slot, segment.start, segment.stop
        last_1D = self.after_NTD[slot, stop - 1 : stop]
        return Rollout(
            context=np.concatenate([self.before_NTD[slot, start:stop], last_1D]),
            actions=self.actions_NT[slot, start:stop],
            behavior_logprobs=self.logprobs_NT[slot, start:stop],
            end=segment.end,
            text=f"{plural(stop - start, 'step')}, {'its environment failed' if segment.failed else segment.end}",
            version=version,
        )


def _by_slot(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(np.stack(arrays).swapaxes(0, 1))


def check_episode_ends(decisions: int) -> None:
    """Refuse an environment whose episodes do not end.

    Raises:
        ConfigError: after LONGEST_WAIT decisions.
    """
    if decisions > LONGEST_WAIT:
        raise ConfigError(
            f"an episode has not ended after {LONGEST_WAIT:,} decisions: set environment.max_episode_steps to fewer"
        )


def end_of(step: Step, slot: int) -> tuple[EndReason, bool]:
    """The EndReason of a slot whose episode ended in this step, and whether its environment failed.

    Termination has precedence over truncation.
    """
    reason = EndReason.TERMINATED if step.terminated_N[slot] else EndReason.TRUNCATED
    return reason, step.failed_N is not None and bool(step.failed_N[slot])


def refuse_failures(segments: Sequence[TrajectorySlice]) -> None:
    """Refuse to go on if more than FAILURES_ALLOWED of the episodes failed.

    Raises:
        EnvironmentFault: with their number.
    """
    failed = sum(segment.failed for segment in segments)
    if failed > FAILURES_ALLOWED * len(segments):
        raise EnvironmentFault(
            f"the environment died, or did not answer, in {failed} of {plural(len(segments), 'episode')}, more than "
            f"{FAILURES_ALLOWED:.0%}: the warnings name the reset seeds and steps"
        )


def collect_episodes(
    environments: Environments,
    policy: ControlPolicy,
    seeds: list[int],
    draws: ActionRng | None,
    names: Sequence[tuple[int, int]] = (),
) -> tuple[list[TrajectorySlice], Trajectories]:
    """Play one whole episode from every reset seed, in all slots in parallel.

    Args:
        environments: the copies of the environment.
        policy: the acting policy.
        seeds: one reset seed per episode.
        draws: the policy's random numbers, with which the slots begin; None: greedy actions.
        names: with `draws`, the (group, rollout) of every episode, which determine its random numbers.

    Returns:
        The slices in the order of the seeds, and the trajectories that they refer to.

    Raises:
        ConfigError: for an environment whose episodes do not end.
    """
    slots = environments.count
    segments: list[TrajectorySlice | None] = [None] * len(seeds)
    job_N = np.arange(slots)  # the episode in each slot; indices from len(seeds) on are unused
    began_N = np.zeros(slots, dtype=np.int64)
    observation_ND = environments.reset([seeds[min(slot, len(seeds) - 1)] for slot in range(slots)])
    waiting = min(slots, len(seeds))  # index of the next episode
    missing = len(seeds)
    buffer = RolloutBuffer()
    silent_N = np.zeros(slots, dtype=np.float32)
    last_end = 0
    while missing:
        check_episode_ends(len(buffer) - last_end)
        if draws is None:
            actions, logprobs_N = policy.greedy_action(observation_ND), silent_N
        else:
            actions, logprobs_N = policy.act(observation_ND, draws.next())
        step = environments.step(actions)
        buffer.add(observation_ND, actions, logprobs_N, step)
        observation_ND = step.observation_ND
        ended_N = step.terminated_N | step.truncated_N
        if not ended_N.any():
            continue
        free = []
        for slot in np.flatnonzero(ended_N).tolist():
            job = int(job_N[slot])
            if job >= len(seeds):
                continue
            segments[job] = TrajectorySlice(slot, int(began_N[slot]), len(buffer), *end_of(step, slot))
            missing -= 1
            last_end = len(buffer)
            job_N[slot] = len(seeds)
            if waiting < len(seeds):
                job_N[slot], began_N[slot] = waiting, len(buffer)
                if draws is not None:
                    draws.begin(slot, *names[waiting])
                free.append(slot)
                waiting += 1
        if free:
            observation_ND = observation_ND.copy()  # the buffer keeps the episode's last observation
            observation_ND[free] = environments.reset_slots(np.array(free), [seeds[int(job_N[slot])] for slot in free])
    return [segment for segment in segments if segment is not None], buffer.finish()
