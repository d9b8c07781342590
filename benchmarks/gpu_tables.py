"""The tables of docs/gpu.md: what trains on a GPU of a size, by the prediction of memory, and the time of a step.

    .venv/bin/python benchmarks/gpu_tables.py           print them
    .venv/bin/python benchmarks/gpu_tables.py --write   replace them in the docs

Nothing is computed on a GPU. `tests/docs/test_pages.py` compares the docs with it.
"""

import argparse
import re
from pathlib import Path

from covey.experiment.plan import CARDS as GPUS
from covey.experiment.plan import Card, read_configs, step_seconds
from covey.llm.memory import TIGHT, Dimensions, predict, read_dimensions

DOCS = Path(__file__).parents[1] / "docs" / "gpu.md"
GIB = 1 << 30
CARDS = (8, 12, 16, 24, 48, 80)
# hidden width, layers, query and key heads, width of the MLP, vocabulary, whether the output layer is the embedding
SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}
TASK = [
    "--prompts-per-step=8",
    "--group-size=8",
    "--max-new-tokens=512",
    "--microbatch-tokens=4096",
    "--precision=bf16",
]
PROMPT_TOKENS = 256
WAYS = {  # the first that fits is shown
    "all weights": [],
    "all weights, recomputed, 8-bit moments": ["--update.recompute=true", "--update.eight-bit-moments=true"],
    "LoRA": ["--lora.rank=16"],
    "LoRA, recomputed": ["--lora.rank=16", "--update.recompute=true"],
    "LoRA, 4 bits, recomputed": ["--lora.rank=16", "--lora.load-in-4bit=true", "--update.recompute=true"],
}


def dimensions(name: str) -> Dimensions:
    hidden, layers, heads, keys, inner, vocabulary, tied = SHAPES[name]
    config = {
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys, "intermediate_size": inner, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 32768,
    }  # fmt: skip
    return read_dimensions(config, name)


def needed(size: Dimensions, card: int) -> dict[str, float]:
    """GiB of each way on a card of so many GiB."""
    return {
        way: predict(
            size, read_configs([*TASK, *words], ["grpo"], None, None)["grpo"], device="cuda", width=2,
            prompt_tokens=PROMPT_TOKENS, memory=card * GIB,
        ).peak / GIB
        for way, words in WAYS.items()
    }  # fmt: skip


def table() -> str:
    lines = ["| model | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for name in SHAPES:
        size, cells = dimensions(name), []
        for card in CARDS:
            fitting = [(way, gib) for way, gib in needed(size, card).items() if gib <= TIGHT * card]
            cells.append(f"{fitting[0][0]}: {fitting[0][1]:.1f}" if fitting else "does not fit")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TIMED_TASK = [
    "--prompts-per-step=16",
    "--group-size=16",
    "--max-new-tokens=1024",
    "--microbatch-tokens=8192",
    "--kl-coefficient=0",
]
TIMED_PROMPT = 512
TIMED = {
    "0.5B": WAYS["all weights, recomputed, 8-bit moments"],
    "1.5B, LoRA": WAYS["LoRA, recomputed"],
    "7B, LoRA": WAYS["LoRA, recomputed"],
}


def timed(name: str, card: Card) -> str:
    """Tokens per second of sampling, and seconds of the update: expected, and in brackets the limit."""
    config = read_configs([*TIMED_TASK, *TIMED[name]], ["grpo"], None, None)["grpo"]
    size = dimensions(name.partition(",")[0])
    plan = predict(
        size, config, device="cuda", width=card.width, prompt_tokens=TIMED_PROMPT, memory=card.gib * GIB,
        has_kernels=card.has_bf16,
    )  # fmt: skip
    if plan.peak > TIGHT * card.gib * GIB:
        return "does not fit"
    sampling, update = step_seconds(size, config, plan.rows, TIMED_PROMPT, card).values()
    tokens = [16 * 16 * 1024 / seconds for seconds in sampling]
    return f"{tokens[1]:,.0f} ({tokens[0]:,.0f}); {update[1]:.1f} ({update[0]:.1f})"


def time_table() -> str:
    lines = ["| card | " + " | ".join(TIMED) + " |", "|---" * (len(TIMED) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(timed(model, card) for model in TIMED) + " |" for name, card in GPUS.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/gpu.md")
    if parser.parse_args().write:
        text = DOCS.read_text(encoding="utf-8")
        for first, made in (("model", table()), ("card", time_table())):
            text = re.sub(rf"\| {first} \| (0|8)(.*\n)+?(?=\n)", made + "\n", text)
        DOCS.write_text(text, encoding="utf-8")
    else:
        print(table(), time_table(), sep="\n\n")


if __name__ == "__main__":
    main()
