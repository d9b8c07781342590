"""Checks of rewards, scores and groups."""

from __future__ import annotations

from statistics import median

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import CERTAIN, RECENT, History, error_of, in_errors
from covey.tracking.diagnosis.settings import Settings

DEAD_STEPS = 2  # in a row, at the beginning of a run, after which more of them are not a use
NO_SIGNAL = 0.75  # fraction of groups without signal at which the standard error of the gradient has doubled
NEXT_TO_NO_SIGNAL = 0.95
SMALL_GROUP = 3  # in groups of 2 at least half, of 3 a quarter have equal rewards, if rewards are 0 or 1
SMALL_GROUP_NO_SIGNAL = 0.5
FEW_GROUPS = 8  # with a signal, in a step
EQUAL = 1e-6  # standard deviation of rewards, relative to their size, that is rounding
SATURATED = 0.02  # standard deviation of rewards, relative to its highest level
NARROWED = 0.25  # the same, if the reward has risen meanwhile: the policy is on its way there
STEPS_LEFT = 0.25  # fraction of the run that is left, below which it is not worth stopping
SOLVED = 0.95  # accuracy
GAIN_LOST = 0.5  # fraction of what the score had gained
HACKED = 0.25  # the same, if the reward rises meanwhile
FAILED, MANY_FAILED = 0.01, 0.1  # fractions of the rollouts


def constant_reward(history: History, settings: Settings) -> Seen | None:
    rewards, spread = history.of("reward/mean"), history.of("reward/std")
    if min(spread.count, rewards.count) < DEAD_STEPS:
        return None
    if max(spread.highest, _range(history)) > EQUAL * max(1.0, abs(rewards.highest)):
        return None
    advice = (
        "a start from which some episodes earn more, a reward on the way to the goal, or "
        + settings.change("loss.entropy_coefficient", 0.01)
        if settings.is_control
        else "harder prompts, and read rollouts/: does the reward refuse a wrong answer?"
        if is_solved(history, settings)
        else "covey check, and read rollouts/: does the reward find the answer in the completions?"
    )
    return Seen(
        f"all rollouts of the {history.steps} steps had the reward {rewards.highest:g}", f"Try {advice}", "problem"
    )


def _range(history: History) -> float:
    recent = history.recent("reward/mean")
    return max(recent) - min(recent)


def reward_saturation(history: History, settings: Settings) -> Seen | None:
    spread, level = history.level("reward/std"), history.level("reward/mean")
    solved = is_solved(history, settings)
    if spread is None or level is None or not history.rises("reward/mean") or (settings.is_control and solved):
        return None
    left = 1 - history.step / settings.steps if settings.steps else 0.0
    if not _narrowed(history, SATURATED) or left < STEPS_LEFT:
        return None
    harder = "a harder environment" if settings.is_control else "harder prompts"
    return Seen(
        f"in steps {history.step - RECENT + 1} to {history.step} the rollouts had nearly the same reward ({level:.3g}, "
        f"standard deviation {spread:.2g}), with {left:.0%} of the steps to go",
        f"Try {harder}, or {settings.change('steps', history.step)}",
    )


def group_too_small(history: History, settings: Settings) -> Seen | None:
    size, starts = int(settings.number("sampling.group_size", 0)), int(settings.number("sampling.prompts_per_step", 16))
    without, spread = history.level("groups/zero_advantage_fraction"), history.level("reward/std")
    if settings.has_critic or not 2 <= size <= SMALL_GROUP or without is None or spread is None:
        return None
    if without < SMALL_GROUP_NO_SIGNAL or spread <= EQUAL or _narrowed(history, SATURATED):
        return None
    left = starts * (1 - without)
    if left >= FEW_GROUPS:
        return None
    return Seen(
        f"{without:.0%} of the groups of {size} had equal rewards in the last {RECENT} steps, which leaves "
        f"{left:.1f} groups for a gradient, although the rewards of a step vary (standard deviation {spread:.2g})",
        f"Try {settings.change('sampling.group_size', 8)}, or "
        f"{settings.change('sampling.prompts_per_step', 4 * starts)}",
    )


