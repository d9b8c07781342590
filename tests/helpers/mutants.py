"""Small wrongs done to the mathematics on purpose; a test suite worth having notices every one.

A mutant is one change of text in a copy of the package. `python mutants.py FOLDER [NAME ...]` makes the copies in
FOLDER, runs each mutant's test files on it and prints a JSON object of pytest's exit statuses (1: a test failed), also
that of an unchanged copy. `make mutants` does that for all of them; `make test` only checks that each text occurs
exactly once. Imports take longer than the tests: they happen once, and every mutant gets a fork. As many run at a time
as there are processors.
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

CPU_INFO = Path("/proc/cpuinfo")
HAS_AMX, HAS_PAIRS = (CPU_INFO.exists() and flag in CPU_INFO.read_text() for flag in ("amx_bf16", "avx512_bf16"))

# A mutant must be noticed by the explicit examples of a property: which ones hypothesis makes is chance.
OPTIONS = ["-x", "--tb=line", "--timeout=300", "--hypothesis-profile=explicit"]

# Makes pytest, hypothesis and torch import what they import on first use.
WARM_UP = """
import pytest, torch
from hypothesis import given, strategies
from transformers import PreTrainedTokenizerFast

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


INVARIANCE = "train/test_update_invariance.py"
CREDIT = "algorithms/test_advantages.py::test_"
STEPS = "algorithms/test_process_advantages.py::test_"
CRITIC = "train/test_critic.py::test_"
OF_WORDS = "llm/test_critic.py::test_"
ADVANTAGES = ("core/baselines.py", ("core/test_baselines.py",))
RATIOS = ("core/ratios.py", ("core/test_ratios.py",))
SURROGATES = ("core/policy_losses.py", ("core/test_policy_losses.py",))
KL = ("core/kl.py", ("core/test_kl.py",))
AGGREGATION = ("core/loss_weights.py", ("core/test_loss_weights.py",))
VALUES = ("core/returns.py", ("core/test_returns.py",))
LAYERS, ATTENTION, KEPT, WHOLE_DECODER, LOGITS, PRODUCTS = (
    (f"llm/native/csrc/{name}.h", ("llm/native/test_kernels.py",))
    for name in ("rmsnorm_swiglu", "decode_attention", "kv_cache", "decode_step", "logits", "weight_gradients")
)
FUSED = ("llm/model/fused_layers.py", ("llm/native/test_kernels.py",))
TRAINING, SQUARES, SEQUENCES = (
    (f"llm/{name}", ("llm/model/test_prefix_attention.py",))
    for name in ("native/csrc/prefix_attention.h", "native/csrc/gemm.h", "model/prefix_attention.py")
)
FAKE_GPU = (
    "llm/generation/decoding.py",
    ("llm/test_gpu.py::test_a_run_on_a_fake_gpu_has_the_numbers_of_a_cpu[llama-]",),
)
DECODER = ("llm/generation/native_decoder.py", ("llm/native/test_kernels.py",))
TORCH_DECODER = ("llm/generation/decoding.py", ("llm/native/test_kernels.py", "parity/test_language_model.py"))
TORCH_LAYERS = ("llm/generation/llama_layers.py", ("llm/native/test_kernels.py",))
LAYOUT = ("llm/model/prefix_attention.py", ("parity/test_language_model.py",))
PLAIN = ("llm/model/plain_forward.py", (LAYOUT[1][0] + "::test_plain_passes_serve_what_they_begin_with",))
TRIAL = ("llm/generation/backend.py", (LAYOUT[1][0] + "::test_a_model_whose_passes_differ_is_refused",))
COMMON = ("llm/model/prefix_tree.py", ("parity/test_language_model.py",))
PACKED = ("llm/generation/prepacked_linear.py", ("llm/generation/test_prepacked_linear.py",))
KL_CONTROL = "train/test_kl_controller.py::test_"
ORIGINS = "llm/model/test_loading.py::test_"
LOOP = ("train/loop.py", ("train/test_kl_controller.py",))
STATE = ("train/state.py", LOOP[1])
STEP_METRICS = ("train/metrics.py", LOOP[1])
FOLLOWING = ("runtime/ema.py", ("runtime/test_ema.py",))
EXACT_KL_TESTS = ("llm/model/test_exact_kl.py::test_value_and_gradients_are_those_of_the_whole_matrix",)
EXACT_KL = ("llm/model/exact_kl.py", EXACT_KL_TESTS)
HEAD = ("llm/model/logprobs.py", EXACT_KL_TESTS)
LOADING = ("llm/model/loading.py", ("llm/model/test_loading.py",))
SCHEDULES = ("core/schedules.py", ("core/test_schedules.py",))
COLLATE = ("data/collate.py", ("data/test_batch.py",))
CREDITS = ("algorithms/advantages.py", ("algorithms/test_process_advantages.py",))
PROCESS = ("llm/rewards/step_splitter.py", ("llm/rewards/test_step_splitter.py",))
ALGORITHMS = (
    "algorithms/algorithm.py",
    ("algorithms/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"),
)
ANNOTATE = ("train/prepare.py", ("algorithms/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"))
BRANCHES = ("llm/generation/test_branching.py",)
CHOICES = BRANCHES[0] + "::test_branches_change_no_choice_and_spare_rows"
SAMPLER = ("llm/sampler.py", BRANCHES)
COPIES = BRANCHES[0] + "::test_a_row_that_is_named_twice_becomes_two"
SEGMENTS = ("llm/model/prefix_attention.py", (BRANCHES[0] + "::test_every_beginning_is_fed_once",))
GROWN = ("llm/model/prefix_tree.py", SEGMENTS[1])
LEAVES = ("llm/model/prefix_attention.py", (BRANCHES[0] + "::test_every_token_has_a_place_in_the_rectangle_of_leaves",))
WHOLE_ROWS = BRANCHES[0] + "::test_numbers_and_gradients_are_those_of_whole_rows"
MICROBATCHES = ("llm/model/microbatches.py", ("llm/model/test_microbatches.py",))
GATHER = ("train/collect.py", ("train/test_collect.py",))
GROUP_SIZES = ("train/state.py", GATHER[1])
FAMILY = ("algorithms/presets.py", ("algorithms/test_presets.py",))
OVERLONG = ("llm/rewards/builtin.py", ("llm/rewards/test_overlong.py",))
LANGUAGE_CRITIC = ("llm/critic.py", ("llm/test_critic.py",))
TRUNK = ("llm/model/hidden_states.py", ("llm/test_critic.py",))
UPDATE = ("train/update.py", ("algorithms/test_known_bugs.py", f"{INVARIANCE}::test_gradient_is_the_papers"))

