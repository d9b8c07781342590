"""What is the same with covey's kernels and without them (no compiler, or `COVEY_NATIVE=0`), in fp32 and in bf16.

    .venv/bin/python benchmarks/without_kernels.py        some minutes on two cores; 5 GB of disk for the gradients

Each way of computing runs twice, in processes of their own. All of them evaluate the same answers, which the first one
sampled. Greedy answers are to held-out problems of the task of `covey train arithmetic_grpo`, sampled ones to problems
of its first step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.algorithms import KLPenalty, grpo
from covey.core import schedules
from covey.data import EndReason, Group, Rollout, collate
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.gguf import EMBEDDED
from covey.llm.model.loading import load_model
from covey.llm.native.bindings import SWITCH
from covey.llm.policy import LanguagePolicy
from covey.llm.rewards.numbers import digits, numeric
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import Arithmetic
from covey.runtime.device import set_threads
from covey.runtime.optimizer import MasterAdamW, StepResult
from covey.tracking.statistics import accuracy
from covey.train.learners import Coefficient, PolicyLearner, UpdatePlan
from covey.train.prepare import prepare_batch
from covey.train.update import update

PROMPTS, GROUP_SIZE, NEW_TOKENS, SEED = 16, 8, 14, 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = [f"{precision} {way}{again}" for precision in DTYPES for way in ("kernels", "torch") for again in ("", " again")]
PAIRS = [
    *((way, f"{way} again") for way in WAYS if not way.endswith("again")),
    *((f"{precision} kernels", f"{precision} torch") for precision in DTYPES),
    *((f"bf16 {way}", "fp32 torch") for way in ("kernels", "torch")),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--problems", type=int, default=256, help="held-out problems that are answered")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        set_threads(options.threads)
        compute(options.way, options.folder, options.problems)
        return
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            switch = {SWITCH: "0"} if "torch" in way else {}
            command = [sys.executable, __file__, "--threads", str(options.threads), "--problems", str(options.problems)]
            subprocess.run([*command, "--way", way, "--folder", folder], env=os.environ | switch, check=True)
        for one, other in PAIRS:
            print(f"{one} and {other}: {compare(Path(folder), one, other)}", flush=True)


def compute(way: str, folder: Path, problems: int) -> None:
    """Write the answers, log-probabilities and gradient of one way."""
    loaded = load_model(EMBEDDED, dtype=DTYPES[way[:4]], device=torch.device("cpu"))
    policy = LanguagePolicy(loaded.module)
    task = Arithmetic(digits=(2,), operators=("+", "-"))
    greedy = LanguageSampler(LocalGenerator(policy), loaded.chat, SEED, NEW_TOKENS, temperature=0).sample(
        task.held_out(problems), 1, 0
    )
    sampled = LanguageSampler(LocalGenerator(policy), loaded.chat, SEED, NEW_TOKENS).sample(
        task.draw(SEED, 1, PROMPTS), GROUP_SIZE, 1
    )
    held_out = accuracy([numeric([g.rollouts[0].text], answer=[g.start.columns["answer"]])[0] for g in greedy])
    print(f"{way}: held-out accuracy {held_out['score']:.1%} ({held_out['low']:.1%} to {held_out['high']:.1%})")
    told = {"greedy": actions_of(greedy), "sampled": actions_of(sampled)}
    (folder / f"{way}.json").write_text(json.dumps(told))
    given = folder / f"{WAYS[0]}.json"  # what the first way sampled, to be evaluated by all
    batch = collate([answered(loaded.chat, group, json.loads(given.read_text())["sampled"]) for group in sampled])
    with torch.no_grad():
        logprobs_N = policy.evaluate(batch).logprobs_BT[batch.mask_BT].float()
    algorithm = grpo(kl=KLPenalty())
    batch, _ = prepare_batch(batch, policy, algorithm)
    recorder = Recorder(policy)
    kl_coefficient = Coefficient(algorithm.kl.coefficient)
    learner = PolicyLearner(policy, recorder, algorithm, UpdatePlan(), schedules.constant(1.0), kl_coefficient)
    update([learner], batch, seed=SEED, step=1)
    save_file({"logprobs": logprobs_N, "gradient": recorder.gradient}, folder / f"{way}.safetensors")


def actions_of(groups: list[Group]) -> list[list[int]]:
    return [list(map(int, rollout.actions)) for group in groups for rollout in group.rollouts]


def answered(chat: Any, group: Group, sampled: list[list[int]]) -> Group:
    """The group with the answers that are evaluated, and the rewards of the recipe."""
    rollouts = []
    for number, rollout in enumerate(group.rollouts):
        tokens = sampled[group.start.index * GROUP_SIZE + number]
        text, answer = chat.decode(tokens), [group.start.columns["answer"]]
        reward = numeric([text], answer=answer)[0] + digits([text], answer=answer)[0]
        rollouts.append(Rollout(rollout.context, tokens, [0.0] * len(tokens), EndReason.STOP, reward=reward))
    return Group(group.start, rollouts)


class Recorder(MasterAdamW):
    """Keeps the gradient and changes nothing."""

    def __init__(self, policy: LanguagePolicy) -> None:
        self.policy = policy
        self.gradient = torch.empty(0)

    def step(self, learning_rate: float) -> StepResult:
        parts = [weight.grad.float().flatten() for weight in self.policy.module.parameters() if weight.grad is not None]
        self.gradient = torch.cat(parts)
        return StepResult(float(self.gradient.norm()), applied=False)


def compare(folder: Path, one: str, other: str) -> str:
    """What is the same in two ways, and how far apart the rest is."""
    ours, theirs = (json.loads((folder / f"{way}.json").read_text()) for way in (one, other))
    a, b = (load_file(folder / f"{way}.safetensors") for way in (one, other))
    answers = ", ".join(f"{kind} answers {agreement(ours[kind], theirs[kind])}" for kind in ours)
    gap_N = (a["logprobs"] - b["logprobs"]).abs()
    logprobs = f"mean {gap_N.mean():.1e}, most {gap_N.max():.1e} nats apart" if gap_N.any() else "bitwise the same"
    return f"{answers}; log-probabilities {logprobs}; gradient {distance(a['gradient'], b['gradient'])}"


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many answers are the same, and after how many tokens the others part."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one != other]
    alike = [sum(takewhile(bool, map(int.__eq__, one, other))) for one, other in pairs]
    where = f" (the others part after {median(alike):g} tokens in the median)" if alike else ""
    return f"{len(ours) - len(pairs)} of {len(ours)} the same{where}"


def distance(ours: Tensor, theirs: Tensor) -> str:
    if torch.equal(ours, theirs):
        return "bitwise the same"
    ours, theirs = ours.double(), theirs.double()
    norm, vector = float(ours.norm() / theirs.norm()) - 1, float((ours - theirs).norm() / theirs.norm())
    return f"apart by {vector:.1e} of its norm, its norm {norm:+.1e}"


if __name__ == "__main__":
    main()