def groups_without_signal(history: History, settings: Settings) -> Seen | None:
    spread = history.level("reward/std")
    without, steps = history.level("groups/zero_advantage_fraction"), RECENT
    if without is None:  # too few steps for a level
        first = history.recent("groups/zero_advantage_fraction", DEAD_STEPS)
        without, steps = min(first) if len(first) == DEAD_STEPS else None, DEAD_STEPS
    if (
        without is None
        or without < (NO_SIGNAL if steps == RECENT else 1.0)
        or group_too_small(history, settings)
        or constant_reward(history, settings)
    ):
        return None
    if is_solved(history, settings) or (_narrowed(history) and history.rises("reward/mean")):
        return None  # success, or soon reward saturation
    if settings.is_control and settings.goal is None and (history.rises("score/mean") or _at_its_best(history)):
        return None  # success as far as can be known
    if settings.get("rollouts.kind") == "branches":
        return None  # in most states of an episode no action is better than another
    mean = history.level("reward/mean")
    rewards = "" if mean is None or spread is None else f" (mean reward {mean:.3g}, standard deviation {spread:.2g})"
    return Seen(
        f"{without:.0%} of the groups of the last {steps} steps had equal rewards{rewards}",
        f"Try {_more_signal(history, settings)}",
        "problem" if without >= NEXT_TO_NO_SIGNAL else "warning",
    )


def _more_signal(history: History, settings: Settings) -> str:
    larger = settings.scaled("sampling.group_size", 2, 8)
    if settings.is_control:
        return f"{settings.change('loss.credit', 'reward_to_go')}, or {larger}"
    score = history.level("score/mean")
    prompts = "easier prompts, or a reward with partial credit"
    if score is not None and score >= 0.5:
        prompts = "harder prompts, or end the run: most prompts are answered alike every time"
    resample = "" if settings.max_resamples else f"{settings.change('sampling.max_resamples', 3)}, "
    return f"{resample}{larger}, or {prompts}"


def _narrowed(history: History, to: float = NARROWED) -> bool:
    """True if the rewards of a step vary at most by this fraction of the most that they have varied."""
    spread, widest = history.level("reward/std"), history.of("reward/std").best
    return spread is not None and widest is not None and spread <= to * widest.value


def _at_its_best(history: History) -> bool:
    """True if the score stands at the highest value of a step so far, and began below it."""
    scores, level = history.of("score/mean"), history.level("score/mean")
    if level is None:
        return False
    equal = EQUAL * max(1.0, abs(scores.highest))
    return level >= scores.highest - equal and min(scores.first) < level - equal


def is_solved(history: History, settings: Settings) -> bool:
    """True if the score is at the return that the recipe expects, or is an accuracy near 1."""
    scores = history.recent("score/mean")
    if not scores:
        return False
    level = median(scores)
    if settings.is_control:
        return settings.goal is not None and level >= settings.goal
    return SOLVED <= level <= 1


def falling_score(history: History, settings: Settings) -> Seen | None:
    start, level, best = history.start("score/mean"), history.level("score/mean"), history.of("score/mean").best
    if start is None or level is None or best is None or history.loss_of_best("score/mean") <= CERTAIN:
        return None
    lost, gained = best.value - level, max(best.value - start, 0.0)
    if lost <= GAIN_LOST * gained or is_solved(history, settings):
        return None
    if gained == 0.0 and not history.falls("score/mean"):
        return None
    cautious = settings.change("update.target_kl", 0.02) if settings.optimizer_steps > 1 else ""
    if not settings.is_control and not settings.number("loss.kl_coefficient", 0.0):
        cautious = settings.change("loss.kl_coefficient", 0.02)
    return Seen(
        f"the score fell from {best.value:.3g} (steps {best.step - RECENT + 1} to {best.step}) to {level:.3g} (last "
        f"{RECENT} steps); it began at {start:.3g}",
        f"Try {settings.scaled('update.learning_rate', 1 / 3, 1e-5)}{f', or {cautious}' if cautious else ''}",
        "problem",
    )


