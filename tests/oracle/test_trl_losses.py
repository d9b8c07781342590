"""covey's losses and gradients against those of TRL 1.16's GRPOTrainer. docs/oracle.md has the mapping of parameters.

In short: covey's group_zscore is given TRL's Bessel std and its 1e-4 (`TRL_STD`); rollouts that are masked as a whole
are counted (`every_row_counts`); `use_bias_correction_kl` is off but in the test that is named after it; TRL's
epsilon_high is 1 + clip_high in CISPO, which has no bound below (clip_low = 1).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from covey import algorithms
from covey.algorithms import Algorithm, Distillation
from covey.algorithms.advantages import outcome
from covey.algorithms.kl_penalty import KLInLoss
from covey.core import baselines, kl, loss_weights
from covey.core.ratios import ImportanceWeights, sequence_product_log_ratio
from covey.data import Batch, PolicyOutput
from covey.llm.model.logprobs import exact_divergence
from covey.llm.native.bindings import TORCH_ALONE
from helpers.tiny_models import tiny_folder
from oracle.cases import ROWS, WIDTH, annotated, losses_of, random_case
from oracle.trl_trainer import MAX_LENGTH, Step, TableTrainer

CASES = range(25)
TRL_STD = outcome(partial(baselines.group_zscore, ddof=1, eps=1e-4))
Agree = Callable[..., None]


class Setup(NamedTuple):
    """One algorithm in the words of both."""

    theirs: dict[str, Any]  # arguments of GRPOConfig
    ours: Algorithm
    spread: float = 0.3  # how far the policies are apart, in nats


def like_trl(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, advantage=TRL_STD)


SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
SETUPS = {
    "grpo": Setup({"loss_type": "grpo"}, like_trl(algorithms.grpo())),
    "grpo, epsilon_high": Setup(
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28},
        like_trl(algorithms.grpo(clip_low=0.1, clip_high=0.28)),
    ),
    "grpo, delta": Setup({"loss_type": "grpo", "delta": 1.4}, like_trl(algorithms.grpo(dual_clip=1.4)), 0.6),
    "dr_grpo": Setup({"loss_type": "dr_grpo", "scale_rewards": "none"}, algorithms.dr_grpo(max_length=MAX_LENGTH)),
    "dapo": Setup({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, like_trl(algorithms.dapo())),
    "cispo": Setup({"loss_type": "cispo", "epsilon_high": 5.0}, like_trl(algorithms.cispo()), 1.2),
    "gspo": Setup(SEQUENCE | {"epsilon": 3e-4, "epsilon_high": 4e-4}, like_trl(algorithms.gspo()), 5e-4),
    "gspo, wide clip": Setup(SEQUENCE, like_trl(algorithms.gspo(clip_low=0.2, clip_high=0.2))),
}
BATCHES = {
    "one microbatch": {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1},
    "accumulation": {"per_device_train_batch_size": ROWS // 4, "gradient_accumulation_steps": 4},
    "two optimizer steps": {
        "per_device_train_batch_size": ROWS // 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model that is loaded and never asked."""
    return tiny_folder(tmp_path_factory.mktemp("model"))


def compare(
    agree: Agree,
    what: str,
    trainer: TableTrainer,
    algorithm: Algorithm,
    seed: int,
    *,
    case_like: dict[str, Any] | None = None,
    batch_like: dict[str, Any] | None = None,
    reweigh: Callable[[Batch, Step], Tensor] | None = None,
) -> None:
    """The loss of every microbatch and the gradient of all, on one random case."""
    case = random_case(seed, **case_like or {})
    theirs = trainer.take(case)
    assert float(theirs.gradient_BT.abs().max()) > 1e-3
    on_policy = trainer.num_iterations == 1
    batch = annotated(case, algorithm, on_policy=on_policy, **batch_like or {})
    # covey multiplies the weights of a step by the number of its optimizer steps (`train.update`).
    optimizer_steps = trainer.args.steps_per_generation / trainer.args.gradient_accumulation_steps
    loss_weights_BT = batch.loss_weights_BT if reweigh is None else reweigh(batch, theirs)
    batch = replace(batch, loss_weights_BT=loss_weights_BT * optimizer_steps)
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    losses = losses_of(algorithm, batch, logprobs_BT, theirs.microbatches, trainer.beta)
    agree(f"{what}: loss", torch.stack(losses), torch.stack(theirs.losses))
    agree(f"{what}: gradient", logprobs_BT.grad, theirs.gradient_BT)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("name", SETUPS)
