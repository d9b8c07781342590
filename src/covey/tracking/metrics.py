"""The metrics of a training step, each defined once. `docs/metrics.md` is printed from this glossary.

python -m covey.tracking.metrics > docs/metrics.md
"""

from __future__ import annotations

from covey.tracking.entropy_metrics import ENTROPY_METRICS
from covey.tracking.metric import Metric
from covey.tracking.replay_metrics import REPLAY_METRICS
from covey.tracking.sampler_metrics import SAMPLER_METRICS
from covey.tracking.supervised_metrics import SUPERVISED_METRICS

PAGE_HEAD = """# Metrics

The meaning of each number in `metrics.jsonl`, and its values in a healthy run. One line of that file is one training
step; a number that a run does not have is left out. A decision is a token of a language model, an action in control.
This page is printed by `python -m covey.tracking.metrics`.

The most frequent question: **is a loss of 0 a bug?** No. With one optimizer step for each batch of rollouts
(`epochs = 1`, `minibatches = 1`) the ratio is exactly 1, nothing is clipped, and the advantages of a group sum to 0, so
the loss is near 0 while its gradient is not. Read `reward/mean`, `score/mean` and `grad_norm` instead.

`covey diagnose RUN` checks these metrics for known faults; [healthy.md](healthy.md) has its thresholds.

"""


