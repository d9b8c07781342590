"""Metrics of samplers in other processes."""

from __future__ import annotations

from covey.tracking.metric import Metric

SAMPLER_METRICS = (
    Metric(
        "sampler/servers",
        "count",
        "samplers in other processes that have the weights of the next step",
        "all of them",
        reproducible=False,
    ),
    Metric(
        "sampler/rerouted",
        "count",
        "requests for the completions of a prompt that were sent to another sampler, because one did not answer or was "
        "refused; of rank 0",
        "0",
        reproducible=False,
    ),
)
