"""Kinds of rollouts of a control run (rollouts.kind), with their environments and samplers."""

from __future__ import annotations

from covey.config import ControlConfig
from covey.config.fields import plural
from covey.control.branch_sampler import BranchSampler, refuse_uncopyable
from covey.control.envs.vector_env import longest_episode, make_environments
from covey.control.policy import ControlPolicy
from covey.control.reward_scaling import RewardScale
from covey.control.sampler import ControlSampler, EpisodeSampler, FragmentSampler


class EpisodeRollouts:
    """Whole episodes from each start; base class of the other kinds.

    Args:
        config: of the run.

    Raises:
        ConfigError: if the environments cannot be made.
    """

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        branches = config.rollouts.kind == "branches"
        self.environments = make_environments(config.environment, config.rollouts.copies, copies_states=branches)

    @staticmethod
    def longest(config: ControlConfig) -> int | None:
        """Largest number of decisions in a rollout; None if there is no limit."""
        return longest_episode(config.environment)

    @property
    def starts_per_step(self) -> int:
        return self.config.rollouts.starts_per_step

    @property
    def group_size(self) -> int:
        return self.config.rollouts.group_size

    def describe(self) -> str:
        """The rollouts of a step, such as "4 starts x 8 episodes"."""
        return f"{plural(self.starts_per_step, 'start')} x {plural(self.group_size, 'episode')}"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        """The sampler of the run."""
        config = self.config
        return EpisodeSampler(policy, self.environments, config.seed, reward_scale, config.discount)

    def close(self) -> None:
        """End the processes of the environments."""
        self.environments.close()


class BranchRollouts(EpisodeRollouts):
    """Rollouts that branch from one state of an episode; the episodes have their own environments.

    Raises:
        ConfigError: if the state of the environment cannot be copied.
    """

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.trunks = make_environments(config.environment, config.rollouts.starts_per_step, copies_states=True)
        refuse_uncopyable(self.trunks)

    @staticmethod
    def longest(config: ControlConfig) -> int | None:
        return config.branch_decisions

    def describe(self) -> str:
        return f"{plural(self.starts_per_step, 'start')} x {self.group_size:,} branches"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        config = self.config
        return BranchSampler(
            policy,
            self.environments,
            config.seed,
            reward_scale,
            config.discount,
            trunks=self.trunks,
            horizon=config.rollouts.horizon,
            decisions=config.branch_decisions,
        )

    def close(self) -> None:
        super().close()
        self.trunks.close()


class FragmentRollouts(EpisodeRollouts):
    """Fragments of a fixed number of steps; each copy of the environment is one start with one rollout."""

    @property
    def starts_per_step(self) -> int:
        return self.environments.count

    @property
    def group_size(self) -> int:
        return 1

    def describe(self) -> str:
        steps = self.config.rollouts.fragment_steps
        return f"{plural(self.environments.count, 'environment')} x {plural(steps, 'step')}"

    def sampler(self, policy: ControlPolicy, reward_scale: RewardScale) -> ControlSampler:
        config = self.config
        return FragmentSampler(
            policy,
            self.environments,
            config.seed,
            reward_scale,
            config.discount,
            steps=config.rollouts.fragment_steps,
        )


ROLLOUT_KINDS: dict[str, type[EpisodeRollouts]] = {
    "episodes": EpisodeRollouts,
    "branches": BranchRollouts,
    "fragments": FragmentRollouts,
}