def test_loss_and_gradient(name, batches, beta, folder, agree):
    setup = SETUPS[name]
    trainer = TableTrainer(folder, beta=beta, **setup.theirs | BATCHES[batches])
    for seed in CASES:
        compare(agree, f"{name}, beta {beta:g}", trainer, setup.ours, seed, case_like={"spread": setup.spread})


@pytest.mark.parametrize("name", SETUPS)
def test_first_step_after_sampling(name, folder, agree):
    """The old policy is the current one: the ratio is 1 and has a gradient nevertheless."""
    setup = SETUPS[name]
    trainer = TableTrainer(folder, beta=0.04, num_iterations=1, **setup.theirs)
    for seed in CASES:
        compare(agree, f"{name}, first step", trainer, setup.ours, seed, case_like={"on_policy": True})


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("batches", ["one microbatch", "accumulation"])
def test_bnpo(batches, beta, folder, agree):
    """TRL averages over the tokens of a microbatch. covey does that for whole steps only, so each is weighed alone."""
    trainer = TableTrainer(folder, beta=beta, loss_type="bnpo", **BATCHES[batches])

    def reweigh(batch: Batch, theirs: Step) -> Tensor:
        assert batch.loss_weights_BT is not None
        loss_weights_BT = torch.zeros_like(batch.loss_weights_BT)
        for rows in theirs.microbatches:
            mask_BT = batch.mask_BT[rows]
            loss_weights_BT[rows] = loss_weights.token_mean(mask_BT, loss_weights.count(mask_BT)) / len(
                theirs.microbatches
            )
        return loss_weights_BT

    def as_it_is(batch: Batch, theirs: Step) -> Tensor:
        assert batch.loss_weights_BT is not None
        return batch.loss_weights_BT

    algorithm = like_trl(algorithms.dapo(clip_high=0.2))
    for seed in CASES:
        compare(agree, f"bnpo, beta {beta:g}", trainer, algorithm, seed, reweigh=reweigh)
        if batches == "one microbatch":
            compare(agree, f"bnpo, beta {beta:g}", trainer, algorithm, seed, reweigh=as_it_is)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo, wide clip"])
def test_truncated_rollouts_are_masked(name, folder, agree):
    setup = SETUPS[name]
    trainer = TableTrainer(folder, beta=0.04, mask_truncated_completions=True, **setup.theirs)
    for seed in CASES:
        compare(agree, f"{name}, truncated masked", trainer, setup.ours, seed, batch_like={"mask_truncated": True})


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_rollouts_masked_as_a_whole_leave_coveys_mean(name, folder, agree):
    """A difference by decision: TRL divides by all B rollouts, covey by those that are left, n. So n/B maps them."""
    setup = SETUPS[name]
    trainer = TableTrainer(folder, mask_truncated_completions=True, **setup.theirs)

    def reweigh(batch: Batch, theirs: Step) -> Tensor:
        left = int(batch.mask_BT.any(dim=1).sum())
        assert left < ROWS
        assert batch.loss_weights_BT is not None
        return batch.loss_weights_BT * left / ROWS

    for seed in CASES:
        compare(
            agree, f"{name}, masked rows uncounted, times n/B", trainer, setup.ours, seed, reweigh=reweigh,
            case_like={"ungraded": 2}, batch_like={"mask_truncated": True, "every_row_counts": False},
        )  # fmt: skip


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo, wide clip"])
def test_bias_corrected_kl(name, folder, agree):
    """TRL's default multiplies k3 by the ratio, with its gradient. In covey that is another estimator."""
    setup = SETUPS[name]
    trainer = TableTrainer(folder, beta=0.04, use_bias_correction_kl=True, **setup.theirs | BATCHES["one microbatch"])
    for seed in CASES:
        case = random_case(seed)
        theirs = trainer.take(case)
        (rows,) = theirs.microbatches
        mask_BT, old_BT = case.mask_BT[rows], case.old_BT[rows]

        def corrected(current_BT: Tensor, reference_BT: Tensor, mask_BT=mask_BT, old_BT=old_BT) -> Tensor:
            return kl.k3(current_BT, reference_BT) * setup.ours.ratio(current_BT, old_BT, mask_BT).exp()

        algorithm = replace(setup.ours, kl=replace(setup.ours.kl, placement=KLInLoss(corrected)))
        logprobs_BT = case.logprobs_BT.clone().requires_grad_()
        losses = losses_of(algorithm, annotated(case, algorithm, on_policy=False), logprobs_BT, [rows], trainer.beta)
        agree(f"{name}, bias-corrected KL: loss", torch.stack(losses), torch.stack(theirs.losses))
        agree(f"{name}, bias-corrected KL: gradient", logprobs_BT.grad, theirs.gradient_BT)


