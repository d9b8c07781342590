"""`examples/grpo_from_scratch.py`, which readers take as the definition of GRPO, has the library's loss."""

from __future__ import annotations

import runpy

import pytest
import torch

from covey import GRPOLoss
from helpers.pages import ROOT

EXAMPLE = ROOT / "examples/grpo_from_scratch.py"


@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_its_loss_and_gradient_are_those_of_the_library(drift: float) -> None:
    example = runpy.run_path(str(EXAMPLE))
    generator = torch.Generator().manual_seed(1)
    prompts, group, length = 3, 4, 5
    shape = (prompts, group, length)
    logprobs, moves, references = (-torch.rand(shape, generator=generator) for _ in range(3))
    rewards = torch.rand(prompts, group, generator=generator)
    decided = torch.arange(length) < torch.randint(1, length + 1, (prompts, group, 1), generator=generator)
    old = logprobs + drift * (moves + 0.5)  # ratios on both sides of the clip range
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    library = GRPOLoss(example["CLIP"], example["KL_WEIGHT"])(ours, old, rewards, references, decided)
    rows = [tensor.flatten(0, 1) for tensor in (theirs, old, references)]
    advantages = example["advantages_of"](rewards).flatten()
    loss = example["grpo_loss"](*rows, advantages, decided.flatten(0, 1))
    library.backward()
    loss.backward()
    torch.testing.assert_close(loss, library)
    torch.testing.assert_close(theirs.grad, ours.grad)


def test_it_fits_on_a_few_screens() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 200
