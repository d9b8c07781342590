"""Metrics of supervised fine-tuning (`covey sft`)."""

from __future__ import annotations

from covey.tracking.metric import Metric

SFT_METRICS = (
    Metric(
        "sft/loss",
        "nats per token",
        "covey sft: mean negative log-likelihood of the trained tokens of the step, before its optimizer step",
        "falls quickly at first, when the model learns the format, then slowly",
    ),
    Metric(
        "sft/held_out_loss",
        "nats per token",
        "covey sft: the same over the held-out examples, after the optimizer step; only at the end of an epoch",
        "falls; if it rises while sft/loss falls, the examples are memorised: use fewer epochs",
    ),
    Metric("sft/decisions", "tokens", "covey sft: number of trained tokens of the step", "varies with the examples"),
    Metric("sft/epoch", "epochs", "covey sft: passes over the examples so far", "rises to sft.epochs"),
)
