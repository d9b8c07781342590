"""Checks of gradients, updates and the critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from covey.tracking.diagnosis.finding import Check, Seen
from covey.tracking.diagnosis.history import KEPT, RECENT, SETTLED, History
from covey.tracking.diagnosis.rewards import NEXT_TO_NO_SIGNAL, is_solved
from covey.tracking.diagnosis.settings import Settings

SPIKE = 10.0  # times the gradient norms beside it
BESIDE = 5
SPIKES, SPIKES_OF = 3, 50
STILL_KL = 1e-5  # to the reference, nats per decision
STILL_STEP = 1e-7  # to the policy that sampled, nats per decision, by several optimizer steps
EXPLAINED = 0.05
WORSE_THAN_NOTHING = -0.5
SMALL_ERROR = 0.1  # of the critic, relative to the mean return
CUT_SHORT = 0.8  # fraction of steps that target_kl ended after half of the epochs or fewer
FEW_SKIPPED = 3
RISEN, RISEN_FOR = 1.02, 2  # times the lowest held-out loss; evaluations in a row
SUPERVISED = {"sft": "sft.epochs", "reward_model": "epochs"}  # first part of the metrics' names -> field of the epochs


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
        f"Look for outliers among the rewards of these steps in rollouts/. Try "
        f"{settings.scaled('update.learning_rate', 1 / 3, 1e-5)}{clip}",
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
    rate = settings.scaled("update.learning_rate", 1 / 3, 1e-5)
    return Seen(
        f"{skipped:.0f} optimizer step{'s were' if skipped > 1 else ' was'} left out, because loss or gradient was "
        "not finite",
        f"Try {rate}, and look for rewards that are infinite or not a number",
        "problem" if skipped >= FEW_SKIPPED else "warning",
    )


def learning_rate_without_effect(history: History, settings: Settings) -> Seen | None:
    if history.steps < 2 * RECENT + settings.number("update.warmup_steps", 0) or history.rises("score/mean"):
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


def critic_explains_nothing(history: History, settings: Settings) -> Seen | None:
    name = "value/explained_variance"
    level = history.level(name)
    if level is None or history.of(name).count < 2 * SETTLED + settings.number("update.critic_warmup_steps", 0):
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
        f"Try {settings.scaled('update.learning_rate', 1 / 3, 1e-5)}",
    )


def memorised_examples(history: History, settings: Settings) -> Seen | None:
    for name, field in SUPERVISED.items():
        losses = list(history.recent(f"{name}/held_out_loss", KEPT))
        best = losses.index(min(losses)) if losses else 0
        after = losses[best + 1 :]
        if len(after) >= RISEN_FOR and min(after[-RISEN_FOR:]) > RISEN * losses[best]:
            return Seen(
                f"the held-out loss is {losses[-1]:.3g}, {len(after)} evaluations after the lowest, {losses[best]:.3g}",
                f"Try {settings.change(field, best + 1)}, or more examples",
            )
    return None


CHECKS = (
    Check(
        "gradient spikes",
        ("grad_norm", "reward/std", "ratio/max"),
        gradient_spikes,
        f"at least {SPIKES} of the last {SPIKES_OF} values of grad_norm are above {SPIKE:g} times the median of the "
        f"{BESIDE} before and of the {BESIDE} after",
        "Single batches have gradients far longer than others. Clipping limits their length, and they still decide the "
        "direction of a step and stay in AdamW's averages.",
    ),
    Check(
        "skipped updates",
        ("update/skipped_steps", "grad_norm", "ratio/max"),
        skipped_updates,
        f"any optimizer step was left out (problem: {FEW_SKIPPED})",
        "A step whose loss or gradient is not finite would destroy the weights, so it is left out, and its rollouts "
        "were sampled in vain. Five in a row stop the run.",
    ),
    Check(
        "learning rate without effect",
        ("kl", "kl/behavior", "grad_norm", "groups/zero_advantage_fraction", "score/mean"),
        learning_rate_without_effect,
        f"after {2 * RECENT} steps there is a gradient, the score has not risen, and the KL to the reference is "
        f"below {STILL_KL:g} nats per token (in control: an update of several steps moves the policy by less than "
        f"{STILL_STEP:g})",
        "The policy is nearly the one that training began with: the steps are too short.",
    ),
    Check(
        "critic that explains nothing",
        ("value/explained_variance", "loss/value", "value/mean", "value/returns_mean"),
        critic_explains_nothing,
        f"after {2 * SETTLED} steps with a critic the median value/explained_variance is below {EXPLAINED:g} "
        f"(problem: {WORSE_THAN_NOTHING:g}), its error is at least {SMALL_ERROR:.0%} of the mean return, and the "
        "task is not solved",
        "Advantages are returns minus the critic's values. A critic that predicts nothing of the returns adds its "
        "errors to the advantages instead of taking noise out of them.",
        "0 is a constant prediction, 1 a perfect one (stable-baselines3, logger; Schulman, Nuts and bolts of deep "
        "RL research)",
    ),
    Check(
        "updates cut short",
        ("update/epochs", "kl/behavior"),
        updates_cut_short,
        f"target_kl ended at least {CUT_SHORT:.0%} of the last {RECENT} updates after half of the epochs or earlier",
        "A pass or two over the rollouts already move the policy as far as target_kl allows, so the other epochs never "
        "run.",
    ),
    Check(
        "memorised examples",
        tuple(f"{name}/{loss}" for name in SUPERVISED for loss in ("held_out_loss", "loss")),
        memorised_examples,
        f"with examples, the last {RISEN_FOR} held-out losses are more than {RISEN - 1:.0%} above the lowest",
        "The model goes on to fit the examples that it trains on, and gets worse on others.",
    ),
)
