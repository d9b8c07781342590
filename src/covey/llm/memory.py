"""Predicts the memory of a run from a model's dimensions (its config.json) and the run's config, without its weights.

`covey plan` and `covey check` print it. The size of every buffer comes from a function of the module that allocates
it; here they are composed for a config, on the assumption that every prompt has `prompt_tokens` and every completion
the maximal number of tokens. docs/memory.md explains the parts and compares them with measurements.

Shapes: S prompts and R rollouts of a microbatch, P tokens of a prompt, C fed tokens of a completion.
"""

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from covey.algorithms import default_kl
from covey.config import CRITIC_FREE, ConfigError, RunConfig
from covey.config.files import user_path
from covey.config.model_sources import MODEL_CONFIG_FILE, ModelKind, locate_model, resolved
from covey.core import kl
from covey.llm import critic
from covey.llm.generation import (
    batch,
    decoder,
    local_generator,
    native_decoder,
    shared_prefix_decoder,
    token_sampling,
)
from covey.llm.generation.decoder import linear_layers, token_bytes, weights_of
from covey.llm.generation.graph_decoder import rows_of_tile
from covey.llm.generation.local_generator import DecoderMemory
from covey.llm.model import fused_layers, logprobs, lora, prefix_attention, recompute
from covey.llm.model.architecture import GPU_FEATURES, Heads, is_llama_like, obstacle
from covey.llm.model.files import check_config, config_of, family_of, read_model_config, reading, skeleton
from covey.llm.model.gguf import read_gguf_config
from covey.llm.model.lora import adaptable_paths, choose_targets, quantizable_layers
from covey.llm.model.prefix_attention import Row, split_rows
from covey.runtime.distributed import GradientTree
from covey.runtime.optimizer import StateBytes, state_bytes

# ---- dimensions of a model, from its config.json alone ----

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


