"""The kernels for GPUs, in Triton's interpreter: torch's numbers, and completions as the kernels for CPUs draw them."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm.generation import backend
from covey.llm.generation.generator import GenerationFailure, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import WHOLE, Drawing
from covey.llm.native import bindings
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy's, of masked numbers
]
CPU = torch.device("cpu")


@pytest.fixture
def kernels():
    from covey.llm.native.triton_kernels import TritonKernels

    return TritonKernels(torch.float32)


@pytest.fixture
def on_gpu_kernels(kernels, monkeypatch):
    """Has policies that are made from now on use the kernels for GPUs, in few programs."""
    from covey.llm.generation import graph_decoder

    monkeypatch.setattr(graph_decoder, "PROGRAMS", 8)
    monkeypatch.setattr(backend, "kernels_for", lambda dtype, _: kernels if dtype == torch.float32 else None)
    monkeypatch.setattr(backend.Trial, "samples", lambda *_, **__: True)  # the interpreter takes half a minute for it


def test_every_kernel_has_the_numbers_of_torch(kernels):
    from covey.llm.native.triton_kernels import check

    check(kernels, CPU)


def test_a_kernel_with_other_numbers_is_not_used(kernels, monkeypatch, caplog):
    from covey.llm.native import triton_kernels

    def wrong(self, gate, up, out):
        out.copy_(gate * up)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(triton_kernels.TritonKernels, "swiglu", wrong)
    bindings._triton_kernels.cache_clear()
    assert bindings._triton_kernels(torch.float32, CPU) is None
    assert "covey's kernels are not used on this GPU" in caplog.text
    assert "SwiGLU differs from torch" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert bindings._triton_kernels(torch.bfloat16, CPU) is None  # products of bf16
    bindings._triton_kernels.cache_clear()


SETTINGS = GenerationSettings(max_new_tokens=13, temperature=0.8, end_ids=frozenset(range(1, 85, 12)), version=0)
PROMPTS = [(5, 6, 7, 8, 9), (5, 6, 11)]


def completions(policy: LanguagePolicy, settings: GenerationSettings):
    requests = [GenerationRequest(prompt, 2, RandomKey(0, 1, n), settings) for n, prompt in enumerate(PROMPTS)]
    return [one for group in LocalGenerator(policy).generate(requests) for one in group]


def test_blocks_of_steps_draw_what_single_steps_draw(request):
    """`tests/llm/generation/test_graph_decoder.py` has the other models and settings, with kernels that are quicker."""
    right = completions(LanguagePolicy(tiny_model("llama")), SETTINGS)
    request.getfixturevalue("on_gpu_kernels")
    policy = LanguagePolicy(tiny_model("llama"))
    assert policy.backend.recorded()["kernels"] == "covey's, Triton"
    found = completions(policy, SETTINGS)
    assert [(one.tokens, one.end) for one in found] == [(one.tokens, one.end) for one in right]
    assert {one.end for one in right} == {EndReason.STOP, EndReason.LENGTH}
    for ours, theirs in zip(found, right, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


# Operations that only make a tensor or another view of one.
NO_LAUNCH = re.compile(
    r"aten\.((new_)?empty(_like)?|(_unsafe_)?view|_reshape_alias|as_strided|detach|alias|slice|split|chunk|select|t|"
    r"transpose|permute|flatten|unsqueeze|expand|lift_fresh)\."
)


class Launches(TorchDispatchMode):
    """Counts torch's operations on numbers, kernels of Triton, which it leaves out, and copies to the host."""

    def __init__(self, monkeypatch) -> None:
        from covey.llm.native import triton_functions

        super().__init__()
        self.count = self.reads = 0
        for name, value in vars(triton_functions).items():
            if type(value).__name__ == "InterpretedFunction":
                monkeypatch.setattr(triton_functions, name, self)
        read = torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: self._read() or read(tensor))

    def _read(self) -> None:
        self.reads += 1

    def __getitem__(self, grid: object):
        self.count += 1
        return lambda *_, **__: None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += NO_LAUNCH.match(str(operation)) is None
        return operation(*args, **(kwargs or {}))


