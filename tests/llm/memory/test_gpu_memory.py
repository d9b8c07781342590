"""The memory of sampling on a GPU with covey's kernels, against the decoder that is made, and the rows that fit."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from covey.config import LoRAConfig, RunConfig, SamplingConfig
from covey.llm.generation import decoder, local_generator
from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.graph_decoder import GraphDecoder
from covey.llm.generation.local_generator import DecoderMemory
from covey.llm.memory import SMOLLM2_135M, TIGHT, decoder_memory, predict, read_dimensions
from covey.llm.model import logprobs
from covey.llm.model.architecture import Heads
from covey.llm.model.lora import add_adapter
from covey.llm.native import bindings
from covey.llm.policy import LanguagePolicy
from covey.runtime import device
from covey.runtime.optimizer import MasterAdamW
from helpers.memory_models import sized_model
from helpers.tiny_models import tiny_model

GIB = 1 << 30
MEMORY = DecoderMemory(64, 96, 200, 2, Heads(4, 2, 32), linear=50_000, joined=30_000, itemsize=2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [LoRAConfig(), LoRAConfig(rank=2), LoRAConfig(rank=2, targets=("down_proj",))])
def test_a_model_has_the_dimensions_of_its_config(kind: str, lora: LoRAConfig) -> None:
    model, size = sized_model(kind)
    if lora.is_used:
        add_adapter(model, lora)
    assert DecoderMemory.of(model) == decoder_memory(size, replace(RunConfig(), lora=lora), 4)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_keys_and_copies_of_a_decoder(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "packs", lambda _: False)  # as on a GPU
    rows, tokens, model = 6, 5, LanguagePolicy(tiny_model("llama")).module  # with attention over packed prompts
    if rank:
        add_adapter(model, LoRAConfig(rank=rank))
    of_model = {parameter.data_ptr() for parameter in model.parameters()}
    memory = DecoderMemory.of(model)
    kernels = pytest.importorskip("covey.llm.native.triton_kernels").TritonKernels(torch.float32)
    made = GraphDecoder(model, kernels, rows, tokens)
    made.prefill([[5, 6, 7, 8], [5, 6, 9, 3]], 3)
    prompts = {id(prompt): prompt for prompt in made.prompts}.values()
    held = [made.own_keys, made.own_values, *(part for one in prompts for part in (one.keys, one.values))]
    assert sum(part.nbytes for part in held) == memory.keys_and_values(rows, tokens, 2, 4)
    copied = [
        part.weight.nbytes
        for layer in made.layers
        for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if part.weight.data_ptr() not in of_model  # type: ignore[union-attr]
    ]
    assert sum(copied) == memory.copies(room=1e18)
    assert memory.copies(room=4 * memory.linear * 4 - 1) == 0


@given(st.integers(0, 1 << 24), st.integers(1, 9), st.integers(1, 12), st.integers(1, 40))
def test_the_rows_that_fit_are_the_most(room: int, completions: int, prompts: int, tokens: int) -> None:
    rows = MEMORY.fitting_rows(room, completions, tokens, prompts, 20)
    left = room - MEMORY.prefill(prompts, 20)
    if 4 * MEMORY.linear * 2 <= room:
        left -= 2 * MEMORY.linear * 2

    def needed(count: int) -> int:
        return MEMORY.keys_and_values(count, tokens, count // completions, 20) + MEMORY.step(count)

    assert rows % completions == 0
    assert rows == 0 or needed(rows) <= left
    assert rows == prompts * completions or needed(rows + completions) > left


def test_a_generator_has_the_rows_of_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = LanguagePolicy(tiny_model("llama"))
    settings = GenerationSettings(max_new_tokens=5, temperature=1.0, end_ids=frozenset({1}), version=0)
    requests = [GenerationRequest((5, 6, 7), 4, RandomKey(0, 1, number), settings) for number in range(3)]
    memory = DecoderMemory.of(policy.module)
    room = memory.prefill(3, 3) + memory.keys_and_values(8, 5, 2, 3) + memory.step(8)
    assert room < 4 * memory.linear * 4, "without copies of weights"
    on_cpu = local_generator.batch_rows(policy, requests, 5, 0, room=room)
    monkeypatch.setattr(local_generator, "device_kind", lambda _: "cuda")
    assert (on_cpu, local_generator.batch_rows(policy, requests, 5, 0, room=room)) == (12, 8)
    assert local_generator.batch_rows(policy, requests, 5, 0, room=0) == 4, "a group at least"
    assert local_generator.batch_rows(policy, requests, 5, 12, room=room) == 12, "as the config says"


def test_keys_and_values_get_what_is_free_between_updates() -> None:
    size = read_dimensions(SMOLLM2_135M)
    config = RunConfig(sampling=SamplingConfig(prompts_per_step=64, group_size=64, max_new_tokens=2048))
    plans = {gib: predict(size, config, device="cuda", width=2, memory=gib * GIB) for gib in (8, 24, 80)}
    assert plans[8].rows < plans[24].rows < plans[80].rows
    for gib, plan in plans.items():
        sampling = plan.staying + sum(plan.parts[name] for name in ("prefill", "keys and values", "prepacked weights"))
        assert sampling + plan.parts["logits of a decoding step"] <= TIGHT * gib * GIB
        assert plan.parts["keys and values"] > 0.5 * (TIGHT * gib * GIB - plan.staying)
    unknown = predict(size, config, device="cuda", width=2)
    assert unknown.parts["keys and values"] < 11 * GIB, "an eighth of a GPU of 80 GB"
    assert not any(plan.parts["gradients"] and "gradients" not in plan.update for plan in plans.values())
    old = predict(size, config, device="cuda", width=2, memory=24 * GIB, has_kernels=False)
    assert old.parts["activations"] > plans[24].parts["activations"], "torch keeps more, and copies of keys"
    assert old.parts["prefill"] == old.parts["prepacked weights"] == 0


@pytest.mark.parametrize(("gib", "decisions"), [(None, 512), (8, 512), (24, 512), (80, 2048), (141, 3584)])
def test_a_chunk_of_logits_is_larger_on_a_gpu_with_memory_for_it(gib: int | None, decisions: int) -> None:
    gpu_bytes = None if gib is None else gib * GIB
    assert logprobs.chunk_decisions(152_000, gpu_bytes) == decisions
    assert logprobs.chunk_size(10_000, 152_000, gpu_bytes) == decisions * 152_000


@pytest.mark.parametrize(("where", "kept"), [("cpu", True), ("meta", False)])
def test_gradients_keep_their_memory_on_a_cpu_alone(where: str, kept: bool) -> None:
    module = nn.Linear(3, 2, bias=False).to(torch.bfloat16).to(where)
    optimizer = MasterAdamW(module, lr=1e-3)
    (master,) = optimizer.masters.values()
    module(torch.ones(1, 3, dtype=torch.bfloat16, device=where)).sum().backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    gradient = weakref.ref(master.grad.untyped_storage())
    master.grad = None
    assert (gradient() is not None) is kept


@pytest.mark.parametrize(("reserved", "returned"), [(19, False), (31, True)])
def test_unused_memory_is_returned_to_a_gpu_if_it_is_much(
    reserved: int, returned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(device, "gpu_memory", lambda _: (100, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    device.return_unused(torch.device("cuda", 0))
    device.return_unused(torch.device("cpu"))
    assert calls == [1] * returned


@pytest.mark.parametrize(
    ("capability", "switch", "expected"),
    [(None, "1", True), ((8, 0), "1", True), ((7, 5), "1", False), ((9, 0), "0", False)],
)
def test_kernels_are_planned_for_a_gpu_that_may_have_them(
    capability: tuple[int, int] | None, switch: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_NATIVE", switch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(bindings, "find_spec", lambda _: object())
    assert bindings.may_have_kernels("cuda") is expected
    assert bindings.may_have_kernels("cpu") is (switch == "1")
