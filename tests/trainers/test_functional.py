"""compute_gae, GRPOLoss and PPOLoss by hand, from the papers' formulas, and against the training loop's own loss."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from covey import ConfigError, GRPOLoss, PPOLoss, compute_gae
from covey.data import EndReason, Group, PolicyOutput, Rollout, Start, collate
from covey.train.prepare import prepare_batch

# ---- exercise: GAE by hand ----

# gamma = 0.9, lambda = 0.5, so that gamma lambda = 0.45
#   delta_2 = 1 - 0.8 = 0.2                    A_2 = 0.2
#   delta_1 = 0 + 0.9 * 0.8 - 0.6 = 0.12       A_1 = 0.12 + 0.45 * 0.2 = 0.21
#   delta_0 = 0 + 0.9 * 0.6 - 0.5 = 0.04       A_0 = 0.04 + 0.45 * 0.21 = 0.1345
REWARDS, VALUES = [0, 0, 1], [0.5, 0.6, 0.8]
ADVANTAGES = [0.1345, 0.21, 0.2]
RETURNS = [0.6345, 0.81, 1.0]
# with a value of 2 after the end: delta_2 = 1 + 0.9 * 2 - 0.8 = 2, A_1 = 0.12 + 0.9 = 1.02, A_0 = 0.04 + 0.459
CUT_ADVANTAGES = [0.499, 1.02, 2.0]


def test_gae_by_hand():
    advantages, returns = compute_gae(REWARDS, VALUES, gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor(ADVANTAGES))
    torch.testing.assert_close(returns, torch.tensor(RETURNS))


def test_gae_goes_on_from_one_value_more():
    advantages, returns = compute_gae(REWARDS, [*VALUES, 2.0], gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor(CUT_ADVANTAGES))
    torch.testing.assert_close(returns, torch.tensor(CUT_ADVANTAGES) + torch.tensor(VALUES))


def test_gae_at_its_ends():
    # lambda = 0: the deltas. lambda = 1, gamma = 1: what was still earned minus what was foreseen.
    assert compute_gae(REWARDS, VALUES, 0.9, 0.0)[0].tolist() == pytest.approx([0.04, 0.12, 0.2])
    assert compute_gae(REWARDS, VALUES, 1.0, 1.0)[0].tolist() == pytest.approx([0.5, 0.4, 0.2])


def test_gae_of_a_batch_is_that_of_its_rows():
    rewards = torch.tensor([REWARDS, [1, 0, 0]], dtype=torch.float64)
    values = torch.tensor([[*VALUES, 2.0], [0.3, 0.0, 0.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    advantages, returns = compute_gae(rewards, values, 0.9, 0.5, mask=mask)
    assert advantages.dtype == torch.float64
    # the second row has one step and then the 7: 1 + 0.9 * 7 - 0.3 = 7
    torch.testing.assert_close(advantages, torch.tensor([CUT_ADVANTAGES, [7.0, 0, 0]], dtype=torch.float64))
    torch.testing.assert_close(returns[1], torch.tensor([7.3, 0, 0], dtype=torch.float64))
    padded, _ = compute_gae([REWARDS, [1, 0, 0]], [VALUES, [0.3, 0, 0]], 0.9, 0.5)
    torch.testing.assert_close(padded, torch.tensor([ADVANTAGES, [0.7, 0, 0]]))


def test_gae_steps_over_what_was_not_decided():
    rewards = torch.tensor([0.0, 5.0, 0.0, 5.0, 5.0, 1.0, 5.0])
    values = torch.tensor([0.5, 9.0, 0.6, 9.0, 9.0, 0.8, 9.0])
    mask = torch.tensor([True, False, True, False, False, True, False])
    for advantages, more in ((ADVANTAGES, []), (CUT_ADVANTAGES, [2.0])):
        found, returns = compute_gae(rewards, torch.cat([values, torch.tensor(more)]), 0.9, 0.5, mask=mask)
        torch.testing.assert_close(found[mask], torch.tensor(advantages))
        torch.testing.assert_close(returns[mask], torch.tensor(advantages) + torch.tensor(VALUES))
        assert not found[~mask].any()


@pytest.mark.parametrize(
    ("rewards", "values", "complaint"),
    [
        ([1, 2, 3], [1.0, 2.0], r"rewards \[3\] and values \[2\] do not fit"),
        ([1], [1.0, 2.0, 3.0], "do not fit"),
        ([[1, 2]], [1.0, 2.0], "do not fit"),
        ([], [], "do not fit"),
    ],
)
def test_gae_refuses_shapes(rewards, values, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        compute_gae(rewards, values)
    assert "\n" not in str(error.value)


def test_gae_refuses_factors():
    with pytest.raises(ConfigError, match="gamma must be a number from 0 to 1"):
        compute_gae([1], [1.0], gamma=99)
    with pytest.raises(ConfigError, match="lam must be"):
        compute_gae([1], [1.0], lam=math.nan)


# ---- exercise: the losses by hand ----


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_grpo_by_hand():
    # rewards 1 and 0: mean 1/2, deviation 1/2, so A = 1 and -1. Both had the probability 0.2.
    # The first now has 0.3, a ratio of 1.5, clipped to 1.2: -1.2. The second 0.1, a ratio of 0.5: min(-0.5, -0.8), 0.8.
    # KL of the first, where the reference says 0.6, twice as much: 2 - ln 2 - 1. Of the second, where it agrees: 0.
    policy = logs(0.3, 0.1).requires_grad_()
    loss = GRPOLoss(clip_epsilon=0.2, kl_beta=0.1)(policy, logs(0.2, 0.2), torch.tensor([[1.0, 0.0]]), logs(0.6, 0.1))
    expected = (-1.2 + 0.8) / 2 + 0.1 * (1 - math.log(2)) / 2
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, abs=3e-6)  # the z-score divides by the deviation plus 1e-6
    loss.backward()
    # Both are clipped, so that only the KL pulls, on the first: d/dlogp (x - log x) = 1 - x = -1, times 0.1 / 2.
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.05, 0.0]], dtype=torch.float64))


def test_grpo_without_the_standard_deviation_by_hand():
    """A is r - mean(r): 1 and -1 for the rewards 3 and 1, twice that for 6 and 2, whose z-scores are 1 and -1."""
    policy = logs(0.22, 0.18)
    for rewards, advantage in (((3.0, 1.0), 1.0), ((6.0, 2.0), 2.0)):
        loss = GRPOLoss(kl_beta=0, scale_rewards=False)(policy, logs(0.2, 0.2), torch.tensor([rewards]))
        # -(1.1 A - 0.9 A) / 2
        torch.testing.assert_close(loss, torch.tensor(-0.1 * advantage).double(), atol=1e-6, rtol=0)
    scaled = GRPOLoss(kl_beta=0)(policy, logs(0.2, 0.2), torch.tensor([[6.0, 2.0]]))
    torch.testing.assert_close(scaled, torch.tensor(-0.1).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", [GRPOLoss(0.2, 0.1), GRPOLoss(scale_rewards=False), PPOLoss()])
def test_losses_are_modules(loss):
    assert loss.state_dict() == {}
    assert list(loss.parameters()) == []
    loss.load_state_dict({})
    assert loss.to(torch.float64).eval() is loss
    assert torch.nn.ModuleDict({"loss": loss})["loss"] is loss
    assert torch.nn.Sequential(loss)[0] is loss
    assert f"clip_epsilon={loss.clip_epsilon}" in repr(loss)
    copied = copy.deepcopy(loss)
    case = (logs(0.3, 0.1), logs(0.2, 0.2), torch.tensor([[1.0, 0.0]]), logs(0.6, 0.1))
    case = case if isinstance(loss, GRPOLoss) else (*case[:2], *[torch.ones(1, 2)] * 3, 0.5)
    assert torch.equal(copied(*case), loss(*case))


def test_gradients_are_those_of_finite_differences():
    """In float64, where no ratio stands at the edge of its range."""
    policy = logs(0.22, 0.35, 0.1).double().requires_grad_()
    old, reference = logs(0.2, 0.2, 0.2).double(), logs(0.3, 0.3, 0.3).double()
    rewards = torch.tensor([[1.0, 0.0, 3.0]])
    for loss in (GRPOLoss(), GRPOLoss(scale_rewards=False)):
        assert torch.autograd.gradcheck(lambda p, loss=loss: loss(p, old, rewards, reference), policy)
    values, entropy = (torch.rand(1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fixed = [torch.rand(1, 3, dtype=torch.float64) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda p, v, h: PPOLoss()(p, old, v, *fixed, h), (policy, values, entropy))


def test_gae_of_the_loss_is_compute_gae():
    for found, expected in zip(
        PPOLoss().compute_gae([0, 0, 1], [0.5, 0.6, 0.8], gamma=0.9, lam=0.5),
        ([0.1345, 0.21, 0.2], [0.6345, 0.81, 1.0]),
        strict=True,
    ):
        torch.testing.assert_close(found, torch.tensor(expected))


def test_grpo_where_nothing_has_moved_is_the_policy_gradient():
    policy = logs(0.3, 0.1).requires_grad_()
    loss = GRPOLoss(kl_beta=0)(policy, policy.detach(), torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.5, 0.5]], dtype=torch.float64), atol=2e-6, rtol=0)


def test_no_gradient_reaches_what_is_not_the_policy():
    policy = logs(0.3, 0.1).requires_grad_()
    GRPOLoss(kl_beta=0.1)(policy, policy, torch.tensor([[1.0, 0.0]]), policy).backward()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.5, 0.5]], dtype=torch.float64), atol=2e-6, rtol=0)


def random_case() -> dict[str, torch.Tensor]:
    """Three groups of four answers of one to six tokens."""
    torch.manual_seed(0)
    shape = (3, 4, 6)
    policy = -torch.rand(shape, dtype=torch.float64) * 3
    return {
        "policy_logprobs": policy.clone().requires_grad_(),
        "old_policy_logprobs": policy + 0.4 * torch.randn(shape, dtype=torch.float64),
        "rewards": torch.rand(3, 4, dtype=torch.float64),
        "reference_logprobs": policy + 0.4 * torch.randn(shape, dtype=torch.float64),
        "mask": torch.arange(6) < torch.randint(1, 7, (3, 4, 1)),
    }


def test_grpo_on_tokens_is_the_papers_formula():
    """DeepSeekMath eq. 3, written out; the mean over the tokens of an answer first, then over answers."""
    case = random_case()
    loss = GRPOLoss(0.2, 0.1)(**case)
    (found,) = torch.autograd.grad(loss, case["policy_logprobs"])
    rewards, policy, mask = case["rewards"], case["policy_logprobs"], case["mask"]
    scores = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True, correction=0) + 1e-6)
    total = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        for g in range(4):
            kept = mask[n, g]
            ratio = (policy - case["old_policy_logprobs"])[n, g][kept].exp()
            log_x = (case["reference_logprobs"] - policy)[n, g][kept]
            gain = torch.minimum(ratio * scores[n, g], ratio.clamp(0.8, 1.2) * scores[n, g])
            total = total - (gain - 0.1 * (log_x.exp() - log_x - 1)).mean() / 12
    (expected,) = torch.autograd.grad(total, policy)
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(found, expected)
    assert not found[~mask].any()


def test_grpo_reads_nothing_at_padding():
    case = random_case()
    expected = GRPOLoss()(**case)
    broken = {
        name: tensor.detach().masked_fill(~case["mask"], math.nan) for name, tensor in case.items() if "log" in name
    }
    broken["policy_logprobs"].requires_grad_()
    loss = GRPOLoss()(**case | broken)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert broken["policy_logprobs"].grad is not None
    assert broken["policy_logprobs"].grad.isfinite().all()


def test_grpo_leaves_out_an_answer_that_was_not_graded():
    rewards = torch.tensor([[1.0, math.nan, 0.0]])
    found = GRPOLoss()(logs(0.3, 0.5, 0.1), logs(0.2, 0.9, 0.2), rewards, logs(0.6, 0.1, 0.1))
    expected = GRPOLoss()(logs(0.3, 0.1), logs(0.2, 0.2), rewards[:, ::2], logs(0.6, 0.1))
    torch.testing.assert_close(found, expected)


def test_grpo_loss_is_that_of_a_run():
    """The same answers through collate, prepare_batch and Algorithm.loss, as the training loop takes them."""
    case = random_case()
    groups = [Group(Start(n, ""), [rollout(case, n, g) for g in range(4)]) for n in range(3)]
    trained = GRPOLoss(0.2, 0.1)
    told = Told(case)
    batch, _ = prepare_batch(
        collate(groups),
        told.of("old_policy_logprobs"),
        trained.algorithm,
        reference=told.of("reference_logprobs"),
        kl_coefficient=0.1,
        optimizer_steps=2,
    )
    policy = case["policy_logprobs"].flatten(0, 1)
    terms = trained.algorithm.loss(PolicyOutput(policy, torch.zeros_like(policy)), batch, 0.1)
    torch.testing.assert_close(trained(**case), terms.loss, rtol=1e-6, atol=1e-6)  # a batch is in float32


def rollout(case: dict[str, torch.Tensor], n: int, g: int) -> Rollout:
    length = int(case["mask"][n, g].sum())
    return Rollout((), [0] * length, [0.0] * length, EndReason.STOP, reward=float(case["rewards"][n, g]))


class Told:
    """A policy whose log-probabilities are told."""

    def __init__(self, case: dict[str, torch.Tensor], name: str = "policy_logprobs") -> None:
        self.case, self.name = case, name

    def of(self, name: str) -> Told:
        return Told(self.case, name)

    def evaluate(self, batch):
        logprobs_BT = self.case[self.name].flatten(0, 1)[:, : batch.mask_BT.shape[1]]
        return PolicyOutput(logprobs_BT, torch.zeros_like(logprobs_BT))

    def microbatches(self, batch):
        yield torch.arange(len(batch))


def test_ppo_by_hand():
    # Ratios 1.5 and 0.5 with advantages 2 and 1: min(3, 2.4), min(0.5, 0.8): -(2.4 + 0.5) / 2.
    # Values 1 and 0 against 3 and 0.5: (4 + 0.25) / 2, halved. Entropy 0.7 and 0.1: 0.01 * 0.4.
    policy, values = logs(0.3, 0.1).requires_grad_(), torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy = torch.tensor([[0.7, 0.1]], requires_grad=True)
    returns, advantages = torch.tensor([[3.0, 0.5]]), torch.tensor([[2.0, 1.0]])
    loss = PPOLoss()(policy, logs(0.2, 0.2), values, returns, advantages, entropy)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(-1.45 + 0.5 * 2.125 - 0.004)
    loss.backward()
    # The first is clipped. The second: -rho A / 2. The critic: 0.5 * 2 (V - R) / 2. Entropy: -0.01 / 2.
    assert policy.grad is not None
    assert policy.grad[0].tolist() == pytest.approx([0, -0.25])
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([-1, -0.25])
    assert entropy.grad is not None
    assert entropy.grad[0].tolist() == pytest.approx([-0.005, -0.005])


def test_ppo_takes_any_shape_a_mask_and_a_mean_entropy():
    flat = [
        torch.tensor(v, dtype=torch.float64) for v in ([-1.0, -2.0], [-1.1, -1.8], [1.0, 0.0], [3.0, 0.5], [2.0, 1.0])
    ]
    expected = PPOLoss()(*flat, torch.tensor([0.7, 0.1]))
    padded = [torch.cat([v, torch.full((2,), math.nan)]).view(1, 4) for v in flat]
    mask = torch.tensor([[True, True, False, False]])
    torch.testing.assert_close(PPOLoss()(*padded, 0.4, mask), expected)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rewards": torch.zeros(3, 5)}, r"rewards has shape \[3, 5\]: one reward per answer is needed, \[3, 4\]"),
        ({"old_policy_logprobs": torch.zeros(3, 4)}, "old_policy_logprobs has shape .* they must be equal"),
        ({"mask": torch.ones(3, 4, 5, dtype=torch.bool)}, "mask has shape"),
        ({"policy_logprobs": torch.zeros(12)}, r"give \[batch, group_size\]"),
        ({"reference_logprobs": None}, "give reference_logprobs, or set kl_beta to 0"),
    ],
)
def test_grpo_refuses_shapes(change, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        GRPOLoss()(**random_case() | change)
    assert "\n" not in str(error.value)


def test_losses_refuse_what_cannot_work():
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        GRPOLoss()(logs(0.5), logs(0.5), torch.ones(1, 1), logs(0.5))
    with pytest.raises(ConfigError, match="values has shape"):
        PPOLoss()(logs(0.5, 0.5), logs(0.5, 0.5), *[torch.ones(3)] * 3, 0.0)
    for wrong in ({"clip_epsilon": 0}, {"clip_epsilon": 1.0}, {"kl_beta": -1}, {"kl_beta": math.inf}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            GRPOLoss(**wrong)
    with pytest.raises(ConfigError, match="value_loss_coef"):
        PPOLoss(value_loss_coef=-0.5)
