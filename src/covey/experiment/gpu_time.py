"""The time of a step on a GPU, by arithmetic: what a card's published rates allow, and what is expected of covey.

Nothing here was measured on a GPU. A decoding step reads all weights and the keys and values of its rows; an update
multiplies every weight twice for each token and pass. The limit is the longer of bytes and operations at the rates of
the data sheet. What is expected takes published fractions of them and a time for every launch.

Shapes: R rows, P tokens of a prompt, C of a completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config import ConfigError, RunConfig
from covey.llm.memory.dimensions import Dimensions
from covey.llm.memory.estimate import has_reference, largest_group, microbatches_of_shard, trained_parameters

# Of the rates that are expected: a decoder of torch read 1,397 GB/s of an A100's 2,039 (Llama-2-7B in bf16, README of
# gpt-fast); the pre-training of Llama 3 405B had 38 to 43 % of the TFLOP/s of H100s (arXiv 2407.21783, table 4).
READING, COMPUTING = 0.68, 0.40
LAUNCH_SECONDS = 2.5e-6  # of a short kernel within a CUDA graph, with the gap to the next one: an assumption
LAUNCHES = {True: 11, False: 48}  # of a layer in a decoding step, with covey's kernels and with torch (docs/speed.md)
LAUNCHES_BESIDE = 16  # of embedding, rotation, last norm, output layer and drawing
OPTIMIZER_BYTES = 42  # read and written for a trained weight: norm, clipping, AdamW, and its copy in bf16


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet (NVIDIA's, and the white papers of GeForce's architectures)."""

    gib: int
    bandwidth: float  # GB/s
    tflops: float  # dense, with sums in fp32: of bf16, or of fp32 if the card has no bf16
    has_bf16: bool = True  # and covey's kernels, which need compute capability 8.0 too

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 2 if self.has_bf16 else 4


CARDS = {
    "T4": Card(16, 320, 8.1, has_bf16=False),
    "L4": Card(24, 300, 121),
    "A10": Card(24, 600, 125),
    "RTX 3090": Card(24, 936, 71),
    "RTX 4090": Card(24, 1008, 165),
    "RTX 5090": Card(32, 1792, 209.5),
    "A100": Card(80, 2039, 312),
    "H100": Card(80, 3350, 989),
    "H200": Card(141, 4800, 989),
}


def find_card(name: str) -> tuple[str, Card]:
    """The card of a name, in any case and without its spaces.

    Raises:
        ConfigError: if it is not in the table.
    """
    for known, card in CARDS.items():
        if name.lower().replace(" ", "").replace("-", "") in (known.lower().replace(" ", ""), known[-4:].lower()):
            return known, card
    raise ConfigError(f"--time {name} is not a known GPU: choose one of {', '.join(CARDS)}")


@dataclass(frozen=True)
class Work:
    """Bytes that are moved, operations, and launches that nothing overlaps."""

    bytes: float
    flops: float
    launches: int = 0

    def limit(self, card: Card) -> float:
        """Seconds at the rates of the data sheet."""
        return max(self.bytes / (1e9 * card.bandwidth), self.flops / (1e12 * card.tflops))

    def expected(self, card: Card) -> float:
        """Seconds at the fractions of them that others have reached, with launches."""
        seconds = max(self.bytes / (1e9 * card.bandwidth * READING), self.flops / (1e12 * card.tflops * COMPUTING))
        return seconds + self.launches * LAUNCH_SECONDS


def decoding_step(size: Dimensions, rows: int, group: int, prompt_tokens: int, new_tokens: int, card: Card) -> Work:
    """The work of one token for each row, in the middle of the completions.

    The keys of a prompt are read once for each tile of its group's rows, with torch once for every row.
    """
    width = card.width
    per_tile = size.rows_of_tile if card.has_bf16 else 1
    prompts = rows // group * -(-group // per_tile)
    keys = size.token_bytes(width) * (prompts * prompt_tokens + rows * new_tokens / 2)
    logits = 2 * rows * size.vocabulary * width
    attention = 4 * size.layers * size.query * (prompt_tokens + new_tokens / 2)
    return Work(
        bytes=size.prepacked_parameters * width + keys + logits,
        flops=rows * (2 * size.prepacked_parameters + attention),
        launches=LAUNCHES[card.has_bf16] * size.layers + LAUNCHES_BESIDE,
    )


def update(size: Dimensions, config: RunConfig, prompt_tokens: int, card: Card) -> Work:
    """The work of a step's update: its passes over the rollouts, also of other models, and AdamW."""
    head = size.vocabulary * size.hidden
    layers, lora = size.prepacked_parameters - head, config.lora.is_used
    new = config.rollout_limit
    forward = training = 0.0
    for prompts, rows in microbatches_of_shard(config, prompt_tokens):
        tokens, decisions = prompts * prompt_tokens + rows * (new - 1), rows * new
        pairs = prompts * prompt_tokens**2 / 2 + rows * new * (prompt_tokens + new / 2)
        attention = 4 * size.layers * size.query * pairs
        in_layers = 2 * layers * tokens + attention
        forward += in_layers + 2 * head * decisions
        # The gradient of the inputs, and of the weights if they are trained; attention's has 5 products for 2.
        training += in_layers * (2 if config.update.recompute else 1) + (2 if lora else 4) * layers * tokens
        training += 2.5 * attention + (6 if lora else 8) * head * decisions  # the logits are computed again
    passes, parts = config.update.epochs, config.update.minibatches
    evaluations = has_reference(config) + (passes * parts > 1) + passes * bool(config.teacher.model)
    flops = parts * (passes * training + forward * evaluations)
    return Work(OPTIMIZER_BYTES * trained_parameters(size, config) * passes * parts, flops)


def time_lines(size: Dimensions, config: RunConfig, rows: int, prompt_tokens: int, name: str) -> list[str]:
    """The report of `covey plan --time` for a card of `CARDS`."""
    card = CARDS[name]
    seconds = step_seconds(size, config, rows, prompt_tokens, card)
    unit = "bf16" if card.has_bf16 else "fp32, because it has no bf16"
    (sample, sampled), (train, trained) = seconds["sampling"], seconds["update"]
    tokens = config.sampling.prompts_per_step * largest_group(config) * config.rollout_limit
    rates = f"{card.bandwidth:,.0f} GB/s, {card.tflops:,.0f} TFLOP/s in {unit}"
    return [
        f"Time of a step, {name} ({rates}), an estimate that no GPU has confirmed:",
        f"  sampling, {rows} rows at a time: {tokens / sampled:,.0f} tokens/s expected, {tokens / sample:,.0f} at most",
        f"  update: {_seconds(trained)} expected, {_seconds(train)} at least",
    ]


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"


def step_seconds(
    size: Dimensions, config: RunConfig, rows: int, prompt_tokens: int, card: Card
) -> dict[str, tuple[float, float]]:
    """Seconds of the two phases of a step in which every completion reaches its limit: (at the limit, expected)."""
    group, prompts = largest_group(config), config.sampling.prompts_per_step
    step = decoding_step(size, rows, group, prompt_tokens, config.rollout_limit, card)
    waves = prompts * group / rows
    prefill = Work(0, 2 * size.prepacked_parameters * prompts * prompt_tokens)
    steps = waves * config.rollout_limit
    of_update = update(size, config, prompt_tokens, card)
    return {
        "sampling": (
            steps * step.limit(card) + prefill.limit(card), steps * step.expected(card) + prefill.expected(card)
        ),
        "update": (of_update.limit(card), of_update.expected(card)),
    }  # fmt: skip