class LinearShape(NamedTuple):
    """A linear layer below the output layer, to which an adapter may be added."""

    path: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder that determine its memory."""

    parameters: int  # all weights, tied ones once
    trunk_parameters: int  # weights below the output layer, with tied embeddings
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    feed_forward_kept: int  # number of tensors of width `intermediate` that autograd keeps per layer
    is_tied: bool  # the output layer shares the embedding's weights
    has_rms_norm: bool  # computed in fp32, which keeps more than torch's own LayerNorm
    has_head_norms: bool  # queries and keys are normalised too
    has_output_norms: bool  # and what attention and MLP add
    prepacked_parameters: int  # weights that decoding on a CPU copies (prepacks)
    has_kernels: bool  # covey's kernels support the model on a CPU
    has_gpu_kernels: bool  # and on a GPU
    architecture: str  # class name of the model
    linear: tuple[LinearShape, ...]
    quantizable: tuple[int, ...]  # numbers of weights of the layers that may be in 4 bits

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def rows_of_tile(self) -> int:
        """Number of rows that read the keys of their prompt together in covey's kernels for GPUs."""
        return rows_of_tile(self.attention_heads)

    def kernels_on(self, device: str) -> bool:
        """Whether covey's kernels support the model on "cpu" or "cuda"."""
        return self.has_kernels if device == "cpu" else self.has_gpu_kernels

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token, of `itemsize` bytes each."""
        return token_bytes(self.layers, self.attention_heads, itemsize)


def read_dimensions(model_config: dict[str, Any], model: str = "of this config.json") -> Dimensions:
    """The dimensions of the model with this `config.json`; `model` is its name in messages.

    transformers builds the model on torch's meta device, where tensors have shapes and no memory, so the weights of
    every architecture that it knows are counted exactly.

    Raises:
        ConfigError: if the dict describes no causal or vision-language model that transformers knows.
    """
    fields = {name: value for name, value in model_config.items() if name != "quantization_config"}
    family = family_of(fields)
    check_config(fields, model, family)
    config = config_of(fields, model)
    module = skeleton(config, model, family)
    with reading(f"model {model}: its config.json describes no language model known here", "check it"):
        return _dimensions(config, module)


def _dimensions(config: PreTrainedConfig, module: PreTrainedModel) -> Dimensions:
    text = config.get_text_config()
    # A recurrent model has no attention heads. Its state is counted as one head, which overestimates it.
    heads, hidden = int(getattr(text, "num_attention_heads", 1)), int(text.hidden_size)
    layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    for name, value in (("heads", heads), ("hidden units", hidden), ("layers", layers), ("tokens", vocabulary)):
        if value < 1:
            raise ConfigError(f"the model's config.json describes no language model: it has {value} {name}")
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    own = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or getattr(text, "n_inner", None)
    head = module.get_output_embeddings()
    return Dimensions(
        parameters=_count(module),
        trunk_parameters=_count(module.base_model),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        intermediate=own or 4 * hidden,
        vocabulary=vocabulary,
        feed_forward_kept=_feed_forward_kept(text, is_gated="gate_proj" in names or "gate_up_proj" in names),
        is_tied=head is not None and head.weight is module.get_input_embeddings().weight,
        has_rms_norm=any("RMSNorm" in type(part).__name__ for part in module.modules()),
        has_head_norms="q_norm" in names,
        has_output_norms="post_feedforward_layernorm" in names,
        prepacked_parameters=weights_of(linear_layers(module)),
        has_kernels=is_llama_like(module),
        has_gpu_kernels=not obstacle(module, GPU_FEATURES),
        architecture=type(module).__name__,
        linear=tuple(_linear_shape(module, path) for path in adaptable_paths(module)),
        quantizable=tuple(layer.weight.numel() for layer in quantizable_layers(module).values()),
    )


def _linear_shape(module: nn.Module, path: str) -> LinearShape:
    layer: Any = module.get_submodule(path)
    rows, columns = layer.weight.shape
    return LinearShape(path, *((columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _feed_forward_kept(text: Any, *, is_gated: bool) -> int:
    """Number of tensors of width `intermediate` that autograd keeps.

    Gated MLP: gate, activation, up projection and their product. Otherwise the activation's input and result; for a
    GELU composed of operations x, x / 2, tanh, 1 + tanh and the result.
    """
    if is_gated:
        return 4
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
    return 5 if activation == "gelu_new" else 2


def find_model_config(model: str) -> dict[str, Any] | None:
    """Find the `config.json` of a model by its name in a recipe, or by its own path, without asking a hub.

    Returns None for a hub's model that is not on this machine.

    Raises:
        ConfigError: if there is no such model, or its config cannot be read.
    """
    if model.endswith(".json"):
        return read_model_config(user_path(model, "model: "))
    source = locate_model(model)
    if source.kind is ModelKind.EMBEDDED:
        return SMOLLM2_135M
    if source.kind is ModelKind.GGUF:
        return read_gguf_config(source.path)
    if source.kind is ModelKind.HUB:
        return _cached_config(source.name)
    assert source.description is not None
    return read_model_config(source.description / MODEL_CONFIG_FILE)


def _cached_config(name: str) -> dict[str, Any] | None:
    """The `config.json` of a hub's model in the local cache, or None."""
    try:
        cached = try_to_load_from_cache(name, MODEL_CONFIG_FILE)
    except HFValidationError:
        return None
    return read_model_config(Path(cached)) if isinstance(cached, (str, os.PathLike)) else None


PROMPT_TOKENS = 64  # default length of a prompt
# Without weights. CPU: Python, torch, transformers and their allocations in a run, measured at 0.42 GiB. GPU: the CUDA
# context and the kernels, which torch does not count.
PROGRAM_BYTES = {"cpu": 430 << 20, "cuda": 600 << 20}
# Fragmentation, as measured fractions of activations and gradients (docs/memory.md): on a CPU the C library's allocator
# cannot reuse all memory of an optimizer step's microbatches for those of the next, which have other sizes. On a GPU
# torch's allocator counts live tensors alone.
HOLES_OF_ONE_MICROBATCH, HOLES_OF_SEVERAL = 0.1, 0.47

