"""Config of a run on a Gymnasium environment."""

from covey.config.common import (
    ALGORITHM_NAMES,
    BY_GROUP,
    CheckpointConfig,
    LossBase,
    ReplayConfig,
    RunBase,
    Table,
    UpdateBase,
    config_field,
    table,
)


@table(frozen=True)
class EnvironmentConfig(Table):
    id: str = config_field("", "a registered Gymnasium environment: CartPole-v1, or module:Env-v0 for one of your own")
    vectorization: str = config_field(
        "auto",
        "how copies of the environment step: one after the other in this process (sync), or each in its own process "
        "(async); auto is all in one process of their own, sync for branches and for Gymnasium's own environments, and "
        "for CartPole-v1 and Acrobot-v1 all copies at once in NumPy",
        choices=("auto", "sync", "async"),
        advanced=True,
    )
    action_masks: bool = config_field(
        True,
        "never take actions that the environment's mask forbids, if it gives one: in info['action_mask'], by a method "
        "action_masks(), or in a Dict observation",
        advanced=True,
    )
    frame_stack: int = config_field(
        1, "the last observations of the environment that the policy sees together", min=1, max=1000, advanced=True
    )
    action_repeat: int = config_field(1, "environment steps for which an action is repeated", min=1, advanced=True)
    timeout_seconds: float = config_field(60.0, "time limit of one step or reset of all copies", above=0, advanced=True)
    max_episode_steps: int = config_field(
        0, "steps after which an episode is truncated; 0: the limit of the environment", min=0
    )


@table(frozen=True)
class PolicyConfig(Table):
    network: str = config_field(
        "auto",
        "layers before the hidden ones: none (mlp), or the convolutions of nature_cnn (pictures from 36 x 36) or "
        "small_cnn; auto takes convolutions if the observation is a picture that is large enough",
        choices=("auto", "mlp", "nature_cnn", "small_cnn"),
        advanced=True,
    )
    memory: int = config_field(
        0,
        "size of a GRU before the hidden layers, by which the policy remembers earlier observations; 0: no memory",
        min=0,
        max=100_000,
        advanced=True,
    )
    hidden: tuple[int, ...] = config_field((64, 64), "widths of the hidden layers", min=1, max=1_000_000)
    activation: str = config_field("tanh", "activation between the layers", choices=("tanh", "relu"), advanced=True)
    normalise_observations: bool = config_field(
        False, "scale observations by their running mean and standard deviation"
    )
    initial_std: float = config_field(
        1.0, "standard deviation of continuous actions at the start", above=0, advanced=True
    )


@table(frozen=True)
class RolloutsConfig(Table):
    kind: str = config_field(
        "episodes",
        "how rollouts are made: whole episodes from each start (episodes), branches from one state of an episode "
        "(branches), or fragments of a fixed number of steps (fragments, for ppo)",
        choices=("episodes", "branches", "fragments"),
    )
    starts_per_step: int = config_field(
        4, "starts (reset seeds) per training step", min=1, used_by=("episodes", "branches")
    )
    group_size: int = config_field(
        8, "rollouts from each start, which are compared with each other", min=1, used_by=("episodes", "branches")
    )
    environments: int = config_field(
        0,
        "copies of the environment that step side by side; 0: one per rollout (8 for fragments)",
        min=0,
        used_by=("episodes", "fragments"),
    )
    fragment_steps: int = config_field(
        128, "fragments: steps of each copy per training step", min=2, used_by=("fragments",)
    )
    horizon: int = config_field(50, "branches: decisions in a branch", min=1, advanced=True, used_by=("branches",))
    gamma: float | None = config_field(
        None,
        "discount per decision; unset: 1 if the outcomes of episodes are compared, else 0.99",
        min=0,
        max=1,
    )
    reward_scaling: str = config_field(
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


@table(frozen=True)
class ControlLossConfig(LossBase):
    kl_coefficient: float = config_field(0.0, "weight of the KL; 0: off", min=0)
    entropy_target: float | None = config_field(
        None,
        "entropy in nats per action that a controller holds, for continuous actions also below 0; unset: no controller",
    )
    credit: str = config_field(
        "outcome",
        "what is compared within a group: returns of whole rollouts (outcome); or returns from a decision on: with "
        "those of all decisions of the group (reward_to_go), of the siblings at the same step (reward_to_go_by_step), "
        "or of the same episode (within_episode)",
        choices=("outcome", "reward_to_go", "reward_to_go_by_step", "within_episode"),
        used_by=BY_GROUP,
    )


@table(frozen=True)
class ControlUpdateConfig(UpdateBase):
    learning_rate: float = config_field(3e-4, "peak learning rate of AdamW", above=0)
    max_grad_norm: float = config_field(0.5, "clip gradients to this norm", above=0)
    epochs: int = config_field(4, "passes over the rollouts of a step", min=1)
    minibatches: int = config_field(1, "optimizer steps per pass; the decisions of a step are split evenly", min=1)


@table(frozen=True)
class ControlEvaluationConfig(Table):
    episodes: int = config_field(100, "episodes played greedily before and after training", min=1, max=1_000_000)
    every: int = config_field(0, "steps between evaluations; 0: only before and after training", min=0)
    patience: int = config_field(
        0,
        "evaluations without a better mean return after which training ends; 0: it never ends early",
        min=0,
        needs="every",
    )
    expected_return: float | None = config_field(None, "mean return that the recipe reaches")


@table(frozen=True)
class ControlConfig(RunBase):
    """One training run on a Gymnasium environment."""

    algorithm: str = config_field(
        "grpo",
        "training algorithm: advantage, loss and KL; dr_grpo divides by the time limit of an episode",
        choices=ALGORITHM_NAMES,
    )
    threads: int = config_field(1, "CPU threads; 0: one per core; small networks are fastest with one", min=0)
    show_rollouts_every: int = config_field(0, "steps between printed rollouts; 0: never", min=0)
    environment: EnvironmentConfig = config_field(EnvironmentConfig(), "[environment] table")
    policy: PolicyConfig = config_field(PolicyConfig(), "[policy] table")
    rollouts: RolloutsConfig = config_field(RolloutsConfig(), "[rollouts] table")
    replay: ReplayConfig = config_field(ReplayConfig(), "[replay] table")
    loss: ControlLossConfig = config_field(ControlLossConfig(), "[loss] table")
    update: ControlUpdateConfig = config_field(ControlUpdateConfig(), "[update] table")
    evaluation: ControlEvaluationConfig = config_field(ControlEvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = config_field(CheckpointConfig(), "[checkpoint] table")

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
