"""The update as one writes it on top of transformers: every rollout with its own prompt, autocast, AdamW.

It is cast to bf16 if covey chooses bf16 on this machine.
"""

import torch
from shape import make_prompts, now, read_shape, report
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = 16  # in one forward and backward


def main() -> None:
    shape = read_shape()
    torch.set_num_threads(shape.threads)
    tokenizer = AutoTokenizer.from_pretrained(shape.model)
    model = AutoModelForCausalLM.from_pretrained(shape.model, dtype=torch.float32).eval().to(shape.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    texts = [text for text in make_prompts(shape, tokenizer) for _ in range(shape.group_size)]
    prompts = tokenizer(texts, return_tensors="pt")["input_ids"].to(shape.device)

    def update(new_tokens: int) -> float:
        completions = torch.randint(len(tokenizer), (shape.rows, new_tokens), device=shape.device)
        advantages = torch.randn(shape.rows, 1, device=shape.device)
        began = now()
        for rows in torch.arange(shape.rows).split(ROWS):
            tokens = torch.cat([prompts[rows], completions[rows]], dim=1)
            with torch.autocast(shape.device, dtype=torch.bfloat16, enabled=shape.dtype == "bfloat16"):
                logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=new_tokens).logits
            logp = logits.float().log_softmax(2).gather(2, completions[rows][..., None])[..., 0]
            (-(logp * advantages[rows]).sum() / completions.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return now() - began

    update(4)  # warm-up
    update(shape.new_tokens)  # the first of this size is given fresh memory
    report(update_seconds=update(shape.new_tokens))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