WEIGHTS = {
    "token_truncate": ImportanceWeights(cap=1.5),  # TRL's has a bound below as well, which is 0 here
    "token_mask": ImportanceWeights(high=1.5),
    "sequence_truncate": ImportanceWeights(cap=1.5, log_ratio=sequence_product_log_ratio),
    "sequence_mask": ImportanceWeights(high=1.5, log_ratio=sequence_product_log_ratio),
}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo, wide clip"])
@pytest.mark.parametrize(("mode", "weights"), WEIGHTS.items(), ids=WEIGHTS)
def test_importance_weights(name, beta, mode, weights, folder, agree):
    """`ImportanceWeights` against the modes of vllm_importance_sampling_mode."""
    setup = SETUPS[name]
    correction = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5}
    trainer = TableTrainer(folder, beta=beta, **setup.theirs, **correction)
    trainer.use_vllm = True  # after construction, which would look for a GPU; the completions come from rollout_func
    trainer._last_loaded_step = trainer.state.global_step
    algorithm = replace(setup.ours, importance=weights)
    for seed in CASES:
        compare(agree, f"{name}, importance weights, {mode}, beta {beta:g}", trainer, algorithm, seed)


def test_log_ratios_are_bounded_in_covey_only(folder):
    """A difference by decision: covey bounds log-ratios by 20 nats, TRL lets e^30 through to the gradient."""
    trainer = TableTrainer(folder, loss_type="grpo", **BATCHES["one microbatch"])
    case = random_case(0)
    advantages_B = trainer.take(case).advantages_B
    row = int((advantages_B < 0).nonzero()[0])
    case.logprobs_BT[row, 0] = case.old_BT[row, 0] + 30.0
    theirs = trainer.take(case)
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    batch = annotated(case, SETUPS["grpo"].ours, on_policy=False)
    losses_of(SETUPS["grpo"].ours, batch, logprobs_BT, [torch.arange(ROWS)], 0.0)
    assert logprobs_BT.grad is not None
    assert float(theirs.gradient_BT.abs().max()) > 1e9
    assert float(logprobs_BT.grad.abs().max()) < 1.0


VOCABULARY, TEMPERATURE = 37, 0.7
IDENTITY = SimpleNamespace(weight=torch.eye(VOCABULARY, dtype=torch.float64), bias=None)  # hidden states are logits


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_loss_and_gradient_of_distillation(beta, agree):
    """With covey's mean over the tokens of a step, which is TRL's over those of a batch."""
    from trl.experimental.gkd import GKDTrainer

    for seed in range(25):
        case = random_case(seed)
        batch = annotated(case, algorithms.dapo(), on_policy=True)
        mask_BT = batch.mask_BT
        generator = torch.Generator().manual_seed(seed)
        own, teacher = (
            2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        ours, theirs = (own.clone().requires_grad_() for _ in range(2))
        labels = torch.where(mask_BT, 0, -100)
        their_loss = GKDTrainer.generalized_jsd_loss(theirs, teacher, labels, beta=beta, temperature=TEMPERATURE)
        their_loss.backward()

        divergence_BT = torch.zeros(mask_BT.shape)
        divergence_BT[mask_BT] = exact_divergence(
            ours[mask_BT], IDENTITY, teacher[mask_BT], IDENTITY, TEMPERATURE, TORCH_ALONE, beta=beta
        )
        zero_BT = torch.zeros(mask_BT.shape)
        output = PolicyOutput(zero_BT, zero_BT, teacher_BT=divergence_BT)
        our_loss = (batch.loss_weights_BT * Distillation(1.0, beta).add(zero_BT, output, batch)).sum()
        our_loss.backward()
        agree(f"distillation, beta {beta:g}: loss", our_loss, their_loss)
        agree(f"distillation, beta {beta:g}: gradient", ours.grad, theirs.grad)
