"""Metrics of what keeps the entropy up: its controller, Clip-Cov and KL-Cov."""

from __future__ import annotations

from covey.tracking.metric import Metric

ENTROPY_METRICS = (
    Metric(
        "entropy_coefficient",
        "-",
        "weight of the entropy bonus in this step, with entropy_target and the controller of the bonus",
        "settles when the entropy is near its target; at a bound of entropy_bounds the target is out of reach",
    ),
    Metric(
        "clip/range_low",
        "-",
        "clip_low in this step, with entropy_target and the controller of the clip range",
        "settles when the entropy is near its target; low values raise the entropy",
    ),
    Metric(
        "clip/range_high",
        "-",
        "clip_high in this step, with entropy_target and the controller of the clip range",
        "settles when the entropy is near its target; high values raise the entropy",
    ),
    Metric(
        "covariance/mean",
        "nats",
        "covariance of log-probability and advantage over the decisions of groups with a signal, with Clip-Cov or "
        "KL-Cov",
        "above 0 while the entropy falls",
    ),
    Metric(
        "covariance/max",
        "nats",
        "largest contribution of a decision to this covariance",
        "above the lower of clip_cov_bounds, else Clip-Cov has nothing to draw from",
    ),
    Metric(
        "covariance/clipped_fraction",
        "fraction",
        "fraction of these decisions that Clip-Cov left without a policy gradient",
        "clip_cov_fraction; less if fewer are within clip_cov_bounds, and at least one decision if one is",
    ),
    Metric(
        "covariance/penalised_fraction",
        "fraction",
        "fraction of these decisions with the penalty of KL-Cov",
        "kl_cov_fraction; at least one decision",
    ),
)
