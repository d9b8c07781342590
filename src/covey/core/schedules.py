"""Schedules: functions of the training step, which counts from 1; and controllers of the KL and of the entropy."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Schedule = Callable[[float], float]  # a float is a place between two steps, in a run with a time budget
Number = TypeVar("Number", int, float)


def constant(value: float, *, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up (arXiv 1706.02677, section 2.2), then constant: value * min(1, step / warmup_steps)."""

    def schedule(step: float) -> float:
        return value * min(1.0, step / warmup_steps) if warmup_steps else value

    return schedule


def linear(value: float, *, steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then linear decay: value * (steps + 1 - step) / (steps + 1 - warmup_steps).

    The decay reaches 0 one step after the last, so the value is positive in every step. PPO (arXiv 1707.06347),
    table 5.
    """

    def schedule(step: float) -> float:
        if step <= warmup_steps:
            return value * step / warmup_steps
        return value * max(0.0, steps + 1 - step) / max(1, steps + 1 - warmup_steps)

    return schedule


def cosine(value: float, *, steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then cosine decay: value * (1 + cos(pi p)) / 2 with p = (step - warmup_steps) / (steps + 1 -
    warmup_steps).

    SGDR (arXiv 1608.03983), eq. 5. As in `linear`, the decay reaches 0 one step after the last.
    """

    def schedule(step: float) -> float:
        if step <= warmup_steps:
            return value * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, steps + 1 - warmup_steps))
        return value * 0.5 * (1 + math.cos(math.pi * progress))

    return schedule


def restarted(
    shape: Callable[[int, int], Callable[[float], Number]], steps: int, restarts: Sequence[int] = ()
) -> Callable[[float], Number]:
    """The schedule of a run of `steps` steps that begins again after each step of `restarts`.

    The warm restarts of SGDR (arXiv 1608.03983, section 3): at a step after the restart r, before the next one or the
    end r', it is shape(r, r')(step - r).

    Args:
        shape: the schedule of the steps after one number up to another, by step from 1.
        steps: number of all steps.
        restarts: ascending, below `steps`.
    """
    parts = [(begin, shape(begin, end)) for begin, end in zip((0, *restarts), (*restarts, steps), strict=True)]

    def schedule(step: float) -> Number:
        begin, part = next((one for one in reversed(parts) if step > one[0]), parts[0])
        return part(step - begin)

    return schedule


def adaptive_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, rollouts: int) -> float:
    """The KL coefficient of the next step: larger if the KL is above its target, smaller if it is below.

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * rollouts / horizon)
    Ziegler et al. (arXiv 1909.08593), section 2.2, with K_beta = rollouts / horizon.

    Args:
        coefficient: of this step.
        kl: measured in this step, in nats per decision.
        target: the target KL, above 0.
        horizon: number of rollouts over which a KL that deviates by 20 % or more changes the coefficient by 20 %.
        rollouts: number of rollouts of this step; at most `horizon` count, so the coefficient stays positive.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return coefficient * (1 + error * min(1.0, rollouts / horizon))


def adaptive_entropy_value(
    value: float, entropy: float, *, target: float, gain: float, low: float, high: float
) -> float:
    """What controls the entropy in the next step: larger if the entropy is below its target, smaller if it is above.

    clip(value * exp(gain * clip((target - entropy) / |target|, -1, 1)), low, high)

    An integral controller of the logarithm. Skywork-OR1 (arXiv 2505.22312, section 3.2.5) adds or subtracts a constant
    after every step instead, so its coefficient has a scale that must be set for each task.

    Args:
        value: of this step, above 0: coefficient of the entropy bonus, or factor of the clip range.
        entropy: measured in this step, in nats per decision.
        target: the target entropy, not 0; below 0 is possible for continuous actions.
        gain: relative change of the value if the entropy deviates from the target by the target's size or more.
        low, high: bounds of the value.
    """
    error = max(-1.0, min(1.0, (target - entropy) / abs(target)))
    return max(low, min(high, value * math.exp(gain * error)))
