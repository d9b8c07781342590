"""Predicts the memory of a run from a model's dimensions and the run's config, without reading a weight.

`covey plan` and `covey check` print it. Tensors are counted as the code allocates them, on the assumption that every
prompt has `prompt_tokens` and every completion the maximal number of tokens. docs/memory.md explains the parts and
compares them with measurements.

Shapes: N tokens of a microbatch, S prompts and R rollouts in it, P tokens of a prompt, C fed tokens of a completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config import CRITIC_FREE, RunConfig
from covey.llm.generation.local_generator import CACHE_BYTES
from covey.llm.generation.token_sampling import ROWS
from covey.llm.memory.dimensions import Dimensions
from covey.llm.model.logprobs import CHUNK
from covey.llm.model.microbatches import Row, split_rows
from covey.llm.model.prefix_attention import SCORES_LIMIT
from covey.llm.native.bindings import padded

PROMPT_TOKENS = 64  # default length of a prompt
# Without weights. CPU: Python, torch, transformers and their allocations in a run, measured at 0.42 GiB. GPU: the CUDA
# context and the kernels, which torch does not count.
PROGRAM_BYTES = {"cpu": 430 << 20, "cuda": 600 << 20}
# Fragmentation, as measured fractions of activations and gradients (docs/memory.md): on a CPU the C library's allocator
# cannot reuse all memory of an optimizer step's microbatches for those of the next, which have other sizes. On a GPU
# torch's allocator counts live tensors alone.
HOLES_OF_ONE_MICROBATCH, HOLES_OF_SEVERAL = 0.1, 0.47

SAMPLING = ("prepacked weights", "keys and values", "logits of a decoding step")
UPDATE = ("activations", "logits", "fragmentation")


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes by part, each at its maximum."""

    parts: dict[str, int]

    @property
    def peak(self) -> int:
        """The peak in bytes: the larger of sampling and update, which do not overlap, and the parts that remain."""
        staying = sum(size for name, size in self.parts.items() if name not in (*SAMPLING, *UPDATE))
        coming = (sum(self.parts[name] for name in phase) for phase in (SAMPLING, UPDATE))
        return staying + max(coming)


def predict(
    size: Dimensions, config: RunConfig, *, device: str, width: int, prompt_tokens: int = PROMPT_TOKENS
) -> MemoryPlan:
    """Predict the memory of a run by part.

    Args:
        device: "cpu" or "cuda".
        width: bytes of a weight and of an activation, 2 in bf16 and 4 in fp32.
    """
    has_critic = config.algorithm not in CRITIC_FREE
    critic = size.hidden + 1 if has_critic else 0  # the value head
    if has_critic and config.critic.trunk == "own":
        critic += size.trunk_parameters
    is_own_master = width == 4
    prompts, rows = largest_microbatch(config, prompt_tokens)
    decisions = rows * config.sampling.max_new_tokens
    fed = config.sampling.max_new_tokens - 1
    fused = device == "cpu" and size.has_kernels
    activations = activation_bytes(size, width, prompts, rows, prompt_tokens, fed, fused=fused)
    if has_critic and config.critic.trunk == "policy" and not is_own_master:
        activations += decisions * size.hidden * 4  # the value head's input, in fp32
    is_only_one = rows == _group_size(config) * _groups_of_a_minibatch(config)
    holes = {"cpu": HOLES_OF_ONE_MICROBATCH if is_only_one else HOLES_OF_SEVERAL, "cuda": 0.0}[device]
    return MemoryPlan(
        {
            "program": PROGRAM_BYTES[device],
            "weights": size.parameters * width,
            "fp32 master weights": 0 if is_own_master else size.parameters * 4,
            "optimizer moments": size.parameters * 8,
            "reference": size.parameters * width,
            "critic's weights": critic * width,
            "critic's master weights": 0 if is_own_master else critic * 4,
            "critic's moments": critic * 8,
            **_sampling(size, config, device, width, prompt_tokens),
            "gradients": size.parameters * 4,
            "critic's gradients": critic * 4,
            "activations": activations,
            "logits": _logit_bytes(size, config, device, width, decisions),
            "fragmentation": int(holes * (activations + 4 * (size.parameters + critic))),
        }
    )


