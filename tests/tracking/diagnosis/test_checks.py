"""Every check by hand-made numbers: it fires at its threshold, and each of its conditions silences it."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from covey.config.recipe import apply_overrides, config_from_dict
from covey.config.rules import validate
from covey.tracking.diagnosis import CHECKS, Finding, diagnose
from helpers.diagnosed_runs import merged

STEPS = 30
FIELD = re.compile(r"((?:[a-z_]+\.)?[a-z_]+) = (\"[^\"]*\"|[\w.+-]+) \(")
LANGUAGE = {
    "algorithm": "grpo",
    "steps": 100,
    "task": {"name": "arithmetic"},
    "sampling": {"group_size": 8, "prompts_per_step": 16, "max_new_tokens": 64},
    "update": {"learning_rate": 1e-5, "epochs": 1, "minibatches": 1, "max_grad_norm": 1.0},
    "evaluation": {"problems": 100},
}
CONTROL = {
    "algorithm": "grpo",
    "steps": 100,
    "environment": {"id": "CartPole-v1"},
    "rollouts": {"group_size": 8, "starts_per_step": 4},
    "update": {"learning_rate": 3e-4, "epochs": 4, "minibatches": 1, "max_grad_norm": 0.5},
}
PPO = {**CONTROL, "algorithm": "ppo", "rollouts": {"kind": "fragments"}}

Column = float | Sequence[float | None]


def then(start: float, level: float) -> list[float]:
    """Ten steps at one value, then twenty at another."""
    return [start] * 10 + [level] * 20


def last(before: float, level: float) -> list[float]:
    """Twenty steps at one value, then ten at another."""
    return [before] * 20 + [level] * 10


def rising(steps: int = STEPS) -> list[float]:
    return [0.01 * step for step in range(steps)]


def found(config: Mapping[str, Any], columns: Mapping[str, Column], steps: int = STEPS) -> dict[str, Finding]:
    """The findings of a run with these columns; a number is a column of equal values."""
    records = [
        {"step": step + 1}
        | {name: column[step] if isinstance(column, Sequence) else column for name, column in columns.items()}
        for step in range(steps)
    ]
    return {finding.check: finding for finding in diagnose(records, config)}


@dataclass(frozen=True)
class Case:
    """A run that a check finds at its threshold, and changes that each silence it or leave it."""

    config: Mapping[str, Any]
    columns: Mapping[str, Column]
    silent: Sequence[Mapping[str, Any]] = field(default=())  # columns, or fields under "config"
    fires: Sequence[Mapping[str, Any]] = field(default=())
    steps: int = STEPS

    def found(self, change: Mapping[str, Any]) -> dict[str, Finding]:
        columns = {name: value for name, value in change.items() if name not in ("config", "steps")}
        return found(self.config_with(change), {**self.columns, **columns}, change.get("steps", self.steps))

    def config_with(self, change: Mapping[str, Any]) -> Mapping[str, Any]:
        own = change.get("config", {})
        return own if "environment" in own else merged(self.config, own)


ABSENT = [None] * 100
NO_SIGNAL = {
    "groups/zero_advantage_fraction": 0.75, "reward/mean": 0.3, "reward/std": 0.4, "score/mean": 0.3,
}  # fmt: skip
CASES: dict[str, Case] = {
    "constant reward": Case(
        LANGUAGE,
        {"reward/mean": 0.5, "reward/std": 1e-6},
        silent=[
            {"reward/std": 1.1e-6},
            {"reward/mean": [0.5, 0.6] * 15},
            {"steps": 1},
            {"reward/std": [0.1] + [0.0] * 29},
        ],
        fires=[{"steps": 2}, {"config": {"environment": {}}}],
    ),
    "reward saturation": Case(
        LANGUAGE,
        {"reward/mean": then(0.2, 0.9), "reward/std": then(0.5, 0.01), "score/mean": then(0.2, 0.9)},
        silent=[
            {"reward/std": then(0.5, 0.0101)},
            {"reward/mean": then(0.9, 0.2)},
            {"config": {"steps": 26}},  # at step 20, 23 % are left
            {"config": {**CONTROL, "evaluation": {"expected_return": 0.9}}},
        ],
        fires=[{"config": {"steps": 27}}, {"config": {**CONTROL, "evaluation": {"expected_return": 0.91}}}],
    ),
    "groups without signal": Case(
        LANGUAGE,
        NO_SIGNAL,
        silent=[
            {"groups/zero_advantage_fraction": 0.749},
            {"groups/zero_advantage_fraction": ABSENT},
            {"score/mean": 0.95},
            {
                "groups/zero_advantage_fraction": last(0.5, 0.75),
                "reward/mean": then(0.2, 0.9),
                "reward/std": then(0.4, 0.1),
            },
            {"config": {"sampling": {"group_size": 3, "prompts_per_step": 15}}},
            {"config": {"rollouts": {"kind": "branches"}}},
            {"config": CONTROL, "score/mean": [9.0, 300.0] + [500.0] * 28},  # solved at once, as far as is known
            {
                "config": CONTROL,
                "groups/zero_advantage_fraction": last(0.5, 0.75),
                "score/mean": [-480.0] * 10 + [-90.0, -80.0] * 10,
            },
            {"steps": 9},
            {"groups/zero_advantage_fraction": 1.0, "steps": 1},
            {"groups/zero_advantage_fraction": [1.0, 1.0, 0.9], "steps": 3},
            {"groups/zero_advantage_fraction": 1.0, "score/mean": 0.95, "steps": 3},
        ],
        fires=[
            {"score/mean": 0.94},
            {"score/mean": 1.01},  # no accuracy
            {"groups/zero_advantage_fraction": [0.5, 1.0, 1.0], "steps": 3},
            {"reward/mean": then(0.2, 0.9), "reward/std": then(0.4, 0.101)},
            {"reward/mean": then(0.9, 0.2), "reward/std": then(0.4, 0.1)},
            {"config": {"sampling": {"group_size": 4}}},
        ],
    ),
    "group too small": Case(
        merged(LANGUAGE, {"sampling": {"group_size": 3, "prompts_per_step": 15}}),
        {"groups/zero_advantage_fraction": 0.5, "reward/mean": 0.3, "reward/std": 0.4},
        silent=[
            {"groups/zero_advantage_fraction": 0.49},
            {"config": {"sampling": {"group_size": 4}}},
            {"config": {"sampling": {"group_size": 1}}},
            {"config": {"algorithm": "ppo"}},
            {"reward/std": 1e-6},
            {"config": {"sampling": {"prompts_per_step": 16}}},  # which leaves 8 groups
            {"groups/zero_advantage_fraction": last(0.4, 0.5), "reward/std": then(0.5, 0.01)},
        ],
        fires=[{"config": {"sampling": {"group_size": 2}}}],
    ),
    "falling score": Case(
        LANGUAGE,
        {"score/mean": [0.2] * 10 + [0.8] * 10 + [0.49] * 10, "reward/mean": 0.5},
        silent=[
            {"score/mean": [0.2] * 10 + [0.8] * 10 + [0.51] * 10},  # 0.29 of 0.6 are lost
            {"score/mean": [0.2] * 10 + [0.8] * 10 + [0.49, 0.9, 0.1, 1.0, 0.0] * 2},  # which is noise
            {"config": {**CONTROL, "evaluation": {"expected_return": 0.49}}},
            {"score/mean": 0.3},
        ],
        fires=[{"score/mean": then(0.3, 0.2)}, {"config": {**CONTROL, "evaluation": {"expected_return": 0.5}}}],
    ),
    "reward hacking": Case(
        LANGUAGE,
        {"score/mean": [0.2] * 10 + [0.8] * 10 + [0.64] * 10, "reward/mean": last(0.2, 0.8)},
        silent=[
            {"score/mean": [0.2] * 10 + [0.8] * 10 + [0.66] * 10},  # 0.14 of 0.6 are lost
            {"reward/mean": 0.2},
            {"reward/mean": last(0.8, 0.2)},
            {"config": CONTROL},
            {"score/mean": 0.5, "eval/score": [None] * 9 + [0.8] + [None] * 19 + [0.62]},  # 2.9 standard errors
            {"score/mean": 0.5, "eval/score": [None] * 9 + [0.6] + [None] * 19 + [0.8]},
            {"score/mean": 0.5, "eval/score": [None] * 9 + [8.0] + [None] * 19 + [6.0]},  # of unknown variance
        ],
        fires=[{"score/mean": 0.5, "eval/score": [None] * 9 + [0.8] + [None] * 19 + [0.60]}],  # 3.2 standard errors
    ),
    "failed gradings": Case(
        LANGUAGE,
        {"groups/failed_rollouts": 1.0, "decisions/sampled": 1000.0, "length/mean": 10.0},
        silent=[{"groups/failed_rollouts": 0.99}, {"decisions/sampled": 1010.0}, {"length/mean": 9.9}, {"steps": 9}],
    ),
    "resampling at its limit": Case(
        merged(LANGUAGE, {"algorithm": "dapo"}),
        {"groups/resamples": 3.0, "groups/drawn": 64.0},
        silent=[
            {"groups/resamples": 2.9},
            {"config": {"sampling": {"max_resamples": 4}}},
            {"config": {"algorithm": "grpo"}},
        ],
        fires=[{"config": {"algorithm": "grpo", "sampling": {"max_resamples": 3}}}, {"groups/drawn": ABSENT}],
    ),
    "truncation": Case(
        LANGUAGE,
        {
            "length/truncated_fraction": 0.25,
            "length/truncated_reward": 0.0,
            "reward/mean": 0.3,  # so the others earn 0.4
            "reward/std": 0.79,
            "score/mean": 0.3,
        },
        silent=[
            {"length/truncated_fraction": 0.24},
            {"reward/std": 0.81},
            {"length/truncated_reward": 0.3},
            {"length/truncated_fraction": [1.0] * 10 + [0.6] * 10 + [0.47] * 10},  # falls by a fifth and more
            {"length/truncated_fraction": 0.95, "score/mean": then(0.2, 0.5)},
            {"length/truncated_reward": ABSENT, "score/mean": then(0.2, 0.5)},
            {"length/truncated_reward": ABSENT, "score/mean": 0.95},
            {"config": CONTROL},
            {"steps": 19},
        ],
        fires=[
            {"length/truncated_fraction": [1.0] * 10 + [0.6] * 10 + [0.49] * 10},
            {"length/truncated_fraction": 0.95},
            {"length/truncated_reward": ABSENT},
            {"score/mean": then(0.2, 0.5)},
            {"steps": 20},
        ],
    ),
    "length drift": Case(
        LANGUAGE,
        {"length/mean": then(10, 20), "score/mean": 0.3},
        silent=[
            {"length/mean": then(10, 19.9)},
            {"length/mean": then(10, 5.1)},
            {"score/mean": then(0.3, 0.4)},
            {"config": CONTROL},
        ],
        fires=[{"length/mean": then(10, 5)}, {"length/mean": 10, "length/steps": then(4, 2)}],
    ),
    "entropy collapse": Case(
        LANGUAGE,
        {"entropy": then(1, 0.1), "score/mean": 0.3, "groups/zero_advantage_fraction": 0.5},
        silent=[
            {"entropy": then(1, 0.101)},
            {"entropy": then(-1, -5)},
            {"groups/zero_advantage_fraction": 0.49},
            {"groups/zero_advantage_fraction": ABSENT, "entropy": then(1, 0.021)},
            {"config": {"algorithm": "ppo"}, "entropy": then(1, 0.021)},
            {"score/mean": 0.95},
            {"score/mean": rising()},
            {"score/mean": ABSENT},
            {"entropy": then(1, 0.1), "policy/std": 1.0},
            {"config": {**CONTROL, "evaluation": {"expected_return": 0.3}}},
        ],
        fires=[
            {"entropy": 1, "policy/std": then(1, 0.1)},
            {"score/mean": 0.94},
            {"groups/zero_advantage_fraction": ABSENT, "entropy": then(1, 0.02)},
            {"config": {"algorithm": "ppo"}, "entropy": then(1, 0.02)},
        ],
    ),
    "rising entropy": Case(
        LANGUAGE,
        {"entropy": then(1, 2), "score/mean": 0.3},
        silent=[{"entropy": then(1, 1.99)}, {"entropy": then(0.4, 0.89)}, {"score/mean": then(0.3, 0.4)}],
        fires=[{"entropy": then(0.4, 0.91)}, {"entropy": 1, "policy/std": then(0.2, 0.4)}],
    ),
    "KL runaway": Case(
        LANGUAGE,
        {"kl": then(0, 2), "entropy": then(1, 0.5), "score/mean": 0.3},
        silent=[
            {"kl": then(0, 1.99)},
            {"entropy": 0.3, "kl": then(0, 0.99)},
            {"config": CONTROL},
            {"entropy": ABSENT},
        ],
        fires=[{"entropy": 0.3, "kl": then(0, 1)}],
    ),
    "large updates": Case(LANGUAGE, {"kl/behavior": 0.1}, silent=[{"kl/behavior": 0.099}], fires=[{"config": CONTROL}]),
    "clip fraction": Case(
        LANGUAGE,
        {"clip/low": 0.1, "clip/high": 0.2},
        silent=[{"clip/low": 0.09}, {"clip/high": 0.19}, {"config": {"algorithm": "gspo"}}],
        fires=[{"config": {"algorithm": "gspo"}, "clip/low": 0.3, "clip/high": 0.3}],
    ),
    "sampler mismatch": Case(
        LANGUAGE,
        {"mismatch/kl": 0.01, "mismatch/effective_sample_fraction": 0.99},
        silent=[{"mismatch/kl": 0.0099}, {"mismatch/kl": 0.0099, "mismatch/effective_sample_fraction": 0.91}],
        fires=[{"mismatch/kl": 0.0, "mismatch/effective_sample_fraction": 0.9}],
    ),
    "gradient spikes": Case(
        LANGUAGE,
        {"grad_norm": [10.1 if step in (6, 14, 22) else 1.0 for step in range(STEPS)]},
        silent=[
            {"grad_norm": [10.0 if step in (6, 14, 22) else 1.0 for step in range(STEPS)]},
            {"grad_norm": [10.1 if step in (6, 14) else 1.0 for step in range(STEPS)]},
            {"grad_norm": [10.1 if step in (6, 14, 26) else 1.0 for step in range(STEPS)]},  # too near to the end
            {"grad_norm": [3.0**step for step in range(STEPS)]},
            {"grad_norm": [3.0**-step for step in range(STEPS)]},
        ],
    ),
    "skipped updates": Case(
        LANGUAGE,
        {"update/skipped_steps": [1.0] + [0.0] * 29},
        silent=[{"update/skipped_steps": 0.0}],
    ),
    "learning rate without effect": Case(
        LANGUAGE,
        {"kl": 9e-6, "grad_norm": 0.1, "groups/zero_advantage_fraction": 0.94, "score/mean": 0.3},
        silent=[
            {"kl": 1e-5},
            {"grad_norm": 0.0},
            {"groups/zero_advantage_fraction": 0.95},
            {"score/mean": then(0.3, 0.4)},
            {"score/mean": ABSENT},
            {"config": {"update": {"warmup_steps": 11}}},
            {"config": {"reference": {"refresh_every": 10}}},
            {"config": CONTROL},
            {"config": CONTROL, "kl/behavior": 1e-7},
            {"config": merged(CONTROL, {"update": {"epochs": 1}}), "kl/behavior": 0.0},
            {"steps": 19},
        ],
        fires=[{"config": {"update": {"warmup_steps": 10}}}, {"config": CONTROL, "kl/behavior": 9e-8}, {"steps": 20}],
    ),
    "critic that explains nothing": Case(
        PPO,
        {"value/explained_variance": 0.049, "loss/value": 0.51, "value/returns_mean": 10.0, "score/mean": 20.0},
        silent=[
            {"value/explained_variance": 0.05},
            {"loss/value": 0.49},  # an error of 0.99, a tenth of the returns
            {"steps": 39},
            {"config": {"update": {"critic_warmup_steps": 1}}},
            {"config": {"evaluation": {"expected_return": 20.0}}},
            {"config": {"loss": {"value_coefficient": 0.6}}},
        ],
        fires=[
            {"value/returns_mean": 0.0},
            {"loss/value": ABSENT},
            {"config": {"evaluation": {"expected_return": 21}}},
        ],
        steps=40,
    ),
    "updates cut short": Case(
        merged(PPO, {"update": {"target_kl": 0.01}}),
        {"update/epochs": [2.0, 2.0, 2.0, 2.0, 3.0] * 6},
        silent=[
            {"update/epochs": [2.0, 2.0, 2.0, 3.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0] * 3},
            {"update/epochs": 3.0},
            {"config": {"update": {"target_kl": 0}}},
            {"config": {"update": {"epochs": 1}}},
            {"steps": 9},
        ],
        fires=[{"steps": 10}],
    ),
    "memorised examples": Case(
        LANGUAGE,
        {"sft/held_out_loss": [3.0, 2.0, 2.06, 2.1], "sft/loss": 1.0},
        silent=[
            {"sft/held_out_loss": [3.0, 2.0, 2.03, 2.1]},
            {"sft/held_out_loss": [3.0, 2.5, 2.0, 2.1]},
            {"sft/held_out_loss": [3.0, 2.0, 2.1, 1.9]},
        ],
        fires=[{"sft/held_out_loss": [2.0, 3.0, 2.9, 2.1]}],
        steps=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_check_fires_at_its_threshold(name):
    case = CASES[name]
    assert name in case.found({})
    for change in case.fires:
        assert name in case.found(change), change


@pytest.mark.parametrize("name", CASES)
def test_each_condition_silences_a_check(name):
    case = CASES[name]
    assert case.silent
    for change in case.silent:
        assert name not in case.found(change), change


@pytest.mark.parametrize(
    ("name", "problem", "warning"),
    [
        ("groups without signal", {"groups/zero_advantage_fraction": 0.95}, {"groups/zero_advantage_fraction": 0.949}),
        ("failed gradings", {"groups/failed_rollouts": 10.0}, {"groups/failed_rollouts": 9.9}),
        ("truncation", {"length/truncated_fraction": 0.75}, {"length/truncated_fraction": 0.74}),
        ("entropy collapse", {"entropy": then(1, 0.02)}, {"entropy": then(1, 0.021)}),
        ("rising entropy", {"score/mean": then(0.3, 0.2)}, {}),
        ("KL runaway", {}, {"score/mean": then(0.3, 0.4)}),
        ("large updates", {"kl/behavior": 1.0}, {"kl/behavior": 0.99}),
        ("sampler mismatch", {"mismatch/kl": 0.1}, {"mismatch/kl": 0.099}),
        (
            "sampler mismatch",
            {"mismatch/effective_sample_fraction": 0.5},
            {"mismatch/effective_sample_fraction": 0.51},
        ),
        (
            "skipped updates",
            {"update/skipped_steps": ([1.0] + [0.0] * 9) * 3},
            {"update/skipped_steps": [2.0] + [0.0] * 29},
        ),
        ("critic that explains nothing", {"value/explained_variance": -0.5}, {"value/explained_variance": -0.49}),
    ],
)
def test_a_finding_is_a_problem_or_a_warning(name, problem, warning):
    case = CASES[name]
    assert case.found(problem)[name].severity == "problem"
    assert case.found(warning)[name].severity == "warning"


def test_every_check_has_a_case():
    assert [check.name for check in CHECKS] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_is_a_recipe(name):
    """The fields of a remedy exist in the run's kind of recipe, and a run takes their values."""
    case = CASES[name]
    for change in ({}, *case.fires):
        tables = case.config_with(change)
        if tables == {"environment": {}}:
            continue  # a fragment of a config
        for field_name, value in FIELD.findall(case.found(change)[name].remedy):
            changed = copy.deepcopy(dict(tables))
            apply_overrides(changed, [(field_name, value.strip('"'))])
            validate(config_from_dict(changed))


