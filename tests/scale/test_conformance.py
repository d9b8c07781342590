"""V12: vLLM and `covey serve` give a run the same answers, to good and to bad updates and requests."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from covey.llm.generation.generator import Completion
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.weights import FileOffer, FileTransport, gathered, give
from helpers import samplers
from helpers.vllm_servers import (
    TOKEN,
    change,
    gaps,
    random_prompts,
    record,
    requests_for,
    running,
    tiny_vllm_folder,
)

pytestmark = [pytest.mark.scale, pytest.mark.timeout(3600)]

END = frozenset({1})
OPTIONS = {"slots": 16, "max_model_len": 256, "eager": True, "threads": 1}


def offers(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileOffer]:
    """Updates that must be refused, by their fault."""
    name = "model.layers.1.mlp.up_proj.weight"
    bad = tensors[name].clone()

    def written(fault: str, changed: dict[str, torch.Tensor], cut: int = 0) -> FileOffer:
        path = folder / f"{fault}.safetensors"
        save_file(changed, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - cut])
        return FileOffer(path, hashlib.sha256(content).hexdigest())

    whole = written("whole", tensors)
    return {
        "checksum": FileOffer(whole.path, "0" * 64),
        "cut": written("cut", tensors, cut=100),
        "missing file": FileOffer(folder / "nothing", whole.sha256),
        "shape": written("shape", tensors | {name: bad[1:].contiguous()}),
        "dtype": written("dtype", {key: value.bfloat16() for key, value in tensors.items()}),
        "missing tensor": written("missing", {key: value for key, value in tensors.items() if key != name}),
        "unknown tensor": written("unknown", tensors | {"lm_head.bias": bad[0].clone()}),
        "outside": FileOffer(Path("/etc/passwd"), whole.sha256),
    }


def conduct(client: Client, folder: Path, model: Path, *, covey: bool) -> list[tuple[str, bool, str, bool]]:
    """For every update its name, whether it was refused, the version afterwards, and whether the old bits serve on."""
    module = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    requests = requests_for(random_prompts(4, 20, module.config.vocab_size), 2, 24, end_ids=END)

    def sampled(version: str) -> list[list[Completion]]:
        async def all_of_them() -> list[list[Completion]]:
            vocabulary = module.config.vocab_size
            return await asyncio.gather(*(client.generate(one, version, vocabulary, covey=covey) for one in requests))

        return asyncio.run(all_of_them())

    def update(offer: FileOffer, version: str) -> bool:
        """True if it was refused."""
        try:
            asyncio.run(give(client, offer, version, covey=covey))
        except LostServer:
            return True
        return False

    def good(version: str) -> bool:
        with FileTransport(str(folder)).offered(gathered(module, torch.float32), version) as offer:
            return update(offer, version)

    def state(name: str, refused: bool, unchanged: Callable[[], bool]) -> tuple[str, bool, str, bool]:
        return name, refused, json.loads(asyncio.run(client.get(wire.WEIGHT_INFO)))["weight_version"], unchanged()

    found = [state("first", good("first"), lambda: True)]
    before = sampled("first")
    for fault, offer in offers(folder, gathered(module, torch.float32)).items():
        found.append(state(fault, update(offer, fault), lambda: sampled("first") == before))
    # A run that was killed has left its update open.
    asyncio.run(client.post(wire.START, {"weight_version": "left"} if covey else {}))
    change(module)
    found.append(state("second", good("second"), lambda: sampled("second") == before))
    assert float(gaps(module, requests, sampled("second")).abs().mean()) < 2e-5
    return found


def test_v12_both_servers_answer_alike(tmp_path):
    model = tiny_vllm_folder(tmp_path / "model", tied=True)
    weights = tmp_path / "weights"
    weights.mkdir()
    with samplers.serving(model, tmp_path, 1, ["--folder", str(weights)]) as (own,):
        ours = conduct(Client(own.address, samplers.TOKEN, 300.0), weights, model, covey=True)
    with running(model, tmp_path, 8951, weights=weights, **OPTIONS) as server:
        theirs = conduct(Client(server.address, TOKEN, 300.0), weights, model, covey=False)
    assert theirs == ours
    assert [refused for _, refused, *_ in ours] == [False, *[True] * (len(ours) - 2), False]
    assert all(version == "first" and same for _, refused, version, same in ours if refused)
    record("V12", f"{len(ours)} updates, good and bad, on vLLM and on covey serve", "the same answers", "the same")
