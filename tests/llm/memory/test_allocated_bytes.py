"""The functions that state the bytes of a buffer, against the bytes of the tensors that are really allocated."""

import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from covey.config import RunConfig, SamplingConfig
from covey.llm.generation import local_generator, native_decoder, shared_prefix_decoder, token_sampling
from covey.llm.generation.backend import find_kernels
from covey.llm.generation.decoder import PackedLinears, token_bytes
from covey.llm.generation.native_decoder import NativeDecoder
from covey.llm.generation.shared_prefix_decoder import SharedPrefixDecoder
from covey.llm.memory import Dimensions, predict, read_dimensions
from covey.llm.model import logprobs
from covey.llm.model.architecture import Heads
from covey.llm.model.prefix_attention import IMPLEMENTATION
from covey.llm.native.bindings import TORCH_ALONE, kernels_for
from covey.runtime.optimizer import MasterAdamW, state_bytes

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
# Head width and prompts are multiples of 32, so the padding of the native cache, which is not counted, is 0.
FIELDS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = AutoConfig.for_model("qwen3", **FIELDS)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()


def tiny_dimensions() -> Dimensions:
    return read_dimensions(json.loads(AutoConfig.for_model("qwen3", **FIELDS).to_json_string(use_diff=False)))


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Those of the tensors in an operation's arguments or results; oneDNN's own tensors have none."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return [leaf.untyped_storage() for leaf in leaves]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that torch's operations make while it is active, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in inputs | self._seen:
                self._seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _freed(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_the_optimizer_s_state(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False)).to(dtype)
    optimizer = MasterAdamW(module, lr=1e-3)
    for _ in range(2):
        module(torch.ones(2, 7, dtype=dtype)).sum().backward()
        masters = optimizer.masters
        gradients = bytes_of(master.grad for master in masters.values())
        optimizer.step(1e-3)
    state = optimizer.state_dict()
    moments = bytes_of([*state["exp_avg"].values(), *state["exp_avg_sq"].values()])
    copies = bytes_of(master for name, master in masters.items() if master is not optimizer.parameters[name])
    count = sum(parameter.numel() for parameter in module.parameters())
    assert state_bytes(count, dtype.itemsize) == (copies, moments, gradients)


def head_of(decisions: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, nn.Linear]:
    return torch.randn(decisions, hidden, dtype=dtype, requires_grad=True), nn.Linear(
        hidden, vocabulary, bias=False, dtype=dtype
    )


