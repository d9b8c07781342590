"""What a run can be told: frozen dataclasses and the rules that their values obey.

`RunConfig` is a run on a language model, `ControlConfig` one on a Gymnasium environment. `covey.config_reader` fills
them from TOML and the command line, `covey.config_checks` refuses what cannot work. Importing this module loads neither
torch nor transformers, so that a mistake is reported at once. The second argument of `option` is the field's `--help`.
"""
# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, made once per field on purpose

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALGORITHM_NAMES = ("grpo", "dr_grpo", "rloo", "reinforce")
CONTROL_ALGORITHM_NAMES = (*ALGORITHM_NAMES, "ppo")
GROUPS = ("episodes", "reward_to_go", "within_episode", "branches", "fragments")
EMBEDDED_MODELS = ("smollm2-135m",)


class ConfigError(ValueError):
    """A mistake of the user's, told in one line that names the fix."""


class RunError(RuntimeError):
    """A run that cannot go on, told in one line; what was learned so far is in its run folder."""


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A config field: its default, its help text and the values it may take.

    `least` and `most` are allowed themselves, `above` and `below` are not. In a list they hold for every item.
    """
    limits = {"least": least, "most": most, "above": above, "below": below}
    return field(default=default, metadata={"help": text, "choices": choices, "limits": limits})


@dataclass(frozen=True)
class LossBase:
    """What both worlds say of the loss. Fields left at None take the algorithm's own default."""

    clip_low: float | None = option(None, "the ratio is clipped below at 1 - clip_low", above=0, most=1)
    clip_high: float | None = option(None, "the ratio is clipped above at 1 + clip_high", above=0)
    dual_clip: float | None = option(None, "bound on the loss of negative advantages (above 1); unset is off", above=1)
    kl_coefficient: float | None = option(None, "weight of the KL to the reference model; 0 only watches it", least=0)
    kl_estimator: str | None = option(
        None, "estimator of that KL; k1 goes into the reward, the others into the loss", choices=("k1", "k2", "k3")
    )
    kl_warmup_steps: int = option(0, "steps over which the KL coefficient rises from 0", least=0)


