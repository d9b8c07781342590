"""One GRPO step of covey: its own sampler, annotation and update, as in training, with random rewards."""

import random

import torch
from gpu_session import learner_of, train_step
from shape import make_prompts, now, read_shape, report

from covey.data import Start, collate
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.runtime.device import choose_device, choose_precision, keep_freed_memory, set_threads


def main() -> None:
    shape = read_shape()
    set_threads(shape.threads)
    keep_freed_memory()
    device = choose_device(shape.device)
    loaded = load_model(shape.model, dtype=choose_precision("auto", device), device=device)
    loaded.chat.end_ids = frozenset()  # every completion has the full length
    policy = LanguagePolicy(loaded.module)
    learner = learner_of(policy, loaded.module)
    starts = [Start(i, text) for i, text in enumerate(make_prompts(shape, loaded.chat.tokenizer))]
    rng = random.Random(1)

    def step(number: int, new_tokens: int) -> tuple[float, float]:
        began = now()
        sampler = LanguageSampler(LocalGenerator(policy), loaded.chat, 0, new_tokens)
        groups = sampler.sample(starts, shape.group_size, number)
        sampled = now()
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = rng.random()
        train_step(learner, collate(groups), number)
        return sampled - began, now() - sampled

    step(1, 4)  # warm-up
    step(2, shape.new_tokens)  # the first of this size is given fresh memory, which costs time on its own
    sampling, updating = step(3, shape.new_tokens)
    report(sampling_seconds=sampling, update_seconds=updating, step_seconds=sampling + updating)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
