"""Metrics of samplers: how they differ from the trainer, and those in other processes."""

from __future__ import annotations

from covey.tracking.metric import Metric

SAMPLER_METRICS = (
    Metric(
        "mismatch/mean",
        "nats",
        "mean |log-probability by the sampler - the same by the trainer| of a decision, before the first "
        "optimizer step",
        "below 1e-4 in fp32, below about 0.02 in bf16; above that they are not the same policy",
    ),
    Metric(
        "mismatch/kl",
        "nats per decision",
        "KL of the sampler to the trainer, before the first optimizer step: mean k3 estimate",
        "below 1e-6 in fp32, below about 1e-3 in bf16; if it is larger, set an importance_cap or an importance_mask",
    ),
    Metric(
        "mismatch/effective_sample_fraction",
        "fraction",
        "effective sample size of the tokens' importance weights (trainer's over sampler's probability), divided by "
        "the number of trained decisions, before the first optimizer step",
        "above 0.99; lower if the sampler's weights are old: the gradient is then as noisy as one of so few decisions",
    ),
    Metric(
        "mismatch/capped_fraction",
        "fraction",
        "fraction of trained decisions whose importance weight (trainer's over sampler's probability) was capped",
        "0 or nearly; otherwise the sampler's weights are old",
    ),
    Metric(
        "mismatch/masked_fraction",
        "fraction",
        "fraction of trained decisions that importance_mask left out of the surrogate loss",
        "0 or nearly; otherwise the sampler's weights are old",
    ),
    Metric(
        "sampler/servers",
        "count",
        "samplers in other processes that have the weights of the next step",
        "all of them",
        reproducible=False,
    ),
    Metric(
        "sampler/cached_fraction",
        "fraction",
        "conversations on covey serve: of the tokens before each turn but the first, those whose keys and values the "
        "server had kept; of rank 0",
        "near 1; lower if the server has too little room for the conversations of a step",
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
