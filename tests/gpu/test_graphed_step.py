"""Decoding steps as CUDA graphs: the logits of single launches, and models that no graph can hold."""

import pytest
import torch
from torch import Tensor, nn

from covey.llm.generation.shared_prefix_decoder import GROWTH, GraphedStep, SharedPrefixDecoder
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import SHARED, tiny_model

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 11]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHARED)
def test_a_graph_has_the_logits_of_single_launches(kind: str, dtype: torch.dtype) -> None:
    """Over the growth of the rows, and after rows were removed."""
    module = tiny_model(kind, dtype=dtype).to(GPU)
    LanguagePolicy(module)  # sets the attention that takes a layout
    graphed, single = (SharedPrefixDecoder(module, 8) for _ in range(2))
    single.graphed_step.can_be_captured = False
    for one in (graphed, single):
        one.prefill(PROMPTS, 3)
    captured, rows = 0, 6
    for step in range(GROWTH["cuda"] + 40):
        if step in (7, 50):
            rows -= 2
            for one in (graphed, single):
                one.select(torch.arange(rows, device=GPU) + step // 50)
        fed = torch.arange(rows, device=GPU) + step % 30
        logits = [one.step(fed).float() for one in (graphed, single)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.05)
        captured += graphed.graphed_step._is_current
    assert captured == GROWTH["cuda"] + 39
    assert single.graphed_step._graph is None


class Reading(nn.Module):
    """Reads a number back from the GPU, which a graph cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


def test_a_step_that_cannot_be_captured_is_computed_by_single_launches() -> None:
    x = torch.ones(3, device=GPU)
    module, calls = Reading(), []

    def compute() -> Tensor:
        calls.append(1)
        return module(x)

    step = GraphedStep(GPU)
    for number in range(6):
        x.fill_(number)
        assert step(compute).tolist() == [3.0 * number**2] * 3
    assert len(calls) == 6
    assert step.can_be_captured is False
    assert torch.rand(3, device=GPU).sum() > 0


def test_a_capture_that_fails_is_not_repeated() -> None:
    x = torch.ones(3, device=GPU)

    def compute() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError
        return x * 2

    step = GraphedStep(GPU)
    assert [step(compute).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert step.can_be_captured is False
