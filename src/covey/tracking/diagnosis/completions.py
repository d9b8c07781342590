"""Checks of the length of completions."""

from __future__ import annotations

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import RECENT, SETTLED, History
from covey.tracking.diagnosis.rewards import is_solved
from covey.tracking.diagnosis.settings import Settings

TRUNCATED = 0.25
MOSTLY_TRUNCATED = 0.75
STILL = 0.8  # of the fraction RECENT steps ago, below which it is falling
NEARLY_ALL = 0.9  # the others are too few to compare with
EQUAL = 1e-6
COSTLY = 0.5  # standard deviations of the reward
DRIFT = 2.0  # factor of the length
MASKED = (
    "A completion that is cut has no loss, because loss.mask_truncated is true: the policy learns from the others "
    "alone, and nothing from a step in which all are cut."
)
LEAST = 0.75  # proposed minimum length, as a fraction of the mean length at the start


def truncation(history: History, settings: Settings) -> Seen | None:
    name = "length/truncated_fraction"
    level, before, start = history.level(name), history.level(name, skip=RECENT), history.start(name)
    if settings.is_control or level is None or before is None or start is None:
        return None
    if level < TRUNCATED or level < STILL * before:
        return None
    cut, others = _rewards_of_cut(history, level)
    if cut is None or others is None:  # unknown, or nearly all completions are cut
        if history.rises("score/mean") or is_solved(history, settings):
            return None
        earned = ""
    else:
        if others - cut < max(COSTLY * (history.level("reward/std") or 0.0), EQUAL):
            return None
        earned = f"; they earned {cut:.3g}, the others {others:.3g}"
    limit = int(settings.number("sampling.max_new_tokens", 64))
    shaped = f", or {settings.change('sampling.overlong_tokens', max(limit // 5, 1))} if they should be shorter"
    return Seen(
        f"the limit of {limit} tokens cut {level:.0%} of the completions of the last {RECENT} steps{earned}",
        f"Try {settings.change('sampling.max_new_tokens', 2 * limit)}"
        + ("" if settings.number("sampling.overlong_tokens", 0) else shaped),
        "problem" if level >= MOSTLY_TRUNCATED else "warning",
        MASKED if settings.get("loss.mask_truncated") else "",
    )


def _rewards_of_cut(history: History, fraction: float) -> tuple[float | None, float | None]:
    """Mean reward of the completions that the limit cut, and of the others; None if unknown."""
    cut, mean = history.level("length/truncated_reward"), history.level("reward/mean")
    if cut is None or mean is None or fraction >= NEARLY_ALL:
        return None, None
    return cut, (mean - fraction * cut) / (1 - fraction)


def length_drift(history: History, settings: Settings) -> Seen | None:
    if settings.is_control:
        return None
    for name, unit in (("length/mean", "tokens"), ("length/steps", "reasoning steps")):
        start, level = history.start(name), history.level(name)
        if not start or level is None or history.rises("score/mean") or 1 / DRIFT < level / start < DRIFT:
            continue
        if level > start:
            remedy = _against_lengthening(settings)
        else:
            remedy = _against_shortening(settings, start if unit == "tokens" else 0.0)
        return Seen(
            f"the completions went from {start:.3g} to {level:.3g} {unit}, and the score did not rise", f"Try {remedy}"
        )
    return None


def _against_lengthening(settings: Settings) -> str:
    if settings.algorithm == "grpo":
        return (
            f"{settings.change('algorithm', 'dr_grpo')}, whose loss does not favour long wrong completions, or "
            f"{_stronger_kl(settings)}"
        )
    return f"{_stronger_kl(settings)}, and read rollouts/: does the reward pay for long completions?"


def _against_shortening(settings: Settings, tokens_at_start: float) -> str:
    shortest = int(LEAST * tokens_at_start)
    # In a conversation the minimum is that of a turn, and the length that of all turns. vLLM as the sampler has none.
    can_be_set = not settings.get("conversation.environment") and settings.get("sampler.kind") != "vllm"
    if can_be_set and shortest > settings.number("sampling.min_new_tokens", 0):
        minimum = f"{settings.change('sampling.min_new_tokens', shortest)}, which allows no shorter completions, or "
    else:
        minimum = ""
    return f"{minimum}{_stronger_kl(settings)}, and read rollouts/: does the reward pay for short completions?"


def _stronger_kl(settings: Settings) -> str:
    return settings.change("loss.kl_coefficient", 2 * settings.number("loss.kl_coefficient", 0.0) or 0.02)


CHECKS = (
    Check(
        "truncation",
        ("length/truncated_fraction", "length/truncated_reward", "reward/mean", "reward/std", "score/mean"),
        truncation,
        f"the median fraction of cut completions is at least {TRUNCATED:.0%} (problem: {MOSTLY_TRUNCATED:.0%}) after "
        f"{SETTLED} steps and is not falling, and they earn less than the others by at least {COSTLY:g} standard "
        f"deviations of the reward; if that is unknown or {NEARLY_ALL:.0%} are cut, the score has not risen",
        "A completion that is cut has no end and often no answer, so it is graded as wrong although it may be on "
        "its way to be right. The policy learns to be short instead of right.",
        "DAPO (arXiv 2503.14476, section 3.4) on the noise of cut completions",
    ),
    Check(
        "length drift",
        ("length/mean", "length/steps", "score/mean"),
        length_drift,
        f"the median length (or number of reasoning steps) is at least {DRIFT:g} times its start or at most a half, "
        "and the score has not risen",
        "The completions became longer or shorter without becoming better. Something other than the task drives the "
        "length: the reward, or the loss, which with grpo weighs a token of a long completion less.",
        "Understanding R1-Zero-like training (Dr.GRPO, arXiv 2503.20783, section 3.1)",
    ),
)
