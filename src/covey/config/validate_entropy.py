"""Validate what keeps the entropy up: its controller, Clip-Cov and KL-Cov."""

from __future__ import annotations

from covey.config.common import ConfigError, LossBase, UpdateBase

WITHOUT_CLIPPED_GRADIENT = ("rloo", "reinforce", "cispo")  # algorithms whose clip range removes no gradient
CLIP_FACTORS = (0.25, 4.0)  # bounds of the factor of the clip range, if the config has none
BONUS_FACTORS = (0.01, 100.0)  # the same for the coefficient of the entropy bonus
_DEFAULT = LossBase()


def check_entropy(loss: LossBase, update: UpdateBase, algorithm: str) -> None:
    """Refuse contradictions between settings that keep the entropy up.

    Raises:
        ConfigError: naming the field and the fix.
    """
    _check_unused(loss)
    check_controller(loss, update, algorithm)
    _check_pair("clip_cov_bounds", loss.clip_cov_bounds)
    check_kl_cov(loss, update, algorithm)


def check_kl_cov(loss: LossBase, update: UpdateBase, algorithm: str) -> None:
    """Refuse KL-Cov where the policy does not move away from the one that sampled. Arguments as of `check_entropy`."""
    if loss.kl_cov_fraction and update.epochs * update.minibatches == 1:
        raise ConfigError(
            "loss.kl_cov_fraction is set, but with update.epochs and update.minibatches at 1 the policy is still the "
            "one that sampled, so its penalty is 0: raise one of them, or set loss.clip_cov_fraction instead"
        )


def entropy_factors(loss: LossBase) -> tuple[float, float]:
    """The bounds of what the controller multiplies."""
    if loss.entropy_bounds:
        low, high = loss.entropy_bounds
        return low, high
    return BONUS_FACTORS if loss.entropy_controller == "bonus" else CLIP_FACTORS


def _check_unused(loss: LossBase) -> None:
    used_by = {
        "entropy_controller": ("entropy_target", loss.entropy_target is not None),
        "entropy_gain": ("entropy_target", loss.entropy_target is not None),
        "entropy_bounds": ("entropy_target", loss.entropy_target is not None),
        "clip_cov_bounds": ("clip_cov_fraction", bool(loss.clip_cov_fraction)),
        "kl_cov_coefficient": ("kl_cov_fraction", bool(loss.kl_cov_fraction)),
    }
    for name, (user, is_used) in used_by.items():
        if getattr(loss, name) != getattr(_DEFAULT, name) and not is_used:
            raise ConfigError(f"loss.{name} is set, but only {user} uses it: take it out, or set loss.{user}")


def check_controller(loss: LossBase, update: UpdateBase, algorithm: str) -> None:
    """Refuse a controller of the entropy that could do nothing. Arguments as of `check_entropy`."""
    if loss.entropy_target is None:
        return
    if loss.entropy_target == 0:
        raise ConfigError(
            "loss.entropy_target is 0, and the controller measures deviations relative to it: set one near 0, such as "
            "0.05"
        )
    if loss.entropy_controller == "bonus" and not loss.entropy_coefficient:
        raise ConfigError(
            "loss.entropy_target is set, but not the coefficient that it adapts: set loss.entropy_coefficient above 0 "
            '(0.001 is usual, in control 0.01), or entropy_controller to "clip"'
        )
    if loss.entropy_bounds:
        _check_pair("entropy_bounds", loss.entropy_bounds)
        low, high = loss.entropy_bounds
        if not low <= 1 <= high:
            raise ConfigError(
                "loss.entropy_bounds are factors, and the run begins with the factor 1, which must be between them, "
                f"such as [0.1, 10.0] (are {list(loss.entropy_bounds)})"
            )
    if loss.entropy_controller != "clip":
        return
    if algorithm in WITHOUT_CLIPPED_GRADIENT:
        raise ConfigError(
            f"loss.entropy_controller is 'clip', but {algorithm} clips no gradients: set it to 'bonus', or choose grpo"
        )
    if update.epochs * update.minibatches == 1:
        raise ConfigError(
            "loss.entropy_controller is 'clip', but with update.epochs and update.minibatches at 1 every ratio is 1 "
            "and nothing is clipped: raise one of them, or set it to 'bonus'"
        )


def _check_pair(name: str, bounds: tuple[float, ...]) -> None:
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ConfigError(
            f"loss.{name} must be two numbers, the lowest and the highest, such as [0.5, 5.0] (is {list(bounds)})"
        )