def largest_microbatch(config: RunConfig, prompt_tokens: int) -> tuple[int, int]:
    """(prompts, rollouts) of the microbatch with the most tokens, cut as `LanguagePolicy.microbatches` cuts."""
    size, tokens = _group_size(config), prompt_tokens + config.sampling.max_new_tokens
    rows = [
        Row(number, number // size, tokens, prompt_tokens if number % size else 0)
        for number in range(_groups_of_a_minibatch(config) * size)
    ]
    pieces = split_rows(rows, config.update.microbatch_tokens)
    shapes = [(len({row.group for row in piece}), len(piece)) for piece in pieces]
    return max(shapes, key=lambda shape: shape[0] * prompt_tokens + shape[1] * config.sampling.max_new_tokens)


def activation_bytes(
    size: Dimensions, width: int, prompts: int, rows: int, prompt_tokens: int, fed: int, *, fused: bool
) -> int:
    """Bytes that autograd keeps of a microbatch between forward and backward.

    Args:
        width: bytes of an activation.
        prompts, rows: S and R.
        prompt_tokens, fed: P and C; the last token of a completion is predicted, never fed.
        fused: whether covey's kernels compute norms, gated MLPs and attention.
    """
    tokens = prompts * prompt_tokens + rows * fed
    # torch keeps the norm's input (in fp32 for an RMSNorm), the normalised input, and the result for the next product.
    # The kernel keeps its input, which is fp32 between layers, and one number per row.
    normalised = (4 + width) if size.has_rms_norm and not fused else width
    norm = size.hidden * 4 + 4 if fused else size.hidden * normalised
    head_norms = (size.query + size.key_value) * normalised + (4 * (size.heads + size.kv_heads) if fused else 0)
    feed_forward = (size.feed_forward_kept - fused) * size.intermediate * width
    each_token = 2 * (norm + size.hidden * width) + 2 * size.query * width + feed_forward
    each_token += head_norms if size.has_head_norms else 0
    if fused:
        attention = tokens * (2 * size.key_value * width + 4 * size.heads)
    else:
        attention = _attention_bytes(size, width, prompts, rows, prompt_tokens, fed)
    layer = tokens * each_token + attention
    after = tokens * (norm + 2 * size.head_dim * width) + rows * (fed + 1) * size.hidden * width
    return size.layers * layer + after


def _attention_bytes(size: Dimensions, width: int, prompts: int, rows: int, prompt_tokens: int, fed: int) -> int:
    """Bytes of one layer's attention without queries and result, which are counted per token: `PackedLayout.attend`."""
    tokens, fed_tokens, seen = prompts * prompt_tokens + rows * fed, rows * fed, prompt_tokens + fed
    prompt_part = prompts * prompt_tokens * (size.query * width + size.heads * 4)
    if size.kv_heads == size.heads:
        prompt_part += 2 * tokens * size.key_value * width
    else:
        prompt_part += 2 * prompts * prompt_tokens * size.query * width  # keys and values, repeated for every head
    scores = fed_tokens * size.heads * seen
    if scores <= SCORES_LIMIT:
        keys_and_values = 2 * tokens * size.key_value * width
        return prompt_part + (scores + fed_tokens * size.query) * width + keys_and_values
    keys_and_values = 2 * rows * seen * size.query * width
    mask = fed_tokens * seen * width
    return prompt_part + keys_and_values + mask + fed_tokens * (size.heads * 4 + size.query * width)


def _logit_bytes(size: Dimensions, config: RunConfig, device: str, width: int, decisions: int) -> int:
    """Bytes that `token_logprobs` and `exact_kl` hold: a chunk of the logits, and in backward the gradients of the
    output layer and of the hidden states. torch also holds the chunk as logits in fp32 and as probabilities.

    `exact_kl` always has logits of policy and reference, and holds its gradient of the output layer until the other
    gradient is computed.
    """
    product = size.vocabulary * min(CHUNK, decisions) * width
    logits = 0 if width == 4 else product * 4 // width
    probabilities = product * 4 // width
    gradients = size.hidden * size.vocabulary * width + decisions * size.hidden * 4
    if device == "cpu":
        needed = product + gradients
    else:
        bonus = 2 * probabilities if config.loss.entropy_coefficient else 0
        needed = product + logits + max(probabilities, bonus + gradients)
    if config.loss.kl_estimator == "exact":
        waiting = size.hidden * size.vocabulary * width + decisions * size.hidden * width
        needed = max(needed + waiting, 2 * (product + logits) + gradients + decisions * size.hidden * width)
    return needed


def _sampling(size: Dimensions, config: RunConfig, device: str, width: int, prompt_tokens: int) -> dict[str, int]:
    """The rows that are decoded together, chosen as `LocalGenerator` chooses them."""
    sampling, group = config.sampling, _group_size(config)
    per_token = 2 * size.layers * size.key_value * width
    fitting = sampling.rows_at_once or CACHE_BYTES // (per_token * sampling.max_new_tokens)
    prompts = min(max(fitting // group, 1), sampling.prompts_per_step)
    rows = prompts * group
    has_kernels = device == "cpu" and size.has_kernels
    own = per_token * rows * padded(sampling.max_new_tokens)
    if not has_kernels:  # after some rows have ended, the keys of the others (at most 7 of 8, half of all) are copied
        own = own * 23 // 16
    # Logits of this token and of the next one, and probabilities of up to ROWS rows.
    logits = size.vocabulary * (2 * rows * width + (0 if has_kernels else 2 * 4 * min(rows, ROWS)))
    return {
        "prepacked weights": size.prepacked_parameters * width if device == "cpu" else 0,
        "keys and values": own + per_token * prompts * prompt_tokens,
        "logits of a decoding step": logits,
    }


def _groups_of_a_minibatch(config: RunConfig) -> int:
    return max(config.sampling.prompts_per_step // config.update.minibatches, 1)


def _group_size(config: RunConfig) -> int:
    """The largest group of the run's schedule."""
    return max(config.sampling.group_size, config.sampling.final_group_size or 0)
