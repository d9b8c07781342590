"""What needs no large model: tied and untied random Llamas in fp32, in which every wrong weight shows.

A tiny server starts in less than a minute on a free core (`--enforce-eager`).
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from covey.config import RunError
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.client import Client
from covey.llm.remote.fleet import Children, Fleet
from covey.llm.remote.generator import RemoteGenerator
from covey.llm.remote.proof import Proof, probe
from covey.llm.remote.weights import FileTransport, GroupOffer, GroupTransport, checksum, gathered, give
from helpers.tiny_models import CHARACTERS
from helpers.vllm_servers import (
    PYTHON,
    ROOT,
    TOKEN,
    RunningVllm,
    change,
    gaps,
    random_prompts,
    record,
    refusal,
    requests_for,
    running,
    tiny_vllm_folder,
    workers_of,
)

pytestmark = [pytest.mark.scale, pytest.mark.timeout(3600)]

VOCABULARY = len(CHARACTERS) + 3
END = frozenset({1})
OPTIONS = {"slots": 16, "max_model_len": 1024, "eager": True, "threads": 1}


def load(server: RunningVllm) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(server.folder, dtype=torch.float32)


def policy_of(server: RunningVllm) -> LanguagePolicy:
    return LanguagePolicy(load(server).requires_grad_(False))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def tied_folder(scratch) -> Path:
    return tiny_vllm_folder(scratch / "tied", tied=True)


@pytest.fixture(scope="module")
def tied(tied_folder, scratch):
    with running(tied_folder, scratch, 8931, **OPTIONS) as server:
        record("start", "a tiny model, --eager, to /health", "recorded", f"{server.start_seconds:.0f} s")
        yield server


@pytest.fixture(scope="module")
def untied(scratch):
    with running(tiny_vllm_folder(scratch / "untied", tied=False), scratch, 8932, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def requests():
    return requests_for(random_prompts(6, 20, VOCABULARY), 2, 24)


def test_v4_an_update_by_file_takes_in_a_tied_model(tied, requests):
    module = load(tied)
    tied.update(module, "first")
    first = tied.sample(requests)
    change(module)
    tied.update(module, "changed")
    changed = tied.sample(requests)
    gap = float(gaps(module, requests, changed).abs().mean())
    assert tied.get("/weight_info") == {"weight_version": "changed"}
    tied.update(load(tied), "back")
    record("V4", "tied, by file: mean gap to a forward of the new weights", "< 2e-5, back bit for bit", f"{gap:.1e}")
    assert gap < 2e-5
    assert float(gaps(load(tied), requests, changed).abs().mean()) > 0.05  # the change is visible
    assert tied.sample(requests) == first


def test_v7_bad_updates_leave_the_old_weights(tied, requests, tmp_path):
    """Every fault is refused before the model is touched: the same bits, then a whole update works."""
    module = load(tied)
    tied.update(module, "old")
    before = tied.sample(requests)
    tensors = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    named = tied.weights / "weights.safetensors"

    def announce(tensors, path=named, cut=0, sha256=""):
        save_file(tensors, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - cut])
        digest = sha256 or hashlib.sha256(content[: len(content) - cut]).hexdigest()
        return {"update_info": {"path": str(path), "sha256": digest}}

    name = "model.layers.1.mlp.up_proj.weight"
    bad = tensors[name].clone()
    bad[3, 5] = float("nan")
    link = tied.weights / "link.safetensors"
    link.symlink_to(tmp_path / "outside.safetensors")
    outside = announce(tensors, tmp_path / "outside.safetensors")
    faults = {
        "checksum": announce(tensors, sha256="0" * 64),
        "truncated": announce(tensors, tied.weights / "cut.safetensors", cut=1000),
        "outside": outside,
        "link to the outside": {"update_info": outside["update_info"] | {"path": str(link)}},
        "/etc/passwd": {"update_info": {"path": "/etc/passwd", "sha256": "0" * 64}},
        "no file": {"update_info": {"path": str(tied.weights / "none"), "sha256": "0" * 64}},
        "nan": announce(tensors | {name: bad}, tied.weights / "nan.safetensors"),
        "shape": announce(tensors | {name: bad[1:].nan_to_num()}, tied.weights / "shape.safetensors"),
        "dtype": announce({k: v.bfloat16() for k, v in tensors.items()}, tied.weights / "dtype.safetensors"),
        "missing": announce({k: v for k, v in tensors.items() if k != name}, tied.weights / "missing.safetensors"),
        "unknown": announce(tensors | {"lm_head.weight": tensors[name].clone()}, tied.weights / "unknown.safetensors"),
    }
    tied.post(wire.INIT, {"init_info": {"folder": str(tied.weights)}})
    for fault, body in faults.items():
        tied.post(wire.START, {})
        refusal(lambda body=body: tied.post(wire.UPDATE, body))
        refusal(lambda: tied.post(wire.FINISH, {"weight_version": "never"}))
        assert tied.get("/weight_info") == {"weight_version": "old"}, fault
        assert tied.sample(requests) == before, fault
    refusal(lambda: tied.post(wire.INIT, {"init_info": {"folder": "/etc"}}))
    change(module)
    tied.update(module, "new")
    assert float(gaps(module, requests, tied.sample(requests)).abs().mean()) < 2e-5
    record("V7", f"{len(faults) + 1} kinds of bad updates", "old weights, same bits; then an update works", "as wanted")


def test_v7_two_updates_at_once(tied, requests):
    """The second ends both, or waits until the server is free; never parts of two are mixed."""
    module = load(tied)
    tied.update(module, "old")
    before = tied.sample(requests)
    save_file({k: v.detach() for k, v in module.named_parameters()}, tied.weights / "twice.safetensors")
    path = tied.weights / "twice.safetensors"
    body = {"update_info": {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}
    tied.post(wire.START, {})
    refusal(lambda: tied.post(wire.START, {}))
    tied.post(wire.UPDATE, body)
    refusal(lambda: tied.post(wire.UPDATE, body))
    refusal(lambda: tied.post(wire.FINISH, {"weight_version": "never"}))
    assert tied.get("/weight_info") == {"weight_version": "old"}
    assert tied.sample(requests) == before
    tied.post(wire.START, {})  # a run that was killed leaves its update open
    change(module)
    tied.update(module, "new")
    assert float(gaps(module, requests, tied.sample(requests)).abs().mean()) < 2e-5


def test_v8_long_seeded_prompts_are_not_cut(tied):
    """64 x 200 tokens are more than a batch has room for; a cut prompt with a seed would end the engine."""
    batched = int(tied.settings.arguments[tied.settings.arguments.index("--max-num-batched-tokens") + 1])
    requests = requests_for(random_prompts(64, 200, VOCABULARY, seed=11), 1, 8)
    assert 2 * batched < 64 * 200
    module = load(tied)
    tied.update(module, "v8")
    gap = float(gaps(module, requests, tied.sample(requests)).abs().mean())
    record("V8", f"64 seeded prompts of 200 tokens at once, batches of {batched}", "none is cut", f"mean gap {gap:.1e}")
    assert gap < 2e-5


def test_v9_every_route_asks_for_the_token(tied):
    with urllib.request.urlopen(authorized(f"{tied.address}/openapi.json"), timeout=60) as answer:
        paths = json.load(answer)["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    for hidden in ("/collective_rpc", "/update_weights", "/pause", "/metrics", "/docs", "/nothing"):
        routes |= {("POST", hidden), ("GET", hidden)}
    statuses = {
        (method, path): status_of(tied.address, method, path, header)
        for method, path in sorted(routes - {("GET", "/health")})
        for header in ("", "Bearer wrong", f"Basic {TOKEN}")
    }
    record("V9", f"{len(routes)} routes without the token, or with a wrong one", "401", str(set(statuses.values())))
    assert set(statuses.values()) == {401}
    assert status_of(tied.address, "GET", "/health", "") == 200


def authorized(url):
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})


def status_of(address, method, path, header):
    data = b"{}" if method in ("POST", "PUT", "PATCH") else None
    headers = {"Content-Type": "application/json"} | ({"Authorization": header} if header else {})
    path = path.replace("{", "").replace("}", "")
    try:
        request = urllib.request.Request(address + path, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_token_is_in_no_argument_and_no_environment(tied):
    """Other users of the machine can read arguments, and vLLM writes them to its output."""
    ids = [tied.process.process.pid, *workers_of(tied.process)]
    for process in ids:
        for file in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{process}/{file}").read_bytes()
    assert TOKEN not in tied.process.log.read_text()


def test_v10_the_probe_accepts(tied):
    result = probe(tied.client, policy_of(tied), FileTransport(str(tied.weights)), END)
    record("V10", "probe at the start, tied model in fp32", "accepted", result.line)
    assert max(result.before, result.changed, result.after) < 2e-5


def test_v10_the_probe_refuses_a_server_without_the_repair(tied_folder, scratch):
    python = without_repair(scratch)
    with running(tied_folder, scratch, 8933, python=python, **OPTIONS) as server:
        policy = policy_of(server)
        before = [parameter.clone() for parameter in policy.module.parameters()]
        with pytest.raises(RunError, match="refused: after an update of its weights") as found:
            probe(server.client, policy, FileTransport(str(server.weights)), END)
        assert all(map(torch.equal, before, policy.module.parameters()))
        gap = str(found.value).split("differ from covey's by ")[1].split(" nats")[0]
        record("V10", "probe of a server without the repair of the tied output layer", "refused", f"{gap} nats")


def without_repair(scratch: Path) -> Path:
    """An interpreter whose plugin does not pack the tied output layer again, as vLLM's own engines do not."""
    copy = scratch / "site" / "covey_vllm"
    shutil.copytree(ROOT / "extras" / "covey_vllm" / "src" / "covey_vllm", copy)
    engine = copy / "engine.py"
    call = "            pack_output_layer(self.model)\n"
    assert engine.read_text().count(call) == 1
    engine.write_text(engine.read_text().replace(call, ""))
    python = scratch / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={copy.parent} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return python


