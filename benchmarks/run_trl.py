"""A step of TRL's GRPOTrainer with its defaults, in covey's precision. Runs in TRL's environment."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from shape import make_prompts, now, read_shape, report
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Seconds of every optimizer step, sampling included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.began)


def main() -> None:
    shape = read_shape()
    torch.set_num_threads(shape.threads)
    tokenizer = AutoTokenizer.from_pretrained(shape.model)
    texts = make_prompts(shape, tokenizer)
    rng = random.Random(1)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=shape.rows,
            num_generations=shape.group_size,
            max_completion_length=shape.new_tokens,
            generation_kwargs={"min_new_tokens": shape.new_tokens},
            max_steps=2,  # the first is given fresh memory
            save_strategy="no",
            report_to=[],
            use_cpu=shape.device == "cpu",
            bf16=shape.dtype == "bfloat16",
            disable_tqdm=True,
        )
        times = StepTimes()
        trainer = GRPOTrainer(
            model=shape.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[times],
        )
        sampling: list[float] = []
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = now()
            outputs = generate(inputs)
            sampling.append(now() - began)
            return outputs

        trainer._generate_and_score_completions = timed
        trainer.train()
    step = times.seconds[1]
    report(sampling_seconds=sampling[1], update_seconds=step - sampling[1], step_seconds=step)


if __name__ == "__main__":
    main()
