"""What needs a trained model: SmolLM2-135M in fp32 and in bf16. All tests of a precision use one server."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.llm.generation.generator import GenerationRequest
from covey.llm.model.loading import find_model, load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.proof import mean_gap, probe
from covey.llm.remote.weights import FileTransport, gathered
from helpers.vllm_servers import RunningVllm, change, gaps, read, record, requests_for, running, spans

pytestmark = [pytest.mark.scale, pytest.mark.timeout(3600)]

OPTIONS = {"slots": 64, "max_model_len": 512}
TOPICS = (
    "apples", "pears", "plums", "grapes", "figs", "dates", "limes", "kiwis", "nuts", "seeds", "leaves", "roots",
    "stems", "buds", "pods", "husks",
)  # fmt: skip
END = frozenset({2})
BF16_MEAN, BF16_K3 = 0.05, 3e-3


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(find_model("smollm2-135m"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def server(request, folder, scratch) -> Iterator[RunningVllm]:
    """One after the other: two need more memory than this machine has to spare."""
    with running(folder, scratch, 8941, precision=request.param, **OPTIONS) as server:
        record("start", f"SmolLM2-135M in {request.param}, to /health", "recorded", f"{server.start_seconds:.0f} s")
        yield server


@pytest.fixture
def fp32(server) -> RunningVllm:
    if server.settings.precision != "fp32":
        pytest.skip("is for fp32")
    return server


@pytest.fixture
def bf16(server) -> RunningVllm:
    if server.settings.precision != "bf16":
        pytest.skip("is for bf16")
    return server


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"If I have {3 + n} {topic} and eat {n} of them, how many are left?"}],
            add_generation_prompt=True, return_dict=False,
        )
        for n, topic in enumerate(TOPICS)
    ]  # fmt: skip


def forward_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def statistics(gap: torch.Tensor) -> tuple[float, float, float]:
    """Mean |d|, max |d|, and the k3 estimate of the KL divergence, with ratio trainer / sampler."""
    return float(gap.abs().mean()), float(gap.abs().max()), float((gap.exp() - 1 - gap).mean())


def test_v1_v2_logprobs_are_those_of_a_forward_pass(server, folder, prompts):
    server.update(in_precision(forward_model(folder), server), "first")
    requests = requests_for(prompts[:8], 4, 96)
    sampled = server.sample(requests)
    mean, most, k3 = statistics(gaps(forward_model(folder), requests, sampled))
    tokens = sum(len(one.tokens) for found in sampled for one in found)
    figures = f"mean {mean:.1e}, max {most:.1e}, k3 {k3:.1e}"
    if server.settings.precision == "fp32":
        record("V1", f"fp32 server, transformers' fp32 forward, {tokens} tokens", "mean < 2e-5, max < 2e-4", figures)
        assert mean < 2e-5
        assert most < 2e-4
        policy = LanguagePolicy(load_model("smollm2-135m", dtype=torch.float32, device=torch.device("cpu")).module)
        ours = mean_gap(policy, requests, sampled)
        record("V1", "the same against covey's policy in fp32", "mean < 2e-5", f"mean {ours:.1e}")
        assert ours < 2e-5
    else:
        record("V2", f"bf16 server, transformers' fp32 forward, {tokens} tokens", "mean < 0.05, k3 < 3e-3", figures)
        assert mean < BF16_MEAN
        assert k3 < BF16_K3


def in_precision(module: torch.nn.Module, server: RunningVllm) -> torch.nn.Module:
    return module if server.settings.precision == "fp32" else module.bfloat16()


def test_v3_seeds_repeat_in_any_company(fp32, prompts):
    """A completion that the server computes alone for some tokens has other last digits: a product with one row has a
    kernel of its own. So whether bits repeat depends on which requests arrive together; tokens always repeat.
    """
    requests = requests_for(prompts[:10], 4, 48, end_ids=END)
    single = [GenerationRequest(one.prompt, 1, one.key, one.settings) for one in requests]
    first = fp32.sample(requests)
    firsts = [found[:1] for found in first]
    again = {
        "again": (fp32.sample(requests), first),
        "one request at a time": (fp32.sample(requests[:5], at_once=1), first[:5]),
        "n = 1 of n = 4": (fp32.sample(single), firsts),
        "alone": (fp32.sample(single, at_once=1), firsts),
    }
    distinct = sum(len({tuple(one.tokens) for one in found}) for found in first)
    assert distinct > 36
    assert any(one.tokens[-1] == 2 for found in first for one in found)
    described = []
    for company, (found, expected) in again.items():
        pairs = [pair for groups in zip(found, expected, strict=True) for pair in zip(*groups, strict=True)]
        assert [one.tokens for one, _ in pairs] == [other.tokens for _, other in pairs], company
        gap = max(abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True))
        described.append(f"{company}: {sum(one == other for one, other in pairs)}/{len(pairs)}, {gap:.0e}")
        assert gap < 1e-4, company
    record("V3", "seeded requests; completions with the same bits, largest difference of log-probabilities",
           "same tokens, < 1e-4", f"{'; '.join(described)}; {distinct} of 40 siblings distinct")  # fmt: skip


def test_v4_an_update_takes_and_goes_back(server, folder, prompts):
    requests = requests_for(prompts[:6], 2, 48)
    module = in_precision(forward_model(folder), server)
    server.update(module, "first")
    first = server.sample(requests)
    change(module, 0.02)
    began = time.perf_counter()
    server.update(module, "changed")
    seconds = time.perf_counter() - began
    changed = server.sample(requests)
    server.update(in_precision(forward_model(folder), server), "back")
    assert server.sample(requests) == first
    mean = float(gaps(module.float(), requests, changed).abs().mean())
    limit = 2e-5 if server.settings.precision == "fp32" else BF16_MEAN
    record("V4", f"135M {server.settings.precision}, tied, by file: mean gap to the new weights, seconds",
           f"< {limit:g}, back bit for bit", f"{mean:.1e}, {seconds:.1f} s")  # fmt: skip
    assert mean < limit


def test_v5_an_update_in_flight_divides_the_completions(server, folder, prompts):
    old, new = (in_precision(forward_model(folder), server) for _ in range(2))
    change(new, 0.02)
    server.update(old, "old")
    requests = requests_for(prompts[:16], 1, 256)
    answers: list[dict] = []
    writing = threading.Thread(target=lambda: answers.extend(server.raw(requests, ignore_eos=True)))
    before = server.tokens_generated()
    writing.start()
    while server.tokens_generated() < before + 16 * 32:  # of 16 * 256
        assert writing.is_alive()
        time.sleep(0.2)
    server.update(new, "new")
    writing.join()
    found = [spans(answer)[0] for answer in answers]
    assert [[version for version, *_ in one] for one in found] == [["old", "new"]] * 16, found[:2]
    assert all(one[0][1] == 0 and one[0][2] == one[1][1] and one[1][2] == 256 for one in found)
    parts: dict[str, list[torch.Tensor]] = {"old": [], "new": []}
    models = {"old": old.float(), "new": new.float()}
    for request, answer, one in zip(requests, answers, found, strict=True):
        completions = [read(answer)]
        for version, start, end in one:
            # Keys and values of the first span stay those of the old weights, so only few tokens after it are compared.
            near = min(end, start + 8) if version == "new" else end
            parts[version].append(gaps(models[version], [request], completions)[start:near])
    means = {version: float(torch.cat(gap).abs().mean()) for version, gap in parts.items()}
    limit = 2e-5 if server.settings.precision == "fp32" else BF16_MEAN
    record("V5", f"{server.settings.precision}: update under 16 requests, gap of the first span to the old weights",
           f"two spans each, < {limit:g}", f"16/16, {means['old']:.1e}")  # fmt: skip
    assert means["old"] < limit


def test_v6_a_prefix_of_older_weights_is_not_used(fp32, folder, prompts):
    """vLLM keeps the keys and values of a prompt when an update does not empty its cache; the salt is the version."""
    module = forward_model(folder)
    fp32.update(module, "old")
    requests = requests_for([[token for prompt in prompts[:10] for token in prompt]], 1, 1)
    for salt in ("old", ""):
        fp32.sample(requests, salt=salt)
    change(module, 0.02)
    with FileTransport(str(fp32.weights)).offered(gathered(module, torch.float32), "new") as offer:
        # As `give`, but the cache is kept, as it is anyway if requests are running.
        fp32.post(f"{wire.PAUSE}?mode=keep&clear_cache=false", {})
        fp32.post(wire.START, {})
        asyncio.run(offer.send(fp32.client, {}))
        fp32.post(wire.FINISH, {"weight_version": "new"})
        fp32.post(wire.RESUME, {})
    salted = float(gaps(module, requests, fp32.sample(requests, salt="new")).abs())
    unsalted = float(gaps(module, requests, fp32.sample(requests)).abs())
    record("V6", "first log-probability after an update without a reset: gap to the new weights",
           "with salt < 2e-4, without > 1e-2", f"{salted:.1e} with, {unsalted:.1e} without")  # fmt: skip
    assert salted < 2e-4
    assert unsalted > 1e-2


def test_v10_the_probe_accepts(server):
    dtype = torch.float32 if server.settings.precision == "fp32" else torch.bfloat16
    policy = LanguagePolicy(load_model("smollm2-135m", dtype=dtype, device=torch.device("cpu")).module)
    result = probe(server.client, policy, FileTransport(str(server.weights)), END)
    record("V10", f"probe at the start, SmolLM2-135M in {server.settings.precision}", "accepted", result.line)


def test_v10_three_steps_of_training(bf16, tmp_path):
    """The recipe of `make train` with 16 prompts x 8 instead of 32 x 6 to 16."""
    metrics, versions = train(bf16, tmp_path)
    assert versions == [{0}, {1}, {2}]
    kl = [one["mismatch/kl"] for one in metrics]
    mean = [one["mismatch/mean"] for one in metrics]
    record("V10", "three steps of arithmetic_grpo on vLLM, bf16: mismatch/kl; mismatch/mean",
           "< 3e-3; version = step - 1",
           "; ".join(", ".join(f"{x:.1e}" for x in row) for row in (kl, mean)))  # fmt: skip
    assert len(kl) == 3
    assert all(value < BF16_K3 for value in kl)


def train(server: RunningVllm, here: Path) -> tuple[list[dict], list[set[int]]]:
    """Metrics of every step, and the versions of its rollouts."""
    words = ["train", "arithmetic_grpo", "--steps", "3", "--run-dir", "run", "--sampler.kind", "vllm"]
    words += ["--prompts-per-step", "16", "--group-size", "8", "--final-group-size", "8"]
    words += ["--evaluation.problems", "16", "--evaluation.token_limits", "14"]
    words += ["--servers", server.address, "--sampler.token_file", str(server.settings.token_file)]
    words += ["--sampler.folder", str(server.weights)]
    done = subprocess.run(
        [sys.executable, "-m", "covey", *words], cwd=here, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = here / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch/kl" in line]
    versions = [
        {json.loads(line)["version"] for line in file.read_text().splitlines()}
        for file in sorted((run / "rollouts").iterdir())
    ]
    return steps, versions


def test_v13_throughput(server, prompts):
    """Recorded, not judged."""
    many = [prompt for prompt in prompts for _ in range(4)]
    server.sample(requests_for(prompts[:8], 1, 8))
    for what, requests in (
        ("64 prompts", requests_for(many, 1, 128)),
        ("8 prompts x 8", requests_for(prompts[:8], 8, 128)),
    ):
        began = time.perf_counter()
        found = server.sample(requests)
        tokens = sum(len(one.tokens) for completions in found for one in completions)
        rate = tokens / (time.perf_counter() - began)
        record("V13", f"{server.settings.precision}, {what} x 128 tokens", "recorded", f"{rate:.0f} tokens/s")
