"""A made-up run, as large as wanted, in the files of a real one."""

import json
import math
import random
from pathlib import Path

METRICS = 60
GROUP_SIZE = 5
WORDS = 4000
NEEDLE = "zanzibar quokka"  # only in the rollouts that `write_run` says


def write_run(folder: Path, steps: int, rollouts: int, *, words: int = 80, seed: int = 0) -> Path:
    """A run of `steps` steps with `rollouts` rollouts in all, of completions of about `words` words.

    Every 500th step has the needle in its first completion. Rewards are 0 or 1, and those of every third group equal.
    """
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
    texts = [" ".join(draw.choices(lexicon, k=words)) for _ in range(2000)]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(f'steps = {steps}\nseed = {seed}\n\n[[rewards]]\nname = "numeric"\n')
    each = rollouts // steps
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(1, steps + 1):
            lines = [_rollout(draw, step, place, texts) for place in range(each)]
            if step % 500 == 0:
                lines[0]["text"] = f"{lines[0]['text']} {NEEDLE} and more"
            content = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(content)
            values = {
                f"reward/part_{number}": math.sin(step / (number + 20)) + draw.random() for number in range(METRICS)
            }
            metrics.write(json.dumps({"step": step, "score/mean": draw.random(), **values}) + "\n")
    return folder


def _rollout(draw: random.Random, step: int, place: int, texts: list[str]) -> dict[str, object]:
    group = place // GROUP_SIZE
    reward = float(draw.random() < 0.5) if (step + group) % 3 else 1.0
    return {
        "step": step, "group": group, "prompt": f"Question {step}-{group}: which words are these?",
        "columns": {"answer": "7"}, "text": f"{draw.choice(texts)} {step} {place}", "reward": reward,
        "reward_parts": {"numeric": reward}, "score": reward, "end": "length" if draw.random() < 0.1 else "stop",
        "decisions": 90, "version": step - 1, "advantage": reward - 0.5, "baseline": 0.5,
    }  # fmt: skip
