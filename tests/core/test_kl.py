"""KL estimators: numbers by hand, and their expectations and gradients by enumerating every action.

Shape: V actions.
"""

import math

import pytest
import torch
from torch import Tensor

from covey.core.kl import FORWARD, REVERSE, absolute, exact, jensen_shannon, k1, k2, k3

EVERY = pytest.mark.parametrize("estimator", [k1, k2, k3])
LOGITS_V = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64)
REFERENCE_V = torch.tensor([1.0, 0.5, -0.5, 0.0], dtype=torch.float64).log_softmax(-1)


def kl(logprobs_V: Tensor, other_V: Tensor) -> Tensor:
    return (logprobs_V.exp() * (logprobs_V - other_V)).sum()


def expected_gradient(estimator) -> Tensor:
    """sum_a pi(a) grad estimator(a): what the loss sees, as sampling has no gradient."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    (logprobs_V.exp().detach() * estimator(logprobs_V, REFERENCE_V)).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


def gradient_of_kl(reverse: bool = False) -> Tensor:
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    (kl(REFERENCE_V, logprobs_V) if reverse else kl(logprobs_V, REFERENCE_V)).backward()
    assert logits_V.grad is not None
    return logits_V.grad


def test_estimators_by_hand():
    # pi 1/2, reference 1/4: x = 1/2, k1 = -log x = 0.693147, k2 = 0.693147^2/2 = 0.240227, k3 = 1/2 + 0.693147 - 1
    # pi 1/4, reference 1/2: x = 2,   k1 = -log x = -0.693147, k2 = 0.240227,                k3 = 2 - 0.693147 - 1
    pi = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    reference = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    assert k1(pi, reference)[0].tolist() == pytest.approx([0.693147, -0.693147], abs=1e-6)
    assert k2(pi, reference)[0].tolist() == pytest.approx([0.240227, 0.240227], abs=1e-6)
    assert k3(pi, reference)[0].tolist() == pytest.approx([0.193147, 0.306853], abs=1e-6)


def test_exact_by_hand():
    # pi (3/4, 1/4), reference (1/2, 1/2): 0.75 log 1.5 + 0.25 log 0.5 = 0.304099 - 0.173287 = 0.130812
    pi = torch.tensor([[[0.75, 0.25]]], dtype=torch.float64).log()
    reference = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64).log()
    assert float(exact(pi, reference)) == pytest.approx(0.130812, abs=1e-6)


def test_exact_is_the_definition():
    logprobs_V = LOGITS_V.log_softmax(-1)
    assert float(exact(logprobs_V, REFERENCE_V)) == pytest.approx(float(kl(logprobs_V, REFERENCE_V)), abs=1e-15)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    logprobs_V = LOGITS_V.log_softmax(-1)
    expectation = (logprobs_V.exp() * estimator(logprobs_V, REFERENCE_V)).sum()
    assert float(expectation) == pytest.approx(float(exact(logprobs_V, REFERENCE_V)), abs=1e-14)


def test_k2_is_biased():
    logprobs_V = LOGITS_V.log_softmax(-1)
    expectation = (logprobs_V.exp() * k2(logprobs_V, REFERENCE_V)).sum()
    assert abs(float(expectation - exact(logprobs_V, REFERENCE_V))) > 0.01


def test_expected_gradient_of_k2_is_the_gradient_of_the_kl():
    torch.testing.assert_close(expected_gradient(k2), gradient_of_kl(), rtol=0, atol=1e-14)


def test_expected_gradient_of_k1_is_zero():
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(LOGITS_V), rtol=0, atol=1e-14)


def test_expected_gradient_of_k3_is_that_of_the_reverse_kl():
    # grad k3 = (1 - x) grad log pi; its expectation is -sum_a reference(a) grad log pi(a) = grad KL(reference || pi)
    torch.testing.assert_close(expected_gradient(k3), gradient_of_kl(reverse=True), rtol=0, atol=1e-14)
    assert float((expected_gradient(k3) - gradient_of_kl()).abs().max()) > 0.01


def test_gradient_of_exact_is_the_gradient_of_the_kl():
    logits_V = LOGITS_V.clone().requires_grad_()
    exact(logits_V.log_softmax(-1), REFERENCE_V).backward()
    torch.testing.assert_close(logits_V.grad, gradient_of_kl(), rtol=0, atol=1e-14)


@EVERY
def test_zero_at_equality(estimator):
    assert estimator(REFERENCE_V, REFERENCE_V).tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", [k2, k3])
def test_k2_and_k3_are_never_negative(estimator):
    gap = torch.linspace(-30, 30, 401)
    assert bool((estimator(gap, torch.zeros_like(gap)) >= 0).all())


def test_k3_keeps_its_precision_near_equality():
    # x - log x - 1 = gap^2/2 for a small gap; computed as exp(gap) - 1 - gap in float32 it would be 0 or negative
    gap = torch.tensor([1e-4])
    assert float(k3(-gap, torch.zeros(1))) == pytest.approx(5e-9, rel=0.01)


@EVERY
@pytest.mark.parametrize("gap", [math.inf, -math.inf, 1e4, -1e4])
def test_a_huge_gap_stays_finite_in_value_and_gradient(estimator, gap):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = estimator(logprobs, torch.tensor([gap]))
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_actions_never_taken_add_nothing_to_exact():
    logits = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64).log_softmax(-1)
    for third in (0.2, 0.0):
        reference = torch.tensor([0.5 - third / 2, 0.5 - third / 2, third], dtype=torch.float64).log()
        assert float(exact(logits, reference)) == pytest.approx(math.log(0.5 / (0.5 - third / 2)))


def test_exact_has_a_finite_gradient_where_an_action_is_impossible():
    logprobs = torch.tensor([math.log(0.5), math.log(0.5), -math.inf], requires_grad=True)
    exact(logprobs, torch.tensor([0.25, 0.25, 0.5]).log()).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_the_absolute_logarithm_by_hand():
    logprobs = torch.tensor([[-1.0, -3.0, -2.0]], requires_grad=True)
    found = absolute(logprobs, torch.tensor([[-1.5, -2.0, -2.0]]))
    assert found[0].tolist() == [0.5, 1.0, 0.0]
    found.sum().backward()
    assert logprobs.grad[0].tolist() == [1.0, -1.0, 0.0]


def test_jensen_shannon_by_hand():
    # pi = (3/4, 1/4), teacher = (1/2, 1/2), beta = 1/4: m = (11/16, 5/16)
    # KL(teacher || m) = log(8/11) / 2 + log(8/5) / 2 = 0.075775, KL(pi || m) = 3/4 log(12/11) + 1/4 log(4/5) = 0.009472
    pi, teacher = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.75, 0.25], [0.5, 0.5]))
    assert float(jensen_shannon(pi, teacher, 0.25)) == pytest.approx(0.075775 / 4 + 0.009472 * 3 / 4, abs=1e-6)
    assert float(jensen_shannon(pi, teacher, 0.0)) == float(exact(teacher, pi))
    assert float(jensen_shannon(pi, teacher, 1.0)) == float(exact(pi, teacher))
    assert (FORWARD, REVERSE) == (0.0, 1.0)


def test_jensen_shannon_near_its_ends_is_a_kl():
    logprobs_V, small = LOGITS_V.log_softmax(-1), 1e-6
    for beta, whole in ((small, exact(REFERENCE_V, logprobs_V)), (1 - small, exact(logprobs_V, REFERENCE_V))):
        assert float(jensen_shannon(logprobs_V, REFERENCE_V, beta)) / small == pytest.approx(float(whole), rel=1e-4)


def test_jensen_shannon_where_an_action_is_impossible():
    logits = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64).log_softmax(-1)
    found = jensen_shannon(logits.log_softmax(-1), teacher, 0.5)
    expected = jensen_shannon(logits[:2].log_softmax(-1), teacher[:2], 0.5)
    assert float(found.detach()) == pytest.approx(float(expected.detach()))
    (gradient,) = torch.autograd.grad(found, logits)
    assert gradient.isfinite().all()
