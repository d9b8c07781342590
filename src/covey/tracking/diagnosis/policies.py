"""Checks of the policy: its entropy, its distance to others, and its sampler."""

from __future__ import annotations

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import RECENT, STALLED, History
from covey.tracking.diagnosis.rewards import SOLVED, is_solved
from covey.tracking.diagnosis.settings import Settings

COLLAPSED = 0.1  # of the entropy at the start, or of the standard deviation of actions
NEXT_TO_NOTHING = 0.02
ALIKE = 0.5  # fraction of groups with equal rewards
RISEN, RISEN_NATS = 2.0, 0.5  # factor and difference of the entropy
RUNAWAY = 2.0  # times the entropy at the start
RUNAWAY_NATS = 1.0
LARGE_STEP, HUGE_STEP = 0.1, 1.0  # KL to the policy that sampled, nats per decision
CLIPPED = 0.3
CLIPPED_SEQUENCES = 0.6  # gspo clips by the mean ratio of a completion, at bounds of 0.0003 and 0.0004
MISMATCH_KL, MISMATCH_KL_PROBLEM = 0.01, 0.1
EFFECTIVE, EFFECTIVE_PROBLEM = 0.9, 0.5  # fraction of the sample size


def entropy_collapse(history: History, settings: Settings) -> Seen | None:
    name = "policy/std" if history.of("policy/std").count else "entropy"
    start, level = history.start(name), history.level(name)
    if start is None or level is None or start <= 0 or level > COLLAPSED * start:
        return None
    score = history.level("score/mean")
    if is_solved(history, settings) or not history.stalls("score/mean"):
        return None
    alike = history.level("groups/zero_advantage_fraction")
    if level > NEXT_TO_NOTHING * start and (alike is None or alike < ALIKE or settings.has_critic):
        return None  # the rollouts of a group still differ
    what = "the standard deviation of the actions" if name == "policy/std" else "the entropy"
    where = "" if score is None else f", and the score stands still at {score:.3g}"
    return Seen(
        f"{what} fell from {start:.3g} to {level:.2g} ({level / start:.0%}){where}",
        f"Try {_more_entropy(settings)}",
        "problem" if level <= NEXT_TO_NOTHING * start else "warning",
    )


def _more_entropy(settings: Settings) -> str:
    bonus = settings.number("loss.entropy_coefficient", 0.0)
    advice = settings.change("loss.entropy_coefficient", 3 * bonus or (0.01 if settings.is_control else 0.002))
    if settings.get("loss.entropy_target") is None:
        advice += " with an entropy_target"
    if not settings.number("loss.clip_cov_fraction", 0.0):
        advice += f", {settings.change('loss.clip_cov_fraction', 0.002)}"
    temperature = settings.number("sampling.temperature", 1.0)
    if not settings.is_control and temperature < 1:
        return f"{settings.change('sampling.temperature', 1.0)}, or {advice}"
    return f"{advice}, or {settings.scaled('update.learning_rate', 1 / 3, 1e-5)}"


def rising_entropy(history: History, settings: Settings) -> Seen | None:
    name = "policy/std" if history.of("policy/std").count else "entropy"
    start, level = history.start(name), history.level(name)
    if start is None or level is None or start <= 0 or history.rises("score/mean"):
        return None
    if level < RISEN * start or (name == "entropy" and level < start + RISEN_NATS):
        return None
    bonus = settings.number("loss.entropy_coefficient", 0.0)
    less = f"{settings.change('loss.entropy_coefficient', bonus / 10)}, or " if bonus else ""
    lower = settings.scaled("update.learning_rate", 1 / 3, 1e-5)
    return Seen(
        f"{'the standard deviation of the actions' if name == 'policy/std' else 'the entropy'} rose from {start:.3g} "
        f"to {level:.3g}, and the score did not",
        f"Try {less}{lower}",
        "problem" if history.falls("score/mean") else "warning",
    )


def kl_runaway(history: History, settings: Settings) -> Seen | None:
    kl, entropies = history.level("kl"), history.of("entropy").first
    if settings.is_control or kl is None or not entropies:
        return None
    entropy = entropies[0]  # of the policy before its first update
    limit = max(RUNAWAY * entropy, RUNAWAY_NATS)
    if kl < limit:
        return None
    coefficient = settings.number("loss.kl_coefficient", 0.0)
    hold = settings.change("loss.kl_coefficient", 3 * coefficient or 0.02)
    return Seen(
        f"the KL to the reference is {kl:.3g} nats per token; the entropy of the policy was {entropy:.3g} at first",
        f"Try {hold}, or {settings.scaled('update.learning_rate', 1 / 3, 1e-5)}",
        "warning" if history.rises("score/mean") else "problem",
    )


def large_updates(history: History, settings: Settings) -> Seen | None:
    kl = history.level("kl/behavior")
    if kl is None or kl < LARGE_STEP:
        return None
    return Seen(
        f"the updates of the last {RECENT} steps moved the policy by {kl:.2g} nats per decision away from the one that "
        "sampled (median)",
        f"Try {_smaller_updates(settings)}",
        "problem" if kl >= HUGE_STEP else "warning",
    )


def clip_fraction(history: History, settings: Settings) -> Seen | None:
    low, high = history.level("clip/low"), history.level("clip/high")
    limit = CLIPPED_SEQUENCES if settings.algorithm == "gspo" else CLIPPED
    if low is None or high is None or low + high < limit:
        return None
    return Seen(
        f"{low + high:.0%} of the decisions of the last {RECENT} steps were clipped ({low:.0%} below, {high:.0%} "
        "above)",
        f"Try {_smaller_updates(settings)}",
    )