def test_v4_updates_take_in_an_untied_model(untied, requests):
    """By a file and over a process group; the run chooses."""
    before = untied.sample(requests)
    for way, transport in (("file", None), ("gloo", GroupTransport(120.0))):
        module = load(untied)
        change(module)
        untied.update(module, f"changed-{way}", transport)
        gap = float(gaps(module, requests, untied.sample(requests)).abs().mean())
        untied.update(load(untied), f"back-{way}", transport)
        record("V4", f"untied, by {way}: mean gap to a forward of the new weights", "< 2e-5, back bit for bit",
               f"{gap:.1e}")  # fmt: skip
        assert gap < 2e-5
        assert untied.sample(requests) == before


def test_v7_bad_updates_over_a_process_group(untied, requests):
    """What was announced is refused before anything is sent, what arrives damaged after it."""
    module = load(untied)
    untied.update(module, "old", GroupTransport(120.0))
    before = untied.sample(requests)
    tensors = gathered(module, torch.float32)
    renamed = {f"x.{name}": tensor for name, tensor in tensors.items()}
    for bad in (
        replace(offer_of(tensors), sha256="0" * 64),
        offer_of(renamed),
        offer_of({"lm_head.weight": tensors["lm_head.weight"]}),
    ):
        refusal(lambda bad=bad: asyncio.run(give(untied.client, bad, "never", covey=False)))
        assert untied.get("/weight_info") == {"weight_version": "old"}
        assert untied.sample(requests) == before
    change(module)
    untied.update(module, "new", GroupTransport(120.0))
    assert float(gaps(module, requests, untied.sample(requests)).abs().mean()) < 2e-5


