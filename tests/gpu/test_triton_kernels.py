"""The kernels for GPUs, compiled: torch's numbers, and completions that do not depend on graphs."""

import pytest
import torch

from covey.llm.generation import graph_decoder
from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.shared_prefix_decoder import SharedPrefixDecoder
from covey.llm.model.architecture import FAMILIES
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import tiny_model
from llm.native.test_families import gradients, made

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
KINDS = ("llama", "qwen2", "qwen3")
PROMPTS = [(5, 6, 7, 8, 9), (5, 6, 11), tuple(range(5, 80))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kernel_has_the_numbers_of_torch(dtype):
    from covey.llm.native.triton_kernels import TritonKernels, check

    check(TritonKernels(dtype), GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"gemma2"}))
def test_the_kernels_compute_every_family(kind, dtype):
    """In fp32 the trial compares the logits with those of transformers' layers."""
    policy = LanguagePolicy(made(kind).to(GPU, dtype))
    assert policy.backend.recorded()["sampling"] == "native"
    logprobs_BT, gradients_of = gradients(policy)
    expected, _ = gradients(LanguagePolicy(made(kind)))
    gaps = (logprobs_BT.detach().float().cpu() - expected).abs()
    assert float(gaps.max()) < (1e-3 if dtype == torch.float32 else 0.3)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients_of.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_logits_of_torch(kind, dtype):
    """Rows that end and prompts that are admitted while others go on."""
    module = tiny_model(kind, dtype=dtype).to(GPU)
    policy = LanguagePolicy(module)
    assert policy.backend.recorded()["kernels"] == "covey's, Triton"
    ours = policy.backend.decoder(module, 12, 40)
    theirs = [SharedPrefixDecoder(module, 4) for _ in PROMPTS]
    rows = [4, 4, 0]
    for number in range(2):
        ours.prefill([list(PROMPTS[number])], 4)
        theirs[number].prefill([list(PROMPTS[number])], 4)
    for step in range(30):
        if step == 10:
            ours.select(torch.tensor([0, 2, 4, 5, 6, 7]))
            theirs[0].select(torch.tensor([0, 2], device=GPU))
            rows[0] = 2
        if step == 20:
            ours.prefill([list(PROMPTS[2])], 4)
            theirs[2].prefill([list(PROMPTS[2])], 4)
            rows[2] = 4
        fed = torch.arange(sum(rows), device=GPU) % 7 + step
        parts = zip(theirs, fed.split(rows), strict=True)
        expected = torch.cat([one.step(tokens).float().clone() for one, tokens in parts if len(tokens)])
        tolerance = 1e-4 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(ours.step(fed).float(), expected, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_draw_what_single_launches_draw(kind, monkeypatch):
    policy = LanguagePolicy(tiny_model(kind).to(GPU))
    settings = GenerationSettings(max_new_tokens=50, temperature=0.9, end_ids=frozenset({1, 30}), version=0, max_rows=8)
    requests = [GenerationRequest(prompt, 4, RandomKey(0, 1, n), settings) for n, prompt in enumerate(PROMPTS)]
    captured = []
    step = graph_decoder.GraphedStep.__call__

    def counted(self, compute):
        captured.append(self.can_be_captured)
        return step(self, compute)

    monkeypatch.setattr(graph_decoder.GraphedStep, "__call__", counted)
    found = LocalGenerator(policy).generate(requests)
    assert captured.count(True) > len(captured) / 2
    monkeypatch.setattr(graph_decoder.GraphedStep, "__call__", lambda self, compute: compute())
    plain = LocalGenerator(policy).generate(requests)
    assert [[one.tokens for one in group] for group in found] == [[one.tokens for one in group] for group in plain]
