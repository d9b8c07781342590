"""Config of a run on a Gymnasium environment."""
# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, made once per field on purpose

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import ALGORITHM_NAMES, CheckpointConfig, LossBase, RunBase, UpdateBase, option

GROUPS = ("episodes", "reward_to_go", "within_episode", "branches", "fragments")


@dataclass(frozen=True)
class EnvironmentConfig:
    id: str = option("", "a registered Gymnasium environment: CartPole-v1, or module:Env-v0 for one of your own")
    vectorization: str = option(
        "auto",
        "how copies of the environment step: in this process (sync), in a process each (async); auto is sync, for "
        "CartPole-v1 all copies at once in NumPy",
        choices=("auto", "sync", "async"),
        advanced=True,
    )
    action_repeat: int = option(1, "environment steps that every action is held for", least=1, advanced=True)
    timeout_seconds: float = option(
        60.0, "longest time that one step or reset of all copies may take", above=0, advanced=True
    )
    max_episode_steps: int = option(0, "an episode is truncated after so many; 0 is the environment's own", least=0)


@dataclass(frozen=True)
class PolicyConfig:
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers", least=1, most=1_000_000)
    activation: str = option("tanh", "between the layers", choices=("tanh", "relu"), advanced=True)
    normalise_observations: bool = option(False, "scale observations by their running mean and standard deviation")
    initial_std: float = option(1.0, "standard deviation of continuous actions at the start", above=0, advanced=True)
    critic_hidden: tuple[int, ...] = option(
        (), "widths of ppo's critic; empty is the same as the policy's", least=1, most=1_000_000, advanced=True
    )


@dataclass(frozen=True)
class RolloutsConfig:
    groups: str = option(
        "episodes",
        "returns of episodes from one start, their rewards to go, the steps of one episode, or branches from one "
        "state are compared; ppo takes fragments",
        choices=GROUPS,
    )
    starts_per_step: int = option(4, "starts (reset seeds) drawn for every training step", least=1)
    group_size: int = option(8, "rollouts from each start; they are compared with each other", least=1)
    environments: int = option(
        0, "copies of the environment that step together; 0 is one a rollout (8 for fragments)", least=0
    )
    fragment_steps: int = option(128, "fragments: steps of every copy in one training step", least=2)
    horizon: int = option(50, "branches: decisions of a branch", least=1, advanced=True)
    gamma: float | None = option(None, "discount a decision; unset is 1 for episodes, else 0.99", least=0, most=1)
    compare: str = option(
        "step",
        "reward_to_go: with the siblings at the same step, or with every decision of the group",
        choices=("step", "group"),
        advanced=True,
    )
    reward_scaling: str = option(
        "none",
        "rewards as they are, divided by the running deviation of the return, or clipped to -1..1",
        choices=("none", "running_std", "clip"),
    )

    @property
    def copies(self) -> int:
        """Number of copies of the environment that step together."""
        if self.groups == "fragments":
            return self.environments or 8
        every_rollout = self.starts_per_step * self.group_size
        return min(self.environments or every_rollout, every_rollout)  # more would not be used

    @property
    def discount(self) -> float:
        """gamma, or what stands for it where it is unset."""
        if self.gamma is not None:
            return self.gamma
        return 1.0 if self.groups == "episodes" else 0.99


@dataclass(frozen=True)
class ControlLossConfig(LossBase):
    kl_coefficient: float = option(0.0, "weight of the KL to the anchor; 0 is off", least=0)


@dataclass(frozen=True)
class ControlUpdateConfig(UpdateBase):
    learning_rate: float = option(3e-4, "peak learning rate of AdamW", above=0)
    max_grad_norm: float = option(0.5, "gradients are scaled down to this norm", above=0)
    epochs: int = option(4, "passes over the rollouts of a step", least=1)
    minibatches: int = option(1, "optimizer steps per pass; the decisions of a step are split evenly", least=1)


@dataclass(frozen=True)
class ControlEvaluationConfig:
    episodes: int = option(100, "episodes played greedily before and after training", least=1, most=1_000_000)
    every: int = option(0, "also evaluate every so many steps; 0 is only before and after", least=0)
    expected_return: float | None = option(None, "mean return that this recipe should reach")


@dataclass(frozen=True)
class ControlConfig(RunBase):
    """One training run on a Gymnasium environment."""

    algorithm: str = option(
        "grpo",
        "how rollouts are compared and the policy moved; dr_grpo divides by the time limit of an episode",
        choices=ALGORITHM_NAMES,
    )
    threads: int = option(1, "CPU threads; 0 is every core; small networks are fastest on one", least=0)
    show_rollouts_every: int = option(0, "steps between printed sample rollouts; 0 is never", least=0)
    environment: EnvironmentConfig = option(EnvironmentConfig(), "[environment] table")
    policy: PolicyConfig = option(PolicyConfig(), "[policy] table")
    rollouts: RolloutsConfig = option(RolloutsConfig(), "[rollouts] table")
    loss: ControlLossConfig = option(ControlLossConfig(), "[loss] table")
    update: ControlUpdateConfig = option(ControlUpdateConfig(), "[update] table")
    evaluation: ControlEvaluationConfig = option(ControlEvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "[checkpoint] table")
