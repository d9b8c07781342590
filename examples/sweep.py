"""The effect of group size and clip range: an exercise of articles, with several seeds for each setting.

    .venv/bin/python examples/sweep.py                      a tiny random model, about a minute
    .venv/bin/python examples/sweep.py --model smollm2-135m  the embedded model on one-digit sums, much longer

Every step samples the same number of answers: a larger group means fewer prompts. Each step makes several passes over
its answers, because with one pass the ratio is 1 and nothing is clipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed

from covey import GRPOTrainer
from covey.llm.rewards.numbers import digits
from covey.llm.tasks import Arithmetic
from covey.tracking.statistics import mean_fraction

TINY = "tiny"
CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
ANSWERS_PER_STEP = 32
LAST = 5  # steps at the end whose mean reward is reported


def tiny_model(seed: int) -> tuple[Any, Any]:
    """A random decoder of two layers, and a tokenizer of single characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return AutoModelForCausalLM.from_config(config), PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    """Reward of the tiny setting: the fraction of the characters of an answer that are digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer_for(model: str, group_size: int, clip_epsilon: float, steps: int, seed: int) -> GRPOTrainer:
    """A trainer of one setting, with a new model, because the trainer changes it in place."""
    shared: dict[str, Any] = {
        "kl_beta": 0.0, "epochs": 4, "steps": steps, "seed": seed, "prompts_per_step": ANSWERS_PER_STEP // group_size
    }  # fmt: skip
    if model == TINY:
        module, tokenizer = tiny_model(seed)
        return GRPOTrainer(
            module, None, group_size, clip_epsilon, tokenizer=tokenizer, reward_function=share_of_digits,
            prompts=[f"{a}+{b}=" for a in range(4) for b in range(4)], max_new_tokens=8, learning_rate=2e-3, **shared,
        )  # fmt: skip
    return GRPOTrainer(
        model, None, group_size, clip_epsilon, reward_function=digits, prompts=Arithmetic(digits=(1,)),
        max_new_tokens=12, learning_rate=1e-5, **shared,
    )  # fmt: skip


def sweep(
    model: str, group_sizes: Sequence[int], clip_epsilons: Sequence[float], steps: int, seeds: int
) -> list[dict[str, Any]]:
    """Train every setting with every seed and print a row for each setting."""
    print(f"{model}, {steps} steps of {ANSWERS_PER_STEP} answers, {seeds} seeds; reward: mean of the last {LAST} steps")
    print("group size  clip epsilon  reward (95 % interval)  clipped  dead groups  seconds a run")
    rows = []
    for group_size in group_sizes:
        for clip_epsilon in clip_epsilons:
            began = time.perf_counter()
            runs = [trainer_for(model, group_size, clip_epsilon, steps, seed).train() for seed in range(seeds)]
            seconds = (time.perf_counter() - began) / seeds
            rewards = [fmean(metrics["reward/mean"] for metrics in run[-LAST:]) for run in runs]
            estimate = mean_fraction(rewards)  # a reward is between 0 and 1
            low, high = estimate["low"], estimate["high"]
            every = [metrics for run in runs for metrics in run]
            clipped = fmean(metrics["clip/low"] + metrics["clip/high"] for metrics in every)
            dead = fmean(metrics["groups/zero_advantage_fraction"] for metrics in every)
            print(
                f"{group_size:10}  {clip_epsilon:12g}  {fmean(rewards):6.3f} ({low:.3f} to {high:.3f})  {clipped:7.1%}"
                f"  {dead:11.1%}  {seconds:13.1f}",
                flush=True,
            )
            rows.append({"group_size": group_size, "clip_epsilon": clip_epsilon, "reward": fmean(rewards)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="tiny, or a name or folder that covey knows")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--clip-epsilons", type=float, nargs="+", default=[0.05, 0.2, 0.5])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for group_size in given.group_sizes:
        if group_size < 2 or ANSWERS_PER_STEP % group_size:
            parser.error(f"--group-sizes: {ANSWERS_PER_STEP} answers a step cannot be groups of {group_size}")
    sweep(given.model, given.group_sizes, given.clip_epsilons, given.steps, given.seeds)


if __name__ == "__main__":
    main()
