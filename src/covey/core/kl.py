"""Estimators of KL(pi || reference) at the decisions that pi sampled, and exact divergences.

Shapes: B rollouts, T decisions, V actions. With x = reference(o) / pi(o) and o drawn from pi, k1 and k3 are unbiased;
k2 is not, but its gradient's expectation is that of the KL. Source: J. Schulman, 'Approximating KL divergence' (2020).
"""

import math

import torch
from torch import Tensor

from covey.core.ratios import LOG_RATIO_LIMIT


def k1(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """-log x. Unbiased, of high variance, often negative. Used in the reward by DeepSeekMath (arXiv 2402.03300), eq. 2.

    Args:
        logprobs_BT: of the policy, in nats.
        reference_logprobs_BT: of the reference, in nats.

    Returns:
        kl_BT, in nats.
    """
    return -_log_x(logprobs_BT, reference_logprobs_BT)


def k2(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """(log x)^2 / 2. Biased, of low variance, never negative. Arguments and return as in `k1`."""
    return 0.5 * _log_x(logprobs_BT, reference_logprobs_BT) ** 2


def k3(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """x - log x - 1. Unbiased, of low variance, never negative. DeepSeekMath (arXiv 2402.03300), eq. 4.

    Arguments and return as in `k1`.
    """
    log_x_BT = _log_x(logprobs_BT, reference_logprobs_BT)
    return log_x_BT.expm1() - log_x_BT


def absolute(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """|log x|. No estimate of the KL: a distance whose gradient has the same size at every x but 1. KL-Cov
    (arXiv 2505.22617), listing 1.

    Arguments and return as in `k1`.
    """
    return _log_x(logprobs_BT, reference_logprobs_BT).abs()


def exact(logprobs_BTV: Tensor, reference_logprobs_BTV: Tensor) -> Tensor:
    """sum_a pi(a) (log pi(a) - log reference(a)), over every action. Kullback and Leibler (1951), section 2.

    Args:
        logprobs_BTV: normalised log-probabilities of every action under the policy, in nats.
        reference_logprobs_BTV: the same under the reference.

    Returns:
        kl_BT, in nats. Actions with probability 0 under the policy add 0.
    """
    probability_BTV = logprobs_BTV.exp()
    gap_BTV = (logprobs_BTV - reference_logprobs_BTV).masked_fill(probability_BTV == 0, 0.0)
    return (probability_BTV * gap_BTV).sum(dim=-1)


FORWARD, REVERSE = 0.0, 1.0  # beta of the KLs among the generalized Jensen-Shannon divergences
LEAST_LOGPROB = -1e30  # stands for -infinity, whose gradient in a sum of probabilities would be NaN


def jensen_shannon(logprobs_BTV: Tensor, teacher_logprobs_BTV: Tensor, beta: float) -> Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(pi || m) with m = beta teacher + (1 - beta) pi, over every action.

    The generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649), eq. 1. At its ends it would be 0; there, as in
    TRL, beta = 0 is the forward KL(teacher || pi) and beta = 1 the reverse KL(pi || teacher), its limits divided by
    beta and by 1 - beta.

    Args:
        logprobs_BTV: normalised log-probabilities of every action under the policy, in nats.
        teacher_logprobs_BTV: the same under the teacher.
        beta: weight of the teacher in the mixture, from 0 to 1.

    Returns:
        divergence_BT, in nats.
    """
    if beta == FORWARD:
        return exact(teacher_logprobs_BTV, logprobs_BTV)
    if beta == REVERSE:
        return exact(logprobs_BTV, teacher_logprobs_BTV)
    own, theirs = logprobs_BTV.clamp(min=LEAST_LOGPROB), teacher_logprobs_BTV.clamp(min=LEAST_LOGPROB)
    mixture_BTV = torch.logaddexp(own + math.log1p(-beta), theirs + math.log(beta))
    return beta * exact(theirs, mixture_BTV) + (1 - beta) * exact(own, mixture_BTV)


def _log_x(logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    return (reference_logprobs_BT - logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
