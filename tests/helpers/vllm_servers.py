"""Real vLLM servers for the tests of `make scale`, and what is asked of them."""

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.weights import FileTransport, Transport, gathered, give
from covey_vllm.launcher import VllmProcess, VllmSettings
from helpers.tiny_models import CHARACTERS, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".scale-venv" / "bin" / "python"
TOKEN = "a-token-for-tests"
TIMEOUT_SECONDS = 600.0

FIGURES: list[tuple[str, str, str, str]] = []  # number of the test, what, criterion, measured


def record(test: str, what: str, criterion: str, measured: str) -> None:
    """Add a row to the table that `make scale` prints at its end."""
    FIGURES.append((test, what, criterion, measured))


@dataclass(frozen=True)
class RunningVllm:
    """A server that has started."""

    process: VllmProcess
    settings: VllmSettings
    folder: Path  # of the model
    weights: Path  # below which files with weights are read
    start_seconds: float

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def client(self) -> Client:
        return Client(self.address, TOKEN, TIMEOUT_SECONDS)

    def post(self, route: str, body: dict[str, Any]) -> Any:
        return json.loads(asyncio.run(self.client.post(route, body, 1 << 28)) or "null")

    def get(self, route: str) -> Any:
        return json.loads(asyncio.run(self.client.get(route)) or "null")

    def tokens_generated(self) -> float:
        """Tokens that the server has generated since its start."""
        request = urllib.request.Request(f"{self.address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))

    def update(self, module: nn.Module, version: str, transport: Transport | None = None) -> None:
        """Give a module's weights to the server, as a run does; by a file if no transport is given."""
        transport = transport or FileTransport(str(self.weights))
        with transport.offered(gathered(module, module.dtype), version) as offer:
            asyncio.run(give(self.client, offer, version, covey=False))

    def raw(
        self, requests: Sequence[GenerationRequest], salt: str = "", at_once: int = 64, *, ignore_eos: bool = False
    ) -> list[dict[str, Any]]:
        """The answers to requests, many at once."""
        return asyncio.run(self._raw(requests, salt, at_once, ignore_eos))

    async def _raw(
        self, requests: Sequence[GenerationRequest], salt: str, at_once: int, ignore_eos: bool
    ) -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(at_once)

        async def ask(request: GenerationRequest) -> dict[str, Any]:
            body = wire.request_body(request, salt or "tests", covey=False)
            body["sampling_params"]["ignore_eos"] = ignore_eos
            if not salt:
                del body["cache_salt"]
            async with limit:
                content = await self.client.post(wire.GENERATE, body, wire.answer_bytes(request))
            answer: dict[str, Any] = json.loads(content)
            return answer

        return await asyncio.gather(*map(ask, requests))

    def sample(self, requests: Sequence[GenerationRequest], **options: Any) -> list[list[Completion]]:
        """The completions of requests, whatever the version of the weights that they are from."""
        return [read(answer) for answer in self.raw(requests, **options)]


def read(answer: dict[str, Any]) -> list[Completion]:
    """The completions in an answer, which need not end or be of one version."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [
        Completion(
            choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]],
            choice["finish_reason"], 0,
        )
        for choice in choices
    ]  # fmt: skip


def spans(answer: dict[str, Any]) -> list[list[tuple[str, int, int]]]:
    """Of every completion the versions that wrote it, with first and last + 1 token."""
    return [
        [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        for choice in answer["choices"]
    ]


def requests_for(
    prompts: Sequence[Sequence[int]], completions: int, tokens: int, *, temperature: float = 1.0,
    end_ids: frozenset[int] = frozenset(), seed: int = 7,
) -> list[GenerationRequest]:  # fmt: skip
    """Requests with a key of their own each."""
    settings = GenerationSettings(tokens, temperature, end_ids, 0)
    return [
        GenerationRequest(tuple(prompt), completions, RandomKey(seed, 1, number), settings)
        for number, prompt in enumerate(prompts)
    ]


def random_prompts(count: int, tokens: int, vocabulary: int, *, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count, tokens), generator=generator).tolist()


@torch.no_grad()
def forward_logprobs(module: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probability of every token, by the model's own forward pass of transformers, in nats."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = module(input_ids=ids[:, :-1]).logits[0, -len(tokens) :].float()
    return logits.log_softmax(-1).gather(1, ids[0, -len(tokens) :, None])[:, 0]


def gaps(
    module: nn.Module, requests: Sequence[GenerationRequest], sampled: Sequence[Sequence[Completion]]
) -> torch.Tensor:
    """log p of the forward pass minus log p of the server, of every token."""
    return torch.cat(
        [
            forward_logprobs(module, request.prompt, one.tokens) - torch.tensor(one.logprobs)
            for request, found in zip(requests, sampled, strict=True)
            for one in found
        ]
    )


@torch.no_grad()
def change(module: nn.Module, noise: float = 0.05, seed: int = 5) -> None:
    """Multiply every weight by 1 + noise * N(0, 1), in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        factor = 1 + noise * torch.randn(parameter.shape, generator=generator)
        parameter.copy_((parameter.float() * factor).to(parameter.dtype))


@contextmanager
def running(
    folder: Path, scratch: Path, port: int, *, python: Path = PYTHON, weights: Path | None = None, **options: Any
) -> Iterator[RunningVllm]:
    """Context manager of a vLLM server that has started.

    Args:
        folder: of the model.
        scratch: for its token, its output and its weights.
        port: at 127.0.0.1.
        python: interpreter of vLLM's environment.
        weights: folder for weights; None: one of its own.
        options: of `VllmSettings`.
    """
    assert PYTHON.exists(), "these tests need .scale-venv: `make scale` creates it and runs them"
    token = scratch / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    weights = weights or scratch / f"weights-{port}"
    weights.mkdir(exist_ok=True)
    settings = VllmSettings(
        python, folder, "127.0.0.1", port, token, [weights], **{"precision": "fp32", "kv_gib": 1} | options
    )
    with VllmProcess(settings, scratch / f"{port}.log") as process:
        seconds = process.wait_until(lambda: is_up(port), print)
        yield RunningVllm(process, settings, folder, weights, seconds)


def tiny_vllm_folder(folder: Path, *, tied: bool) -> Path:
    """A random Llama whose heads are large enough for vLLM's attention on CPUs."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 3, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def refusal(call: Any) -> str:
    """The message of the LostServer that a call raises."""
    try:
        call()
    except LostServer as error:
        return str(error)
    raise AssertionError("the server did not refuse")


def workers_of(process: VllmProcess) -> list[int]:
    """Process ids of the engine's workers, which do the computation."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                session = os.getsid(int(entry.name))
            except OSError:
                continue
            if session == process.process.pid and command.startswith(b"VLLM::Worker"):
                found.append(int(entry.name))
    return found