def recorded(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """The objects of a class that a module makes from now on."""
    made: list[Any] = []
    own = getattr(module, name)

    class Recorded(own):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    patch.setattr(module, name, Recorded)
    return made


@settings(max_examples=25)
@given(
    decisions=st.integers(1, 30),
    hidden=st.integers(1, 20),
    vocabulary=st.integers(4, 50),
    dtype=st.sampled_from(DTYPES),
    native=st.booleans(),
)
@example(decisions=5, hidden=3, vocabulary=7, dtype=torch.bfloat16, native=False)
@example(decisions=20, hidden=3, vocabulary=7, dtype=torch.float32, native=True)
def test_a_chunk_of_the_logits_and_the_gradients(
    decisions: int, hidden: int, vocabulary: int, dtype: torch.dtype, native: bool
) -> None:
    states_NW, head = head_of(decisions, hidden, vocabulary, dtype)
    kernels = find_kernels(CPU) if native and kernels_for(dtype, CPU) else TORCH_ALONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CHUNK", 8)
        logits = recorded(patch, logprobs, "Logits")
        gradients = recorded(patch, logprobs, "LogitGradients")
        tokens_N = torch.zeros(decisions, dtype=torch.int64)
        out, _ = logprobs.token_logprobs(states_NW, head.weight, None, tokens_N, 1.0, kernels)
        out.sum().backward()
        chunk = logprobs.chunk_bytes(decisions, vocabulary, dtype.itemsize)
        if kernels is not TORCH_ALONE:
            chunk = logprobs.chunk_size(decisions, vocabulary) * dtype.itemsize
        assert [bytes_of([part._products, part._exact]) for part in logits] == [chunk, chunk]
        made = bytes_of([gradients[0].hidden, gradients[0].weight])
        assert made == logprobs.gradient_bytes(decisions, hidden, vocabulary, dtype.itemsize)
        native_bytes = logprobs.buffer_bytes(
            decisions, hidden, vocabulary, dtype.itemsize, native=True, has_entropy_bonus=False
        )
        assert kernels is TORCH_ALONE or native_bytes == chunk + made


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_entropy_bonus", [False, True], ids=["logprobs", "entropy"])
def test_the_peak_of_token_logprobs_in_the_backward_pass(
    dtype: torch.dtype, has_entropy_bonus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, vocabulary = 400, 2000
    monkeypatch.setattr(logprobs, "CHUNK", 64)
    states_NW, head = head_of(96, hidden, vocabulary, dtype)
    with LiveBytes() as counted:
        tokens_N = torch.zeros(96, dtype=torch.int64)
        out, entropy = logprobs.token_logprobs(states_NW, head.weight, None, tokens_N, 1.0, TORCH_ALONE)
        (out + entropy if has_entropy_bonus else out).sum().backward()
    needed = logprobs.buffer_bytes(
        96, hidden, vocabulary, dtype.itemsize, native=False, has_entropy_bonus=has_entropy_bonus
    )
    # What is not counted: a part's addend to the gradient of the hidden states, [N, W].
    assert counted.peak == pytest.approx(needed, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_the_exact_kl(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = recorded(monkeypatch, logprobs, "Logits")
    gradients = recorded(monkeypatch, logprobs, "LogitGradients")
    shape = 9, 8, 30
    (states_NW, head), (other_NW, other_head) = (head_of(*shape, dtype) for _ in range(2))
    logprobs.exact_divergence(states_NW, head, other_NW, other_head, 1.0, TORCH_ALONE).sum().backward()
    assert len(logits) == 4, "policy and reference, forward and backward"
    held = bytes_of(tensor for part in logits[2:] for tensor in (part._products, part._exact))
    held += bytes_of([gradients[0].hidden, gradients[0].weight, other_NW])
    assert held == logprobs.divergence_bytes(*shape, dtype.itemsize)
    assert bytes_of([states_NW.grad, head.weight.grad]) == logprobs.divergence_returned_bytes(*shape, dtype.itemsize)


@pytest.mark.parametrize("rows", [5, 40])
def test_the_draw_of_tokens(rows: int) -> None:
    vocabulary = 40_001
    logits_RV = torch.randn(rows, vocabulary)
    with LiveBytes() as counted:
        token_sampling.sample_tokens(logits_RV, torch.rand(rows, dtype=torch.float64), 1.0, TORCH_ALONE)
    assert counted.peak == pytest.approx(token_sampling.buffer_bytes(rows, vocabulary, "cpu"), rel=0.03)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_the_prepacked_weights(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not prepack bf16 on this processor, and the prediction has a copy too much")
    packed = PackedLinears(tiny_model(dtype)).packed.values()
    plan = predict(tiny_dimensions(), RunConfig(), device="cpu", width=dtype.itemsize)
    assert plan.parts["prepacked weights"] == sum(part.weight.numel() * dtype.itemsize for part in packed)


def cache_of_native(decoder: NativeDecoder) -> int:
    prompts = {id(shared): shared for shared in decoder.prompts}.values()
    return bytes_of(
        [decoder.own_keys, decoder.own_values, *(part for shared in prompts for part in (shared.keys, shared.values))]
    )


def cache_of_shared_prefix(decoder: SharedPrefixDecoder) -> int:
    layout = decoder.layout
    assert layout is not None
    return bytes_of([*layout.own_keys, *layout.own_values, *layout.keys_KSPD, *layout.values_KSPD])


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [[3 + (7 * prompt + place) % 150 for place in range(length)] for prompt in range(count)]


def token_bytes_of(module: PreTrainedModel) -> int:
    return token_bytes(FIELDS["num_hidden_layers"], Heads.of(module), module.dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("max_new_tokens", [1, 32, 33])
@pytest.mark.parametrize(("prompts", "group_size", "prompt_tokens"), [(1, 5, 32), (3, 2, 64)])
def test_the_cache_of_the_native_decoder(
    prompts: int, group_size: int, prompt_tokens: int, max_new_tokens: int, dtype: torch.dtype
) -> None:
    kernels = kernels_for(dtype, CPU)
    if kernels is None:
        pytest.skip("no compiler")
    module, rows = tiny_model(dtype), prompts * group_size
    decoder = NativeDecoder(module, kernels, rows, max_new_tokens)
    decoder.prefill(prompts_of(prompts, prompt_tokens), group_size)
    stated = native_decoder.cache_bytes(token_bytes_of(module), rows, max_new_tokens, prompts, prompt_tokens)
    assert cache_of_native(decoder) == stated
    sampling = SamplingConfig(prompts_per_step=prompts, group_size=group_size, max_new_tokens=max_new_tokens)
    config = replace(RunConfig(), sampling=sampling)
    plan = predict(tiny_dimensions(), config, device="cpu", width=dtype.itemsize, prompt_tokens=prompt_tokens)
    assert plan.parts["keys and values"] == stated


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 32, 33])
def test_the_cache_of_the_shared_prefix_decoder(tokens: int) -> None:
    module, rows = tiny_model(), 16
    decoder = SharedPrefixDecoder(module, rows)
    sizes = []
    with LiveBytes() as counted:
        decoder.prefill(prompts_of(2, 20), 8)
        for _ in range(tokens):
            decoder.step(torch.zeros(rows, dtype=torch.int64))
            sizes.append(cache_of_shared_prefix(decoder))
        before, counted.peak = counted.live, counted.live
        decoder.select(torch.tensor([row for row in range(rows) if row % 8]))  # an eighth has ended
        copied = counted.peak - before
    prompts = token_bytes_of(module) * 2 * 20
    own = [token_bytes_of(module) * rows * shared_prefix_decoder.capacity(count + 1, "cpu") for count in range(tokens)]
    assert sizes == [prompts + size for size in own]
    stated, on_gpu = (
        shared_prefix_decoder.cache_bytes(token_bytes_of(module), rows, tokens, 2, 20, device)
        for device in ("cpu", "cuda")
    )
    assert sizes[-1] + copied == pytest.approx(stated, rel=0.01)
    config = replace(RunConfig(), sampling=SamplingConfig(prompts_per_step=2, group_size=8, max_new_tokens=tokens))
    plan = predict(tiny_dimensions(), config, device="cuda", width=4, prompt_tokens=20, has_kernels=False)
    assert plan.parts["keys and values"] == on_gpu


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 12))
def test_rows_that_are_decoded_together(fitting: int, requests: int, completions: int) -> None:
    rows = local_generator.rows_together(fitting, requests, completions)
    assert completions <= rows <= requests * completions
    assert rows <= max(fitting, completions)
