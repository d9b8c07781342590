"""Compares a model whose layers are recomputed with the model itself, bit for bit."""

import copy
from dataclasses import fields

import torch
from torch import nn

from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import KLToReference, LanguagePolicy


def batch_of(seed: int = 0) -> Batch:
    """Two groups of completions, some of which begin alike; in the first, tokens in the middle are undecided."""
    generator = torch.Generator().manual_seed(seed)

    def rollout(prompt: int, number: int) -> Rollout:
        length = 4 + 3 * number
        actions = torch.randint(3, 40, (length,), generator=generator).tolist()
        actions[:2] = 9, 8
        decided = [not (prompt == 0 and 1 <= place < 3) for place in range(length)]
        return Rollout((5, 6, 7 + prompt), actions, [-1.0] * length, EndReason.STOP, decided=decided, reward=0.0)

    return collate([Group(Start(one, ""), [rollout(one, number) for number in range(3)]) for one in range(2)])


def gradients(policy: LanguagePolicy, batch: Batch) -> tuple[PolicyOutput, dict[str, torch.Tensor]]:
    """The output and the gradient of a weighted sum of all outputs."""
    output = policy.evaluate(batch)
    total = torch.zeros(())
    for number, item in enumerate(fields(PolicyOutput), start=1):
        value = getattr(output, item.name)
        if value is not None:
            total = total + number * (value * torch.arange(value.shape[1])).sum()
    total.backward()
    return output, {name: part.grad for name, part in policy.module.named_parameters() if part.grad is not None}


def check_same_bits(module: nn.Module, *, outputs: bool = False) -> None:
    batch, results = batch_of(), []
    for recomputed in (False, True):
        policy = LanguagePolicy(copy.deepcopy(module))  # type: ignore[arg-type]
        if recomputed:
            recompute_layers(policy.module)
        if outputs:
            reference = LanguagePolicy(copy.deepcopy(policy.module).requires_grad_(False), backend=policy.backend)
            with torch.no_grad():
                for part in reference.module.parameters():
                    part.mul_(0.9)
            critic = LanguageCritic(policy, own_trunk=False)
            nn.init.ones_(critic.head.linear.weight)
            policy = policy.with_outputs(SharedTrunkValues(critic), KLToReference(reference))
        results.append(gradients(policy, batch))
    (plain, of_plain), (again, of_again) = results
    assert torch.equal(plain.logprobs_BT, again.logprobs_BT)
    assert of_plain.keys() == of_again.keys()
    assert any(gradient.any() for gradient in of_plain.values())
    for name, gradient in of_plain.items():
        assert torch.equal(gradient, of_again[name]), name
