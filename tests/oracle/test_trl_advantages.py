"""covey's advantages, and a whole training step of it, against TRL 1.16's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from covey import algorithms
from covey.algorithms import Algorithm
from covey.algorithms.advantages import outcome
from covey.core import baselines
from covey.data import Batch, PolicyOutput
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.tiny_models import tiny_folder
from helpers.updates import one_update
from oracle.cases import GROUP_SIZE, ROWS, collated, random_case
from oracle.trl_trainer import MAX_LENGTH, TableTrainer

CASES = range(25)
TRL_STD = partial(baselines.group_zscore, ddof=1, eps=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("scale_rewards", "compare"), [("group", TRL_STD), ("none", baselines.group_centered)])
def test_advantages(scale_rewards, compare, folder, agree):
    """covey's own defaults are the population's std (ddof=0) and 1e-6."""
    trainer = TableTrainer(folder, scale_rewards=scale_rewards)
    for seed in CASES:
        case = random_case(seed, ungraded=seed % 6)
        batch = collated(case)
        ours_B = compare(batch.reward_B, batch.group_B, batch.valid_B)
        agree(f"advantages, scale_rewards {scale_rewards}", ours_B, trainer.take(case).advantages_B)


def test_each_reward_normalized(folder, agree):
    """GDPO: TRL's `normalize_then_sum`, with rewards of very different sizes, equal ones and missing ones."""
    weights = [1.0, 0.5, -2.0]
    trainer = TableTrainer(folder, parts=3, multi_objective_aggregation="normalize_then_sum", reward_weights=weights)
    for seed in CASES:
        parts = [random_case(31 * seed + number, ungraded=number * (seed % 3)).rewards for number in range(3)]
        parts[1] = [None if value is None else 64 * value for value in parts[1]]
        step = trainer.take(replace(random_case(seed), parts=parts))
        parts_BR = torch.tensor([[float("nan") if value is None else value for value in part] for part in parts]).T
        known_BR = ~parts_BR.isnan()
        valid_B, group_B = known_BR.any(dim=1), torch.arange(ROWS) // GROUP_SIZE
        columns = zip(parts_BR.T, known_BR.T, strict=True)
        advantage_BR = torch.stack([TRL_STD(part_B, group_B, known_B) for part_B, known_B in columns], dim=1)
        ours_B = baselines.weighted_whitened_sum(advantage_BR, torch.tensor(weights), valid_B, eps=1e-4, ddof=1)
        agree("advantages, normalize_then_sum", ours_B, step.advantages_B)


def test_rounding_of_equal_rewards_teaches_in_trl_only(folder):
    """A difference by decision: rewards that differ by one unit of float32 are alike to covey."""
    trainer = TableTrainer(folder)
    rewards = [1000.0] * ROWS
    rewards[0] = float(torch.nextafter(torch.tensor(1000.0).float(), torch.tensor(2000.0).float()))
    case = replace(random_case(0), rewards=rewards)
    batch = collated(case)
    assert TRL_STD(batch.reward_B, batch.group_B, batch.valid_B).count_nonzero() == 0
    assert float(trainer.take(case).advantages_B.max()) > 0.3


@dataclass
class TablePolicy:
    """Meets `covey.data.Policy`: a row's context is its number in a table of log-probabilities."""

    table_BT: Tensor

    def evaluate(self, batch: Batch) -> PolicyOutput:
        logprobs_BT = self.table_BT[list(batch.context)][:, : batch.mask_BT.shape[1]]
        return PolicyOutput(logprobs_BT, torch.zeros_like(logprobs_BT))

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        yield from torch.arange(len(batch)).split(3)


class NoStep(NamedTuple):
    """Meets `covey.train.update.Optimizer`: gradients add up and nothing moves."""

    grad_norm: float = 0.0
    applied: bool = True

    def before_last_pass(self) -> None: ...

    def step(self, learning_rate: float) -> NoStep:
        return self


WHOLE_STEPS: dict[str, tuple[dict[str, object], Algorithm]] = {
    "grpo": ({"loss_type": "grpo"}, algorithms.grpo()),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, algorithms.dr_grpo(max_length=MAX_LENGTH)),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, algorithms.dapo()),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, algorithms.cispo()),
    "dapo, truncated masked": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
        algorithms.dapo(),
    ),
}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_a_whole_step(name, beta, folder, agree):
    """`prepare_batch` and `update`: two minibatches of two groups in microbatches of three rows, weights in float32.

    TRL makes its two optimizer steps from other rows, so what is compared is the sum of both.
    """
    theirs, algorithm = WHOLE_STEPS[name]
    if name != "dr_grpo":
        algorithm = replace(algorithm, advantage=outcome(TRL_STD))
    trainer = TableTrainer(folder, beta=beta, gradient_accumulation_steps=2, steps_per_generation=4, **theirs)
    for seed in CASES:
        case = random_case(seed)
        policy = TablePolicy(case.old_BT)
        plan = UpdatePlan(minibatches=2)
        batch, _ = prepare_batch(
            collated(case),
            policy,
            algorithm,
            reference=TablePolicy(case.reference_BT),
            kl_coefficient=beta,
            optimizer_steps=plan.minibatches,
            mask_truncated=trainer.mask_truncated_completions,
        )
        policy.table_BT = case.logprobs_BT.clone().requires_grad_()
        one_update(policy, NoStep(), algorithm, batch, plan, learning_rate=0.0, kl_coefficient=beta, seed=seed)
        gradient_BT = trainer.take(case).gradient_BT
        # A difference by decision: where all did equally well, nothing pulls on a group in covey, the KL neither.
        alike = [len(set(case.rewards[i : i + GROUP_SIZE])) == 1 for i in range(0, ROWS, GROUP_SIZE)]
        gradient_BT[torch.tensor(alike).repeat_interleave(GROUP_SIZE)] = 0.0
        agree(
            f"{name}, beta {beta:g}, prepare_batch and update: gradient",
            policy.table_BT.grad,
            gradient_BT,
            tolerance=1e-6,
        )
