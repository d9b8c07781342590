"""Metrics of rollout replay."""

from __future__ import annotations

from covey.tracking.metric import Metric

REPLAY_METRICS = (
    Metric(
        "replay/groups",
        "count",
        "groups of earlier steps that the step learnt from again",
        "the recipe's replay.groups after the first steps; lower if few groups have differences between their rewards",
    ),
    Metric(
        "replay/age",
        "steps",
        "mean number of steps since these groups were sampled",
        "near 1; higher if few groups have differences between their rewards",
    ),
    Metric(
        "replay/importance_weight",
        "-",
        "mean importance weight of their decisions (old policy over the policy that sampled), after cap and mask",
        "near 1; below about 0.9 the cap or the mask takes away much, so the gradient has a bias",
    ),
    Metric(
        "replay/effective_sample_fraction",
        "fraction",
        "effective sample size of these weights, divided by the number of replayed decisions",
        "above about 0.9; if it falls, lower replay.max_age or the learning rate",
    ),
    Metric(
        "replay/capped_fraction",
        "fraction",
        "fraction of the replayed decisions whose importance weight was capped or masked",
        "below about 0.05",
    ),
)
