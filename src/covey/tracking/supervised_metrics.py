"""Metrics of trainings on examples: `covey sft` and `covey reward-model train`."""

from __future__ import annotations

from covey.tracking.metric import Metric

SUPERVISED_METRICS = (
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
    Metric(
        "reward_model/loss",
        "nats",
        "covey reward-model train: mean loss of the step's pairs, completions or steps, before its optimizer step",
        "falls below 0.69, the loss of a model that knows nothing (of grades that are no probabilities: any value)",
    ),
    Metric(
        "reward_model/accuracy",
        "fraction",
        "covey reward-model train: fraction of the step's predictions that are right; with pairs or binary labels",
        "rises above 0.5",
    ),
    Metric(
        "reward_model/tokens",
        "tokens",
        "covey reward-model train: tokens of the step's examples",
        "varies with the examples",
    ),
    Metric(
        "reward_model/epoch", "epochs", "covey reward-model train: passes over the examples so far", "rises to epochs"
    ),
    Metric(
        "reward_model/held_out_<measure>",
        "",
        "covey reward-model train: loss, accuracy, auc and other measures of covey reward-model eval on the held-out "
        "examples; only at the end of an epoch",
        "the loss falls; if it rises while reward_model/loss falls, the examples are memorised: use fewer epochs",
    ),
)
