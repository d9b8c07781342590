"""Small wrongs done to the mathematics on purpose; a test suite worth having notices every one.

A mutant is one change of text in a copy of the package. `python mutants.py FOLDER [NAME ...]` makes the copies in
FOLDER, runs each mutant's test files on it and prints a JSON object of pytest's exit statuses (1: a test failed); the
last is that of an unchanged copy. Imports take longer than the tests: they happen once, and every mutant gets a fork.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "covey"
UNCHANGED = "unchanged"

# Makes pytest, hypothesis and torch import what they import on first use.
WARM_UP = """
import pytest, torch
from hypothesis import given, strategies

@given(strategies.integers())
def test_hypothesis(number): ...

def test_torch():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.zeros(1), torch.ones(1))
"""


class Mutant(NamedTuple):
    name: str
    file: str  # in the package
    old: str  # occurs there exactly once
    new: str
    tests: tuple[str, ...]


INVARIANCE = "learning/test_update_invariance.py"
CREDIT = "learning/test_credit.py::test_"
CRITIC = "learning/test_critic.py::test_"
ADVANTAGES = ("core/advantages.py", ("core/test_advantages.py",))
RATIOS = ("core/ratios.py", ("core/test_ratios.py",))
SURROGATES = ("core/surrogates.py", ("core/test_surrogates.py",))
KL = ("core/kl.py", ("core/test_kl.py",))
AGGREGATION = ("core/aggregation.py", ("core/test_aggregation.py",))
VALUES = ("core/values.py", ("core/test_values.py",))
SCHEDULES = ("core/schedules.py", ("core/test_schedules.py",))
COLLATE = ("data/collate.py", ("data/test_batch.py",))
ALGORITHMS = ("algorithms.py", ("learning/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"))
ANNOTATE = ("train/annotate.py", ("learning/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"))
UPDATE = ("train/update.py", ("learning/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"))


def _mutant(name: str, where: tuple[str, tuple[str, ...]], old: str, new: str, test: str = "") -> Mutant:
    """`test` is the one that notices, where it would come late in the others; without a file, one of
    test_update_invariance.py."""
    if test and "::" not in test:
        test = f"{INVARIANCE}::{test}"
    return Mutant(name, where[0], old, new, (test,) if test else where[1])


MUTANTS = [
    _mutant("bessel_by_default", ADVANTAGES, "ddof: int = 0)", "ddof: int = 1)"),
    _mutant("eps_under_the_root", ADVANTAGES, "(variance_B.sqrt() + eps)", "(variance_B + eps).sqrt()"),
    _mutant("baseline_added", ADVANTAGES, "reward_B - mean_B, 0.0)", "reward_B + mean_B, 0.0)"),
    _mutant(
        "failed_rows_counted_in_the_mean",
        ADVANTAGES,
        "weight_B = valid_B.to(reward_B.dtype)",
        "weight_B = torch.ones_like(reward_B)",
    ),
    _mutant("failed_rewards_read", ADVANTAGES, "reward_B = torch.where(valid_B, reward_B, 0.0)", "pass"),
    _mutant("residue_not_zero", ADVANTAGES, "RELATIVE_RANGE = 1e-6", "RELATIVE_RANGE = 0.0"),
    _mutant("small_differences_zero", ADVANTAGES, "RELATIVE_RANGE = 1e-6", "RELATIVE_RANGE = 1e-2"),
    _mutant("leave_one_in", ADVANTAGES, "(count_B - 1).clamp(min=1)", "count_B.clamp(min=1)"),
    _mutant(
        "whole_batch_as_one_group",
        ADVANTAGES,
        "index_add(0, group_B, value_B)[group_B]",
        "index_add(0, 0 * group_B, value_B)[0 * group_B]",
    ),
    _mutant("ratio_inverted", RATIOS, "logprobs_BT - old_logprobs_BT, 0.0)", "old_logprobs_BT - logprobs_BT, 0.0)"),
    _mutant(
        "ratio_not_masked",
        RATIOS,
        "torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)",
        "logprobs_BT - old_logprobs_BT",
    ),
    _mutant(
        "ratio_masked_by_multiplying",
        RATIOS,
        "torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)",
        "(logprobs_BT - old_logprobs_BT) * mask_BT",
    ),
    _mutant(
        "ratio_not_clamped",
        RATIOS,
        "return log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
        "return log_ratio_BT",
    ),
    _mutant(
        "sequence_ratio_over_padding",
        RATIOS,
        "length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)",
        "length_B1 = mask_BT.shape[1]",
    ),
    _mutant(
        "sequence_ratio_as_product",
        RATIOS,
        "log_ratio_BT.sum(dim=1, keepdim=True) / length_B1",
        "log_ratio_BT.sum(dim=1, keepdim=True)",
    ),
    _mutant(
        "clip_bounds_swapped",
        SURROGATES,
        "clamp(1 - clip_low, 1 + clip_high)",
        "clamp(1 - clip_high, 1 + clip_low)",
    ),
    _mutant("optimist_instead_of_pessimist", SURROGATES, "-torch.minimum(ratio_BT", "-torch.maximum(ratio_BT"),
    _mutant("clipped_loss_maximised", SURROGATES, "loss_BT = -torch.minimum(", "loss_BT = torch.minimum("),
    _mutant("score_function_maximised", SURROGATES, "-advantages_BT * logprobs_BT", "advantages_BT * logprobs_BT"),
    _mutant("dual_clip_for_good_actions", SURROGATES, "torch.where(negative_BT,", "torch.where(negative_BT | True,"),
    _mutant(
        "dual_clip_not_reported",
        SURROGATES,
        "low_BT | (negative_BT & (ratio_BT > dual_clip))",
        "low_BT",
    ),
    _mutant("clip_reported_for_any_advantage", SURROGATES, "(advantages_BT > 0) & (ratio_BT >", "(ratio_BT >"),
    _mutant(
        "kl_inverted", KL, "(reference_logprobs_BT - logprobs_BT).clamp", "(logprobs_BT - reference_logprobs_BT).clamp"
    ),
    _mutant("k2_not_halved", KL, "0.5 * _log_x", "_log_x"),
    _mutant("k3_without_precision", KL, "log_x_BT.expm1() - log_x_BT", "log_x_BT.exp() - 1 - log_x_BT"),
    _mutant("kl_not_clamped", KL, ".clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)", ""),
    _mutant("exact_kl_of_impossible_actions", KL, ".masked_fill(probability_BTV == 0, 0.0)", ""),
    _mutant(
        "mean_over_the_wrong_axis", AGGREGATION, "mask_BT.sum(dim=1, keepdim=True)", "mask_BT.sum(dim=0, keepdim=True)"
    ),
    _mutant("empty_rows_counted", AGGREGATION, "int(mask_BT.any(dim=1).sum())", "len(mask_BT)"),
    _mutant("tokens_of_the_part_only", AGGREGATION, "max(counts.decisions, 1)", "max(int(mask_BT.sum()), 1)"),
    _mutant("no_mean_over_rollouts", AGGREGATION, "float(max(counts.rollouts, 1) * length)", "float(length)"),
    _mutant("warmup_from_zero", SCHEDULES, "min(1.0, step / warmup_steps)", "min(1.0, (step - 1) / warmup_steps)"),
    _mutant(
        "padding_known_by_its_id",
        COLLATE,
        "mask_BT=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]",
        "mask_BT=_pad([rollout.actions for rollout in rollouts], lengths) != 0",
    ),
    _mutant("cut_taken_for_final", COLLATE, "[not rollout.end.is_final for", "[rollout.end.is_final for"),
    _mutant(
        "advantage_of_the_neighbour", ALGORITHMS, "advantage_B[:, None], 0.0)", "advantage_B.roll(1)[:, None], 0.0)"
    ),
    _mutant("kl_maximised", ALGORITHMS, "loss_BT + kl_coefficient", "loss_BT - kl_coefficient"),
    _mutant(
        "sampler_taken_for_old_policy",
        ALGORITHMS,
        "logprobs_BT.detach() if batch",
        "batch.behavior_logprobs_BT if batch",
    ),
    _mutant(
        "reference_not_masked",
        ALGORITHMS,
        "torch.where(mask, current, 0.0), torch.where(mask, other, 0.0)",
        "torch.where(mask, current, 0.0), other",
        "test_what_stands_at_padding_is_never_read",
    ),
    _mutant("kl_rewarded", ANNOTATE, "batch.reward_B - penalty_BT", "batch.reward_B + penalty_BT"),
    _mutant(
        "failed_rows_in_denominators",
        ANNOTATE,
        "counted_BT = batch.mask_BT & batch.valid_B[:, None]",
        "counted_BT = batch.mask_BT",
        "test_failed_rollouts_change_neither_baseline_nor_denominators",
    ),
    _mutant(
        "truncated_rows_in_denominators", ANNOTATE, "count(counted_BT)", "count(batch.mask_BT & batch.valid_B[:, None])"
    ),
    _mutant(
        "dead_groups_out_of_denominators",
        ANNOTATE,
        "count(counted_BT)",
        "count(counted_BT & teaches_B[:, None])",
        "test_dead_groups_count_in_the_denominators_and_have_no_kl",
    ),
    _mutant("truncated_rows_kept", ANNOTATE, "counted_BT & ~batch.truncated_B[:, None]", "counted_BT"),
    _mutant("kl_of_average_rollouts_lost", ANNOTATE, "alive[batch.group_B] if pulled else ", ""),
    _mutant("minibatches_not_scaled", UPDATE, "batch.weights_BT * plan.minibatches", "batch.weights_BT"),
    _mutant(
        "one_epoch_only",
        UPDATE,
        "range(plan.epochs)",
        "range(1)",
        "test_every_epoch_at_frozen_weights_sees_the_same_gradient",
    ),
    _mutant(
        "order_without_the_step",
        UPDATE,
        "permutation(seed, step, epoch,",
        "permutation(seed, 1, epoch,",
        "test_a_group_stays_in_one_minibatch_and_the_order_depends_on_the_step",
    ),
    _mutant(
        "gamma_and_lambda_swapped", VALUES, "rewards + gamma * following - values", "rewards + lam * following - values"
    ),
    _mutant("gae_discounted_by_lambda_alone", VALUES, "_scan(deltas, gamma * lam)", "_scan(deltas, lam)"),
    _mutant(
        "value_of_the_state_itself_for_the_next",
        VALUES,
        "following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)",
        "following = values",
    ),
    _mutant(
        "what_follows_after_the_padding",
        VALUES,
        "(mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)",
        "torch.full_like(order_BT[:, :1], mask_BT.shape[1] - 1)",
    ),
    _mutant("returns_without_the_value", VALUES, "order_BT, advantages + values)", "order_BT, advantages)"),
    _mutant(
        "undecided_rewards_read",
        VALUES,
        "deltas = torch.where(decided_BT, rewards + gamma * following - values, 0.0)",
        "deltas = rewards + gamma * following - values",
    ),
    _mutant(
        "gaps_take_time",
        VALUES,
        "(~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)",
        "torch.arange(mask_BT.shape[1]).repeat(len(mask_BT), 1)",
    ),
    _mutant(
        "gaps_out_of_order",
        VALUES,
        "(~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)",
        "(~mask_BT).to(torch.uint8).argsort(dim=1, stable=True).flip(1)",
    ),
    _mutant(
        "sums_reach_half_as_far",
        VALUES,
        "while reach < value_BT.shape[1] and",
        "while 2 * reach < value_BT.shape[1] and",
    ),
    _mutant("discount_not_squared", VALUES, "2 * reach, power * power", "2 * reach, power"),
    _mutant("value_clip_of_the_optimist", VALUES, "torch.maximum((values_BT", "torch.minimum((values_BT"),
    _mutant(
        "value_clip_from_the_answer",
        VALUES,
        "near_BT = old_values_BT + (values_BT - old_values_BT)",
        "near_BT = returns_BT + (values_BT - returns_BT)",
    ),
    _mutant("explained_variance_with_the_bias", VALUES, "errors.var(correction=0)", "(errors**2).mean()"),
    _mutant(
        "terminated_bootstrapped",
        ANNOTATE,
        "torch.where(batch.truncated_B, next_value_B, 0.0)",
        "next_value_B",
        CRITIC + "only_what_stopped_before_the_episodes_end_is_worth_what_follows",
    ),
    _mutant(
        "truncated_not_bootstrapped",
        ANNOTATE,
        "torch.where(batch.truncated_B, next_value_B, 0.0)",
        "0 * next_value_B",
        CRITIC + "only_what_stopped_before_the_episodes_end_is_worth_what_follows",
    ),
    _mutant(
        "kl_not_taken_off_single_decisions",
        ANNOTATE,
        "rewards_BT=batch.rewards_BT - penalty_BT",
        "rewards_BT=batch.rewards_BT",
        CREDIT + "the_kl_is_taken_off_the_decisions_that_it_was_measured_at",
    ),
    _mutant(
        "critic_taught_by_advantages_only",
        ANNOTATE,
        " | (critic is not None)",
        "",
        CRITIC + "the_critic_learns_from_rows_without_an_advantage",
    ),
    _mutant("whitening_dropped", ALGORITHMS, "if whiten:", "if not whiten:", CRITIC + "gradient_of_ppo_is_the_papers"),
    _mutant(
        "whitening_with_failed_rows",
        ALGORITHMS,
        "counted_BT = batch.mask_BT & batch.valid_B[:, None]",
        "counted_BT = batch.mask_BT",
        CRITIC + "failed_rows_are_not_whitened_with_the_others",
    ),
    _mutant(
        "ended_rollouts_compared_as_zero",
        ALGORITHMS,
        "counted_BT = batch.mask_BT & batch.valid_B[:, None]",
        "counted_BT = (batch.mask_BT | True) & batch.valid_B[:, None]",
        CREDIT + "a_rollout_that_ended_early_is_not_compared_at_later_steps",
    ),
    _mutant(
        "steps_of_all_groups_compared",
        ALGORITHMS,
        "group_BT = group_BT * width + torch",
        "group_BT = 0 * group_BT + torch",
        CREDIT + "reward_to_go_at_the_same_step_by_hand",
    ),
    _mutant(
        "kl_to_behavior_turned_round",
        ALGORITHMS,
        "self.kl.estimator(other, current) if",
        "self.kl.estimator(current, other) if",
        CREDIT + "kl_and_its_gradient_are_those_of_the_formula",
    ),
    _mutant(
        "entropy_minimised",
        ALGORITHMS,
        "loss_BT - self.entropy_coefficient",
        "loss_BT + self.entropy_coefficient",
        CREDIT + "the_entropy_bonus_makes_undecided",
    ),
    _mutant(
        "value_coefficient_dropped",
        ALGORITHMS,
        "return self.value_loss.coefficient * (",
        "return (",
        CRITIC + "gradient_of_ppo_is_the_papers",
    ),
    _mutant(
        "kl_of_all_epochs",
        UPDATE,
        "self.sums_before_epoch = sums",
        "pass",
        CRITIC + "the_kl_is_that_of_the_epoch_and_not_of_all_so_far",
    ),
    _mutant(
        "critic_epochs_forgotten",
        UPDATE,
        "range(plan.epochs, plan.epochs + plan.critic_epochs)",
        "range(0)",
        CRITIC + "further_epochs_of_the_critic_move_the_critic_only",
    ),
    _mutant(
        "every_decision_in_every_minibatch",
        UPDATE,
        "mask_BT.view(-1)[decisions] = True",
        "mask_BT = batch.mask_BT",
        CREDIT + "a_decision_is_in_one_minibatch_and_the_order_depends_on_step_and_epoch",
    ),
    _mutant(
        "critic_at_the_policys_learning_rate",
        UPDATE,
        "sizes.critic_learning_rate",
        "sizes.learning_rate",
        CRITIC + "value_loss_metric_is_the_loss_however_cut",
    ),
    _mutant(
        "reward_at_the_first_decision", COLLATE, "[0.0] * (length - 1) + [reward]", "[reward] + [0.0] * (length - 1)"
    ),
    _mutant("step_rewards_forgotten", COLLATE, "if rollout.step_rewards is None else", "if True else"),
]


def copy_package(folder: Path, mutant: Mutant | None) -> None:
    shutil.copytree(PACKAGE, folder / "covey", ignore=_all_but_code)
    if mutant:
        target = folder / "covey" / mutant.file
        target.write_text(target.read_text().replace(mutant.old, mutant.new))


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if not name.endswith(".py") and (name == "__pycache__" or Path(folder, name).is_file())
    ]


def exit_status(folder: Path, tests: list[str]) -> int:
    """pytest's exit status in a fork of this process that imports covey from `folder`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(folder))
        import covey

        assert Path(covey.__file__).is_relative_to(folder)
        status = pytest.main(["-x", "--tb=line", "--timeout=60", *(str(TESTS / name) for name in tests)])
    finally:
        os._exit(status)


def main(root: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warm_up = root / "test_warm_up.py"
    warm_up.write_text(WARM_UP)
    with redirect_stdout(sys.stderr):
        pytest.main([str(warm_up)])
    gc.freeze()  # pytest collects garbage at its end: without looking through all of torch again
    statuses = {}
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for mutant in mutants:
        folder = root / mutant.name
        copy_package(folder, mutant)
        statuses[mutant.name] = exit_status(folder, list(mutant.tests))
    copy_package(root / UNCHANGED, None)
    statuses[UNCHANGED] = exit_status(root / UNCHANGED, sorted({name for mutant in mutants for name in mutant.tests}))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
