"""Sampling completions of very different lengths beside completions of one length: what stragglers cost.

    .venv/bin/python benchmarks/uneven.py          64 rows of 8 to 512 tokens, and 64 rows of their mean; some minutes

Both write the same number of tokens, in turn, in one process; the figure is a ratio of their rates.
"""

import random
import time

import torch
from shape import Shape, make_prompts

from covey.llm.generation.token_sampling import sample_tokens
from covey.llm.model.gguf import EMBEDDED
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.runtime.device import choose_precision, keep_freed_memory, set_threads

PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 100
SHORTEST, LONGEST = 8, 512
ROUNDS = 3


def main() -> None:
    threads = set_threads(0)
    keep_freed_memory()
    device = torch.device("cpu")
    loaded = load_model(EMBEDDED, dtype=choose_precision("auto", device), device=device)
    shape = Shape(loaded.source, PROMPTS, GROUP_SIZE, PROMPT_TOKENS, LONGEST, threads)
    prompts = [list(loaded.chat.tokenizer(text)["input_ids"]) for text in make_prompts(shape, loaded.chat.tokenizer)]
    policy = LanguagePolicy(loaded.module)
    last = shape.rows - 1
    uneven = [SHORTEST + (LONGEST - SHORTEST) * row // last for row in range(shape.rows)]
    random.Random(0).shuffle(uneven)
    even = [sum(uneven) // shape.rows] * shape.rows
    tokens_per_second(policy, prompts, [4] * shape.rows)  # warm-up
    for number in range(1, ROUNDS + 1):
        of_even, of_uneven = (tokens_per_second(policy, prompts, lengths) for lengths in (even, uneven))
        print(
            f"round {number} of {ROUNDS}: {of_even:,.0f} tokens/s at {even[0]} tokens each, {of_uneven:,.0f} at "
            f"{SHORTEST} to {LONGEST}: {of_uneven / of_even:.0%}",
            flush=True,
        )


def tokens_per_second(policy: LanguagePolicy, prompts: list[list[int]], lengths: list[int]) -> float:
    """Decode until every row has its length; rows that have it leave, as in `LanguageSampler`."""
    began = time.perf_counter()
    decoder = policy.backend.decoder(policy.module, len(lengths), LONGEST)
    logits_RV = decoder.prefill(prompts, GROUP_SIZE).repeat_interleave(GROUP_SIZE, dim=0)
    left_R = torch.tensor(lengths)
    while True:
        tokens_R, _ = sample_tokens(
            logits_RV, torch.rand(len(left_R), dtype=torch.float64), 1.0, policy.backend.kernels
        )
        left_R = left_R - 1
        stay = (left_R > 0).nonzero()[:, 0]
        if not len(stay):
            return sum(lengths) / (time.perf_counter() - began)
        if len(stay) < len(left_R):
            decoder.select(stay)
            tokens_R, left_R = tokens_R[stay], left_R[stay]
        logits_RV = decoder.step(tokens_R)


if __name__ == "__main__":
    main()
