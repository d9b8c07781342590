"""transformers' `model.generate` in covey's precision with its default cache: the sampler that most trainers use."""

import torch
from shape import make_prompts, now, read_shape, report
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    shape = read_shape()
    torch.set_num_threads(shape.threads)
    tokenizer = AutoTokenizer.from_pretrained(shape.model)
    model = AutoModelForCausalLM.from_pretrained(shape.model, dtype=shape.dtype).eval().to(shape.device)
    texts = [text for text in make_prompts(shape, tokenizer) for _ in range(shape.group_size)]
    inputs = tokenizer(texts, return_tensors="pt").to(shape.device)

    def generate(new_tokens: int) -> float:
        began = now()
        model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        )  # fmt: skip
        return now() - began

    generate(4)  # warm-up
    generate(shape.new_tokens)  # the first of this size is given fresh memory
    report(sampling_seconds=generate(shape.new_tokens))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
