"""Validate how groups are collected, and their token limit."""

from __future__ import annotations

from covey.config import ConfigError, RunConfig, SamplingConfig

# Algorithms that compare with a critic or with the whole step, so that no group is without a signal for them.
NOT_BY_GROUP = ("ppo", "reinforce_pp")


def check_collection(config: RunConfig) -> None:
    """Refuse contradictions in the group fields of [sampling].

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    sampling, algorithm = config.sampling, config.algorithm
    _check_overlong(config)
    _check_schedule(sampling, config.steps)
    for name, wanted in (("adaptive", sampling.adaptive), ("max_resamples", config.max_resamples > 0)):
        if wanted and algorithm in NOT_BY_GROUP:
            raise ConfigError(
                f"sampling.{name} is set, but {algorithm} does not compare within groups, so a group whose rewards are "
                "all the same has advantages too: take it out, or choose grpo"
            )
    if sampling.adaptive and config.max_resamples:
        raise ConfigError(
            f"sampling.adaptive with max_resamples = {config.max_resamples}: both say what "
            "follows a group whose rewards are all the same; set max_resamples = 0, or take out adaptive"
        )
    if sampling.adaptive:
        _check_adaptive(sampling)
    else:
        _refuse_adaptive_fields(sampling)


def check_credit(credit: str, algorithm: str, decision: str) -> None:
    """Refuse a loss.credit other than the default for an algorithm that does not compare within groups.

    Args:
        decision: a decision of the policy in a word, for the message.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    if credit != "outcome" and algorithm in NOT_BY_GROUP:
        raise ConfigError(
            f"loss.credit is {credit!r}, but {algorithm} already credits every {decision} with what was earned from it "
            "on and does not compare within groups: take it out, or choose grpo"
        )


def _check_overlong(config: RunConfig) -> None:
    tokens, limit = config.sampling.overlong_tokens, config.rollout_limit
    if tokens is not None and tokens > limit:
        raise ConfigError(
            f"sampling.overlong_tokens ({tokens}) are the last ones of max_new_tokens ({limit}): set it to at most "
            f"{limit} (a fifth is usual)"
        )


def _check_schedule(sampling: SamplingConfig, steps: int) -> None:
    if sampling.final_group_size is not None and steps < 2:
        raise ConfigError(
            "sampling.final_group_size is reached at the last step, and the run has one step: set steps to 2 or more, "
            "or take it out"
        )


def _check_adaptive(sampling: SamplingConfig) -> None:
    sizes = [sampling.group_size]
    if sampling.final_group_size is not None:
        sizes.append(sampling.final_group_size)
    first, most = sampling.initial_group_size, sampling.max_group_size
    if first > min(sizes):
        raise ConfigError(
            f"sampling.initial_group_size ({first}) spends more than the budget of group_size ({min(sizes)}) rollouts "
            f"a prompt: set it to at most {min(sizes)} (4 is usual)"
        )
    if most is not None and most < max(sizes):
        raise ConfigError(
            f"sampling.max_group_size ({most}) is below group_size ({max(sizes)}), so part of the budget could never "
            f"be spent: set it to {max(sizes)} or more"
        )


def _refuse_adaptive_fields(sampling: SamplingConfig) -> None:
    default = SamplingConfig()
    for name in ("initial_group_size", "max_group_size"):
        if getattr(sampling, name) != getattr(default, name):
            raise ConfigError(f"sampling.{name} is set, but only adaptive groups use it: set adaptive = true too")