def offer_of(tensors: dict[str, torch.Tensor]) -> GroupOffer:
    return GroupOffer(tensors, checksum(tensors.values()), 10.0)


def test_v11_a_killed_worker_loses_no_group(tied, tied_folder, scratch):
    """Of two servers one is killed in the middle; its groups go to the other, and it returns after it was restarted."""
    policy = policy_of(tied)
    requests = requests_for(random_prompts(8, 20, VOCABULARY, seed=3), 2, 200, end_ids=END)
    clients = [Client(f"http://127.0.0.1:{port}", TOKEN, 300.0) for port in (tied.settings.port, 8934)]
    fleet = Fleet(policy, clients, FileTransport(str(tied.weights)), False, Children(0, (), 300.0))
    generator = RemoteGenerator(fleet, Proof(policy, 3.0))

    def second():
        return running(tied_folder, scratch, 8934, weights=tied.weights, **OPTIONS)

    try:
        with second() as server:
            generator.refresh(0)
            assert sorted(fleet.rotation) == [0, 1], fleet.faults
            (worker,) = workers_of(server.process)
            killer = threading.Timer(1.0, os.kill, (worker, signal.SIGKILL))
            killer.start()
            results = generator.generate(requests)
            killer.join()
            if not fleet.faults:  # all had ended before the kill: the next are sent to the dead server
                results = generator.generate(requests)
            rerouted = generator.metrics()["sampler/rerouted"]
        assert rerouted > 0
        assert fleet.rotation == [0]
        assert all(isinstance(found, list) and len(found) == 2 for found in results)
        assert float(gaps(policy.module, requests, results).abs().mean()) < 2e-5
        with second():
            change(policy.module)
            generator.refresh(1)
            assert sorted(fleet.rotation) == [0, 1], fleet.faults
            requests = [replace(one, settings=replace(one.settings, version=1)) for one in requests]
            assert float(gaps(policy.module, requests, generator.generate(requests)).abs().mean()) < 2e-5
            assert generator.metrics()["sampler/rerouted"] == 0
    finally:
        generator.close()
    record("V11", "kill -9 of a worker in mid-step, beside a second server", "the step completes; the server returns",
           f"{rerouted:.0f} groups re-routed")  # fmt: skip


PARENT = """
import sys, time
from pathlib import Path
from covey_vllm.launcher import VllmProcess, VllmSettings
from helpers.vllm_servers import PYTHON
folder, scratch = map(Path, sys.argv[1:])
settings = VllmSettings(PYTHON, folder, "127.0.0.1", 8935, scratch / "token", [scratch], "fp32", eager=True)
process = VllmProcess(settings, scratch / "8935.log")
time.sleep(10)
print(process.process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_its_parent(tied_folder, scratch):
    """Also if covey is killed, and cannot end anything itself."""
    (scratch / "token").write_text(TOKEN)
    (scratch / "token").chmod(0o600)
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tied_folder), str(scratch)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        server = int(child.stdout.readline())
        child.kill()
    for _ in range(1200):
        if not Path(f"/proc/{server}").exists():
            return
        threading.Event().wait(0.1)
    raise AssertionError("vLLM still runs")