def reward_hacking(history: History, settings: Settings) -> Seen | None:
    if settings.is_control:
        return None
    return _proxy_against_score(history, settings) or _reward_against_held_out(history, settings)


def _proxy_against_score(history: History, settings: Settings) -> Seen | None:
    best, level = history.of("score/mean").best, history.level("score/mean")
    start, reward = history.start("score/mean"), history.level("reward/mean")
    if best is None or level is None or start is None or reward is None:
        return None
    lost = history.loss_of_best("score/mean") > CERTAIN and best.value - level > HACKED * max(best.value - start, 0.0)
    gained = in_errors(reward - best.reward, best.reward_error, error_of(history.recent("reward/mean"))) > CERTAIN
    if not (lost and gained):
        return None
    return Seen(
        f"since step {best.step} the reward rose from {best.reward:.3g} to {reward:.3g}, and the score fell from "
        f"{best.value:.3g} to {level:.3g}",
        _against_hacking(settings),
        "problem",
    )


def _reward_against_held_out(history: History, settings: Settings) -> Seen | None:
    if len(history.held_out) < 2:
        return None
    best, last = max(history.held_out, key=lambda found: found.score), history.held_out[-1]
    lost = in_errors(best.score - last.score, best.error, last.error) > CERTAIN
    gained = in_errors(last.reward - best.reward, best.reward_error, last.reward_error) > CERTAIN
    if not (lost and gained):
        return None
    return Seen(
        f"since step {best.step} the reward rose from {best.reward:.3g} to {last.reward:.3g}, and the held-out score "
        f"fell from {best.score:.3g} to {last.score:.3g}",
        _against_hacking(settings),
        "problem",
    )


def _against_hacking(settings: Settings) -> str:
    if settings.number("iteration.steps", 0) or any("model" in table for table in settings.get("rewards", ())):
        advice = f"{settings.change('iteration.reward_model_epochs', 1)} with iteration.steps, or "
    else:
        advice = "a reward that the completions in rollouts/ cannot exploit, score = true for the one that counts, or "
    coefficient = settings.number("loss.kl_coefficient", 0.0)
    return f"Try {advice}{settings.change('loss.kl_coefficient', 2 * coefficient or 0.05)}"


def failed_gradings(history: History, settings: Settings) -> Seen | None:
    failed, sampled = history.recent("groups/failed_rollouts"), history.recent("decisions/sampled")
    lengths = history.recent("length/mean")
    if len(failed) < RECENT or len(sampled) < RECENT or len(lengths) < RECENT or not all(lengths):
        return None
    rollouts = sum(decisions / length for decisions, length in zip(sampled, lengths, strict=True))
    fraction = sum(failed) / rollouts if rollouts else 0.0
    if fraction < FAILED:
        return None
    return Seen(
        f"{sum(failed):.0f} of {rollouts:.0f} rollouts of the last {RECENT} steps ({fraction:.1%}) have no reward, "
        "because their grading failed",
        "Read the warnings of the run; for a reward that is slow, try a longer timeout_seconds in [[rewards]]",
        "problem" if fraction >= MANY_FAILED else "warning",
    )


def resampling_at_its_limit(history: History, settings: Settings) -> Seen | None:
    rounds = history.level("groups/resamples")
    limit = settings.max_resamples
    if rounds is None or limit < 1 or rounds < limit:
        return None
    drawn = history.level("groups/drawn")
    groups = (
        "" if drawn is None else f" and drew {drawn:.0f} groups for {settings.get('sampling.prompts_per_step', 16)}"
    )
    return Seen(
        f"half of the last {RECENT} steps or more resampled {limit} times, as often as they may{groups}",
        f"Try prompts that are sometimes answered right, or {settings.scaled('sampling.group_size', 2, 16)}",
    )


