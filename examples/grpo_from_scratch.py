"""GRPO in one file: train a language model to add, without covey's training loop.

    .venv/bin/python examples/grpo_from_scratch.py

The loop at the bottom has five steps: draw prompts, sample several answers to each, score the answers, compare each
answer with the others to its prompt, and make the better ones more likely. covey's trainer does the same several times
faster; this file uses only its model loader and its generator of problems.

Shapes: N prompts, G answers to each, B = N * G rows, P prompt tokens, T answer tokens, V vocabulary.
"""

from __future__ import annotations

import re
import time

import torch
from torch import Tensor

from covey.llm.model.loading import load_model
from covey.llm.tasks import Arithmetic

PROMPTS = 8  # N
GROUP = 8  # G
ANSWER_TOKENS = 12  # T
STEPS = 30
LEARNING_RATE = 2e-5
CLIP = 0.2
KL_WEIGHT = 0.01  # coefficient of the KL to the initial model


def sample(model: torch.nn.Module, prompts: list[list[int]], end: int) -> tuple[Tensor, Tensor, Tensor]:
    """G answers to every prompt, one token at a time.

    Returns tokens_BL (prompt padded on the left, then the answer), attention_BL (1 where a token is real) and
    decided_BT (True for the answer's tokens up to its end token).
    """
    width = max(len(prompt) for prompt in prompts)
    tokens_BL = torch.tensor([[0] * (width - len(p)) + p for p in prompts]).repeat_interleave(GROUP, dim=0)
    attention_BL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(
        GROUP, dim=0
    )
    running_B = torch.ones(len(tokens_BL), dtype=torch.bool)
    decided, cache, fed_BL = [], None, tokens_BL
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            positions_BL = (attention_BL.cumsum(1) - 1).clamp(min=0)[:, -fed_BL.shape[1] :]
            output = model(fed_BL, attention_mask=attention_BL, position_ids=positions_BL, past_key_values=cache)
            cache = output.past_key_values
            probabilities_BV = output.logits[:, -1].float().softmax(-1)
            fed_BL = torch.multinomial(probabilities_BV, 1)
            tokens_BL = torch.cat([tokens_BL, fed_BL], dim=1)
            attention_BL = torch.cat([attention_BL, torch.ones_like(fed_BL)], dim=1)
            decided.append(running_B)
            running_B = running_B & (fed_BL[:, 0] != end)
            if not running_B.any():
                break
    return tokens_BL, attention_BL, torch.stack(decided, dim=1)


def logprobs_of(model: torch.nn.Module, tokens_BL: Tensor, attention_BL: Tensor, length: int) -> Tensor:
    """Log-probability of each of the last `length` tokens, given all before it."""
    positions_BL = (attention_BL.cumsum(1) - 1).clamp(min=0)
    output = model(
        tokens_BL[:, :-1], attention_mask=attention_BL[:, :-1], position_ids=positions_BL[:, :-1], logits_to_keep=length
    )
    logprobs_BTV = output.logits.float().log_softmax(-1)
    return logprobs_BTV.gather(2, tokens_BL[:, -length:, None])[:, :, 0]


def score(text: str, answer: str) -> float:
    """1 for the right number, less for a near miss, so that a group of wrong answers still has different rewards."""
    numbers = re.findall(r"-?\d+", text)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer))) if numbers else 0.0


def advantages_of(rewards_NG: Tensor) -> Tensor:
    """Z-score of each reward within its group (DeepSeekMath, section 4.1.2)."""
    mean_N1 = rewards_NG.mean(dim=1, keepdim=True)
    std_N1 = rewards_NG.std(dim=1, keepdim=True, correction=0)
    return (rewards_NG - mean_N1) / (std_N1 + 1e-6)


def grpo_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, reference_BT: Tensor, advantage_B: Tensor, decided_BT: Tensor
) -> Tensor:
    """The negated clipped objective with the KL to the reference (DeepSeekMath, eq. 3 and 4), to be minimised."""
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    advantage_B1 = advantage_B[:, None]
    gain_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
    log_x_BT = reference_BT - logprobs_BT
    kl_BT = log_x_BT.exp() - log_x_BT - 1
    per_row_B = ((gain_BT - KL_WEIGHT * kl_BT) * decided_BT).sum(1) / decided_BT.sum(1)
    return -per_row_B.mean()


def main() -> None:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    # fp32 weights, because bf16 would round small updates away; the matrix products run in bf16 under autocast.
    policy = load_model("smollm2-135m", dtype=torch.float32, device=cpu)
    model, chat = policy.module.eval(), policy.chat
    reference = load_model("smollm2-135m", dtype=torch.bfloat16, device=cpu).module.eval()
    writer = load_model("smollm2-135m", dtype=torch.bfloat16, device=cpu).module.eval()  # a bf16 copy that samples
    (end,) = chat.end_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    task = Arithmetic(digits=(2,), operators=("+",))

    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        # 1. Draw prompts.
        starts = task.draw(seed=0, step=step, count=PROMPTS)
        prompts = [list(chat.encode(start.prompt)) for start in starts]
        # 2. Sample several answers to each prompt.
        for copied, parameter in zip(writer.parameters(), model.parameters(), strict=True):
            copied.data.copy_(parameter.data)
        tokens_BL, attention_BL, decided_BT = sample(writer, prompts, end)
        length = decided_BT.shape[1]
        # 3. Score every answer.
        answers_BT = tokens_BL[:, -length:]
        texts = [chat.decode(row[mask].tolist()) for row, mask in zip(answers_BT, decided_BT, strict=True)]
        gold = [str(start.columns["answer"]) for start in starts for _ in range(GROUP)]
        rewards_B = torch.tensor([score(text, answer) for text, answer in zip(texts, gold, strict=True)])
        # 4. Compare each answer with the others to its prompt.
        advantage_B = advantages_of(rewards_B.view(PROMPTS, GROUP)).flatten()
        # 5. Make the better ones more likely. With one step for each sampling the old policy is the current one.
        with torch.no_grad():
            reference_BT = logprobs_of(reference, tokens_BL, attention_BL, length)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs_BT = logprobs_of(model, tokens_BL, attention_BL, length)
            loss = grpo_loss(logprobs_BT, logprobs_BT.detach(), reference_BT, advantage_B, decided_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        right = (rewards_B == 1).float().mean()
        seconds = time.perf_counter() - began
        print(f"step {step:2}/{STEPS}  right {right:6.1%}  reward {rewards_B.mean():.3f}  {seconds:4.1f} s", flush=True)
        print(f"    {starts[0].prompt[0]['content']}  ->  {texts[0]!r}")
    print("Next: the same with held-out accuracy, checkpoints and a curve: covey train arithmetic_grpo")


if __name__ == "__main__":
    main()