def test_a_remedy_follows_the_settings():
    """Its values are relative to those of the run."""
    case = CASES["groups without signal"]
    assert "sampling.group_size = 16 (now 8)" in case.found({})["groups without signal"].remedy
    dapo = case.found({"config": {"algorithm": "dapo", "sampling": {"group_size": 5}}})["groups without signal"]
    assert "sampling.group_size = 10 (now 5)" in dapo.remedy
    assert "max_resamples" not in dapo.remedy  # dapo resamples already
    assert "easier prompts" in dapo.remedy
    high = case.found({"score/mean": 0.6})["groups without signal"]
    assert "harder prompts" in high.remedy
    rate = CASES["large updates"].found({})["large updates"]
    assert rate.remedy == "Try update.learning_rate = 3.33e-06 (now 1e-05)"


def test_a_solved_environment_is_one_at_its_best_score_or_its_expected_return():
    """One that always fails, succeeds rarely, or has not reached the expected return has groups without signal."""
    for score, goal in ((0.3, None), ([0.0, 1.0] + [0.0] * 28, None), ([9.0] * 10 + [200.0] * 20, 475.0)):
        config = {**CONTROL, "evaluation": {} if goal is None else {"expected_return": goal}}
        assert "groups without signal" in CASES["groups without signal"].found({"config": config, "score/mean": score})