@dataclass(frozen=True)
class UpdateBase:
    """What both worlds say of the update."""

    learning_rate: float = option(1e-5, "peak learning rate of AdamW", above=0)
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "steps over which the learning rate rises from 0", least=0)
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay", least=0)
    beta1: float = option(0.9, "AdamW's decay of the mean gradient", least=0, below=1)
    beta2: float = option(0.999, "AdamW's decay of the mean squared gradient", least=0, below=1)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", above=0)
    epochs: int = option(1, "passes over the rollouts of a step", least=1)
    minibatches: int = option(1, "optimizer steps per pass; the prompts of a step are split evenly", least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(20, "steps between checkpoints", least=1)
    keep: int = option(2, "checkpoints kept, at least 2", least=2)


@dataclass(frozen=True)
class RunBase:
    """What both worlds say of a run."""

    algorithm: str = option("grpo", "how rollouts are compared and the policy moved", choices=ALGORITHM_NAMES)
    steps: int = option(100, "training steps", least=1)
    seed: int = option(0, "names the run's random choices", least=0, most=2**32 - 1)
    run_dir: str = option("", "folder of the run; empty is runs/<recipe>-<number>")
    threads: int = option(0, "CPU threads; 0 is every core", least=0)
    show_rollouts_every: int = option(10, "steps between printed sample rollouts; 0 is never", least=0)


@dataclass(frozen=True)
class SamplingConfig:
    prompts_per_step: int = option(16, "prompts drawn for every training step", least=1)
    group_size: int = option(16, "rollouts from each prompt; they are compared with each other", least=2)
    max_new_tokens: int = option(64, "longest completion, in tokens, the end token included", least=1)
    temperature: float = option(1.0, "divides the logits while sampling and in the log-probabilities", above=0)
    top_p: float = option(1.0, "must stay 1.0 while training: cutting the tail biases the ratio")
    top_k: int = option(0, "must stay 0 while training: cutting the tail biases the ratio")
    rows_at_once: int = option(0, "rollouts decoded together; 0 chooses by memory", least=0)


@dataclass(frozen=True)
class LossConfig(LossBase):
    mask_truncated: bool = option(False, "leave completions cut by the token limit out of the loss")


@dataclass(frozen=True)
class UpdateConfig(UpdateBase):
    microbatch_tokens: int = option(
        4096, "tokens in one backward pass; less memory when smaller, same gradient", least=1
    )


@dataclass(frozen=True)
class EvaluationConfig:
    problems: int = option(256, "held-out problems, answered greedily before and after training", least=1)
    every: int = option(0, "also evaluate every so many steps; 0 is only before and after", least=0)
    token_limits: tuple[int, ...] = option((), "token limits to report; empty is the training's own limit", least=1)


@dataclass(frozen=True)
class ArithmeticConfig:
    digits: tuple[int, ...] = option((2,), "digits of an operand, drawn evenly from this list", least=1, most=12)
    operators: tuple[str, ...] = option(("+", "-"), "drawn evenly from this list of + - *", choices=("+", "-", "*"))
    terms: tuple[int, ...] = option((2,), "numbers in an expression, drawn evenly from this list", least=2)
    negative: bool = option(False, "whether answers may be below 0, as that of 17 - 45 is")
    instruction: str = option("Reply with the number only.", "sentence added to the question")
    held_out_digits: tuple[int, ...] = option(
        (), "digits of an operand in held-out problems; empty is the same as in training", least=1, most=12
    )


@dataclass(frozen=True)
class CountdownConfig:
    numbers: int = option(3, "how many numbers are given", least=2, most=6)
    largest: int = option(20, "largest given number", least=2)
    operators: tuple[str, ...] = option(
        ("+", "-", "*"), "operators that a solution may use, of + - * /", choices=("+", "-", "*", "/")
    )


@dataclass(frozen=True)
class WordProblemsConfig:
    steps: tuple[int, ...] = option(
        (2,), "reasoning steps of a problem, drawn evenly from this list (1 to 4)", least=1, most=4
    )
    largest: int = option(20, "largest number in a problem", least=2)


@dataclass(frozen=True)
class JsonlConfig:
    path: str = option("", "JSONL file; each line has a 'prompt' (string or chat messages) and any other columns")
    held_out_path: str = option("", "JSONL file of held-out prompts; empty takes held_out_share of `path`")
    held_out_share: float = option(0.1, "share of lines kept from training for evaluation", above=0, below=1)


TASK_CONFIGS: dict[str, type] = {
    "arithmetic": ArithmeticConfig,
    "countdown": CountdownConfig,
    "word_problems": WordProblemsConfig,
    "jsonl": JsonlConfig,
}


@dataclass(frozen=True)
class RewardConfig:
    name: str = option("", "a built-in reward", choices=("numeric", "digits", "exact", "format", "countdown"))
    function: str = option("", "or your own: file.py:function or module:function, with TRL's signature")
    weight: float = option(1.0, "weight in the sum of rewards")
    pattern: str = option("", "regular expression of the format reward, matched against the whole completion")
    answer_column: str = option("answer", "column that holds the right answer")
    timeout_seconds: float = option(10.0, "a call of your own function that takes longer has failed", above=0)
    score: bool = option(False, "this reward (1 = right) is what evaluation counts; default: the first")


@dataclass(frozen=True)
class RunConfig(RunBase):
    """One training run on a language model."""

    task: Any = option(None, "[task] table: name = arithmetic, countdown, word_problems or jsonl, and its fields")
    model: str = option("smollm2-135m", "smollm2-135m (embedded), a Hugging Face folder, a hub name, or a .gguf file")
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = option("auto", "of products: bf16 keeps fp32 master weights", choices=("auto", "bf16", "fp32"))
    rewards: tuple[RewardConfig, ...] = option((), "[[rewards]] tables; empty is the task's own reward")
    sampling: SamplingConfig = option(SamplingConfig(), "[sampling] table")
    loss: LossConfig = option(LossConfig(), "[loss] table")
    update: UpdateConfig = option(UpdateConfig(), "[update] table")
    evaluation: EvaluationConfig = option(EvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "[checkpoint] table")


@dataclass(frozen=True)
class EnvironmentConfig:
    id: str = option("", "a registered Gymnasium environment: CartPole-v1, or module:Env-v0 for one of your own")
    vectorization: str = option(
        "auto",
        "how copies step together: auto is sync, for CartPole-v1 a faster one; async takes processes",
        choices=("auto", "sync", "async", "entry_point"),
    )
    autoreset: str = option(
        "disabled",
        "when a copy begins its next episode: when it is asked to (disabled), or by itself (fragments only; a run that "
        "is resumed then begins new episodes)",
        choices=("disabled", "same_step", "next_step"),
    )
    action_repeat: int = option(1, "environment steps that every action is held for", least=1)
    max_episode_steps: int = option(0, "an episode is truncated after so many; 0 is the environment's own", least=0)


@dataclass(frozen=True)
class PolicyConfig:
    hidden: tuple[int, ...] = option((64, 64), "widths of the hidden layers", least=1)
    activation: str = option("tanh", "between the layers", choices=("tanh", "relu"))
    normalise_observations: bool = option(False, "scale observations by their running mean and standard deviation")
    initial_std: float = option(1.0, "standard deviation of continuous actions at the start", above=0)
    critic_hidden: tuple[int, ...] = option((), "widths of ppo's critic; empty is the same as the policy's", least=1)


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
    horizon: int = option(50, "branches: decisions of a branch", least=1)
    gamma: float | None = option(None, "discount a decision; unset is 1 for episodes, else 0.99", least=0, most=1)
    compare: str = option(
        "step",
        "reward_to_go: with the siblings at the same step, or with every decision of the group",
        choices=("step", "group"),
    )
    reward_scaling: str = option(
        "none",
        "rewards as they are, divided by the running deviation of the return, or clipped to -1..1",
        choices=("none", "running_std", "clip"),
    )

    @property
    def copies(self) -> int:
        """How many copies of the environment step together."""
        if self.groups == "fragments":
            return self.environments or 8
        every_rollout = self.starts_per_step * self.group_size
        return min(self.environments or every_rollout, every_rollout)  # more would play for nobody

    @property
    def discount(self) -> float:
        """gamma, or what stands for it where it is unset."""
        if self.gamma is not None:
            return self.gamma
        return 1.0 if self.groups == "episodes" else 0.99


@dataclass(frozen=True)
class ControlLossConfig(LossBase):
    kl_coefficient: float = option(0.0, "weight of the KL to the anchor; 0 is off", least=0)
    kl_estimator: str | None = option(
        None,
        "estimator of that KL; exact sums over all discrete actions; k1 goes into the reward, the others into the loss",
        choices=("k1", "k2", "k3", "exact"),
    )
    kl_anchor: str = option(
        "reference",
        "the policy that the KL ties to: the untrained one, or the one that acted",
        choices=("reference", "behavior"),
    )
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus", least=0)
    value_coefficient: float = option(
        0.5, "ppo: weight of the critic's loss; its network is its own, so it is felt where max_grad_norm cuts", least=0
    )
    value_clip: float | None = option(None, "ppo: a value moves at most so far in one step; unset is off", above=0)
    gae_lambda: float = option(0.95, "ppo: 0 trusts the critic, 1 the rewards", least=0, most=1)
    whiten: bool = option(True, "ppo: advantages get mean 0 and deviation 1 over the step")


@dataclass(frozen=True)
class ControlUpdateConfig(UpdateBase):
    learning_rate: float = option(3e-4, "peak learning rate of AdamW", above=0)
    max_grad_norm: float = option(0.5, "gradients are scaled down to this norm", above=0)
    epochs: int = option(4, "passes over the rollouts of a step", least=1)
    minibatches: int = option(1, "optimizer steps per pass; the decisions of a step are split evenly", least=1)
    critic_learning_rate: float | None = option(None, "ppo: the critic's own; unset is learning_rate", above=0)
    critic_epochs: int = option(0, "ppo: further passes that move the critic alone", least=0)
    target_kl: float | None = option(None, "nats from the policy that acted, after which a step stops", above=0)


@dataclass(frozen=True)
class ControlEvaluationConfig:
    episodes: int = option(100, "episodes played greedily before and after training", least=1)
    every: int = option(0, "also evaluate every so many steps; 0 is only before and after", least=0)
    expected_return: float | None = option(None, "mean return that this recipe should reach")


@dataclass(frozen=True)
class ControlConfig(RunBase):
    """One training run on a Gymnasium environment."""

    algorithm: str = option(
        "grpo",
        "how rollouts are compared and the policy moved; dr_grpo divides by the time limit of an episode",
        choices=CONTROL_ALGORITHM_NAMES,
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