def test_a_layer_is_eleven_launches_and_eight_steps_are_one_read(kernels, monkeypatch):
    from covey.llm.generation.decoder import SharedPrompt
    from covey.llm.generation.graph_decoder import GraphDecoder

    module = tiny_model("llama")
    decoder = GraphDecoder(module, kernels, 4, 8)
    keys = torch.zeros(len(decoder.layers), decoder.heads.keys, 3 * decoder.heads.width)
    decoder._append([SharedPrompt(keys, keys, 3)] * 4, list(range(4)), 0)
    fed, uniforms, lengths = torch.zeros(4, dtype=torch.int64), np.zeros((4, 8)), np.zeros(4, dtype=np.int64)
    drawing = Drawing(1.0, WHOLE, (1,))

    def draw(steps: int) -> None:
        list(decoder.draw(fed, uniforms[:, :steps], lengths, drawing))

    draw(1)  # makes the tensors of the step
    decoder.feed([[5] * 2] * 4)
    launches, layers, sample = Launches(monkeypatch), decoder.layers, kernels.sample_tokens
    drawn = torch.zeros(4, dtype=torch.int64), torch.zeros(4)  # what is counted is not run, and leaves no tokens
    monkeypatch.setattr(kernels, "sample_tokens", lambda *given: (sample(*given), drawn)[1])
    for compute in (lambda: draw(1), lambda: decoder.feed([[5] * 2] * 4)):
        counts = []
        for decoder.layers in (layers, layers[:1]):
            launches.count = 0
            with launches:
                compute()
            counts.append(launches.count)
        assert counts[0] - counts[1] == 11 * (len(layers) - 1)
    launches.reads = 0
    with launches:
        decoder.feed([[5] * 2] * 4)  # of replies
        draw(8)
    assert launches.reads == 1


def test_a_row_without_a_distribution_fails_its_batch(on_gpu_kernels):
    policy = LanguagePolicy(tiny_model("llama"))
    with torch.no_grad():
        policy.module.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    (failure,) = LocalGenerator(policy).generate([GenerationRequest(PROMPTS[0], 1, RandomKey(0, 1, 0), SETTINGS)])
    assert isinstance(failure, GenerationFailure)
    assert "not finite" in failure.message


def test_the_update_has_the_gradients_of_the_kernels_for_cpus(request):
    def gradients() -> dict[str, torch.Tensor]:
        policy = LanguagePolicy(tiny_model("qwen2"))
        rollouts = [
            Rollout(
                context=PROMPTS[0],
                actions=actions,
                behavior_logprobs=[-1.0] * len(actions),
                end=EndReason.STOP,
                reward=1.0,
            )
            for actions in ([9, 8, 7, 1], [9, 8, 3], [4, 1])
        ]
        output = policy.evaluate(collate([Group(Start(0, "x"), rollouts)]))
        weights = torch.linspace(-1, 1, output.logprobs_BT.numel()).view_as(output.logprobs_BT)
        (output.logprobs_BT * weights + 0.3 * output.entropy_BT).sum().backward()
        return {name: parameter.grad for name, parameter in policy.module.named_parameters()}

    right = gradients()
    request.getfixturevalue("on_gpu_kernels")
    for name, gradient in gradients().items():
        assert (gradient - right[name]).norm() <= 1e-5 * right[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_can_be_compiled_and_fits_the_gpus_of_laptops(capability):
    """Without a GPU. Capabilities 8.6, 8.9 and 12.0 have 99 KB of shared memory for a block, others more."""
    script = Path(__file__).parents[2] / "helpers" / "compiled_kernels.py"
    found = subprocess.run([sys.executable, script, str(capability)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    low, exact = json.loads(found.stdout).values()
    from covey.llm.native import triton_functions

    jitted = {name for name, value in vars(triton_functions).items() if type(value).__name__ == "InterpretedFunction"}
    called = "product rows_of tile_of parent_of attend_part store_part first_seen within gate_of"
    assert low.keys() == exact.keys() == jitted - set(called.split()), "those called by others"
    assert max(low.values()) <= 99 << 10
    assert max(exact.values()) <= 163 << 10  # an A100's; elsewhere fp32 may fall back to torch
