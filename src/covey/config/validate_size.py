"""Validate the size of a run: refuse one whose smallest possible memory exceeds that of the machine.

The bounds find mistyped numbers without loading the model or the environment. `covey check` and `covey plan` estimate
the memory of a run on a language model.
"""

from __future__ import annotations

from itertools import pairwise

from covey.config.common import ConfigError
from covey.config.control import ControlConfig
from covey.config.llm import RunConfig
from covey.config.machine import memory_bytes, processors

THREADS_A_PROCESSOR = 16
LEAST_THREAD_LIMIT = 256  # a run may be resumed on a smaller machine
ROLLOUT_BYTES = 2000  # of a rollout as Python objects, without its tokens
TOKEN_BYTES = 64  # of a sampled token: its id and its log-probability
COPY_BYTES = 1000  # of one copy of an environment
PROCESS_BYTES = 32 << 20  # of one copy of an environment in a process of its own
DECISION_BYTES = 100  # of a decision: observation, action, log-probability, reward
WEIGHT_BYTES = 24  # of a weight that is trained: itself, its master, gradient, two moments, reference
MOST_LAYERS = 100


def check_size(config: RunConfig) -> None:
    """Refuse a run on a language model that does not fit into the memory of this machine.

    Raises:
        ConfigError: naming the fields to lower.
    """
    check_threads(config.threads)
    sampling = config.sampling
    rollouts = sampling.prompts_per_step * max(sampling.group_size, sampling.final_group_size or 0)
    rollouts *= 1 + config.max_resamples
    _refuse_above(rollouts * ROLLOUT_BYTES, f"a step of {rollouts:,} rollouts", "sampling.prompts_per_step, group_size")
    _refuse_above(
        rollouts * config.rollout_limit * TOKEN_BYTES,
        f"a step of {rollouts:,} rollouts of {config.rollout_limit:,} tokens",
        "sampling.prompts_per_step, group_size or max_new_tokens",
    )
    kept = config.replay.groups * config.replay.max_age * max(sampling.group_size, sampling.final_group_size or 0)
    _refuse_above(
        kept * config.rollout_limit * TOKEN_BYTES,
        f"a replay of {kept:,} rollouts of {config.rollout_limit:,} tokens",
        "replay.groups or replay.max_age",
    )


def check_control_size(config: ControlConfig) -> None:
    """Refuse a run on an environment that does not fit into the memory of this machine.

    Raises:
        ConfigError: naming the fields to lower.
    """
    check_threads(config.threads)
    rollouts = config.rollouts
    own_process = config.environment.vectorization == "async"
    _refuse_above(
        rollouts.copies * (PROCESS_BYTES if own_process else COPY_BYTES),
        f"{rollouts.copies:,} copies of the environment" + (" in processes of their own" if own_process else ""),
        "rollouts.environments" if rollouts.environments else "rollouts.starts_per_step, group_size",
    )
    steps = {"fragments": rollouts.fragment_steps, "branches": rollouts.horizon}.get(rollouts.kind, 1)
    count = rollouts.copies if rollouts.kind == "fragments" else rollouts.starts_per_step * rollouts.group_size
    _refuse_above(count * steps * DECISION_BYTES, f"a step of {count * steps:,} decisions", "the fields of [rollouts]")
    for name, widths in (("hidden", config.policy.hidden), ("critic_hidden", config.policy.critic_hidden)):
        if len(widths) > MOST_LAYERS:
            raise ConfigError(f"policy.{name} has {len(widths):,} layers: at most {MOST_LAYERS} are trained")
        weights = sum(first * second for first, second in pairwise(widths)) + sum(widths)
        _refuse_above(weights * WEIGHT_BYTES, f"a network of {weights:,} weights", f"the widths in policy.{name}")


def check_threads(threads: int, where: str = "threads") -> None:
    """Refuse more threads than are useful on this machine; `where` names the setting.

    Raises:
        ConfigError: naming the largest number.
    """
    most = max(LEAST_THREAD_LIMIT, THREADS_A_PROCESSOR * processors())
    if threads > most:
        raise ConfigError(f"{where} must be at most {most} on this machine (is {threads}); 0 is every core")


def _refuse_above(needed: int, what: str, fields: str) -> None:
    """Refuse `what` if it needs more bytes than the machine has; `fields` are the settings to lower."""
    memory = memory_bytes()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"{what} needs at least {needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.1f} GiB: lower "
            f"{fields}"
        )
