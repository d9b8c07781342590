"""Config fields that runs on language models and on environments share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CRITIC_FREE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce_pp")
ALGORITHM_NAMES = (*CRITIC_FREE, "ppo")


class ConfigError(ValueError):
    """A mistake in the user's input; the message is one line that names the fix."""


class RunError(RuntimeError):
    """A run that cannot continue; the message is one line. The run folder keeps the progress so far."""


class MachineError(RuntimeError):
    """A fault of the machine (disk, memory, permissions), in one line with the path and what to do about it."""


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    advanced: bool = False,
) -> Any:
    """A config field: its default, its help text and the values it may take.

    Args:
        least, most: inclusive limits; in a list they hold for every item.
        above, below: exclusive limits.
        advanced: shown by `--help-all` only.
    """
    limits = {"least": least, "most": most, "above": above, "below": below}
    return field(default=default, metadata={"help": text, "choices": choices, "limits": limits, "advanced": advanced})


@dataclass(frozen=True)
class LossBase:
    """Fields of the loss that both kinds of run share. None takes the algorithm's own default."""

    clip_low: float | None = option(None, "the ratio is clipped below at 1 - clip_low", above=0, most=1)
    clip_high: float | None = option(None, "the ratio is clipped above at 1 + clip_high", above=0)
    dual_clip: float | None = option(
        None, "dual clip: bound of the ratio for negative advantages, above 1; unset: off", above=1, advanced=True
    )
    kl_coefficient: float | None = option(None, "weight of the KL; 0 only logs it", least=0)
    kl_estimator: str | None = option(
        None,
        "estimator of the KL; k1 enters the reward, the others the loss; exact sums over the vocabulary, in control "
        "over all discrete actions",
        choices=("k1", "k2", "k3", "exact"),
    )
    kl_anchor: str = option(
        "reference",
        "policy that the KL is taken to: the reference (the policy before training) or the one that sampled",
        choices=("reference", "behavior"),
        advanced=True,
    )
    kl_warmup_steps: int = option(0, "steps over which the KL coefficient rises from 0", least=0, advanced=True)
    adaptive_kl_target: float | None = option(
        None,
        "target KL in nats per token or action, which the KL coefficient is adapted to reach; unset: fixed",
        above=0,
        advanced=True,
    )
    adaptive_kl_horizon: int = option(
        10_000, "horizon of the adaptive KL coefficient, in rollouts", least=1, advanced=True
    )
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus", least=0)
    value_coefficient: float = option(
        0.5,
        'ppo: weight of the value loss; with critic.trunk = "own" it matters only where max_grad_norm clips',
        least=0,
        advanced=True,
    )
    value_clip: float | None = option(
        None, "ppo: clip range of the value loss; unset: no clipping", above=0, advanced=True
    )
    gae_lambda: float = option(
        0.95, "ppo: lambda of GAE, from 0 (one-step TD error) to 1 (Monte Carlo returns)", least=0, most=1
    )
    whiten: bool = option(
        True, "ppo: normalise advantages to mean 0 and standard deviation 1 over the step", advanced=True
    )


@dataclass(frozen=True)
class UpdateBase:
    """Fields of the update that both kinds of run share."""

    learning_rate: float = option(1e-5, "peak learning rate of AdamW", above=0)
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "steps over which the learning rate rises from 0", least=0)
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay", least=0, advanced=True)
    beta1: float = option(0.9, "AdamW's decay of the mean gradient", least=0, below=1, advanced=True)
    beta2: float = option(0.999, "AdamW's decay of the mean squared gradient", least=0, below=1, advanced=True)
    max_grad_norm: float = option(1.0, "clip gradients to this norm", above=0)
    epochs: int = option(1, "passes over the rollouts of a step", least=1)
    minibatches: int = option(1, "optimizer steps per pass; the prompts of a step are split evenly", least=1)
    target_kl: float | None = option(
        None,
        "KL to the policy that sampled, in nats, beyond which the epochs of a step end early",
        above=0,
        advanced=True,
    )
    critic_learning_rate: float | None = option(
        None, "ppo: the critic's learning rate; unset: learning_rate", above=0, advanced=True
    )
    critic_epochs: int = option(0, "ppo: further passes for the critic alone", least=0, advanced=True)
    critic_warmup_steps: int = option(0, "ppo: first steps in which only the critic is trained", least=0, advanced=True)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(20, "steps between checkpoints", least=1)
    keep: int = option(2, "checkpoints kept, at least 2", least=2, advanced=True)


@dataclass(frozen=True)
class RunBase:
    """Top-level fields that both kinds of run share."""

    algorithm: str = option("grpo", "training algorithm: advantage, loss and KL", choices=ALGORITHM_NAMES)
    steps: int = option(100, "training steps", least=1)
    seed: int = option(0, "seed of all random choices", least=0, most=2**32 - 1)
    run_dir: str = option("", "folder of the run; empty: runs/<recipe>-<number>")
    threads: int = option(0, "CPU threads; 0: one per core", least=0)
    show_rollouts_every: int = option(10, "steps between printed rollouts; 0: never", least=0)
