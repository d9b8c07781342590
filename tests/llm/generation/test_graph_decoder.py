"""Rows on a GPU: completions and conversations have the tokens and log-probabilities of the kernels for CPUs.

The kernels are those of `helpers/gpu_kernels.py`; `tests/llm/native/test_triton_kernels.py` runs those of Triton.
"""

import importlib.util
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from covey.data import EndReason
from covey.llm.generation import backend, decoder
from covey.llm.generation.generator import GenerationSettings
from covey.llm.generation.hf_cache_decoder import CacheDecoder, FullForwardDecoder
from covey.llm.generation.local_generator import Engine, LocalGenerator
from covey.llm.generation.shared_prefix_decoder import GraphedStep, SharedPrefixDecoder, _capture_stream
from covey.llm.generation.token_sampling import Truncation
from covey.llm.model.chat import Chat
from covey.llm.model.stop_strings import StopStrings
from covey.llm.policy import LanguagePolicy
from helpers.tiny_models import tiny_model, tiny_tokenizer
from llm.generation.test_prefix_cache import converse_on
from llm.generation.test_turns import END_IDS, Script, make_requests

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
STOP = StopStrings(Chat(tiny_tokenizer(), frozenset({1})), ("a", "7"))
SETTINGS = GenerationSettings(11, 0.8, END_IDS, 0)
TRUNCATED = Truncation(top_k=9, top_p=0.9, min_p=0.01, min_new_tokens=3)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes policies that use the decoder of GPUs; also counts its calls."""
    from covey.llm.generation.graph_decoder import GraphDecoder
    from helpers.gpu_kernels import PlainKernels

    calls = Counter[str]()

    def counted(name):
        method = getattr(GraphDecoder, name)
        return lambda *args: calls.update([name]) or method(*args)

    def policy(kind):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "kernels_for", lambda dtype, _: kernels if dtype == torch.float32 else None)
            made = LanguagePolicy(tiny_model(kind))
        chosen = made.backend.recorded()
        assert (chosen["sampling"], chosen["kernels"]) == ("native", "covey's, Triton"), "the decoder failed its trial"
        calls.clear()  # those of the trial
        return made

    kernels, policy.calls = PlainKernels(), calls
    for name in ("step", "feed", "draw"):
        monkeypatch.setattr(GraphDecoder, name, counted(name))
    return policy


def assert_alike(ours: Script, theirs: Script) -> None:
    assert ours.tokens == theirs.tokens
    assert ours.ends == theirs.ends
    for place, logprobs in theirs.logprobs.items():
        assert ours.logprobs[place] == pytest.approx(logprobs, abs=2e-5)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "changed", "room"),
    [
        ("llama", {}, 60),
        ("qwen2", {"max_rows": 4}, 60),  # conversations wait for rows of others
        ("qwen3", {}, 0),  # room for the first turn alone
        ("llama", {"temperature": 0.0, "max_rows": 5}, 60),  # branches stay together
        ("qwen2", {"truncation": TRUNCATED}, 60),
        ("qwen3", {"stop": STOP, "end_ids": frozenset({1}), "truncation": Truncation(min_new_tokens=4)}, 60),
    ],
)
def test_conversations_go_on_in_their_rows(kind, changed, room, on_gpu, monkeypatch):
    """Replies come after random numbers of blocks, and are fed in parts."""
    monkeypatch.setitem(decoder.PREFILL_TOKENS, "cuda", 1)
    requests = make_requests(replace(SETTINGS, **changed), 5)
    here, there = Script(limit=10), Script(limit=10, late=random.Random(4))
    assert LocalGenerator(LanguagePolicy(tiny_model(kind))).converse(requests, here, 60) == [None] * 5
    policy = on_gpu(kind)
    prompts = []
    prefill = backend.SlotDecoder.prefill
    monkeypatch.setattr(
        backend.SlotDecoder, "prefill", lambda self, given, *more: prompts.extend(given) or prefill(self, given, *more)
    )
    with there.by_steps():
        assert LocalGenerator(policy).converse(requests, there, room) == [None] * 5
    assert_alike(there, here)
    assert len(prompts) == len(requests), "a turn was prefilled"
    assert len({len(ends) for ends in here.ends.values()}) > 1
    assert {end for ends in here.ends.values() for end in ends} == {EndReason.STOP, EndReason.LENGTH}


@needs_triton
@pytest.mark.parametrize("changed", [{}, {"temperature": 0.0}, {"truncation": TRUNCATED}], ids=str)
def test_every_token_after_the_first_is_drawn_in_blocks(changed, on_gpu):
    """The first token is drawn with the prefill, the others of a turn in a block of 8 and one of 1."""
    generator, script = LocalGenerator(on_gpu("llama")), Script(turns=3, limit=9, always=True)
    settings = replace(SETTINGS, max_new_tokens=10, end_ids=frozenset(), **changed)
    requests = [replace(one, completions=2) for one in make_requests(settings, 3)]
    assert generator.converse(requests, script, 60) == [None] * 3
    assert on_gpu.calls == {"draw": 2 + 2 + 2, "feed": 2}


@needs_triton
@pytest.mark.parametrize("rows", [0, 4])
def test_a_server_goes_on_with_the_rows_of_earlier_turns(rows, on_gpu):
    settings = GenerationSettings(5, 0.7, END_IDS, 0, continues=True)
    requests, here, served = make_requests(settings), Script(always=True), Script(always=True)
    LocalGenerator(LanguagePolicy(tiny_model("qwen3"))).converse(requests, here, 60)
    engine = Engine(on_gpu("qwen3"), rows=rows)
    engine.start()
    counts = converse_on(engine, requests, served)
    engine.stop()
    assert_alike(served, here)
    assert {prompt - cached for prompt, cached in counts} == {1 + served.longest}


@needs_triton
def test_siblings_go_on_from_one_kept_row(on_gpu):
    (request,) = make_requests(replace(SETTINGS, continues=True), 1)
    engine = Engine(on_gpu("llama"))
    engine.start()
    (first,) = engine.generate(request).result(60)
    key = replace(request.key, first_position=len(first.tokens) + 1)
    turn = replace(request, prompt=(*request.prompt, *first.tokens, 9), completions=4, key=key)
    found = engine.generate(turn).result(60)
    engine.stop()
    expected = LocalGenerator(LanguagePolicy(tiny_model("llama"))).generate([turn])[0]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert len({tuple(one.tokens) for one in found}) > 1
    assert {one.cached_tokens for one in found} == {len(turn.prompt) - 2}


@needs_triton
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("qwen3", {"max_rows": 3}),  # norms of heads; a prompt waits for rows
        ("qwen2", {"temperature": 1.1}),  # biases, without copies of weights
        ("qwen2", {"truncation": TRUNCATED, "stop": STOP}),
        ("llama", {"temperature": 0.0}),
    ],
)
def test_completions_are_those_of_the_kernels_for_cpus(kind, changed, on_gpu, monkeypatch):
    monkeypatch.setattr("covey.llm.generation.decoder.copies_fit", lambda _: "temperature" not in changed)
    requests = [replace(one, completions=3) for one in make_requests(replace(SETTINGS, **changed), 5)]
    right = LocalGenerator(LanguagePolicy(tiny_model(kind))).generate(requests)
    found = LocalGenerator(on_gpu(kind)).generate(requests)
    for ours, theirs in zip(*([one for group in groups for one in group] for groups in (found, right)), strict=True):
        assert (ours.tokens, ours.end) == (theirs.tokens, theirs.end)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompts_are_prefilled_in_parts(kind, monkeypatch):
    module = tiny_model(kind)
    module.set_attn_implementation("covey")
    prompts = [list(range(3, 3 + length)) for length in (9, 4, 20, 2, 3, 11)]
    fed, forward = [], decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda base, tokens, *more: fed.append(len(tokens)) or forward(base, tokens, *more)
    )
    found = []
    for most in (1 << 62, 16):
        monkeypatch.setitem(decoder.PREFILL_TOKENS, "cpu", most)
        fed.clear()
        made = SharedPrefixDecoder(module, 12)
        logits = [made.prefill(prompts, 2, 0)]
        for rows in (range(12), (0, 3, 5, 6, 7, 11)):
            made.select(torch.tensor(rows))
            logits.append(made.step(torch.tensor(rows) + 5))
        found.append(torch.cat(logits))
    assert fed == [13, 20, 16]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make", [partial(CacheDecoder, pads=True), partial(CacheDecoder, pads=False), FullForwardDecoder]
)
def test_prompts_of_a_cache_are_prefilled_in_parts(make, monkeypatch):
    module, fed, found = tiny_model("bloom"), [], []
    module.register_forward_pre_hook(lambda _, args, given: fed.append(given["input_ids"].numel()), with_kwargs=True)
    prompts = [list(range(3, 3 + length)) for length in (9, 9, 4, 20, 9)]
    for most in (1 << 62, 20):
        monkeypatch.setitem(decoder.PREFILL_TOKENS, "cpu", most)
        fed.clear()
        made = make(module, 10)
        logits = [made.prefill(prompts, 2), made.step(torch.arange(10) + 5)]
        made.select(torch.tensor([0, 3, 5, 6, 9]))
        logits.append(made.step(torch.arange(5) + 5))
        found.append(torch.cat(logits))
    assert max(fed) <= 22  # of the longest row
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("room", [0, 1 << 40, None])
def test_copies_of_weights_are_decided_once(room, monkeypatch):
    module, free = tiny_model("llama"), [1 << 40, 0]
    monkeypatch.setattr(type(module), "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free.pop(0), 0))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    for _ in range(2):
        decoder.settle_copies(module, room)
        assert decoder.copies_fit(module) == (room != 0)


def test_graphs_share_the_memory_of_one_pool_and_stream(monkeypatch):
    """Memory that a capture leaves is used by captures of the same pool on the same stream alone."""
    captures, streams = [], []

    class Stream:
        def __init__(self, device):
            streams.append(self)
            self.wait_stream = lambda _: None

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            captures.append((pool, streams[-1]))

        def capture_end(self):
            pass

        replay = capture_end

    here = Stream("cuda")
    for name, value in {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": lambda _: here, "stream": lambda _: nullcontext(),
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    _capture_stream.cache_clear()
    for step in [GraphedStep(torch.device("cuda"), "pool") for _ in range(2)]:
        assert [step(lambda: torch.ones(1)).item() for _ in range(3)] == [1.0] * 3
    _capture_stream.cache_clear()
    assert captures == [("pool", streams[1])] * 2
