"""The checks: functions of the metrics of a run and its settings. `checks.toml` has their texts."""

import math
from collections.abc import Sequence
from statistics import median

from covey.tracking.diagnosis.history import (
    CERTAIN,
    KEPT,
    RECENT,
    SETTLED,
    History,
    Seen,
    Settings,
    error_of,
    in_errors,
)

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
TRUNCATED = 0.25
MOSTLY_TRUNCATED = 0.75
STILL = 0.8  # of the fraction RECENT steps ago, below which it is falling
NEARLY_ALL = 0.9  # the others are too few to compare with
COSTLY = 0.5  # standard deviations of the reward
DRIFT = 2.0  # factor of the length
MASKED = (
    "A completion that is cut has no loss, because loss.mask_truncated is true: the policy learns from the others "
    "alone, and nothing from a step in which all are cut."
)
LEAST = 0.75  # proposed minimum length, as a fraction of the mean length at the start
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
SPIKE = 10.0  # times the gradient norms beside it
BESIDE = 5
SPIKES, SPIKES_OF = 3, 50
STILL_KL = 1e-5  # to the reference, nats per decision
STILL_STEP = 1e-7  # to the policy that sampled, nats per decision, by several optimizer steps
EXPLAINED = 0.05
WORSE_THAN_NOTHING = -0.5
SMALL_ERROR = 0.1  # of the critic, relative to the mean return
CUT_SHORT = 0.8  # fraction of steps that target_kl ended after half of the epochs or fewer
EARLIEST, EARLIEST_CRITIC = 2 * RECENT, 2 * SETTLED  # steps
FEW_SKIPPED = 3
HELD_OUT_RISEN, HELD_OUT_RISEN_FOR = 0.02, 2  # above the lowest held-out loss; evaluations in a row
SUPERVISED = {"sft": "sft.epochs", "reward_model": "epochs"}  # first part of the metrics' names -> field of the epochs


def constant_reward(history: History, settings: Settings) -> Seen | None:
    rewards, spread = history.of("reward/mean"), history.of("reward/std")
    if settings.get("teacher.model"):
        return None  # with a teacher, a run also learns without rewards
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
        or settings.get("teacher.model")
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
        f"Try {settings.lower_rate}{f', or {cautious}' if cautious else ''}",
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
    return f"{advice}, or {settings.lower_rate}"


