"""Predicts the memory of a run from a model's dimensions and the run's config, without reading a weight.

`covey plan` and `covey check` print it. Tensors are counted as the code makes them, on the assumption that every prompt
is `prompt_tokens` long and every completion uses the whole token limit. docs/memory.md explains the parts and compares
them with what was measured.

Shapes: N tokens of a microbatch, S prompts and R rollouts in it, P tokens of a prompt, C fed tokens of a completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config import CRITIC_FREE, RunConfig
from covey.llm.generation.local_generator import CACHE_BYTES
from covey.llm.generation.token_sampling import ROWS
from covey.llm.memory.dimensions import Dimensions
from covey.llm.model.logprobs import CHUNK
from covey.llm.model.microbatches import Row, cut
from covey.llm.model.prefix_attention import SCORES_LIMIT
from covey.llm.native.bindings import padded

PROMPT_TOKENS = 64  # of a prompt, if none is given
# Before any weight. CPU: Python, torch, transformers and what they allocate in a run, measured at 0.42 GiB. GPU: the
# CUDA context and the kernels, outside of what torch counts.
PROGRAM_BYTES = {"cpu": 430 << 20, "cuda": 600 << 20}
# On a CPU the C library's allocator gives freed memory back only in part: what the microbatches of an optimizer step
# leave behind has holes that the next one, of other sizes, does not fill. As shares of activations and gradients,
# measured (docs/memory.md); torch's own allocator on a GPU reports live tensors alone.
HOLES_OF_ONE_MICROBATCH, HOLES_OF_SEVERAL = 0.1, 0.47

SAMPLING = ("packed weights", "keys and values", "logits of a decoding step")
UPDATE = ("activations", "logits", "holes between them")


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes by part, each at its own largest."""

    parts: dict[str, int]

    @property
    def peak(self) -> int:
        """The most bytes at one time: sampling and the update take turns, the rest stays."""
        staying = sum(size for name, size in self.parts.items() if name not in (*SAMPLING, *UPDATE))
        coming = (sum(self.parts[name] for name in phase) for phase in (SAMPLING, UPDATE))
        return staying + max(coming)


def predict(
    size: Dimensions, config: RunConfig, *, device: str, width: int, prompt_tokens: int = PROMPT_TOKENS
) -> MemoryPlan:
    """Predicted memory of a run by part.

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
        activations += decisions * size.hidden * 4  # what the value head reads, in fp32
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
            "holes between them": int(holes * (activations + 4 * (size.parameters + critic))),
        }
    )


def largest_microbatch(config: RunConfig, prompt_tokens: int) -> tuple[int, int]:
    """(prompts, rollouts) of the microbatch with the most tokens, cut as `LanguagePolicy.microbatches` cuts."""
    size, tokens = _group_size(config), prompt_tokens + config.sampling.max_new_tokens
    rows = [
        Row(number, number // size, tokens, prompt_tokens if number % size else 0)
        for number in range(_groups_of_a_minibatch(config) * size)
    ]
    pieces = cut(rows, config.update.microbatch_tokens)
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
    # The norm's input (in fp32 for an RMSNorm of torch's), what was normalised, and the result, which the next product
    # reads. The kernel keeps its input, which between layers is fp32, and a number of each row.
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
    """Of one layer, without the queries and the result, which are as wide as a token: see `PackedLayout.attend`."""
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
    output layer and of the hidden states. Where torch computes, the part as logits in fp32 and as probabilities too.

    `exact_kl` always has products and logits of policy and reference, and its gradient of the output layer waits for
    the other one.
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
    if not has_kernels:  # when rows have ended, the keys of the others (at most 7 of 8, half of all) are copied
        own = own * 23 // 16
    # The logits of this token and of the next one, and the probabilities of a few rows.
    logits = size.vocabulary * (2 * rows * width + (0 if has_kernels else 2 * 4 * min(rows, ROWS)))
    return {
        "packed weights": size.packed_parameters * width if device == "cpu" else 0,
        "keys and values": own + per_token * prompts * prompt_tokens,
        "logits of a decoding step": logits,
    }


def _groups_of_a_minibatch(config: RunConfig) -> int:
    return max(config.sampling.prompts_per_step // config.update.minibatches, 1)


def _group_size(config: RunConfig) -> int:
    """The largest group of the run's schedule."""
    return max(config.sampling.group_size, config.sampling.final_group_size or 0)
