"""Every number that a training step reports, defined once. `docs/metrics.md` is this glossary, printed.

python -m covey.tracking.metrics > docs/metrics.md
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_HEAD = """# Metrics

What each number in `metrics.jsonl` means, and what it looks like in a run that goes well. One line of that file is one
training step; a number that a run does not have is left out. A decision is a token of a language model, an action in
control. This page is printed by `python -m covey.tracking.metrics`.

The question asked most: **is a loss of 0 a bug?** No. With one optimizer step for each batch of rollouts (`epochs = 1`,
`minibatches = 1`) the ratio is exactly 1, nothing is clipped, and the advantages of a group sum to 0, so the loss is
near 0 while its gradient is not. Read `reward/mean`, `score/mean` and `grad_norm` instead.

"""


@dataclass(frozen=True)
class Metric:
    """One number of a training step."""

    name: str  # a part in <angle brackets> stands for any word
    unit: str
    meaning: str
    healthy: str  # what a run that goes well shows
    reproducible: bool = True  # False: it depends on the clock or on the machine


def _glossary(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS: dict[str, Metric] = _glossary(
    Metric(
        "reward/mean",
        "reward",
        "mean reward of the step's rollouts; rollouts whose grading failed are not counted, nor those that were added "
        "to a group because of its rewards",
        "rises, with noise from step to step",
    ),
    Metric(
        "reward/std",
        "reward",
        "standard deviation of the reward over all rollouts of the step",
        "above 0; at 0 every rollout earns the same and nothing is learned",
    ),
    Metric(
        "reward/<name>",
        "reward",
        "mean of one reward function before its weight is applied",
        "each rises, or stays high; one that rises while score/mean falls is being gamed",
    ),
    Metric(
        "reward/<reward>/<name>",
        "as logged",
        "mean of the finite values that a reward function logged by `log_metric(name, value)` in its calls of the step",
        "as its author expects",
    ),
    Metric(
        "score/mean",
        "score; return",
        "score on the training prompts, at the sampling temperature: an accuracy (a share of right answers) where the "
        "reward is right or wrong by its kind, else the mean of the reward that evaluations average; in control the "
        "mean return of the episodes "
        "that ended in the step, actions sampled",
        "rises; lies below eval/score, whose answers and actions are the most probable ones",
    ),
    Metric(
        "eval/score",
        "score; return",
        "score on held-out problems with greedy answers, of the same kind as score/mean; in control the mean "
        "return of the evaluation episodes with "
        "the best actions; on the steps that evaluate",
        "rises with score/mean; if it stays behind, a language model memorises its prompts",
    ),
    Metric(
        "kl",
        "nats per decision",
        "distance from the reference: mean k3 estimate over sampled decisions, or where kl_estimator is exact on a "
        "language model the exact one, before the first optimizer step; of a language model at any coefficient, in "
        "control where it has one",
        "0 at the first step and after a refresh of the reference, then grows slowly, often to between 0.01 and 0.5; a "
        "jump comes before collapse. In "
        "control, where training begins from nothing, it grows without a bound unless the coefficient holds it",
    ),
    Metric(
        "kl/behavior",
        "nats per decision",
        "how far the step's updates moved the policy from the one that sampled: mean k3 estimate over the decisions "
        "of the update",
        "0 with one optimizer step a batch; between about 0.001 and 0.02 with several; more asks for fewer epochs, a "
        "lower learning rate or a target_kl",
    ),
    Metric(
        "entropy",
        "nats per decision",
        "how undecided the policy is about its next decision; that of a normal distribution may be below 0",
        "falls slowly; a policy of n actions begins at ln n. Near 0 the rollouts of a group are all alike, so raise "
        "the temperature or the KL coefficient, in control the entropy coefficient",
    ),
    Metric(
        "policy/std",
        "action",
        "mean standard deviation of continuous actions",
        "begins at initial_std and falls slowly; near 0 nothing new is tried",
    ),
    Metric(
        "loss",
        "-",
        "the number whose gradient is followed, summed over the step; not a measure of progress",
        "near 0 on-policy (one optimizer step a batch), which is no fault; small and noisy with several",
    ),
    Metric(
        "loss/value",
        "return²",
        "the critic's loss: value_coefficient times its squared error against the returns",
        "rises at first where returns grow, then falls; its size is that of the returns, so judge by "
        "value/explained_variance",
    ),
    Metric(
        "value/explained_variance",
        "share",
        "share of the returns' variance that the critic foresaw, before the update: 1 - var(return - value) / "
        "var(return)",
        "begins near 0 and rises above about 0.5; below 0 the critic does worse than a constant",
    ),
    Metric(
        "value/mean",
        "return",
        "what the critic expected to be still earned, before the update: the mean over the decisions",
        "near value/returns_mean; a language model's begins at 0",
    ),
    Metric(
        "value/returns_mean",
        "return",
        "what the critic should have said: advantage plus value, the mean over the decisions",
        "follows reward/mean; growing without bound means that the critic learns from its own words",
    ),
    Metric(
        "reward_scale",
        "-",
        "what rewards are divided by before learning, where reward_scaling is running_std",
        "settles after some steps",
    ),
    Metric(
        "grad_norm",
        "-",
        "norm of the gradient before it is clipped, averaged over the step's optimizer steps",
        "steady and above 0; 0 means nothing to learn, spikes ask for a lower learning rate",
    ),
    Metric("learning_rate", "-", "AdamW's learning rate in this step", "follows the schedule of the recipe"),
    Metric(
        "kl_coefficient",
        "-",
        "weight of the KL in this step",
        "follows the recipe; at 0 the KL is only logged. With adaptive_kl_target it changes by at most a fifth a step "
        "and settles once the KL is near its target",
    ),
    Metric(
        "ratio/max",
        "-",
        "largest new probability of a decision divided by its old one",
        "exactly 1 on-policy (one optimizer step a batch), which is no fault; below about 2 with several",
    ),
    Metric(
        "clip/low",
        "share",
        "share of trained decisions whose ratio was clipped below",
        "0 on-policy (one optimizer step a batch), which is no fault; below about 0.1 with several",
    ),
    Metric(
        "clip/high",
        "share",
        "share of trained decisions whose ratio was clipped above",
        "0 on-policy (one optimizer step a batch), which is no fault; below about 0.1 with several",
    ),
    Metric(
        "length/mean",
        "decisions",
        "mean length of a rollout; of a completion its end token included",
        "settles; no steady climb in language, with the return in control",
    ),
    Metric(
        "length/steps",
        "steps",
        "mean number of reasoning steps of a completion, where a reward pays them",
        "settles near what the task needs; one that drifts to 1, or climbs, is after the sum of step rewards",
    ),
    Metric("length/max", "decisions", "longest rollout of the step", "at most max_new_tokens or the episode's limit"),
    Metric(
        "length/truncated_fraction",
        "share",
        "share of rollouts that the token limit or the environment's time limit stopped",
        "falls toward 0 in language (if it stays high, raise max_new_tokens); in control as the task has it: near 1 in "
        "CartPole once solved",
    ),
    Metric(
        "groups/zero_advantage_fraction",
        "share",
        "share of the drawn groups whose rollouts all earned the same; they teach nothing and are left out of the "
        "update",
        "below about 0.7; near 1 the starts are too hard or too easy, or group_size is too small",
    ),
    Metric(
        "groups/drawn",
        "count",
        "groups that were sampled, the dropped ones among them; where a step may draw again",
        "prompts_per_step at least; much more says that most prompts are too hard or too easy",
    ),
    Metric(
        "groups/resamples",
        "count",
        "how often the step drew further prompts in place of groups whose rewards were all the same",
        "below the recipe's max_resamples; at it, steps end with fewer groups than prompts_per_step",
    ),
    Metric(
        "groups/size_mean",
        "rollouts",
        "mean size of a group; where sizes change over the run or differ within a step",
        "follows the recipe; never above group_size where it is adaptive",
    ),
    Metric(
        "groups/size_max",
        "rollouts",
        "largest group of the step",
        "grows where few prompts are live; at max_group_size part of the budget goes unspent",
    ),
    Metric(
        "groups/unused_budget",
        "rollouts",
        "adaptive: what is left of prompts_per_step x group_size, because no group varied or those that did were full",
        "near 0; if it stays high, raise initial_group_size, or max_group_size",
    ),
    Metric(
        "prompts/left_out",
        "count",
        "prompts that a task made up for the step and the model cannot take: left out, and replaced by others if the "
        "task has some; where there were any",
        "not there: prompts and max_new_tokens fit the model's positions",
    ),
    Metric("groups/failed_rollouts", "count", "rollouts whose grading failed; they leave their group", "0"),
    Metric(
        "mismatch/mean",
        "nats",
        "mean |log-probability by the sampler - the same by the trainer| of a decision, before the first "
        "optimizer step",
        "below 1e-4 in fp32, below about 0.02 in bf16; more means that they are not the same policy",
    ),
    Metric(
        "mismatch/kl",
        "nats per decision",
        "KL of the sampler to the trainer, before the first optimizer step: mean k3 estimate",
        "below 1e-6 in fp32, below about 1e-3 in bf16; more asks for an importance_cap",
    ),
    Metric(
        "mismatch/capped_fraction",
        "share",
        "share of trained decisions that the trainer finds more than importance_cap times as probable as the sampler",
        "0 or nearly; where it is not, the sampler's weights are old",
    ),
    Metric(
        "update/optimizer_steps",
        "count",
        "optimizer steps that the policy made",
        "epochs x minibatches; 0 while a critic warms up",
    ),
    Metric(
        "update/critic_steps", "count", "optimizer steps that the critic made", "(epochs + critic_epochs) x minibatches"
    ),
    Metric(
        "update/epochs",
        "count",
        "passes over the rollouts that were made before target_kl stopped them",
        "the recipe's epochs most of the time; at 1 all along the learning rate is too high for that target",
    ),
    Metric(
        "update/skipped_steps",
        "count",
        "optimizer steps left out because loss or gradient was not finite",
        "0; five in a row stop the run",
    ),
    Metric("update/rows", "share", "share of the step's rollouts that took part in the update", "above about 0.3"),
    Metric("environment/steps", "count", "environment steps of the run so far, evaluation aside", "rises evenly"),
    Metric(
        "environment/episodes",
        "count",
        "episodes that have ended so far, evaluation aside",
        "rises ever more slowly where a long episode is a good one",
    ),
    Metric("decisions/sampled", "decisions", "tokens or actions of all rollouts of the step", "rollouts x length/mean"),
    Metric(
        "decisions/trained", "decisions", "those that took part in the loss", "those sampled, without the dead groups"
    ),
    Metric(
        "decisions_per_second",
        "decisions / s",
        "decisions sampled, divided by the seconds of the whole step",
        "steady",
        reproducible=False,
    ),
    Metric("time/sample", "s", "sampling the rollouts", "often the largest part", reproducible=False),
    Metric("time/grade", "s", "calling the reward functions; in control there are none", "small", reproducible=False),
    Metric(
        "time/prepare",
        "s",
        "advantages, values, log-probabilities of the reference and of the old policy",
        "below time/update",
        reproducible=False,
    ),
    Metric("time/update", "s", "forward, backward and optimizer", "steady", reproducible=False),
    Metric(
        "time/forward",
        "s",
        "of time/update: log-probabilities of the policy, and the loss",
        "half of time/backward or less",
        reproducible=False,
    ),
    Metric("time/backward", "s", "of time/update: the gradients", "the largest part of it", reproducible=False),
    Metric("time/critic", "s", "of time/update: a critic's forward and backward", "steady", reproducible=False),
    Metric("time/optimizer", "s", "of time/update: clipping and AdamW", "small", reproducible=False),
    Metric("time/refresh", "s", "handing the new weights to the sampler", "small", reproducible=False),
    Metric("time/step", "s", "the whole step, without evaluation and checkpoints", "steady", reproducible=False),
    Metric(
        "memory/peak_bytes",
        "bytes",
        "most memory that the run has held so far: of the GPU where there is one, else of the process",
        "flat after the first steps",
        reproducible=False,
    ),
)


def find(name: str) -> Metric:
    """The definition of a metric as it stands in `metrics.jsonl`; `reward/format` finds `reward/<name>`, and
    `reward/format/length` finds `reward/<reward>/<name>`.

    Raises:
        KeyError: for a name that the glossary does not define.
    """
    if name in METRICS:
        return METRICS[name]
    section, slash, rest = name.partition("/")
    family = f"{section}/<{section}>/<name>" if "/" in rest else f"{section}/<name>"
    if slash and rest and family in METRICS:
        return METRICS[family]
    raise KeyError(f"the metric {name!r} is not defined in covey.tracking.metrics")


def is_reproducible(name: str) -> bool:
    """True where the same run gives the same number again: everything but the clock's and the machine's."""
    return find(name).reproducible


def markdown_table() -> str:
    """The glossary as a markdown table, one row a metric."""
    lines = ["| metric | unit | meaning | a healthy run |", "|---|---|---|---|"]
    for metric in METRICS.values():
        meaning = metric.meaning.replace("|", "\\|")
        if not metric.reproducible:
            meaning += " (differs from run to run)"
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {metric.healthy} |")
    return "\n".join(lines) + "\n"


def markdown_page() -> str:
    """`docs/metrics.md`."""
    return PAGE_HEAD + markdown_table()


if __name__ == "__main__":
    print(markdown_page(), end="")
