"""A step of TRL's GRPOTrainer with its defaults, in covey's precision. Runs in TRL's environment."""

import torch
from gpu_session import trl_seconds
from shape import make_prompts, now, read_shape, report
from transformers import AutoTokenizer


def main() -> None:
    shape = read_shape()
    torch.set_num_threads(shape.threads)
    tokenizer = AutoTokenizer.from_pretrained(shape.model)
    found = trl_seconds(
        shape.model,
        make_prompts(shape, tokenizer),
        tokenizer,
        now,
        per_device_train_batch_size=shape.rows,
        num_generations=shape.group_size,
        max_completion_length=shape.new_tokens,
        use_cpu=shape.device == "cpu",
        bf16=shape.dtype == "bfloat16",
    )
    sampling, update = found["sampling_s"], found["update_s"]
    report(sampling_seconds=sampling, update_seconds=update, step_seconds=sampling + update)


if __name__ == "__main__":
    main()
