"""Policy-gradient algorithms.

advantages    advantage estimators: a batch -> advantages_BT
kl_penalty    KL penalties: in the reward or in the loss, to the reference or to the behavior policy
algorithm     the composition: advantage x ratio x surrogate x KL x distillation x aggregation x value loss; the
              divergence to a teacher; Clip-Cov and KL-Cov, which keep the entropy up
presets       grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, ppo
"""

from covey.algorithms.algorithm import (
    Algorithm,
    CriticError,
    Distillation,
    HighCovariance,
    LossTerms,
    SurrogateLoss,
    ValueLoss,
)
from covey.algorithms.kl_penalty import (
    NO_KL,
    KLEstimator,
    KLFromOutput,
    KLInLoss,
    KLInReward,
    KLPenalty,
    KLPlacement,
    KLToBehavior,
)
from covey.algorithms.presets import (
    ALGORITHMS,
    cispo,
    dapo,
    default_kl,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
)

__all__ = [
    "ALGORITHMS", "NO_KL", "Algorithm", "CriticError", "Distillation", "HighCovariance", "KLEstimator", "KLFromOutput",
    "KLInLoss", "KLInReward", "KLPenalty", "KLPlacement", "KLToBehavior", "LossTerms", "SurrogateLoss", "ValueLoss",
    "cispo", "dapo", "default_kl", "dr_grpo", "grpo", "gspo", "ppo", "reinforce", "reinforce_pp", "rloo",
]  # fmt: skip