def test_completions_that_have_no_loss_teach_no_brevity():
    case = CASES["truncation"]
    masked = case.found({"config": {"loss": {"mask_truncated": True}}})["truncation"]
    assert "learns to be short" in case.found({})["truncation"].explanation
    assert "learns to be short" not in masked.explanation
    assert "nothing from a step in which all are cut" in masked.explanation


def test_a_minimum_length_is_proposed_against_shorter_completions_alone():
    """It is a fraction of the length at the start, and not below a minimum that the run has already."""
    case = CASES["length drift"]
    shorter = {"length/mean": then(12.5, 5)}
    assert "sampling.min_new_tokens = 9 (unset now)" in case.found(shorter)["length drift"].remedy
    whole = asdict(config_from_dict(copy.deepcopy(LANGUAGE)))  # with all tables, as a run records them
    assert "sampling.min_new_tokens = 9 (now 0)" in case.found({"config": whole, **shorter})["length drift"].remedy
    assert "min_new_tokens" not in case.found({})["length drift"].remedy
    fewer_steps = {"length/mean": 10, "length/steps": then(4, 2)}
    assert "min_new_tokens" not in case.found(fewer_steps)["length drift"].remedy
    cannot = {"conversation": {"environment": "maze"}}, {"sampler": {"kind": "vllm"}}
    for tables in ({"sampling": {"min_new_tokens": 9}}, *cannot):
        assert "min_new_tokens" not in case.found({"config": tables, **shorter})["length drift"].remedy


@pytest.mark.parametrize("name", CASES)
def test_a_check_says_nothing_about_metrics_that_are_missing(name):
    assert not found(CASES[name].config, {})


@pytest.mark.parametrize("name", CASES)
def test_a_check_reads_what_it_names(name):
    """The columns of its case are among its metrics, so that a display shows what a finding is about."""
    (check,) = [check for check in CHECKS if check.name == name]
    read = {column for column in CASES[name].columns if column != "score/mean"}
    assert read <= {*check.metrics}
