"""covey's masked policies against sb3-contrib 2.9.2: MaskablePPO's distributions, on the same logits and masks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution

from covey.control.envs.spaces import Discrete, MultiDiscrete
from covey.control.policy import ControlPolicy
from covey.data import Batch

D = 3
SPACES = {
    "one choice": (Discrete(6), spaces.Discrete(6)),
    "several": (MultiDiscrete((2, 3, 4)), spaces.MultiDiscrete([2, 3, 4])),
}


@pytest.fixture(autouse=True)
def _single_precision() -> Iterator[None]:
    """Acting and the masks of sb3-contrib are in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", SPACES)
def test_a_masked_policy_has_the_numbers_of_maskable_ppo(name: str, seed: int) -> None:
    actions, space = SPACES[name]
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    policy = ControlPolicy(D, actions, masked=True, hidden=(8,), normaliser=None, seed=seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows, mask = _rows(actions, random)
    drawn, logprobs = policy.act(rows, random.random((len(rows), actions.size)))
    batch = Batch.blank(torch.ones(1, len(rows), dtype=torch.bool))
    batch.context = (np.concatenate([rows, rows[:1]]),)
    batch.actions_BT = torch.from_numpy(drawn)[None]

    theirs = make_masked_proba_distribution(space)
    logits = policy.module.network(torch.from_numpy(rows[:, :D]))
    theirs.proba_distribution(action_logits=logits)
    theirs.apply_masking(mask)
    wanted = theirs.log_prob(torch.from_numpy(drawn)), theirs.entropy()
    found = policy.evaluate(batch)
    for ours, other in zip((found.logprobs_BT[0], found.entropy_BT[0]), wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(logprobs), wanted[0].detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(policy.greedy_action(rows), theirs.mode().numpy())
    parameters = list(policy.module.parameters())
    gradients = [
        torch.autograd.grad((logprob + 0.3 * entropy).sum(), parameters)
        for logprob, entropy in ((found.logprobs_BT, found.entropy_BT), wanted)
    ]
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def _rows(actions: Any, random: np.random.Generator) -> tuple[Any, Any]:
    """Observations with their masks, and the masks alone."""
    masks = []
    for count in actions.counts:
        mask = random.random((40, count)) < 0.5
        mask[np.arange(40), random.integers(count, size=40)] = True
        masks.append(mask)
    mask = np.hstack(masks)
    return np.hstack([random.standard_normal((40, D)), mask]).astype(np.float32), mask