ARTICLES = ("functional.py", ("trainers/test_functional.py",))


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
        "advantage_of_the_neighbour",
        CREDITS,
        "advantage_B[:, None], 0.0)",
        "advantage_B.roll(1)[:, None], 0.0)",
        CREDIT + "outcome_by_hand",
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
    _mutant("minibatches_not_scaled", UPDATE, "batch.loss_weights_BT * plan.minibatches", "batch.loss_weights_BT"),
    _mutant(
        "one_epoch_only",
        UPDATE,
        "range(policy_epochs)",
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
        "torch.where(batch.truncated_B, bootstrap_value_B, 0.0)",
        "bootstrap_value_B",
        CRITIC + "only_what_stopped_before_the_episodes_end_is_worth_what_follows",
    ),
    _mutant(
        "truncated_not_bootstrapped",
        ANNOTATE,
        "torch.where(batch.truncated_B, bootstrap_value_B, 0.0)",
        "0 * bootstrap_value_B",
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
    _mutant("whitening_dropped", CREDITS, "if whiten:", "if not whiten:", CRITIC + "gradient_of_ppo_is_the_papers"),
    _mutant(
        "whitening_with_failed_rows",
        CREDITS,
        "group_BT, batch.mask_BT & batch.valid_B[:, None])",
        "group_BT, batch.mask_BT)",
        CRITIC + "failed_rows_are_not_whitened_with_the_others",
    ),
    _mutant(
        "ended_rollouts_compared_as_zero",
        CREDITS,
        "group_BT, batch.mask_BT & batch.valid_B[:, None])",
        "group_BT, (batch.mask_BT | True) & batch.valid_B[:, None])",
        CREDIT + "a_rollout_that_ended_early_is_not_compared_at_later_steps",
    ),
    _mutant(
        "steps_of_all_groups_compared",
        CREDITS,
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
        STEP_METRICS,
        "self.sums_before_epoch = sums",
        "pass",
        CRITIC + "the_kl_is_that_of_the_epoch_and_not_of_all_so_far",
    ),
    _mutant(
        "critic_epochs_forgotten",
        UPDATE,
        "range(policy_epochs, plan.epochs + plan.critic_epochs)",
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
    _mutant("branches_meet_again", SAMPLER, "ways = branches * logits_BV.shape[1] + tokens", "ways = tokens", CHOICES),
    _mutant("siblings_apart_at_once", SAMPLER, "1 if decoder.can_fork else group_size", "group_size", CHOICES),
    _mutant("branches_that_ended_are_fed", SAMPLER, "fed[parents] = tokens", "fed[: len(parents)] = tokens", CHOICES),
    _mutant(
        "branch_without_values",
        DECODER,
        "(self.own_keys, self.own_values):\n            own[",
        "(self.own_keys,):\n            own[",
        COPIES,
    ),
    _mutant(
        "branch_without_its_last_token", DECODER, "written = padded(tokens)", "written = padded(tokens - 1)", COPIES
    ),
    _mutant("prompts_branch_together", GROWN, "setdefault((prompt_of_row[row], ", "setdefault((0, "),
    _mutant("branches_stand_at_their_prompt", SEGMENTS, "[segment.prompt] + segment.begin", "[segment.prompt]"),
    _mutant(
        "branches_see_their_prompt_alone", SEGMENTS, "places.get(self.nodes[number].parent, of_prompt)", "of_prompt"
    ),
    _mutant("branches_lie_elsewhere", SEGMENTS, "for row in segment.rows:", "for row in segment.rows[:1]:"),
    _mutant(
        "one_decision_for_every_state", TRUNK, "(source_D * actions + actions_D)", "(source_D * actions)", WHOLE_ROWS
    ),
    _mutant(
        "shared_tokens_counted_again",
        MICROBATCHES,
        " + common_prefix_length(written[rows[-1].number], written[number])",
        "",
    ),
    _mutant("groups_cut_for_nothing", MICROBATCHES, "whole_groups = by_groups <= anywhere", "whole_groups = False"),
    _mutant("groups_never_cut", MICROBATCHES, "whole_groups = by_groups <= anywhere", "whole_groups = True"),
    _mutant("pieces_as_full_as_can_be", MICROBATCHES, "_filled(groups, enough,", "_filled(groups, limit,"),
    _mutant("what_goes_on_is_a_leaf", LEAVES, "if number not in continued", "if True"),
    _mutant("copies_without_gradients", LEAVES, "in ctx.copies.more:", "in ctx.copies.more[1:]:"),
    _mutant("tokens_taken_from_the_next_cell", LEAVES, "order[number == 0]", "order[number == 0].roll(1)"),
    _mutant(
        "leaves_see_the_first_prompt",
        LAYOUT,
        "[self.prompt_of_row[row] for row in self.leaf_rows]",
        "[0 for row in self.leaf_rows]",
    ),
    _mutant(
        "prompt_of_a_new_piece_not_counted",
        MICROBATCHES,
        "tokens, new, new_piece = 0, row.tokens, False",
        "tokens, new_piece = 0, False",
    ),
    _mutant("first_round_not_charged", GATHER, "left = count * (size - first)", "left = count * size"),
    _mutant("group_of_any_size", GATHER, "min(left // len(live), largest - first)", "left // len(live)"),
    _mutant("rest_rounded_up", GATHER, "left // len(live)", "-(-left // len(live))"),
    _mutant("dead_groups_grow", GATHER, "for group in live], more,", "for group in judged], more,"),
    _mutant("further_rollouts_repeat_the_first", GATHER, "more, first_rollout=first)", "more)"),
    _mutant("schedule_ends_late", GROUP_SIZES, "max(self.steps - 1, 1)", "self.steps"),
    _mutant("one_try_too_many", GATHER, "resamples == self.max_resamples", "resamples > self.max_resamples"),
    _mutant("whole_draws_again", GATHER, "source.draw(count - len(kept), first", "source.draw(count, first"),
    _mutant("live_groups_dropped", GATHER, "(kept if alive else dropped)", "(dropped if alive else kept)"),
    _mutant("starts_drawn_again", GATHER, "before=self.drawn + first", "before=self.drawn"),
    _mutant("dropped_groups_not_shared", GATHER, "if not self.dropped:", "if True:"),
    _mutant(
        "means_of_chosen_rollouts",
        GATHER,
        "StepGroups(groups, unselected=judged",
        "StepGroups(groups, unselected=groups",
    ),
    _mutant("capped_weight_has_a_gradient", SURROGATES, "log_ratio_BT.detach().exp()", "log_ratio_BT.exp()"),
    _mutant("weight_not_capped", SURROGATES, "-ratio_BT.clamp(least, cap)", "-ratio_BT.clamp(min=least)"),
    _mutant("weight_without_its_least", SURROGATES, "-ratio_BT.clamp(least, cap)", "-ratio_BT.clamp(max=cap)"),
    _mutant("capped_score_maximised", SURROGATES, "-ratio_BT.clamp(least, cap)", "ratio_BT.clamp(least, cap)"),
    _mutant(
        "capped_and_raised_swapped", SURROGATES, "ratio_BT < least, ratio_BT > cap", "ratio_BT > cap, ratio_BT < least"
    ),
    _mutant(
        "kl_in_the_reward_and_the_loss",
        ALGORITHMS,
        "if kl_coefficient and not self.kl.in_reward:",
        "if kl_coefficient:",
        "algorithms/test_known_bugs.py::test_openrlhf_768_kl_counted_twice",
    ),
    _mutant(
        "kl_times_zero",
        ALGORITHMS,
        "if kl_coefficient and not self.kl.in_reward:",
        "if not self.kl.in_reward:",
        "algorithms/test_known_bugs.py::test_openrlhf_768_kl_of_nan_where_it_is_off",
    ),
    _mutant(
        "later_passes_on_policy",
        ALGORITHMS,
        " if batch.proximal_logprobs_BT is None else batch.proximal_logprobs_BT",
        "",
        "algorithms/test_known_bugs.py::test_trl_3493_later_passes_used_as_if_on_policy",
    ),
    _mutant("dapo_bounds_alike", FAMILY, "clip_high: float = 0.28", "clip_high: float = 0.2"),
    _mutant("gspo_by_token", FAMILY, "ratio=ratios.sequence_log_ratio", "ratio=ratios.token_log_ratio"),
    _mutant("gspo_bounds_swapped", FAMILY, "clip_low: float = 3e-4", "clip_low: float = 4e-4"),
    _mutant("cispo_cap_without_the_one", FAMILY, "cap=1 + clip_high", "cap=clip_high"),
    _mutant(
        "reinforce_pp_in_groups",
        ("algorithms/advantages.py", ("algorithms/test_presets.py",)),
        "_compare_over_step(compare, returns_BT, batch)",
        "_compare_decisions(compare, returns_BT, batch.group_B[:, None].expand_as(batch.mask_BT), batch)",
    ),
    _mutant("overlong_pays", OVERLONG, "min(0.0, (free - len(ids))", "max(0.0, (free - len(ids))"),
    _mutant(
        "policy_moves_while_the_critic_warms_up",
        UPDATE,
        "return 0 if step <= self.critic_warmup_steps else",
        "return",
        OF_WORDS + "warm_up_leaves_the_policy_as_it_is",
    ),
    _mutant(
        "warm_up_a_step_short",
        UPDATE,
        "step <= self.critic_warmup_steps",
        "step < self.critic_warmup_steps",
        OF_WORDS + "warm_up_leaves_the_policy_as_it_is",
    ),
    _mutant(
        "warm_up_passes_forgotten_in_the_mean",
        UPDATE,
        "gathered.epochs + plan.epochs - policy_epochs + plan.critic_epochs",
        "gathered.epochs + plan.critic_epochs or 1",
        OF_WORDS + "value_loss_of_a_warm_up_is_the_mean_over_its_passes",
    ),
    _mutant(
        "value_loss_not_added",
        UPDATE,
        "loss = loss + value_loss",
        "pass",
        OF_WORDS + "on_the_policys_trunk_the_gradient_is_the_sum_of_both",
    ),
    _mutant(
        "head_taught_twice",
        UPDATE,
        "                if evaluation.values_BT is None:\n",
        "                if True:\n",
        OF_WORDS + "on_the_policys_trunk_the_gradient_is_the_sum_of_both",
    ),
    _mutant(
        "value_after_the_token",
        TRUNK,
        "source_T[1 : 1 + len(places)]",
        "source_T[: len(places)]",
        OF_WORDS + "values_are_those_of_a_plain_forward",
    ),
    _mutant(
        "plain_value_after_the_token",
        TRUNK,
        "input_ids=tokens_L[None, :-1]",
        "input_ids=tokens_L[None]",
        OF_WORDS + "values_are_those_of_a_plain_forward",
    ),
    _mutant(
        "cut_completions_bootstrapped",
        LANGUAGE_CRITIC,
        "return torch.zeros(len(batch))",
        "return self.values(batch)[:, -1]",
        OF_WORDS + "a_reward_is_not_paid_twice_where_the_token_limit_cut",
    ),
    _mutant(
        "trunk_shared_by_mistake",
        LANGUAGE_CRITIC,
        "copy.deepcopy(decoder) if own_trunk else decoder",
        "decoder",
        OF_WORDS + "with_its_own_trunk_neither_loss_reaches_the_other_model",
    ),
    _mutant(
        "critic_alone_moves_the_policys_trunk",
        LANGUAGE_CRITIC,
        "self.own_trunk and torch.is_grad_enabled()",
        "torch.is_grad_enabled()",
        OF_WORDS + "further_epochs_on_the_policys_trunk_move_the_head_alone",
    ),
    _mutant(
        "values_begin_anywhere",
        LANGUAGE_CRITIC,
        "nn.init.zeros_(self.linear.weight)",
        "nn.init.normal_(self.linear.weight)",
        OF_WORDS + "values_begin_at_zero_and_are_at_least_fp32",
    ),
    _mutant(
        "values_in_bf16",
        LANGUAGE_CRITIC,
        "torch.promote_types(dtype, torch.float32)",
        "dtype",
        OF_WORDS + "values_begin_at_zero_and_are_at_least_fp32",
    ),
    _mutant("overlong_begins_late", OVERLONG, "free = max_new_tokens - overlong_tokens", "free = max_new_tokens"),
    # process supervision
    _mutant(
        "own_step_not_credited",
        CREDITS,
        "number_BT = end_BT.cumsum(dim=1) - end_BT.long()",
        "number_BT = (end_BT.cumsum(dim=1)).clamp(max=end_BT.shape[1] - 1)",
        STEPS + "process_by_hand",
    ),
    _mutant(
        "later_steps_not_credited",
        CREDITS,
        "discounted_returns(at_end_BT, batch.mask_BT, 1.0)",
        "discounted_returns(at_end_BT, batch.mask_BT, 0.0)",
        STEPS + "process_by_hand",
    ),
    _mutant(
        "later_steps_discounted",
        CREDITS,
        "discounted_returns(at_end_BT, batch.mask_BT, 1.0)",
        "discounted_returns(at_end_BT, batch.mask_BT, 0.99)",
        STEPS + "process_by_hand",
    ),
    _mutant(
        "earlier_steps_credited_in_place_of_later_ones",
        CREDITS,
        "earned_BK.flip(1).cumsum(dim=1).flip(1)",
        "earned_BK.cumsum(dim=1)",
        STEPS + "process_return_by_hand",
    ),
    _mutant(
        "steps_compared_with_the_next_ones",
        CREDITS,
        "group_BK = batch.group_B[:, None] * width + torch.arange(width, device=batch.group_B.device)",
        "group_BK = batch.group_B[:, None] + torch.arange(width, device=batch.group_B.device)",
        STEPS + "advantages_are_those_of_the_formula",
    ),
    _mutant(
        "steps_of_failed_rollouts_compared",
        CREDITS,
        "exists_BK & batch.valid_B[:, None]",
        "exists_BK",
        STEPS + "failed_rollouts_change_nothing",
    ),
    _mutant(
        "steps_that_do_not_exist_compared",
        CREDITS,
        "exists_BK & batch.valid_B[:, None]",
        "(exists_BK | True) & batch.valid_B[:, None]",
        STEPS + "process_by_hand",
    ),
    _mutant(
        "only_the_end_of_a_step_earns",
        CREDITS,
        "earned_BT = torch.where(batch.mask_BT, batch.rewards_BT, 0.0)",
        "earned_BT = torch.where(end_BT, batch.rewards_BT, 0.0)",
        STEPS + "a_kl_in_the_reward_is_charged_to_the_step_of_its_tokens",
    ),
    _mutant(
        "step_ends_forgotten",
        COLLATE,
        "ends = [length - 1] if rollout.step_ends is None else list(rollout.step_ends)",
        "ends = [length - 1]",
        STEPS + "without_steps_the_whole_rollout_is_one",
    ),
    _mutant("step_ends_a_token_early", PROCESS, "decode(tokens[: k + 1])", "decode(tokens[: k + 2])"),
    _mutant("step_covers_by_length", PROCESS, ".startswith(text[:position])", ".__len__() >= position"),
    _mutant("end_token_in_no_step", PROCESS, "len(rollout.actions) - 1]", "len(tokens) - 1]"),
    _mutant("steps_in_one_token_kept_apart", PROCESS, "ends.pop(len(tokens) - 1, None)", "pass"),
    _mutant("value_after_a_cut_episode_forgotten", ARTICLES, "if ended else", "if True else"),
    _mutant("answers_in_anothers_group", ARTICLES, ".repeat_interleave(answers)", ".repeat(answers)"),
    _mutant("ungraded_answers_averaged", ARTICLES, "batch.mask_BT & valid_B[:, None]", "batch.mask_BT"),
    _mutant("old_policy_gets_a_gradient", ARTICLES, "value.detach().to(like_BT)", "value.to(like_BT)"),
    _mutant("critic_unlearns", ARTICLES, "policy_loss + algorithm", "policy_loss - algorithm"),
    _mutant("entropy_not_paid", ARTICLES, "entropy_coefficient=self.entropy_coef", "entropy_coefficient=0.0"),
    _mutant("value_loss_unweighted", ARTICLES, "value_coefficient=self.value_loss_coef", "value_coefficient=1.0"),
    _mutant(
        "rewards_scaled_though_forbidden",
        ARTICLES,
        "return algorithm if self.scale_rewards",
        "return algorithm if True",
    ),
    _mutant("beginning_of_a_pass_taken_from_its_end", PLAIN, "logits_LV[: len(tokens)]", "logits_LV[-len(tokens) :]"),
    _mutant(
        "random_model_taken", TRIAL, "_agree(forked[:alike], whole[:alike])", "_agree(whole[:alike], whole[:alike])"
    ),
    _mutant("kl_target_repels", SCHEDULES, "min(0.2, kl / target - 1)", "min(0.2, 1 - kl / target)"),
    _mutant("kl_error_not_clipped", SCHEDULES, "max(-0.2, min(0.2, kl / target - 1))", "kl / target - 1"),
    _mutant("kl_gain_by_step", SCHEDULES, "min(1.0, rollouts / horizon)", "1.0"),
    _mutant("kl_gain_without_a_bound", SCHEDULES, "min(1.0, rollouts / horizon)", "rollouts / horizon"),
    _mutant("controller_acts_in_the_warmup", SCHEDULES, "if step < self.first_step:", "if False:"),
    _mutant(
        "controller_follows_the_other_kl",
        LOOP,
        '"kl/behavior" if kl.to_behavior else "kl"',
        '"kl" if kl.to_behavior else "kl/behavior"',
        KL_CONTROL + "the_coefficient_follows_the_measured_kl",
    ),
    _mutant(
        "controlled_coefficient_not_used",
        LOOP,
        "if progress.kl_coefficient is None else progress.kl_coefficient",
        "if True else progress.kl_coefficient",
        KL_CONTROL + "the_coefficient_follows_the_measured_kl",
    ),
    _mutant(
        "reference_follows_a_step_late",
        LOOP,
        "step % settings.follow_every == 0",
        "step % settings.follow_every == 1",
        KL_CONTROL + "a_copy_brings_the_kl_back_to_zero_every_so_many_steps",
    ),
    _mutant(
        "reference_forgotten_on_resume",
        STATE,
        'parts.reference_updater.load_state_dict(state["reference"])',
        "pass",
        KL_CONTROL + "a_resumed_run_has_the_same_coefficient_reference_and_weights",
    ),
    _mutant("average_in_low_precision", FOLLOWING, "if share == 1 else", "if True else"),
    _mutant(
        "share_of_the_wrong_side", FOLLOWING, "weight.lerp_(leader, self.share)", "weight.lerp_(leader, 1 - self.share)"
    ),
    _mutant(
        "importance_weight_inverted",
        RATIOS,
        "token_log_ratio(logprobs_BT, sampler_logprobs_BT,",
        "token_log_ratio(sampler_logprobs_BT, logprobs_BT,",
    ),
    _mutant("importance_weight_not_capped", RATIOS, "log_ratio_BT.exp().clamp(max=cap)", "log_ratio_BT.exp()"),
    _mutant(
        "importance_weight_learns", RATIOS, "sampler_logprobs_BT, mask_BT).detach()", "sampler_logprobs_BT, mask_BT)"
    ),
    _mutant(
        "importance_weight_on_the_whole_loss",
        ALGORITHMS,
        "loss = (batch.loss_weights_BT * loss_BT).sum()",
        "loss = (batch.loss_weights_BT * loss_BT * (1 if capped_BT is None else weight_BT)).sum()",
        KL_CONTROL + "weights_multiply_the_surrogate_and_neither_the_kl_nor_the_entropy",
    ),
    _mutant(
        "importance_weight_forgotten",
        ALGORITHMS,
        "loss_BT = weight_BT * loss_BT",
        "pass",
        KL_CONTROL + "weights_correct_for_a_sampler_with_other_weights",
    ),
    _mutant(
        "mismatch_kl_turned_round",
        STEP_METRICS,
        "k3(torch.zeros_like(gap_N), gap_N)",
        "k3(gap_N, torch.zeros_like(gap_N))",
        KL_CONTROL + "mismatch_metrics_by_hand",
    ),
    _mutant(
        "reference_read_although_the_policy_does",
        ANNOTATE,
        "kl_left_to_policy = to_reference and algorithm.kl.by_policy",
        "kl_left_to_policy = False",
        "llm/model/test_exact_kl.py::test_the_exact_kl_is_in_the_loss_and_in_the_metrics_and_the_reference_is_read_once",
    ),
    _mutant(
        "exact_kl_slope_without_the_kl", EXACT_KL, "(other_log_total - log_total - kl)", "(other_log_total - log_total)"
    ),
    _mutant(
        "exact_kl_turned_round",
        EXACT_KL,
        "gap = other.neg_().add_(z).add_((other_log_total - log_total)[part, None])",
        "gap = other.sub_(z).sub_((other_log_total - log_total)[part, None])",
    ),
    _mutant("exact_kl_of_unnormalised_logits", EXACT_KL, ".add_((other_log_total - log_total)[part, None])", ""),
    _mutant("exact_kl_temperature_forgotten", EXACT_KL, "grad_kl[:, None] / ctx.temperature", "grad_kl[:, None]"),
    _mutant("hidden_gradient_of_the_last_part", HEAD, "self.hidden += gradient @", "self.hidden = gradient @"),
    _mutant(
        "checkpoint_weights_not_taken_over",
        LOADING,
        "parameters[name].copy_(master)",
        "parameters[name].zero_()",  # left alone, their memory might hold the same weights by chance
        ORIGINS + "a_stopped_run_stands_for_its_newest_checkpoint",
    ),
    _mutant(
        "kernel_forgets_the_scale", ATTENTION, "tokens, row_stride}, shape.scaling);", "tokens, row_stride}, 1.0f);"
    ),
    _mutant(
        "kernel_sees_padding", LAYERS, "std::fill(part.scores + part.tokens, part.scores + part.end, -INFINITY);", ""
    ),
    _mutant(
        "kernel_misses_the_new_token",
        ATTENTION,
        "int tokens = shape.decoded[row] + 1, row_stride = padded(tokens);",
        "int tokens = shape.decoded[row], row_stride = padded(tokens + 1);",
    ),
    _mutant(
        "kernel_asks_for_the_first_row_again", ATTENTION, "own.score(query, q, queries,", "own.score(query, 0, queries,"
    ),
    _mutant("kernel_mixes_prompts", ATTENTION, "shape.prompt_keys[end] == shape.prompt_keys[first]", "true"),
    _mutant("kernel_keeps_its_own_answer_alone", ATTENTION, "blended, true, ahead);", "blended, false, ahead);"),
    _mutant(
        "kernel_turns_the_other_way", ATTENTION, "x[i] = a * to_float(cosine[i]) -", "x[i] = a * to_float(cosine[i]) +"
    ),
    _mutant(
        "kernel_swaps_gate_and_up",
        LAYERS,
        "silu(load(gate + i)) * load(up + i)",
        "silu(load(up + i)) * load(gate + i)",
    ),
    _mutant(
        "kernel_forgets_the_residual",
        LAYERS,
        "store(sum += load(added + begin + i), total",
        "store(sum = load(added + begin + i), total",
    ),
    _mutant(
        "kernel_draws_one_too_far",
        LOGITS,
        "if (reached > wanted) break;",
        "if (reached > wanted) { chosen++; break; }",
    ),
    _mutant("kernel_draws_hot", LOGITS, "if (temperature != 1.0f) x /= temperature;", ""),
    _mutant(
        "kernel_norm_gradient_without_mean",
        LAYERS,
        "(load(&dn[i]) - load(&n[i]) * mean) * scale;",
        "load(&dn[i]) * scale;",
    ),
    _mutant(
        "kernel_norm_misses_rows",
        LAYERS,
        "int row = int(int64_t(rows) * part / threads);",
        "int row = 1 + int(int64_t(rows) * part / threads);",
    ),
    *(
        [
            _mutant("amx_forgets_earlier_tokens", PRODUCTS, "t < tokens; t += DEPTH) {", "t < DEPTH; t += DEPTH) {"),
            _mutant(
                "amx_forgets_odd_tokens", PRODUCTS, "token + 1 < tokens ? at + row_stride", "false ? at + row_stride"
            ),
            _mutant("amx_begins_anew", SQUARES, "    if (begun) {\n", "    if (false) {\n"),
            _mutant("amx_swaps_squares", SQUARES, "_tile_stored(1, sums + 256", "_tile_stored(2, sums + 256"),
            _mutant(
                "amx_loses_every_second_value",
                KEPT,
                "t + 2 * i + 1 < tokens ? _mm512_loadu_si512(pair + stride)",
                "false ? _mm512_loadu_si512(pair + stride)",
            ),
            _mutant("amx_values_in_disorder", KEPT, "(low[i], upper, high[i])", "(low[i], lower, high[i])"),
            _mutant("amx_asks_for_the_first_queries", KEPT, "square[q % TILE + i]", "square[i]"),
            _mutant("amx_turns_half_a_query", KEPT, "load(from + LANES), load(from)", "load(from), load(from)"),
        ]
        if HAS_AMX
        else []
    ),
    *(
        [
            _mutant("step_forgets_the_bias", WHOLE_DECODER, "if (linear.bias) low_bias", "if (false) low_bias"),
            _mutant("step_swaps_gate_and_up", WHOLE_DECODER, "Floats gate, Floats up)", "Floats up, Floats gate)"),
            _mutant("step_adds_half", WHOLE_DECODER, "some(high, TILE);", ""),
            _mutant("step_rows_in_disorder", WHOLE_DECODER, "sums + i / TILE * 512", "sums + i / TILE * 0"),
            _mutant("step_reads_the_first_layer_s_keys", WHOLE_DECODER, "attention.layer = number;", ""),
        ]
        if HAS_PAIRS
        else []
    ),
    *(
        [
            _mutant("vectors_forget_the_last_row", WHOLE_DECODER, "take(std::integral_constant<int, 1>());", ""),
            _mutant(
                "vectors_rows_in_disorder",
                WHOLE_DECODER,
                "sums + row / TILE * 512 + row % TILE * TILE",
                "sums + row / TILE * 512",
            ),
            _mutant("vectors_lose_the_second_half", WHOLE_DECODER, "right[TILE + pair]", "right[pair]"),
        ]
        if HAS_PAIRS and not HAS_AMX
        else []
    ),
    _mutant("kernel_gate_slope", LAYERS, "y * (1.0f + x * (1.0f - y))", "y * (1.0f + x)"),
    _mutant("kernel_entropy_sign", LOGITS, "log_mass - float(product / total)", "log_mass + float(product / total)"),
    _mutant(
        "kernel_forgets_the_chosen_token", LOGITS, "if (here) from_float(of_token", "if (false) from_float(of_token"
    ),
    _mutant(
        "kernel_gradient_ignores_temperature",
        LOGITS,
        "Floats gradient = slope(x) / temperature;",
        "Floats gradient = slope(x);",
    ),
    _mutant(
        "head_forgets_where_a_part_begins",
        ("llm/model/logprobs.py", ("llm/native/test_kernels.py",)),
        "ctx.temperature, part.start",
        "ctx.temperature, 0",
    ),
    _mutant("products_share_one_gradient", FUSED, "dx.addmm_(d, weight)", "pass"),
    _mutant("residual_loses_its_gradient", FUSED, "d.contiguous(), past, ctx.adds", "d.contiguous(), None, ctx.adds"),
    _mutant(
        "residual_in_bf16",
        FUSED,
        "return PendingResidual(total, added)",
        "return PendingResidual(total.to(added.dtype).float(), added)",
    ),
    _mutant(
        "what_a_layer_adds_is_lost",
        FUSED,
        "return PendingResidual(total, added)",
        "return PendingResidual(total, 0 * added)",
    ),
    _mutant(
        "what_is_added_has_no_gradient_in_bf16",
        LAYERS,
        "store(down, dadded + begin + i)",
        "store(0 * down, dadded + begin + i)",
    ),
    _mutant("training_sees_the_future", TRAINING, "std::min(query, last - 1) / queries + 1;", "newest() + 1;"),
    _mutant(
        "training_sees_padding",
        TRAINING,
        "depth ? all_tokens : std::min",
        "depth ? levels[level].keys : std::min",
    ),
    _mutant("training_forgets_the_scale", TRAINING, "top[i] * shape.scaling + std::log", "top[i] + std::log"),
    _mutant("training_gradient_without_mean", TRAINING, "(load(dweights + from) - mean)", "load(dweights + from)"),
    _mutant("gradients_of_queries_stay_turned", TRAINING, "rotate_back(dquery,", "rotate(dquery,"),
    _mutant("gradients_of_keys_stay_turned", TRAINING, "rotate_back(dkey,", "rotate(dkey,"),
    _mutant(
        "training_mixes_up_heads", TRAINING, "head) * together + i % together) * width;", "head) * together) * width;"
    ),
    _mutant("prompts_learn_from_one_part", TRAINING, "giver < gifts.size();", "giver < size_t(shape.kv_heads);"),
    _mutant("prompts_are_cut_short", TRAINING, "own ? stretch.end :", "true ? stretch.end :"),
    _mutant(
        "prompts_are_forgotten",
        TRAINING,
        "seen_of(level) / ROW<Value>, level > 0,",
        "seen_of(level) / ROW<Value>, false,",
    ),
    _mutant("values_learn_from_queries", TRAINING, "add(weights, dout_pairs,", "add(weights, query_pairs,"),
    _mutant("vectors_begin_anew", SQUARES, "x = begun ? fetch", "x = false ? fetch"),
    _mutant("vectors_take_one_of_a_pair", SQUARES, "+ to_float(left[1]) * odd;", "+ to_float(left[0]) * odd;"),
    _mutant(
        "vectors_repeat_their_columns", SQUARES, "Columns(columns + (PARTS - 1) * SOME * WORD)", "Columns(columns)"
    ),
    _mutant(
        "pairs_are_swapped",
        SQUARES,
        "store_pair(load(even), load(even + ROW<Value>),",
        "store_pair(load(even + ROW<Value>), load(even),",
    ),
    _mutant(
        "prompts_do_not_see_what_is_common", SEQUENCES, "lengths[1 + prompt], beginning))", "lengths[1 + prompt], -1))"
    ),
    _mutant("rests_do_not_see_their_last_tokens", LAYOUT, ".tril(common)", ".tril(common - 1)"),
    _mutant(
        "rests_have_the_positions_of_the_beginning", LAYOUT, "*[self.common for _ in prompts]", "*[0 for _ in prompts]"
    ),
    _mutant("all_of_a_prompt_is_common", COMMON, "prompt[:-1] for prompt in prompts", "prompt for prompt in prompts"),
    _mutant("an_empty_place_is_seen", TORCH_DECODER, "(room >= self.decoded)", "(room > self.decoded)"),
    _mutant(
        "places_are_counted_on_the_cpu",
        FAKE_GPU,
        "torch.arange(self.own_keys[0].shape[2], device=self.prompt_of_row.device)",
        "torch.arange(self.own_keys[0].shape[2])",
    ),
    _mutant("room_is_made_in_front", TORCH_DECODER, "(0, 0, 0, GROWTH)", "(0, 0, GROWTH, 0)"),
    _mutant(
        "rotates_backwards_in_torch",
        TORCH_LAYERS,
        "[-sine[:, :, :1], sine[:, :, 1:]]",
        "[sine[:, :, :1], -sine[:, :, 1:]]",
    ),
    _mutant("every_position_is_the_first_in_torch", TORCH_LAYERS, "positions_R[None]", "0 * positions_R[None]"),
    _mutant("up_is_gated_in_torch", TORCH_LAYERS, "F.silu(gate).mul_(up)", "F.silu(up).mul_(gate)"),
    _mutant("keys_are_not_normalised_in_torch", TORCH_LAYERS, "self._normalise(key, layer.parts.key_norm)", "key"),
    _mutant("norm_without_epsilon_in_torch", TORCH_LAYERS, "addcmul(self.epsilon,", "addcmul(0 * self.epsilon,"),
    _mutant("norm_of_the_sum_of_squares_in_torch", TORCH_LAYERS, "value=1 / x.shape[-1]", "value=1"),
    _mutant("one_norm_for_both_in_torch", TORCH_LAYERS, "layer.parts.inner_norm", "layer.parts.input_norm"),
    _mutant("prompts_padding_is_seen", LAYOUT, "masked_fill(self.padding_SP[:, None], -torch.inf)", "clone()"),
    _mutant("packed_in_another_order", PACKED, "torch.cat(weights)", "torch.cat(weights[::-1])"),
    _mutant("packing_does_not_end", PACKED, "del layer.forward", "pass"),
    _mutant("decoder_stands_still", DECODER, "self.lengths_R + self.decoded_R)[None]", "self.lengths_R)[None]"),
    _mutant(
        "decoder_keeps_the_wrong_slots",
        DECODER,
        "self.slots_R[rows].tolist()",
        "self.slots_R[: len(rows)].tolist()",
    ),
    _mutant("decoder_never_frees", DECODER, "self.free += sorted(", "sorted("),
    _mutant(
        "sampler_waits_for_all",
        ("llm/sampler.py", ("llm/native/test_kernels.py",)),
        "if admitted:",
        "if admitted and not len(inside):",
    ),
]


def copy_package(folder: Path, mutant: Mutant | None) -> None:
    shutil.copytree(PACKAGE, folder / "covey", ignore=_all_but_code)
    if mutant:
        target = folder / "covey" / mutant.file
        target.write_text(target.read_text().replace(mutant.old, mutant.new))


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not name.endswith((".py", ".cpp", ".h")) and (name == "__pycache__" or Path(folder, name).is_file())
    ]


def start(folder: Path, tests: list[str]) -> int:
    """The id of a fork of this process that imports covey from `folder`, runs the tests and exits as pytest does."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)  # for the processes that tests start
        import covey

        assert Path(covey.__file__).is_relative_to(folder)
        status = pytest.main([*OPTIONS, *(str(TESTS / name) for name in tests)])
    finally:
        os._exit(status)


def main(root: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warm_up = root / "test_warm_up.py"
    warm_up.write_text(WARM_UP)
    with redirect_stdout(sys.stderr):
        pytest.main([str(warm_up)])
    gc.freeze()  # pytest collects garbage at its end: without looking through all of torch again
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    tests = {mutant.name: list(mutant.tests) for mutant in mutants}
    tests[UNCHANGED] = sorted({name for some in tests.values() for name in some})
    statuses: dict[str, int] = {}
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        statuses[running.pop(child)] = os.waitstatus_to_exitcode(status)

    for mutant in (*mutants, None):
        name = mutant.name if mutant else UNCHANGED
        copy_package(root / name, mutant)
        if len(running) == (os.cpu_count() or 1):
            wait_for_one()
        running[start(root / name, tests[name])] = name
    while running:
        wait_for_one()
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