CHECKS = (
    Check(
        "constant reward",
        ("reward/mean", "reward/std"),
        constant_reward,
        f"reward/std and the range of reward/mean are 0 since the first step, for at least {DEAD_STEPS} steps",
        "If every rollout earns the same, no rollout is better than another and there is no gradient. Usually the "
        "reward does not find the answer, or the task is out of reach of the policy.",
    ),
    Check(
        "reward saturation",
        ("reward/mean", "reward/std"),
        reward_saturation,
        f"the reward has risen, the median reward/std is at most {SATURATED:.0%} of its maximum, at least "
        f"{STEPS_LEFT:.0%} of the steps are left, and the score is below the expected return, if the recipe has one",
        "The policy has learnt what this reward can teach: further steps sample rollouts that are all as good, and "
        "change nothing.",
        keeps_first=True,
    ),
    Check(
        "groups without signal",
        ("groups/zero_advantage_fraction", "reward/mean", "reward/std", "score/mean"),
        groups_without_signal,
        f"the median fraction of groups with equal rewards is at least {NO_SIGNAL:.0%} (problem: "
        f"{NEXT_TO_NO_SIGNAL:.0%}), or in a run of fewer than {RECENT} steps all groups of the last {DEAD_STEPS} "
        f"steps have, and the task is not solved (accuracy {SOLVED:.0%}, or the expected return; in an environment "
        "without one, a score that has risen or stands at its maximum)",
        "A group whose rewards are all equal has advantages of 0 and no gradient. At 75 % the standard error of the "
        "gradient is twice that of all groups, for the same cost of sampling.",
        "1 / sqrt(1 - 0.75) = 2; DAPO (arXiv 2503.14476, section 3.2) replaces such groups",
    ),
    Check(
        "group too small",
        ("groups/zero_advantage_fraction", "reward/mean", "reward/std"),
        group_too_small,
        f"group_size is at most {SMALL_GROUP}, and the median fraction of groups with equal rewards is at least "
        f"{SMALL_GROUP_NO_SIGNAL:.0%}, which leaves fewer than {FEW_GROUPS} groups in a step, although the rewards "
        "of a step vary",
        "Rollouts are compared within their group. In a small one they are often all right or all wrong: a reward "
        "of 0 or 1 is equal in at least half of the groups of 2, in a hundredth of the groups of 8. Many small "
        "groups are as good as few large ones (docs/questions.md); few small ones leave next to nothing.",
        "p^G + (1 - p)^G for groups of G rollouts that are right with probability p; its minimum is at p = 0.5",
    ),
    Check(
        "falling score",
        ("score/mean", "reward/mean"),
        falling_score,
        f"the level of score/mean is below its best by more than {CERTAIN:g} standard errors and by more than "
        f"{GAIN_LOST:.0%} of what it had gained",
        "The policy has become worse than it was, and by more than noise. The updates are larger than the data "
        "support, or the policy has lost its exploration or its language.",
    ),
    Check(
        "reward hacking",
        ("reward/mean", "score/mean", "eval/score"),
        reward_hacking,
        f"the reward has risen by more than {CERTAIN:g} standard errors since the best score, while the score "
        f"(score/mean or held-out) has fallen by more than {CERTAIN:g}",
        "The policy earns more of the reward while what counts gets worse: it exploits an error of the reward, or "
        "memorises the training prompts.",
        "Gao et al., Scaling laws for reward model overoptimization (arXiv 2210.10760)",
    ),
    Check(
        "failed gradings",
        ("groups/failed_rollouts", "decisions/sampled", "length/mean"),
        failed_gradings,
        f"at least {FAILED:.0%} of the rollouts of the last {RECENT} steps have no reward (problem: "
        f"{MANY_FAILED:.0%}; a run stops at 20 %)",
        "A rollout whose grading failed leaves its group. If the failures depend on the completion, the policy is "
        "never told about them.",
    ),
    Check(
        "resampling at its limit",
        ("groups/resamples", "groups/drawn", "groups/zero_advantage_fraction"),
        resampling_at_its_limit,
        "the median of groups/resamples is max_resamples",
        "Dynamic sampling replaces groups without signal by further prompts. At its limit most of the sampling is for "
        "groups that are thrown away, and steps are smaller than prompts_per_step.",
        "DAPO (arXiv 2503.14476, section 3.2)",
    ),
)
