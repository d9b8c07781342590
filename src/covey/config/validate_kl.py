"""Validate the KL settings: refuse those that have no effect or cannot be computed."""

from __future__ import annotations

from covey.config.common import ConfigError, LossBase, UpdateBase
from covey.config.llm import RunConfig
from covey.config.replay import ReplayConfig, importance_cap

_HORIZON = LossBase().adaptive_kl_horizon


def check_kl(loss: LossBase, update: UpdateBase, coefficient: float | None, replay: ReplayConfig) -> None:
    """Refuse contradictions between KL settings that language models and control share.

    Args:
        coefficient: initial KL coefficient; None if it is the default of the algorithm.
        replay: which has importance weights.

    Raises:
        ConfigError: naming the field and the fix.
    """
    if loss.adaptive_kl_target is not None and not coefficient:
        raise ConfigError(
            "loss.adaptive_kl_target is set, but not the coefficient that it adapts: set loss.kl_coefficient above 0 "
            "(0.05 is usual)"
        )
    if loss.adaptive_kl_horizon != _HORIZON and loss.adaptive_kl_target is None:
        raise ConfigError(
            "loss.adaptive_kl_horizon is set, but only adaptive_kl_target uses it: take it out, or set that one"
        )
    if loss.kl_warmup_steps and coefficient == 0:
        raise ConfigError("loss.kl_warmup_steps is set, but kl_coefficient is 0: take it out, or set kl_coefficient")
    once = update.epochs * update.minibatches == 1
    if loss.kl_to == "behavior" and once and coefficient != 0:
        raise ConfigError(
            "loss.kl_to is 'behavior', but with update.epochs and update.minibatches at 1 the policy is still the "
            "one that sampled, and their KL is 0: raise one of them, or set kl_to to 'reference'"
        )
    _check_importance(loss, replay)


def check_language_kl(config: RunConfig) -> None:
    """Refuse contradictions between the KL settings of a language model.

    Raises:
        ConfigError: naming the field and the fix.
    """
    check_kl(config.loss, config.update, config.kl_coefficient, config.replay)
    if config.loss.kl_estimator == "exact" and config.loss.kl_to == "behavior":
        raise ConfigError(
            "loss.kl_estimator = 'exact' with kl_to = 'behavior' would need the weights that sampled beside those "
            "that learn: use 'k3', or set kl_to to 'reference'"
        )
    if config.reference.refresh_fraction != 1 and not config.reference.refresh_every:
        raise ConfigError("reference.refresh_fraction is set, but nothing is refreshed: set reference.refresh_every")


def _check_importance(loss: LossBase, replay: ReplayConfig) -> None:
    mask = loss.importance_mask
    if mask and (len(mask) != 2 or not 0 <= mask[0] < 1 < mask[1]):
        raise ConfigError(
            "loss.importance_mask must be a lowest weight below 1 and a highest above 1, such as [0.5, 5.0], got "
            f"{list(mask)}"
        )
    if mask and loss.importance_cap is not None and loss.importance_cap >= mask[1]:
        raise ConfigError(
            f"loss.importance_cap = {loss.importance_cap:g} has no effect, because importance_mask leaves out weights "
            f"above {mask[1]:g}: lower the cap, or take one of them out"
        )
    if loss.importance_level == "sequence" and not mask and importance_cap(loss, replay) is None:
        raise ConfigError(
            "loss.importance_level is 'sequence', but there are no importance weights: set importance_cap or "
            "importance_mask, or take it out"
        )
