"""The work that every contestant is given: prompts of one exact length, and how many tokens to write.

Read by each contestant in its own environment, so it needs torch and transformers, and nothing of covey.
"""

import argparse
import json
import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

WORDS = ("time", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family")


@dataclass(frozen=True)
class Shape:
    """Rollouts of one training step."""

    model: str  # folder
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    device: str = "cpu"
    dtype: str = "bfloat16"  # or float32: what covey chooses on this machine

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def sampled_tokens(self) -> int:
        return self.rows * self.new_tokens


def read_shape() -> Shape:
    """The shape from the command line of a contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", help="JSON")
    return Shape(**json.loads(parser.parse_args().shape))


def make_prompts(shape: Shape, tokenizer: Any) -> list[str]:
    """Distinct texts of exactly `prompt_tokens` tokens: common words, one token each, in random order."""
    rng = random.Random(0)
    texts = []
    for _ in range(shape.prompts):
        text = "The"
        while len(tokenizer(text)["input_ids"]) < shape.prompt_tokens:
            text += " " + rng.choice(WORDS)
        assert len(tokenizer(text)["input_ids"]) == shape.prompt_tokens, text
        texts.append(text)
    return texts


def now() -> float:
    """Seconds of a clock, after everything that was given to a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def report(**numbers: Any) -> None:
    """The contestant's last line, which the benchmark reads. On a GPU, memory is torch's."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps(numbers | {"peak_memory_bytes": peak}), flush=True)