TIGHT = 0.9  # a plan may use this fraction of a machine's memory; the rest is for other programs

SAMPLING = ("gathered weights", "prepacked weights", "prefill", "keys and values", "logits of a decoding step")
GRADIENTS = ("gradients", "critic's gradients")
UPDATE = ("gathered layers", "gradients of shards", "activations", "logits", "fragmentation")


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes by part, each at its maximum."""

    parts: dict[str, int]
    rows: int = 0  # that are decoded together; 0: elsewhere
    update: tuple[str, ...] = UPDATE  # the parts that are in memory during the update alone

    @property
    def staying(self) -> int:
        """Bytes of the parts that are in memory all the time."""
        return sum(size for name, size in self.parts.items() if name not in (*SAMPLING, *self.update))

    @property
    def peak(self) -> int:
        """The peak in bytes: the larger of sampling and update, which do not overlap, and the parts that remain."""
        return self.staying + max(sum(self.parts[name] for name in phase) for phase in (SAMPLING, self.update))


def predict(
    size: Dimensions,
    config: RunConfig,
    *,
    device: str,
    width: int,
    prompt_tokens: int = PROMPT_TOKENS,
    reward_model_parameters: int = 0,
    processes: int = 0,
    ranks: int = 1,
    memory: int | None = None,
    has_kernels: bool = True,
) -> MemoryPlan:
    """Predict the memory of a run by part; with several ranks, of one that has all weights.

    Args:
        device: "cpu" or "cuda".
        width: bytes of a weight and of an activation, 2 in bf16 and 4 in fp32.
        reward_model_parameters: number of weights of all reward models (`count_parameters`).
        processes: bytes of the processes of rewards (`RewardConfig.process_bytes`) and of the task; a GPU's memory has
            none of them.
        ranks: processes that train together; they divide the shards of the config.
        memory: bytes of the GPU, of which keys and values get what is left; None: a share of one of 80 GB.
        has_kernels: whether the device has covey's kernels, for the models that they support.
    """
    gpu_bytes = memory if device == "cuda" else None
    critic_weights = critic_weights_of(size, config)
    policy_state, critic_state = (
        state_bytes(parameters, width, eight_bit_moments=config.update.eight_bit_moments)
        for parameters in (trained_parameters(size, config), critic_weights)
    )
    prompts, rows = largest_microbatch(config, prompt_tokens, ranks)
    decisions, fed = rows * config.rollout_limit, config.rollout_limit - 1
    fused, recomputed = has_kernels and size.kernels_on(device), config.update.recompute
    activations = activation_bytes(size, width, prompts, rows, prompt_tokens, fed, fused=fused, recomputed=recomputed)
    tokens = prompts * prompt_tokens + rows * fed
    activations += activation_change(size, config, tokens, width, fused=fused, recomputed=recomputed)
    if critic_weights and config.critic.trunk == "policy":
        activations += critic.head_input_bytes(decisions, size.hidden, width)
    copies = GradientTree.copies(shards_of_rank(config, ranks)) * max(policy_state.gradients, critic_state.gradients)
    plan = MemoryPlan(
        {
            "program": PROGRAM_BYTES[device],
            "weights": weight_bytes(size, config, width),
            "adapter": adapter_parameters(size, config) * width,
            "fp32 master weights": policy_state.masters,
            "optimizer moments": policy_state.moments,
            "reference": reference_parameters(size, config) * width,
            "teacher": teacher_parameters(config) * width,
            "critic's weights": critic_weights * width,
            "critic's master weights": critic_state.masters,
            "critic's moments": critic_state.moments,
            "reward models": reward_model_parameters * width,
            "reward model's optimizer": _reward_model_state(config, reward_model_parameters, width),
            "other processes": processes if device == "cpu" else 0,
            **dict.fromkeys(SAMPLING, 0),  # "gathered weights" are those of sharded weights: covey_cluster
            "gradients": policy_state.gradients,
            "critic's gradients": critic_state.gradients,
            "gathered layers": 0,
            "gradients of shards": copies,
            "activations": activations,
            "logits": _logit_bytes(size, config, gpu_bytes, width, decisions, native=has_kernels),
            "fragmentation": _holes(config, device, rows, activations, policy_state, critic_state),
        },
        update=UPDATE if device == "cpu" else (*GRADIENTS, *UPDATE),  # a CPU keeps gradients (`MasterAdamW`)
    )
    if config.sampler.kind == "local":
        free = plan.staying, gpu_bytes
        rows, sampling = _sampling(size, config, device, width, prompt_tokens, ranks, free=free, native=fused)
        plan = replace(plan, parts=plan.parts | sampling, rows=rows)
    return plan


def _holes(config: RunConfig, device: str, rows: int, activations: int, policy: StateBytes, critic: StateBytes) -> int:
    """Unused bytes between activations and gradients of an update whose microbatches have `rows` rows."""
    if device != "cpu":
        return 0
    is_only_one = rows == largest_group(config) * _groups_of_a_minibatch(config)
    return int(
        (HOLES_OF_ONE_MICROBATCH if is_only_one else HOLES_OF_SEVERAL)
        * (activations + policy.gradients + critic.gradients)
    )


def weight_bytes(size: Dimensions, config: RunConfig, width: int) -> int:
    """Bytes of the policy's weights, with `lora.load_in_4bit` in 4 bits with the largest layer as it computes."""
    of_layers = size.quantizable if config.lora.load_in_4bit else ()
    kept = size.parameters - sum(of_layers) + max(of_layers, default=0)
    return kept * width + lora.packed_bytes(sum(of_layers))


