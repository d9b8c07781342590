"""What covey needs to know from a GPU that is at hand for a quarter of an hour: correctness, then speed and memory.

    python benchmarks/gpu_session.py results.jsonl --seconds 540                    on the GPU: every stage
    python benchmarks/gpu_session.py results.jsonl --stages sample,update
    python benchmarks/gpu_session.py results.jsonl --tiny                           on a CPU, to try the script

Every stage is a process of its own with a limit of seconds. It writes each number as a line of JSON when it has it, so
a stage that is killed, crashes or runs out of memory loses only what it had not measured. Models are random, in the
shapes of Qwen2.5, built on the GPU in a second: there is no download. TRL is compared if it is installed.

| stage  | answers                                                                                              |
|--------|------------------------------------------------------------------------------------------------------|
| probe  | the machine; rates of matrix products and copies, which are the limits of the others                 |
| check  | the kernels have torch's numbers, in both dtypes                                                     |
| agree  | sampler = update = plain forward pass in a real shape; graphs = single launches; the same bits twice |
| sample | tokens/s with and without the kernels, with lengths as in practice, beside `model.generate`          |
| update | tokens/s and TFLOP/s with and without the kernels, recomputed, beside plain transformers             |
| memory | peaks of whole steps beside `covey plan`: all weights, LoRA, LoRA of 7B                              |
| trl    | a step of TRL on the same work                                                                       |
| flex   | attention of the update: covey's kernels, covey's torch, FlexAttention                               |
| tests  | tests/gpu, as many as fit, and the names of those that fail                                          |
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STAGES = {
    "probe": 20, "check": 60, "agree": 70, "sample": 110, "update": 110, "memory": 60, "trl": 60, "flex": 40,
    "tests": 120,
}  # fmt: skip
LEAST_SECONDS = 15  # a stage that would get less is left out
QWEN = {
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, 151936),
    "7B": (3584, 28, 28, 4, 18944, 152064),
    "tiny": (64, 2, 4, 2, 128, 512),
}
Prompts = list[tuple[int, ...]]


def drive(args: argparse.Namespace) -> None:
    """Run the stages one after the other."""
    began = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.stages.split(",") if args.stages else STAGES:
        left = args.seconds - (time.monotonic() - began)
        seconds = min(STAGES[name] * (5 if args.tiny else 1), left)  # a busy CPU imports slowly
        if seconds < LEAST_SECONDS:
            write(args.out, {"stage": name, "skipped": f"{left:.0f} s are left"})
            continue
        command = [sys.executable, __file__, str(args.out), "--stage", name, "--seconds", str(seconds)]
        start = time.monotonic()
        try:
            found = subprocess.run(
                [*command, *(["--tiny"] if args.tiny else [])], timeout=seconds, stderr=subprocess.PIPE, check=False
            )
            ended, errors = f"exit {found.returncode}", found.stderr if found.returncode else b""
        except subprocess.TimeoutExpired as error:
            ended, errors = "stopped at its limit", error.stderr or b""
        write(args.out, {"stage": name, "ended": ended, "seconds": round(time.monotonic() - start, 1)})
        print(errors.decode(errors="replace")[-1500:], end="", flush=True)


def write(out: Path, line: dict[str, Any]) -> None:
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


class Stage:
    """The device and the time of a stage, and the file for its numbers."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.out, self.name, self.tiny = args.out, args.stage, args.tiny
        self.ends = time.monotonic() + args.seconds - 3
        self.device = torch.device("cpu" if args.tiny else "cuda")
        self.dtype = torch.float32 if args.tiny else torch.bfloat16

    def record(self, what: str, **numbers: Any) -> None:
        rounded = {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in numbers.items()}
        write(self.out, {"stage": self.name, "what": what, **rounded})

    @contextlib.contextmanager
    def part(self, what: str, seconds: float = 0) -> Iterator[None]:
        """A measurement: an error of it is recorded, and the stage goes on. `TimeoutError` if time is short."""
        try:
            if time.monotonic() + seconds > self.ends:
                raise TimeoutError("no time")
            yield
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            self.record(what, failed=f"{type(error).__name__}: {str(error)[:300]}", at=where)
        finally:
            self.free()

    def free(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def memory(self) -> dict[str, float]:
        import torch

        if self.device.type == "cpu":
            return {}
        return {
            "gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }

    def model(self, shape: str, dtype: Any = None) -> Any:
        """A random model whose distributions are far from uniform."""
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        hidden, layers, heads, keys, inner, vocabulary = QWEN["tiny" if self.tiny else shape]
        config = Qwen2Config(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
            intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=shape != "7B",
            max_position_embeddings=32768, eos_token_id=0, pad_token_id=0, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or self.dtype)
        try:
            with torch.device(self.device):
                module = Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if weight.dim() > 1:
                    weight.normal_(std=0.05 if "embed" in name else 1.5 / weight.shape[1] ** 0.5)
        return module.eval()

    def prompts(self, count: int, tokens: int) -> Prompts:
        rng = random.Random(0)
        vocabulary = QWEN["tiny" if self.tiny else "0.5B"][-1]
        return [tuple(rng.randrange(10, vocabulary) for _ in range(tokens)) for _ in range(count)]


@contextlib.contextmanager
def kernels(used: bool) -> Iterator[None]:
    """With covey's kernels, or with torch alone, for the policies that are made within."""
    os.environ["COVEY_NATIVE"] = "1" if used else "0"
    yield
    os.environ["COVEY_NATIVE"] = "1"


def policy_of(module: Any, microbatch: int = 8192) -> Any:
    from covey.llm.policy import LanguagePolicy

    for part in module.modules():  # of a policy before
        vars(part).pop("forward", None)
    return LanguagePolicy(module, microbatch_tokens=microbatch)


def sample(policy: Any, prompts: Prompts, group: int, new: int, ends: frozenset[int] = frozenset()) -> list[Any]:
    from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
    from covey.llm.generation.local_generator import LocalGenerator

    settings = GenerationSettings(
        max_new_tokens=new, temperature=1.0, end_ids=ends, version=0, max_rows=len(prompts) * group
    )
    requests = [GenerationRequest(prompt, group, RandomKey(0, 1, n), settings) for n, prompt in enumerate(prompts)]
    results = LocalGenerator(policy).generate(requests)
    assert all(isinstance(one, list) for one in results), results
    return results


def batch_of(prompts: Prompts, completions: list[Any]) -> Any:
    from covey.data import Group, Rollout, Start, collate

    rng, groups = random.Random(1), []
    for number, (prompt, found) in enumerate(zip(prompts, completions, strict=True)):
        rollouts = [
            Rollout(
                context=prompt, actions=one.tokens, behavior_logprobs=one.logprobs, end=one.end, reward=rng.random()
            )
            for one in found
        ]  # fmt: skip
        groups.append(Group(Start(number, "x"), rollouts))
    return collate(groups)


def invented(prompts: Prompts, group: int, new: int) -> list[Any]:
    """Completions of random tokens, so that an update is measured without sampling."""
    from covey.data import EndReason
    from covey.llm.generation.generator import Completion

    rng = random.Random(2)
    return [
        [
            Completion([rng.randrange(10, 500) for _ in range(new)], [-1.0] * new, EndReason.LENGTH, 0)
            for _ in range(group)
        ]
        for _ in prompts
    ]


def learner_of(policy: Any, trained: Any) -> Any:
    from covey.algorithms import KLPenalty, grpo
    from covey.core.schedules import constant
    from covey.runtime.optimizer import MasterAdamW
    from covey.train.learners import Coefficient, PolicyLearner, UpdatePlan

    algorithm = grpo(kl=KLPenalty(constant(0.0)))
    optimizer = MasterAdamW(trained, lr=1e-6)
    return PolicyLearner(
        policy, optimizer, algorithm, UpdatePlan(), constant(1e-6), Coefficient(algorithm.kl.coefficient)
    )


def train_step(learner: Any, batch: Any, step: int) -> None:
    from covey.train.prepare import prepare_batch
    from covey.train.update import update

    prepared, _ = prepare_batch(batch, learner.policy, learner.algorithm)
    update([learner], prepared, seed=0, step=step)


class Graphs:
    """Counts the steps of decoders and those that are a CUDA graph, and times the graphs."""

    def __init__(self, stage: Stage) -> None:
        from covey.llm.generation.shared_prefix_decoder import GraphedStep

        self.stage, self.steps, self.graphed = stage, 0, 0
        self.events: list[Any] = []
        self.kind, self.call = GraphedStep, GraphedStep.__call__

    def __enter__(self) -> Graphs:
        import torch

        def counted(step: Any, compute: Callable[[], Any]) -> Any:
            self.steps += 1
            self.graphed += step._is_current
            if not step._is_current or self.steps % 8:
                return self.call(step, compute)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            output = self.call(step, compute)
            end.record()
            self.events.append((begin, end))
            return output

        self.kind.__call__ = counted  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self.kind.__call__ = self.call  # type: ignore

    def numbers(self) -> dict[str, Any]:
        self.stage.now()
        times = [begin.elapsed_time(end) for begin, end in self.events]
        return {
            "steps": self.steps,
            "replayed": self.graphed,
            "graph_ms": statistics.median(times) if times else None,
        }


def probe(stage: Stage) -> None:
    import torch
    import transformers

    about: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if stage.device.type == "cuda":
        card = torch.cuda.get_device_properties(stage.device)
        about |= {"gpu": card.name, "gib": card.total_memory / 2**30, "capability": f"{card.major}.{card.minor}"}
    stage.record("machine", cpus=os.cpu_count(), **about)
    with stage.part("rates"):
        size = 256 if stage.tiny else 8192
        a, b = (torch.randn(size, size, device=stage.device, dtype=stage.dtype) for _ in range(2))
        _ = a @ b
        began = stage.now()
        for _ in range(5):
            _ = a @ b
        rate = 5 * 2 * size**3 / (stage.now() - began) / 1e12
        big = torch.empty((1 << 20) if stage.tiny else (1 << 31), dtype=torch.uint8, device=stage.device)
        other = big.clone()
        began = stage.now()
        for _ in range(5):
            other.copy_(big)
        stage.record("rates", matrix_tflops=rate, copy_tb_s=5 * 2 * big.numel() / (stage.now() - began) / 1e12)


def check(stage: Stage) -> None:
    import torch

    from covey.llm.native import triton_kernels

    for dtype in (torch.float32,) if stage.tiny else (torch.bfloat16, torch.float32):
        with stage.part(f"kernels in {dtype}", 10):
            began = stage.now()
            triton_kernels.check(triton_kernels.TritonKernels(dtype), stage.device)
            stage.record(f"kernels in {dtype}", agree=True, seconds=stage.now() - began)


def agree(stage: Stage) -> None:
    """Every `mean` should be below 0.02 nats in bf16, and `k3` below 1e-3."""
    import torch

    new, group, count = (8, 2, 2) if stage.tiny else (96, 16, 4)
    prompts = [prompt[: len(prompt) - n] for n, prompt in enumerate(stage.prompts(count, 16 if stage.tiny else 200))]
    module = stage.model("0.5B").requires_grad_(False)
    policy = policy_of(module)
    stage.record("backend", **policy.backend.recorded())
    ends = frozenset(range(0, module.config.vocab_size, 25))
    for what, end_ids in (("all rows to the end", frozenset()), ("rows that end early", ends)):
        with stage.part(what):
            with Graphs(stage) as graphs:
                found = sample(policy, prompts, group, new, end_ids)
            batch = batch_of(prompts, found)
            with torch.no_grad():
                update = policy.evaluate(batch).logprobs_BT.cpu().double()
            stage.record(what, **gap(batch.behavior_logprobs_BT.double(), update, batch.mask_BT), **graphs.numbers())
    with stage.part("the same bits twice, and with single launches"):
        again = sample(policy, prompts, group, new, ends)
        with Graphs(stage) as graphs:
            graphs.kind.__call__ = lambda self, compute: compute()  # type: ignore
            single = sample(policy, prompts, group, new, ends)
        same = [[one.tokens for one in group] for group in found]
        stage.record(
            "the same bits twice, and with single launches",
            twice=[[one.tokens for one in group] for group in again] == same,
            single=[[one.tokens for one in group] for group in single] == same,
        )
    with stage.part("beside fp32", 10):  # the exact numbers: plain forward passes of transformers
        exact = stage.model("0.5B", torch.float32).requires_grad_(False)
        exact.load_state_dict({name: tensor.float() for name, tensor in module.state_dict().items()})
        logprobs = []
        for kind in (module, exact):
            before, kind.config._attn_implementation = kind.config._attn_implementation, "sdpa"
            rows = [(prompt, one.tokens) for prompt, of in zip(prompts, found, strict=True) for one in of[:2]]
            logprobs.append([plain_logprobs(kind, *row) for row in rows])
            kind.config._attn_implementation = before
        theirs, right = (torch.cat(one).cpu().double() for one in logprobs)
        ours = torch.tensor([x for group in found for one in group[:2] for x in one.logprobs], dtype=torch.float64)
        everywhere = torch.ones(len(right), dtype=torch.bool)
        stage.record("sampler beside fp32", **gap(ours, right, everywhere))
        stage.record("transformers in bf16 beside fp32", **gap(theirs, right, everywhere))
    with stage.part("gradients in fp32", 10):
        few = batch_of(prompts[:2], [one[:3] for one in found[:2]])
        results = []
        for used in (True, False):
            with kernels(used):
                trained = policy_of(exact.requires_grad_(True))
            exact.zero_grad(set_to_none=True)
            trained.evaluate(few).logprobs_BT.sum().backward()
            results.append(torch.cat([weight.grad.flatten() for weight in exact.parameters()]))
        error = float((results[0] - results[1]).norm() / results[1].norm())
        stage.record("gradients in fp32", kernels_beside_torch=error)


def plain_logprobs(module: Any, prompt: tuple[int, ...], tokens: list[int]) -> Any:
    import torch

    fed = torch.tensor([[*prompt, *tokens]], device=module.device)
    with torch.no_grad():
        logp = module(fed[:, :-1]).logits[0, -len(tokens) :].float().log_softmax(1)
    return logp.gather(1, fed[0, -len(tokens) :, None])[:, 0]


def gap(a: Any, b: Any, mask: Any) -> dict[str, float]:
    difference = (a - b)[mask]
    k3 = (difference.neg().exp() - 1 + difference).mean()
    return {"mean": float(difference.abs().mean()), "largest": float(difference.abs().max()), "k3": float(k3)}


def sampling(stage: Stage) -> None:
    import torch

    cases = [("0.5B", 16, 512, 192), ("1.5B", 16, 512, 192), ("7B", 8, 512, 96)]
    group = 2 if stage.tiny else 16
    for shape, count, length, new in [("tiny", 2, 16, 8)] if stage.tiny else cases:
        prompts, rows = stage.prompts(count, length), count * group
        module = stage.model(shape).requires_grad_(False)
        heads = module.config
        token = 4 * heads.num_hidden_layers * heads.hidden_size // heads.num_attention_heads * heads.num_key_value_heads
        read = sum(weight.nbytes for weight in module.parameters()) + rows * new / 2 * token + count * length * token
        ends = frozenset(range(0, heads.vocab_size, max(new // 4, 2)))
        for used in (True, False):
            what = f"{shape}, {'kernels' if used else 'torch'}"
            with stage.part(what, 10):
                with kernels(used):
                    policy = policy_of(module)
                sample(policy, prompts, group, 12)  # kernels are compiled
                with Graphs(stage) as graphs:
                    began = stage.now()
                    sample(policy, prompts, group, new)
                    seconds = stage.now() - began
                began = stage.now()
                mixed = sum(len(one.tokens) for of in sample(policy, prompts, group, new, ends) for one in of)
                stage.record(
                    what, rows=rows, tokens_s=rows * new / seconds, ms_a_token=1e3 * seconds / new,
                    gb_a_token=read / 1e9,
                    tokens_s_of_unequal_lengths=mixed / (stage.now() - began), **graphs.numbers(), **stage.memory(),
                )  # fmt: skip
        if stage.device.type == "cuda" and shape == "1.5B":
            with stage.part("profile of a token", 8):
                with kernels(True):
                    policy = policy_of(module)
                sample(policy, prompts, group, 12)
                profile(stage, policy, prompts, group, 16)
        if shape != "7B":
            with stage.part(f"{shape}, model.generate", 10):
                policy_of(module)
                module.config._attn_implementation = "sdpa"
                inputs, few = (
                    torch.tensor([prompt for prompt in prompts for _ in range(group)], device=stage.device),
                    min(new, 48),
                )
                wanted = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}
                module.generate(inputs, max_new_tokens=2, **wanted)
                began = stage.now()
                module.generate(inputs, max_new_tokens=few, **wanted)
                stage.record(f"{shape}, model.generate", tokens_s=rows * few / (stage.now() - began), **stage.memory())
        del module, policy
        stage.free()


def profile(stage: Stage, policy: Any, prompts: Prompts, group: int, tokens: int) -> None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        sample(policy, prompts, group, tokens)
    events = [event for event in found.key_averages() if event.device_type == DeviceType.CUDA]
    busy = sum(event.self_device_time_total for event in events)
    top = sorted(events, key=lambda event: -event.self_device_time_total)[:10]
    stage.record(
        "profile of a token", kernels=sum(event.count for event in events) / tokens, busy_ms=busy / 1e3 / tokens,
        top={event.key[:60]: round(event.self_device_time_total / 1e3 / tokens, 3) for event in top},
    )  # fmt: skip


def updating(stage: Stage) -> None:
    from covey.llm.model.recompute import recompute_layers

    cases = [("0.5B", 8192, False), ("1.5B", 8192, False), ("1.5B", 16384, True)]
    count, group, length, new = (2, 2, 16, 8) if stage.tiny else (4, 16, 512, 1024)
    prompts = stage.prompts(count, length)
    batch = batch_of(prompts, invented(prompts, group, new))
    few = batch_of(prompts[:1], invented(prompts[:1], 2, new))
    fed = count * (length + group * new)
    for shape, microbatch, recompute in [("tiny", 64, False)] if stage.tiny else cases:
        for used in (True, False):
            what = f"{shape}, {'kernels' if used else 'torch'}{', recomputed' if recompute else ''}"
            with stage.part(what, 12):
                module = stage.model(shape)
                with kernels(used):
                    policy = policy_of(module, microbatch)
                if recompute:
                    recompute_layers(module)
                learner = learner_of(policy, module)
                train_step(learner, few, 1)
                began = stage.now()
                train_step(learner, batch, 2)
                seconds = stage.now() - began
                weights = 6 * sum(weight.numel() for weight in module.parameters())
                attention = 12 * module.config.num_hidden_layers * module.config.hidden_size * (length + new / 2)
                rate = fed * (weights + attention) / seconds / 1e12
                stage.record(what, seconds=seconds, tokens_s=fed / seconds, tflops=rate, **stage.memory())
                del module, policy, learner
        if not recompute:
            with stage.part(f"{shape}, plain transformers", 12):
                stage.record(f"{shape}, plain transformers", seconds=plain_update(stage, shape, prompts, group, new))


def plain_update(stage: Stage, shape: str, prompts: Prompts, group: int, new: int) -> float:
    """Seconds of the update as a script would write it: whole rows, four at a time, bf16 weights, torch's AdamW."""
    import torch

    module = stage.model(shape)
    module.config._attn_implementation = "sdpa"
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=stage.device.type == "cuda")
    made = zip(prompts, invented(prompts, group, new), strict=True)
    rows = torch.tensor([[*prompt, *one.tokens] for prompt, of in made for one in of], device=stage.device)

    def step(part: Any) -> None:
        for piece in part.split(4):
            logits = module(piece[:, :-1], logits_to_keep=new).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), piece[:, -new:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(rows[:4])
    began = stage.now()
    step(rows)
    return stage.now() - began


def memory(stage: Stage) -> None:
    from covey.config.model_sources import LoRAConfig
    from covey.experiment.plan import read_configs
    from covey.llm.memory import predict, read_dimensions
    from covey.llm.model.lora import add_adapter
    from covey.llm.model.recompute import recompute_layers

    cases = [("0.5B", 0, False), ("1.5B", 16, True), ("7B", 16, True)]
    count, group, length, new, microbatch = (2, 2, 16, 8, 64) if stage.tiny else (4, 16, 512, 256, 8192)
    for shape, rank, recompute in [("tiny", 0, False), ("tiny", 2, True)] if stage.tiny else cases:
        what = f"{shape}{f', LoRA of rank {rank}' if rank else ''}{', recomputed' if recompute else ''}"
        with stage.part(what, 12):
            module = stage.model(shape)
            policy = policy_of(module, microbatch)
            peaks = {"start": stage.memory()}
            trained = module
            if recompute:
                recompute_layers(module)
            if rank:
                adapter = add_adapter(module, LoRAConfig(rank=rank), seed=0)
                trained = adapter.parameters
                policy = policy.with_outputs(trained=trained, weights=adapter.weights())
            learner, prompts = learner_of(policy, trained), stage.prompts(count, length)
            for number in (1, 2):
                stage.free()
                found = sample(policy, prompts, group, new)
                peaks["sampling"] = stage.memory()
                stage.free()
                train_step(learner, batch_of(prompts, found), number)
                peaks["update"] = stage.memory()
            words = [
                f"--prompts-per-step={count}", f"--group-size={group}", f"--max-new-tokens={new}",
                f"--microbatch-tokens={microbatch}", f"--lora.rank={rank}",
                f"--update.recompute={str(recompute).lower()}", f"--precision={'fp32' if stage.tiny else 'bf16'}",
            ]  # fmt: skip
            plan = predict(
                read_dimensions(module.config.to_dict(), shape), read_configs(words, ["grpo"], None, None)["grpo"],
                device=stage.device.type, width=stage.dtype.itemsize, prompt_tokens=length,
            )  # fmt: skip
            absent = plan.parts["program"] + (0 if rank else plan.parts["reference"])
            measured = {f"{phase}_{name}": value for phase, of in peaks.items() for name, value in of.items()}
            stage.record(what, predicted_gib=(plan.peak - absent) / 2**30, **measured)
            del module, policy, learner, trained


def trl(stage: Stage) -> None:
    """A step of TRL's own trainer, 4 x 16 rows of 512 + 256 tokens, beside covey's."""
    count, group, length, new = (2, 4, 16, 8) if stage.tiny else (4, 16, 512, 256)
    prompts = stage.prompts(count, length)
    with stage.part("covey", 10):
        module = stage.model("0.5B")
        policy = policy_of(module, 16384)
        learner = learner_of(policy, module)
        for number in (1, 2):
            began = stage.now()
            found = sample(policy, prompts, group, new)
            sampled = stage.now()
            train_step(learner, batch_of(prompts, found), number)
        stage.record("covey", sampling_s=sampled - began, update_s=stage.now() - sampled, **stage.memory())
        del module, policy, learner
    with stage.part("TRL", 20):
        stage.record("TRL", **trl_step(stage, prompts, group, new), **stage.memory())


def trl_step(stage: Stage, prompts: Prompts, group: int, new: int) -> dict[str, float]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    module = stage.model("0.5B")
    module.config._attn_implementation = "sdpa"
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(module.config.vocab_size)}, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="w0", eos_token="w0", unk_token="w1", padding_side="left"
    )
    parts = 1 if stage.tiny else 4
    return trl_seconds(
        module, [" ".join(f"w{i}" for i in one) for one in prompts], tokenizer, stage.now,
        per_device_train_batch_size=len(prompts) * group // parts, gradient_accumulation_steps=parts,
        num_generations=group, max_completion_length=new, use_cpu=stage.device.type == "cpu", bf16=not stage.tiny,
        gradient_checkpointing=False,
    )  # fmt: skip


def trl_seconds(
    model: Any, texts: list[str], tokenizer: Any, now: Callable[[], float], **settings: Any
) -> dict[str, float]:
    """Seconds of the second step of TRL's GRPOTrainer with random rewards; the first is given fresh memory."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rng = random.Random(1)
    seconds: dict[str, list[float]] = {"step": [], "sampling": []}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["step"].append(now() - self.began)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, generation_kwargs={"min_new_tokens": settings["max_completion_length"]}, max_steps=2,
            save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=1e-6, **settings,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=lambda completions, **_: [rng.random() for _ in completions], args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=tokenizer, callbacks=[Steps()],
        )  # fmt: skip
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = now()
            outputs = generate(inputs)
            seconds["sampling"].append(now() - began)
            return outputs

        trainer._generate_and_score_completions = timed
        trainer.train()
    return {"sampling_s": seconds["sampling"][-1], "update_s": seconds["step"][-1] - seconds["sampling"][-1]}


def flex(stage: Stage) -> None:
    """Attention forward and backward at a shape of 1.5B: 5 completions of 1,024 tokens after one prompt of 512."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from covey.llm.model.architecture import AttentionRule
    from covey.llm.model.fused_layers import Attention
    from covey.llm.model.prefix_attention import PackedLayout
    from covey.llm.native.triton_kernels import TritonKernels

    heads, keys, width, rows, prompt, own = (4, 2, 16, 2, 8, 16) if stage.tiny else (12, 2, 128, 5, 512, 1024)
    total = prompt + rows * own
    q, k, v = (
        torch.randn(total, count * width, device=stage.device, dtype=stage.dtype, requires_grad=True)
        for count in (heads, keys, keys)
    )
    layout = PackedLayout(
        [list(range(prompt))], [torch.arange(own) + 1000 * row for row in range(rows)], [0] * rows, stage.device
    )
    of_row = torch.cat([torch.zeros(prompt, dtype=torch.int64), 1 + torch.arange(rows).repeat_interleave(own)])
    of_row = of_row.to(stage.device)

    def allowed(_: Any, __: Any, i: Any, j: Any) -> Any:  # the prefix tree
        return (i >= j) & ((of_row[j] == 0) | (of_row[i] == of_row[j]))

    def by_head(x: Any) -> Any:
        return x.unflatten(1, (-1, width)).transpose(0, 1)

    no_rotation = (torch.ones(total, width, device=stage.device, dtype=stage.dtype), torch.zeros_like(q[:, :width]))
    native, scale = TritonKernels(stage.dtype), width**-0.5
    rule = AttentionRule(scale)
    ways: dict[str, Callable[[], Any]] = {
        "covey's kernels": lambda: Attention.apply(q, k, v, no_rotation, layout.sequences, rule, native),
        "covey with torch": lambda: layout.attend(0, by_head(q), by_head(k), by_head(v), scale).flatten(1),
    }
    with stage.part("mask of FlexAttention"):
        mask = create_block_mask(allowed, None, None, total, total, device=str(stage.device))
        attend = flex_attention if stage.tiny else torch.compile(flex_attention, dynamic=False)
        ways["FlexAttention"] = lambda: attend(
            by_head(q)[None], by_head(k)[None], by_head(v)[None], block_mask=mask, enable_gqa=True
        )[0].transpose(0, 1).flatten(1)  # fmt: skip
    first = None
    for what, way in ways.items():
        with stage.part(what, 8):
            out = way()
            out.sum().backward()
            first = out.detach() if first is None else first
            began = stage.now()
            for _ in range(1 if stage.tiny else 10):
                way().sum().backward()
            ms = 1e3 * (stage.now() - began) / (1 if stage.tiny else 10)
            stage.record(what, ms=ms, differs_from_the_first=float((out.detach() - first).abs().max()))


def tests(stage: Stage) -> None:
    """The file of results is read even if the time ends."""
    root, log = Path(__file__).parents[1], stage.out.with_suffix(".tests.txt")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-n",
        "12",
        "--dist",
        "worksteal",
        "-v",
        "--timeout",
        "60",
    ]
    with open(log, "w", encoding="utf-8") as file, contextlib.suppress(subprocess.TimeoutExpired):
        limit = stage.ends - time.monotonic() - 2
        subprocess.run(command, cwd=root, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ended = {
        word: sorted({line.split()[-1] for line in lines if f" {word} " in f" {line} " and "::" in line})
        for word in ("PASSED", "FAILED", "ERROR")
    }
    stage.record(
        "tests/gpu", passed=len(ended["PASSED"]), failed=ended["FAILED"][:20], errors=ended["ERROR"][:20],
        reasons=[line[:200] for line in lines if line.startswith("E  ")][:12],
    )  # fmt: skip


RUN: dict[str, Callable[[Stage], None]] = {
    "probe": probe, "check": check, "agree": agree, "sample": sampling, "update": updating, "memory": memory,
    "trl": trl, "flex": flex, "tests": tests,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of results, to which lines are appended")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all stages")
    parser.add_argument("--stages", default="", help="names, separated by commas; all by default")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try this script")
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        RUN[args.stage](Stage(args))
    else:
        drive(args)


if __name__ == "__main__":
    main()