def _glossary(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS: dict[str, Metric] = _glossary(
    Metric(
        "reward/mean",
        "reward",
        "mean reward of the step's rollouts, without those whose grading failed and those that were added to a group "
        "because of its rewards",
        "rises, with noise from step to step",
    ),
    Metric(
        "reward/std",
        "reward",
        "standard deviation of the reward over all rollouts of the step",
        "above 0; at 0 every rollout has the same reward and there is no gradient",
    ),
    Metric(
        "reward/<name>",
        "reward",
        "mean of one reward function before its weight is applied",
        "each rises, or stays high; one that rises while score/mean falls is being exploited (reward hacking)",
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
        "score on the training prompts, at the sampling temperature: an accuracy (a fraction of right answers) if the "
        "reward is always 1 (right) or 0 (wrong), else the mean of the reward that evaluations average; in control the "
        "mean return of the episodes that ended in the step, with sampled actions",
        "rises; is below eval/score, whose answers and actions are the most probable ones",
    ),
    Metric(
        "eval/score",
        "score; return",
        "score on held-out problems with greedy answers, of the same kind as score/mean; in control the mean return of "
        "the evaluation episodes with greedy actions; only on steps that evaluate",
        "rises with score/mean; if it does not, a language model memorises its prompts",
    ),
    Metric(
        "kl",
        "nats per decision",
        "KL to the reference: mean k3 estimate over sampled decisions, or the exact KL of a language model with "
        "kl_estimator = exact, before the first optimizer step; for a language model at any coefficient, in control "
        "only with a coefficient",
        "0 at the first step and after a refresh of the reference, then grows slowly, often to between 0.01 and 0.5; a "
        "jump precedes collapse. In control, which trains from random weights, it grows without bound unless the "
        "coefficient limits it",
    ),
    Metric(
        "kl/behavior",
        "nats per decision",
        "KL of the updated policy to the one that sampled: mean k3 estimate over the decisions of the update",
        "0 with one optimizer step per batch; between about 0.001 and 0.02 with several; if it is larger, use fewer "
        "epochs, a lower learning rate or a target_kl",
    ),
    Metric(
        "entropy",
        "nats per decision",
        "entropy of the policy's distribution of the next decision; that of a normal distribution may be below 0",
        "falls slowly; a policy of n actions begins at ln n. Near 0 the rollouts of a group are all equal: raise the "
        "temperature or the KL coefficient, in control the entropy coefficient, or set an entropy_target",
    ),
    Metric(
        "policy/std",
        "action",
        "mean standard deviation of continuous actions",
        "begins at initial_std and falls slowly; near 0 there is no exploration",
    ),
    Metric(
        "loss",
        "-",
        "the surrogate loss, summed over the step; not a measure of progress",
        "near 0 on-policy (one optimizer step per batch), which is no fault; small and noisy with several",
    ),
    Metric(
        "loss/value",
        "return²",
        "the critic's loss: value_coefficient times its squared error against the returns",
        "rises at first if returns grow, then falls; it scales with the squared returns, so judge by "
        "value/explained_variance",
    ),
    Metric(
        "value/explained_variance",
        "fraction",
        "fraction of the returns' variance that the critic predicted, before the update: 1 - var(return - value) / "
        "var(return)",
        "begins near 0 and rises above about 0.5; below 0 the critic does worse than a constant, which is no fault "
        "if all returns are equal, as in a solved task",
    ),
    Metric(
        "value/mean",
        "return",
        "mean of the critic's values over the decisions, before the update",
        "near value/returns_mean; a language model's begins at 0",
    ),
    Metric(
        "value/returns_mean",
        "return",
        "mean of the critic's targets over the decisions: advantage plus value",
        "follows reward/mean; if it grows without bound, the critic is fitted to its own errors",
    ),
    Metric(
        "reward_scale",
        "-",
        "divisor of the rewards with reward_scaling = running_std",
        "settles after some steps",
    ),
    Metric(
        "grad_norm",
        "-",
        "norm of the gradient before it is clipped, averaged over the step's optimizer steps",
        "steady and above 0; at 0 no group varies; if it has spikes, use a lower learning rate",
    ),
    Metric("learning_rate", "-", "AdamW's learning rate in this step", "follows the schedule of the recipe"),
    Metric(
        "kl_coefficient",
        "-",
        "weight of the KL in this step",
        "follows the recipe; at 0 the KL is only logged. With adaptive_kl_target it changes by at most 20 % per step "
        "and settles when the KL is near its target",
    ),
    Metric(
        "ratio/max",
        "-",
        "largest new probability of a decision divided by its old one",
        "exactly 1 on-policy (one optimizer step per batch), which is no fault; below about 2 with several",
    ),
    Metric(
        "clip/low",
        "fraction",
        "fraction of trained decisions whose ratio was clipped below",
        "0 on-policy (one optimizer step per batch), which is no fault; below about 0.1 with several",
    ),
    Metric(
        "clip/high",
        "fraction",
        "fraction of trained decisions whose ratio was clipped above",
        "0 on-policy (one optimizer step per batch), which is no fault; below about 0.1 with several",
    ),
    Metric(
        "length/mean",
        "decisions",
        "mean length of a rollout, for a completion with its end token",
        "settles for a language model; in control it follows the return",
    ),
    Metric(
        "length/steps",
        "steps",
        "mean number of reasoning steps of a completion, if a reward is per step",
        "settles near the number that the task needs; if it drifts to 1 or climbs, the step rewards are exploited",
    ),
    Metric("length/max", "decisions", "longest rollout of the step", "at most max_new_tokens or the episode's limit"),
    Metric(
        "length/truncated_fraction",
        "fraction",
        "fraction of rollouts that the token limit or the environment's time limit stopped",
        "falls toward 0 for a language model (if it stays high, raise max_new_tokens); in control it depends on the "
        "task: near 1 in a solved CartPole",
    ),
    Metric(
        "length/truncated_reward",
        "reward",
        "mean reward of the rollouts that a limit stopped; only on steps that have some",
        "for a language model not far below reward/mean; else the limit costs right answers: raise max_new_tokens",
    ),
    Metric(
        "groups/zero_advantage_fraction",
        "fraction",
        "fraction of the sampled groups whose rewards are all the same; they have no gradient and are left out of the "
        "update",
        "below 0.75, where the gradient has twice the noise; near 1 the starts are too hard or too easy, or "
        "group_size is too small",
    ),
    Metric(
        "groups/drawn",
        "count",
        "sampled groups, with those that were dropped; only if a step may resample",
        "at least prompts_per_step; if it is much larger, most prompts are too hard or too easy",
    ),
    Metric(
        "groups/resamples",
        "count",
        "rounds in which the step replaced groups whose rewards were all the same by further prompts",
        "below the recipe's max_resamples; at this limit, steps end with fewer groups than prompts_per_step",
    ),
    Metric(
        "groups/size_mean",
        "rollouts",
        "mean size of a group; only if sizes change over the run or differ within a step",
        "follows the recipe; at most group_size if groups are adaptive",
    ),
    Metric(
        "groups/size_max",
        "rollouts",
        "largest group of the step",
        "grows if the rewards of few prompts vary; at max_group_size a part of the budget is unused",
    ),
    Metric(
        "groups/unused_budget",
        "rollouts",
        "adaptive: unused rollouts of prompts_per_step x group_size, because no group varied or all that did were full",
        "near 0; if it stays high, raise initial_group_size, or max_group_size",
    ),
    Metric("selection/kinds", "count", "kinds of prompts with observed rewards", "grows to the number of kinds"),
    Metric(
        "prompts/left_out",
        "count",
        "generated prompts that are too long for the model: left out, and replaced by others if the task has some; "
        "only if there were any",
        "absent: prompts and max_new_tokens fit the model's positions",
    ),
    Metric("groups/failed_rollouts", "count", "rollouts whose grading failed; they leave their group", "0"),
    Metric(
        "conversation/turns",
        "turns",
        "mean number of turns of the model in a conversation",
        "follows the task; at the recipe's conversation.turns, most conversations are cut",
    ),
    Metric(
        "conversation/tool_calls",
        "calls",
        "mean number of tool calls in a conversation, without those that cannot be read",
        "rises while the model learns to use a tool; stays 0 for environments without tools",
    ),
    Metric("conversation/failed", "count", "conversations whose environment failed; they leave their group", "0"),
    Metric(
        "conversation/different_prompts",
        "count",
        "groups whose conversations began with different observations, because the environment is not repeatable",
        "0; otherwise rollouts of different tasks are compared with each other",
    ),
    *REPLAY_METRICS,
    *ENTROPY_METRICS,
    *SAMPLER_METRICS,
    *SUPERVISED_METRICS,
    Metric(
        "update/optimizer_steps",
        "count",
        "optimizer steps of the policy",
        "epochs x minibatches; 0 while a critic warms up",
    ),
    Metric("update/critic_steps", "count", "optimizer steps of the critic", "(epochs + critic_epochs) x minibatches"),
    Metric(
        "update/epochs",
        "count",
        "passes over the rollouts before target_kl ended them",
        "the recipe's epochs in most steps; if it is always 1, the learning rate is too high for that target",
    ),
    Metric(
        "update/skipped_steps",
        "count",
        "optimizer steps left out because loss or gradient was not finite",
        "0; five in a row stop the run",
    ),
    Metric("update/rows", "fraction", "fraction of the step's rollouts in the update", "above about 0.3"),
    Metric("environment/steps", "count", "environment steps of the run so far, without evaluation", "rises evenly"),
    Metric(
        "environment/episodes",
        "count",
        "episodes that have ended so far, without evaluation",
        "rises ever more slowly if longer episodes are better",
    ),
    Metric(
        "decisions/sampled",
        "decisions",
        "tokens or actions of all rollouts of the step that the policy decided",
        "rollouts x length/mean",
    ),
    Metric(
        "decisions/trained",
        "decisions",
        "tokens or actions in the loss",
        "decisions/sampled without those of zero-advantage groups, and with those of replayed groups",
    ),
    Metric(
        "decisions_per_second",
        "decisions / s",
        "decisions sampled, divided by the seconds of the whole step",
        "steady",
        reproducible=False,
    ),
    Metric("time/sample", "s", "sampling the rollouts", "often the largest part", reproducible=False),
    Metric(
        "time/grade",
        "s",
        "grading that was not done while the step was sampled; in control there is none",
        "small; if not, raise workers in [[rewards]]",
        reproducible=False,
    ),
    Metric("time/gather", "s", "waiting for other ranks, and their rollouts", "small", reproducible=False),
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
    Metric("time/refresh", "s", "passing the new weights to the sampler", "small", reproducible=False),
    Metric(
        "time/record",
        "s",
        "advantages and baselines for the rollouts file; with record.tokens a forward pass of the updated policy",
        "near 0, with record.tokens a fraction of time/update",
        reproducible=False,
    ),
    Metric("time/step", "s", "the whole step, without evaluation and checkpoints", "steady", reproducible=False),
    Metric(
        "memory/peak_bytes",
        "bytes",
        "peak memory of the run so far: of the GPU if there is one, else of the process",
        "flat after the first steps",
        reproducible=False,
    ),
)


def find(name: str) -> Metric:
    """The definition of a metric by its name in `metrics.jsonl`; `reward/format` finds `reward/<name>`, and
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
    """True if a repeated run gives the same number: every metric except those of time and memory."""
    return find(name).reproducible


def markdown_table() -> str:
    """The glossary as a markdown table, one row per metric."""
    lines = ["| metric | unit | meaning | a healthy run |", "|---|---|---|---|"]
    for metric in METRICS.values():
        differs = "" if metric.reproducible else " (differs from run to run)"
        meaning = metric.meaning.replace("|", "\\|") + differs
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {metric.healthy} |")
    return "\n".join(lines) + "\n"


def markdown_page() -> str:
    """`docs/metrics.md`."""
    return PAGE_HEAD + markdown_table()


if __name__ == "__main__":
    print(markdown_page(), end="")