def _reward_model_state(config: RunConfig, parameters: int, width: int) -> int:
    """Masters and moments of the reward model that an iterative run trains. Its gradients and activations are not in
    memory together with those of the policy's update.
    """
    if not (config.iteration.steps and config.iteration.reward_model_epochs):
        return 0
    state = state_bytes(parameters, width)
    return state.masters + state.moments


def shards_of_rank(config: RunConfig, ranks: int) -> int:
    """The number of logical shards of each rank."""
    return max((config.cluster.shards or ranks) // ranks, 1)


def largest_microbatch(config: RunConfig, prompt_tokens: int, ranks: int = 1) -> tuple[int, int]:
    """(prompts, rollouts) of the microbatch with the most tokens, cut as `LanguagePolicy.microbatches` cuts."""
    return max(
        microbatches_of_shard(config, prompt_tokens, ranks),
        key=lambda shape: shape[0] * prompt_tokens + shape[1] * config.rollout_limit,
    )


def microbatches_of_shard(config: RunConfig, prompt_tokens: int, ranks: int = 1) -> list[tuple[int, int]]:
    """(prompts, rollouts) of every microbatch of a minibatch's largest shard."""
    size, tokens = largest_group(config), prompt_tokens + config.rollout_limit
    groups = -(-_groups_of_a_minibatch(config) // (config.cluster.shards or ranks))
    rows = [
        Row(number, number // size, tokens, prompt_tokens if number % size else 0) for number in range(groups * size)
    ]
    pieces = split_rows(rows, config.update.microbatch_tokens)
    return [(len({row.group for row in piece}), len(piece)) for piece in pieces]


def activation_bytes(
    size: Dimensions,
    width: int,
    prompts: int,
    rows: int,
    prompt_tokens: int,
    fed: int,
    *,
    fused: bool,
    recomputed: bool = False,
) -> int:
    """Bytes that autograd keeps of a microbatch between forward and backward.

    Args:
        width: bytes of an activation.
        prompts, rows: S and R.
        prompt_tokens, fed: P and C; the last token of a completion is predicted, never fed.
        fused: whether covey's kernels compute norms, gated MLPs and attention.
        recomputed: whether layers keep their inputs alone; the activations of the layer that the backward pass has
            reached are counted too.
    """
    heads, tokens = size.attention_heads, prompts * prompt_tokens + rows * fed
    if fused:
        layer = tokens * fused_layers.kept_bytes(
            heads, size.hidden, size.intermediate, width,
            has_head_norms=size.has_head_norms, has_output_norms=size.has_output_norms,
        )  # fmt: skip
        norm = fused_layers.residual_norm_bytes(size.hidden)
    else:
        layer = tokens * layer_bytes(size, width)
        layer += prefix_attention.kept_bytes(heads, prompts, rows, prompt_tokens, fed, width)
        norm = norm_bytes(size, size.hidden, width)
    angles = 2 * size.head_dim * width  # cosine and sine of a token's position, for all layers
    decided = logprobs.kept_bytes(rows * (fed + 1), size.hidden, width)
    layers = size.layers * layer
    if recomputed:
        first, further = (recompute.input_bytes(size.hidden, width, fused=fused and begun) for begun in (False, True))
        layers = tokens * (first + (size.layers - 1) * further) + layer
    return layers + tokens * (norm + angles) + decided


def critic_weights_of(size: Dimensions, config: RunConfig) -> int:
    """Number of weights that the critic has besides those of the policy."""
    if config.algorithm in CRITIC_FREE:
        return 0
    trunks = {"own": size.trunk_parameters, "adapter": adapter_parameters(size, config), "policy": 0}
    return trunks[config.critic.trunk] + critic.head_parameters(size.hidden)


def _logit_bytes(
    size: Dimensions, config: RunConfig, gpu_bytes: int | None, width: int, decisions: int, *, native: bool
) -> int:
    """Bytes of `token_logprobs` and `exact_divergence`; one has its gradients while the next computes."""
    shape = decisions, size.hidden, size.vocabulary, width
    has_entropy_bonus, trains_head = bool(config.loss.entropy_coefficient), not config.lora.is_used
    needed = logprobs.buffer_bytes(
        *shape, native=native, has_entropy_bonus=has_entropy_bonus, trains_head=trains_head, gpu_bytes=gpu_bytes
    )
    betas = [kl.REVERSE] * (config.loss.kl_estimator == "exact")
    betas += [config.teacher.mixture] * bool(config.teacher.model)
    returned = logprobs.divergence_returned_bytes(*shape, trains_head=trains_head)
    for beta in betas:
        own = logprobs.divergence_bytes(*shape, trains_head=trains_head, gpu_bytes=gpu_bytes, beta=beta)
        needed = max(needed + returned, own)
    return needed


def _sampling(
    size: Dimensions,
    config: RunConfig,
    device: str,
    width: int,
    prompt_tokens: int,
    ranks: int,
    *,
    free: tuple[int, int | None],
    native: bool,
) -> tuple[int, dict[str, int]]:
    """Rows and bytes of a batch of requests of equal size, with as many whole groups at a time as fit.

    Args:
        free: bytes that are in memory all the time, and the memory of the GPU; None: not known, or a CPU.
        native: whether covey's kernels decode.
    """
    staying, gpu_bytes = free
    room = None if gpu_bytes is None else int(TIGHT * gpu_bytes) - staying
    token, completions = size.token_bytes(width), largest_group(config)
    requests, max_rows = -(-config.sampling.prompts_per_step // ranks), config.sampling.rows_at_once
    on_gpu = decoder_memory(size, config, width)
    if native and room is not None and not max_rows:
        fitting = on_gpu.fitting_rows(room, completions, config.rollout_limit, requests, prompt_tokens)
        max_rows = max(fitting, completions)
    rows = decoded_rows(
        token,
        requests=requests,
        completions=completions,
        max_rows=max_rows,
        max_new_tokens=config.rollout_limit,
        device=device,
        gpu_bytes=gpu_bytes,
    )
    logits = batch.logits_bytes(rows, size.vocabulary, width)
    prompts = rows // completions
    if native and device == "cuda":
        keys_and_values = on_gpu.keys_and_values(rows, config.rollout_limit, prompts, prompt_tokens)
        prefill, logits = on_gpu.prefill(prompts, prompt_tokens), on_gpu.step(rows)
        copies = on_gpu.copies(math.inf if room is None else room)
    else:
        shape = token, rows, config.rollout_limit, prompts, prompt_tokens
        copies, prefill = decoder.copy_bytes(size.prepacked_parameters, width, device), 0
        if native:
            keys_and_values = native_decoder.cache_bytes(*shape)
        else:
            keys_and_values = shared_prefix_decoder.cache_bytes(*shape, device)
            logits += token_sampling.buffer_bytes(rows, size.vocabulary, device)
    return rows, {
        "prepacked weights": copies,
        "prefill": prefill,
        "keys and values": keys_and_values,
        "logits of a decoding step": logits,
    }


def decoder_memory(size: Dimensions, config: RunConfig, width: int) -> DecoderMemory:
    """The memory of the decoder of covey's kernels on a GPU."""
    adapted = {one.path for one in adapted_shapes(size, config)}
    joined = [one for one in size.linear if one.path.rpartition(".")[2] in JOINED or one.path in adapted]
    return DecoderMemory(
        size.hidden, size.intermediate, size.vocabulary, size.layers, size.attention_heads, size.prepacked_parameters,
        sum(one.inputs * one.outputs for one in joined), width,
    )  # fmt: skip


def _groups_of_a_minibatch(config: RunConfig) -> int:
    return max((config.sampling.prompts_per_step + config.replay.groups) // config.update.minibatches, 1)


def largest_group(config: RunConfig) -> int:
    """The largest group of the run's schedule."""
    return max(config.sampling.group_size, config.sampling.final_group_size or 0)


def layer_bytes(size: Dimensions, itemsize: int) -> int:
    """Bytes kept of one token in one layer, without attention's keys, values and scores.

    These are in `prefix_attention`. `itemsize`: bytes of an activation.
    """
    norms = 2 * (norm_bytes(size, size.hidden, itemsize) + size.hidden * itemsize)  # and the results
    queries_and_result = 2 * size.query * itemsize
    mlp = size.feed_forward_kept * size.intermediate * itemsize
    head_norms = norm_bytes(size, size.query + size.key_value, itemsize) if size.has_head_norms else 0
    return norms + queries_and_result + mlp + head_norms


def norm_bytes(size: Dimensions, features: int, itemsize: int) -> int:
    """Bytes of a norm's input of `features` numbers; an RMSNorm also keeps its input in fp32."""
    return features * ((4 + itemsize) if size.has_rms_norm else itemsize)


SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # autograd keeps it once
JOINED = tuple(itertools.chain(*SAME_INPUT))  # the layers that `GraphDecoder` joins
KEPT_BY_ATTENTION = "o_proj"  # covey's attention keeps its result, which is the input of this layer


def adapted_shapes(size: Dimensions, config: RunConfig) -> list[LinearShape]:
    """The linear layers that have an adapter; none without LoRA.

    Raises:
        ConfigError: if a target is not a linear layer, or the adapter with which training begins cannot be read.
    """
    if not config.lora.is_used:
        return []
    targets = resolved(config.lora).targets
    chosen = set(choose_targets([one.path for one in size.linear], targets, size.architecture))
    return [one for one in size.linear if one.path in chosen]


def adapter_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers of A and B of all layers; 0 without LoRA."""
    shapes = adapted_shapes(size, config)
    return resolved(config.lora).rank * sum(one.inputs + one.outputs for one in shapes)


def trained_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that the policy's optimizer holds."""
    return adapter_parameters(size, config) if config.lora.is_used else size.parameters


def has_reference(config: RunConfig) -> bool:
    """Whether the run has a KL, with the algorithm's own coefficient if none is given, or the reference as teacher."""
    coefficient = config.kl_coefficient
    return config.teacher.model == "reference" or bool(
        default_kl(config.algorithm).coefficient(1) if coefficient is None else coefficient
    )


def reference_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that the reference has besides those of the policy: a copy of the model, or of the adapter; 0 without
    a reference.
    """
    if not has_reference(config):
        return 0
    if not config.lora.is_used:
        return size.parameters
    return adapter_parameters(size, config) if config.copies_reference_adapter else 0


def teacher_parameters(config: RunConfig) -> int:
    """The numbers of a teacher that is another model; one that has not been downloaded counts as 0."""
    name = config.teacher.model
    found = find_model_config(name) if config.teacher.is_own_model else None
    return 0 if found is None else read_dimensions(found, name).parameters


def frozen_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that are not trained: of reference and teacher, and with LoRA of the model."""
    own = size.parameters if config.lora.is_used else 0
    return reference_parameters(size, config) + teacher_parameters(config) + own


def activation_change(
    size: Dimensions, config: RunConfig, tokens: int, itemsize: int, *, fused: bool, recomputed: bool
) -> int:
    """Bytes that autograd keeps with LoRA beyond `activation_bytes`, below 0 if it keeps less; 0 without LoRA.

    Args:
        tokens: of a microbatch.
        itemsize: bytes of an activation.
        fused: whether covey's kernels compute the layers.
        recomputed: whether layers keep their inputs alone; the change is that of one layer then.
    """
    if not config.lora.is_used:
        return 0
    shapes = adapted_shapes(size, config)
    products = len(shapes) * resolved(config.lora).rank
    unneeded = _unneeded_inputs(size, {one.path for one in shapes}, fused=fused)
    # torch's RMSNorm keeps its normalised input for the gradient of its weight, covey's computes it again.
    has_frozen = size.has_rms_norm and not fused
    head_norms = size.query + size.key_value if size.has_head_norms else 0
    of_norms = size.layers * (2 * size.hidden + head_norms) if has_frozen else 0
    change = (products - unneeded - of_norms) * itemsize
    last = size.hidden * itemsize if has_frozen else 0
    if recomputed:
        return tokens * (change // size.layers - last)
    # The embeddings are frozen, so the first norm has no backward pass.
    of_input = size.hidden * (4 if size.has_rms_norm else itemsize)
    first = fused_layers.residual_norm_bytes(size.hidden) if fused else of_input
    return tokens * (change - last - first)


def _unneeded_inputs(size: Dimensions, adapted: set[str], *, fused: bool) -> int:
    """The width of all inputs of linear layers that no adapted layer reads."""
    inputs = {_input_of(one.path): one.inputs for one in size.linear if not (fused and KEPT_BY_ATTENTION in one.path)}
    needed = {_input_of(path) for path in adapted}
    return sum(width for name, width in inputs.items() if name not in needed)


def _input_of(path: str) -> tuple[str, ...]:
    """A key of a layer's input."""
    parent, _, name = path.rpartition(".")
    return parent, *next((names for names in SAME_INPUT if name in names), (name,))


def decoded_rows(
    token: int,
    *,
    requests: int,
    completions: int,
    max_rows: int,
    max_new_tokens: int,
    device: str,
    gpu_bytes: int | None = None,
) -> int:
    """Number of completions that are generated together, in whole groups.

    Args:
        token: bytes of the keys and values of a token.
        requests, completions: number of prompts, and of completions of each.
        max_rows: completions that are generated together; 0 if memory decides.
        max_new_tokens: tokens of a completion.
        device: "cpu" or "cuda".
        gpu_bytes: memory of the GPU; None: the GPU of this machine.
    """
    fitting = max_rows or local_generator.fitting_rows(token * max_new_tokens, device, gpu_bytes)
    return local_generator.rows_together(fitting, requests, completions) // completions * completions
