"""Config of a run on a Gymnasium environment."""
# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, made once per field on purpose

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import ALGORITHM_NAMES, CheckpointConfig, LossBase, RunBase, UpdateBase, option


@dataclass(frozen=True)
class EnvironmentConfig:
    id: str = option("", "a registered Gymnasium environment: CartPole-v1, or module:Env-v0 for one of your own")
    vectorization: str = option(
        "auto",
        "how copies of the environment step: one after the other in this process (sync), or each in its own process "
        "(async); auto is sync, and for CartPole-v1 all copies at once in NumPy",
        choices=("auto", "sync", "async"),
        advanced=True,
    )
    action_repeat: int = option(1, "environment steps for which an action is repeated", least=1, advanced=True)
    timeout_seconds: float = option(60.0, "time limit of one step or reset of all copies", above=0, advanced=True)
    max_episode_steps: int = option(
        0, "steps after which an episode is truncated; 0: the limit of the environment", least=0
    )


@dataclass(frozen=True)
class PolicyConfig:
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers", least=1, most=1_000_000)
    activation: str = option("tanh", "activation between the layers", choices=("tanh", "relu"), advanced=True)
    normalise_observations: bool = option(False, "scale observations by their running mean and standard deviation")
    initial_std: float = option(1.0, "standard deviation of continuous actions at the start", above=0, advanced=True)
    critic_hidden: tuple[int, ...] = option(
        (), "widths of ppo's critic; empty: the policy's", least=1, most=1_000_000, advanced=True
    )


@dataclass(frozen=True)
class RolloutsConfig:
    kind: str = option(
        "episodes",
        "how rollouts are made: whole episodes from each start (episodes), branches from one state of an episode "
        "(branches), or fragments of a fixed number of steps (fragments, for ppo)",
        choices=("episodes", "branches", "fragments"),
    )
    starts_per_step: int = option(4, "starts (reset seeds) per training step", least=1)
    group_size: int = option(8, "rollouts from each start, which are compared with each other", least=1)
    environments: int = option(
        0, "copies of the environment that step side by side; 0: one per rollout (8 for fragments)", least=0
    )
    fragment_steps: int = option(128, "fragments: steps of each copy per training step", least=2)
    horizon: int = option(50, "branches: decisions in a branch", least=1, advanced=True)
    gamma: float | None = option(
        None,
        "discount per decision; unset: 1 if the outcomes of episodes are compared, else 0.99",
        least=0,
        most=1,
    )
    reward_scaling: str = option(
        "none",
        "scaling of rewards: none, divided by the running standard deviation of returns, or clipped to -1..1",
        choices=("none", "running_std", "clip"),
    )

    @property
    def copies(self) -> int:
        """Number of copies of the environment that step side by side."""
        if self.kind == "fragments":
            return self.environments or 8
        every_rollout = self.starts_per_step * self.group_size
        return min(self.environments or every_rollout, every_rollout)  # further copies would not be used


@dataclass(frozen=True)
class ControlLossConfig(LossBase):
    kl_coefficient: float = option(0.0, "weight of the KL; 0: off", least=0)
    credit: str = option(
        "outcome",
        "what is compared within a group: returns of whole rollouts (outcome); or returns from a decision on: with "
        "those of all decisions of the group (reward_to_go), of the siblings at the same step (reward_to_go_by_step), "
        "or of the same episode (within_episode)",
        choices=("outcome", "reward_to_go", "reward_to_go_by_step", "within_episode"),
    )


@dataclass(frozen=True)
class ControlUpdateConfig(UpdateBase):
    learning_rate: float = option(3e-4, "peak learning rate of AdamW", above=0)
    max_grad_norm: float = option(0.5, "clip gradients to this norm", above=0)
    epochs: int = option(4, "passes over the rollouts of a step", least=1)
    minibatches: int = option(1, "optimizer steps per pass; the decisions of a step are split evenly", least=1)


@dataclass(frozen=True)
class ControlEvaluationConfig:
    episodes: int = option(100, "episodes played greedily before and after training", least=1, most=1_000_000)
    every: int = option(0, "steps between evaluations; 0: only before and after training", least=0)
    expected_return: float | None = option(None, "mean return that the recipe reaches")


@dataclass(frozen=True)
class ControlConfig(RunBase):
    """One training run on a Gymnasium environment."""

    algorithm: str = option(
        "grpo",
        "training algorithm: advantage, loss and KL; dr_grpo divides by the time limit of an episode",
        choices=ALGORITHM_NAMES,
    )
    threads: int = option(1, "CPU threads; 0: one per core; small networks are fastest with one", least=0)
    show_rollouts_every: int = option(0, "steps between printed rollouts; 0: never", least=0)
    environment: EnvironmentConfig = option(EnvironmentConfig(), "[environment] table")
    policy: PolicyConfig = option(PolicyConfig(), "[policy] table")
    rollouts: RolloutsConfig = option(RolloutsConfig(), "[rollouts] table")
    loss: ControlLossConfig = option(ControlLossConfig(), "[loss] table")
    update: ControlUpdateConfig = option(ControlUpdateConfig(), "[update] table")
    evaluation: ControlEvaluationConfig = option(ControlEvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "[checkpoint] table")

    @property
    def discount(self) -> float:
        """rollouts.gamma; unset, 1 if the outcomes of episodes are compared, else 0.99."""
        if self.rollouts.gamma is not None:
            return self.rollouts.gamma
        by_outcome = self.rollouts.kind == "episodes" and self.loss.credit == "outcome" and self.algorithm != "ppo"
        return 1.0 if by_outcome else 0.99

    @property
    def branch_decisions(self) -> int:
        """Decisions of a branch that the update uses: all of them, or the first if outcomes are compared.

        The outcome of a branch is credited to the first decision alone, because only there siblings share their state.
        """
        return 1 if self.loss.credit == "outcome" else self.rollouts.horizon