def rising_entropy(history: History, settings: Settings) -> Seen | None:
    name = "policy/std" if history.of("policy/std").count else "entropy"
    start, level = history.start(name), history.level(name)
    if start is None or level is None or start <= 0 or history.rises("score/mean"):
        return None
    if level < RISEN * start or (name == "entropy" and level < start + RISEN_NATS):
        return None
    bonus = settings.number("loss.entropy_coefficient", 0.0)
    less = f"{settings.change('loss.entropy_coefficient', bonus / 10)}, or " if bonus else ""
    return Seen(
        f"{'the standard deviation of the actions' if name == 'policy/std' else 'the entropy'} rose from {start:.3g} "
        f"to {level:.3g}, and the score did not",
        f"Try {less}{settings.lower_rate}",
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
        f"Try {hold}, or {settings.lower_rate}",
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
    if settings.optimizer_steps == 1:
        return settings.lower_rate
    epochs = int(settings.number("update.epochs", 1))
    return f"{settings.lower_rate}, or " + (
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


def gradient_spikes(history: History, settings: Settings) -> Seen | None:
    norms = history.recent("grad_norm", SPIKES_OF)
    spikes = _spikes(norms)
    if len(spikes) < SPIKES:
        return None
    middle, limit = median(norms), settings.number("update.max_grad_norm", 1.0)
    clip = f", and {settings.change('update.max_grad_norm', middle)}" if limit > 2 * middle else ""
    return Seen(
        f"{len(spikes)} of the last {len(norms)} gradients were more than {SPIKE:g} times as long as those before and "
        f"after them; the longest was {max(spikes):.3g}, the median is {middle:.2g}",
        f"Look for outliers among the rewards of these steps in rollouts/. Try {settings.lower_rate}{clip}",
    )


def _spikes(norms: Sequence[float]) -> list[float]:
    """The norms above `SPIKE` times the medians of the `BESIDE` norms before and after them."""
    places = range(BESIDE, len(norms) - BESIDE)
    beside = [max(median(norms[i - BESIDE : i]), median(norms[i + 1 : i + 1 + BESIDE])) for i in places]
    return [norms[i] for i, usual in zip(places, beside, strict=True) if norms[i] > SPIKE * usual]


def skipped_updates(history: History, settings: Settings) -> Seen | None:
    skipped = history.of("update/skipped_steps").total
    if not skipped:
        return None
    return Seen(
        f"{skipped:.0f} optimizer step{'s were' if skipped > 1 else ' was'} left out, because loss or gradient was "
        "not finite",
        f"Try {settings.lower_rate}; in an algorithm of your own, look for advantages and losses that are not finite",
        "problem" if skipped >= FEW_SKIPPED else "warning",
    )


def learning_rate_without_effect(history: History, settings: Settings) -> Seen | None:
    if history.steps < EARLIEST + settings.number("update.warmup_steps", 0) or history.rises("score/mean"):
        return None
    norm, silent = history.level("grad_norm"), history.level("groups/zero_advantage_fraction") or 0.0
    if not norm or silent >= NEXT_TO_NO_SIGNAL or not history.of("score/mean").count:
        return None
    moved = _movement(history, settings)
    if moved is None:
        return None
    usual = 3e-4 if settings.is_control else 1e-5
    rate = settings.number("update.learning_rate", usual)
    return Seen(
        f"after {history.steps} steps {moved}, and the score has not risen",
        f"Try {settings.change('update.learning_rate', max(10 * rate, usual))}",
        "problem",
    )


def _movement(history: History, settings: Settings) -> str | None:
    """The evidence that the policy has hardly moved; None if it has, or if that is unknown."""
    kl, step = history.level("kl"), history.level("kl/behavior")
    reference_stays = not settings.number("reference.refresh_every", 0)
    if kl is not None and not settings.is_control and reference_stays:
        return f"the KL to the policy before training is {kl:.1g} nats per token" if kl < STILL_KL else None
    if settings.optimizer_steps > 1 and step is not None:
        return f"an update moves the policy by {step:.1g} nats per decision" if step < STILL_STEP else None
    return None


def critic_that_explains_nothing(history: History, settings: Settings) -> Seen | None:
    name = "value/explained_variance"
    level = history.level(name)
    if level is None or history.of(name).count < EARLIEST_CRITIC + settings.number("update.critic_warmup_steps", 0):
        return None
    if level >= EXPLAINED or is_solved(history, settings) or _error_of_critic(history, settings) < SMALL_ERROR:
        return None
    policy_rate = settings.number("update.learning_rate", 1e-5)
    rate = max(policy_rate, 10 * settings.number("update.critic_learning_rate", policy_rate))
    more = settings.change("update.critic_epochs", int(settings.number("update.critic_epochs", 0)) + 4)
    return Seen(
        f"the critic predicted {level:.1%} of the variance of the returns of the last {RECENT} steps",
        f"Try {settings.change('update.critic_learning_rate', rate)}, or {more}",
        "problem" if level <= WORSE_THAN_NOTHING else "warning",
    )


def _error_of_critic(history: History, settings: Settings) -> float:
    """Root mean squared error of the critic, relative to the mean return; infinite if unknown.

    If all returns are equal, as in a task that is solved, the critic cannot explain their variance, and is still right.
    """
    loss, mean = history.level("loss/value"), history.level("value/returns_mean")
    coefficient = settings.number("loss.value_coefficient", 0.5)
    if loss is None or not mean or not coefficient:
        return math.inf
    return math.sqrt(max(loss, 0.0) / coefficient) / abs(mean)


def updates_cut_short(history: History, settings: Settings) -> Seen | None:
    epochs, recent = settings.number("update.epochs", 1), history.recent("update/epochs")
    target = settings.number("update.target_kl", 0.0)
    if not target or epochs < 2 or len(recent) < RECENT:
        return None
    ended = sum(value <= epochs / 2 for value in recent) / RECENT
    if ended < CUT_SHORT:
        return None
    return Seen(
        f"the target_kl of {target:g} ended {ended:.0%} of the last {RECENT} updates early, after {median(recent):g} "
        f"of {epochs:g} epochs (median)",
        f"Try {settings.lower_rate}",
    )


def memorised_examples(history: History, settings: Settings) -> Seen | None:
    for name, field in SUPERVISED.items():
        losses = list(history.recent(f"{name}/held_out_loss", KEPT))
        best = losses.index(min(losses)) if losses else 0
        after = losses[best + 1 :]
        if len(after) >= HELD_OUT_RISEN_FOR and min(after[-HELD_OUT_RISEN_FOR:]) > (1 + HELD_OUT_RISEN) * losses[best]:
            return Seen(
                f"the held-out loss is {losses[-1]:.3g}, {len(after)} evaluations after the lowest, {losses[best]:.3g}",
                f"Try {settings.change(field, best + 1)}, or more examples",
            )
    return None
