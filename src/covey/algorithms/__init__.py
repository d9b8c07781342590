"""Algorithms: what the gradient is.

advantages    which numbers are compared with which: a batch -> advantages_BT
algorithm     the composition: advantage x ratio x surrogate x KL x aggregation x value loss
presets       grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, ppo
"""

from covey.algorithms.algorithm import (
    Algorithm,
    CriticError,
    KLEstimator,
    KLPenalty,
    LogRatio,
    LossTerms,
    SurrogateLoss,
    ValueLoss,
)
from covey.algorithms.presets import (
    ALGORITHMS,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
)

__all__ = [
    "ALGORITHMS", "Algorithm", "CriticError", "KLEstimator", "KLPenalty", "LogRatio", "LossTerms", "SurrogateLoss",
    "ValueLoss", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce", "reinforce_pp", "rloo",
]  # fmt: skip
