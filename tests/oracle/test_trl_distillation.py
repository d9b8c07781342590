"""covey's divergence to a teacher against the loss of TRL's GKDTrainer: all logits of random decisions."""

from types import SimpleNamespace

import pytest
import torch

from covey import algorithms
from covey.algorithms import Distillation
from covey.data import PolicyOutput
from covey.llm.model.logprobs import exact_divergence
from covey.llm.native.bindings import TORCH_ALONE
from oracle.cases import ROWS, WIDTH, annotated, random_case

VOCABULARY, TEMPERATURE = 37, 0.7
IDENTITY = SimpleNamespace(weight=torch.eye(VOCABULARY, dtype=torch.float64), bias=None)  # hidden states are logits


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_loss_and_gradient(beta, agree):
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