def _smaller_updates(settings: Settings) -> str:
    lower = settings.scaled("update.learning_rate", 1 / 3, 1e-5)
    if settings.optimizer_steps == 1:
        return lower
    epochs = int(settings.number("update.epochs", 1))
    return f"{lower}, or " + (
        settings.change("update.epochs", max(epochs // 2, 1))
        if epochs > 1
        else settings.change("update.target_kl", 0.02)
    )


def sampler_mismatch(history: History, settings: Settings) -> Seen | None:
    kl, effective = history.level("mismatch/kl"), history.level("mismatch/effective_sample_fraction")
    if kl is None or effective is None or (kl < MISMATCH_KL and effective > EFFECTIVE):
        return None
    advice = f"Try {_closer_sampler(settings)}"
    if not settings.is_control and settings.get("loss.importance_cap") is None:
        advice += f". Until it is mended, {settings.change('loss.importance_cap', 2.0)} bounds the error"
    return Seen(
        f"sampler and trainer differ by {kl:.2g} nats per decision, so {effective:.0%} of the sample size is left",
        advice,
        "problem" if kl >= MISMATCH_KL_PROBLEM or effective <= EFFECTIVE_PROBLEM else "warning",
    )


def _closer_sampler(settings: Settings) -> str:
    if settings.get("sampler.servers"):
        return "the weights of each step, the same precision and the same temperature on the servers"
    if not settings.is_control and settings.get("precision") != "fp32":
        return settings.change("precision", "fp32")
    return "the same run on another machine, and report it: sampler and trainer have the same weights here"


CHECKS = (
    Check(
        "entropy collapse",
        ("entropy", "policy/std", "score/mean", "groups/zero_advantage_fraction"),
        entropy_collapse,
        f"the median entropy (of continuous actions: their standard deviation) is at most {COLLAPSED:.0%} of its "
        f"start and {ALIKE:.0%} of the groups have equal rewards, or it is at most {NEXT_TO_NOTHING:.0%} (problem); "
        f"the score stands still (less than {STALLED:.0%} of its gain in the last {RECENT} steps), and the task is "
        f"not solved (accuracy {SOLVED:.0%}, or the expected return)",
        "The policy has become nearly deterministic before the task is solved. The rollouts of a group are then all "
        "alike, nothing new is tried, and the score stays where it is.",
        "The entropy mechanism of RL for reasoning language models (arXiv 2505.22617): the score is bought with "
        "entropy and ends where it is used up; DAPO (arXiv 2503.14476, section 3.1)",
    ),
    Check(
        "rising entropy",
        ("entropy", "policy/std", "score/mean"),
        rising_entropy,
        f"the median entropy is at least {RISEN:g} times its start and {RISEN_NATS:g} nats above it (standard "
        f"deviation of actions: {RISEN:g} times), and the score has not risen",
        "The policy becomes more random without becoming better: the entropy bonus outweighs the reward, or the "
        "updates are so large that they destroy the weights.",
    ),
    Check(
        "KL runaway",
        ("kl", "entropy", "score/mean"),
        kl_runaway,
        f"the median KL to the reference is at least {RUNAWAY:g} times the policy's entropy at the start, and at least "
        f"{RUNAWAY_NATS:g} nat per token (warning if the score has risen, else problem; language models only)",
        "A policy that only makes the likely tokens of the reference certain has a KL of about the reference's "
        "entropy. Far above that it writes tokens that the reference would hardly ever write.",
        "KL of a distribution to a sharper one: at most the negative log-probability of the token that it chooses, "
        "whose mean is the entropy",
    ),
    Check(
        "large updates",
        ("kl/behavior", "ratio/max", "learning_rate"),
        large_updates,
        f"the median KL to the policy that sampled is at least {LARGE_STEP:g} nats per decision (problem: "
        f"{HUGE_STEP:g})",
        "The update uses rollouts of a policy that it has left: their advantages do not describe the new policy.",
        "at most 0.02 in the healthy runs below; target_kl is 0.01 to 0.05 in Spinning Up",
    ),
    Check(
        "clip fraction",
        ("clip/low", "clip/high", "kl/behavior"),
        clip_fraction,
        f"the medians of clip/low and clip/high add up to at least {CLIPPED:.0%} (gspo: {CLIPPED_SEQUENCES:.0%})",
        "A clipped decision has no gradient. A few per cent are what clipping is for; if a third is clipped, the "
        "steps are too large for these rollouts.",
        "at most 11 % in the healthy runs below; 45 % with gspo, whose bounds are for long completions "
        "(docs/family.md)",
    ),
    Check(
        "sampler mismatch",
        ("mismatch/kl", "mismatch/effective_sample_fraction", "mismatch/mean"),
        sampler_mismatch,
        f"the median KL of the sampler to the trainer is at least {MISMATCH_KL:g} nats (problem: "
        f"{MISMATCH_KL_PROBLEM:g}), or the effective sample size at most {EFFECTIVE:.0%} (problem: "
        f"{EFFECTIVE_PROBLEM:.0%})",
        "The rollouts come from another policy than the one that is trained: the sampler has old weights, another "
        "precision or other settings. The gradient is then biased, and runs collapse late and without warning.",
        "at most 0.0008 nats in the healthy runs below, in bf16; the effective sample size is then above 99 %",
    ),
)
