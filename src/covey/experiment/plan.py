"""Reports of `covey plan` and of the memory in `covey check`: predicted bytes as a table, and advice.

The time of a step on a GPU is arithmetic, from a card's published rates; nothing of it was measured on a GPU. A
decoding step reads all weights and the keys and values of its rows; an update multiplies every weight twice for each
token and pass. The limit is the longer of bytes and operations at the rates of the data sheet. What is expected takes
published fractions of them and a time for every launch. Shapes: R rows, P tokens of a prompt, C of a completion.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from covey.config import CRITIC_FREE, ConfigError, DatasetConfig, LoRAConfig, RunConfig, UpdateConfig
from covey.config.fields import plural
from covey.config.machine import memory_bytes, ranks_of_machine
from covey.config.recipe import apply_overrides, config_from_dict, split_overrides
from covey.config.rules import validate
from covey.config.sft import SFT_ALGORITHM, RewardModelTraining
from covey.data import Team
from covey.experiment.advice import ADAPTER_RANK
from covey.llm.data.images import ImagePrompt
from covey.llm.data.rows import read_rows
from covey.llm.memory import (
    PROMPT_TOKENS,
    SAMPLING,
    TIGHT,
    Dimensions,
    MemoryPlan,
    critic_weights_of,
    find_model_config,
    frozen_parameters,
    has_reference,
    largest_group,
    microbatches_of_shard,
    predict,
    read_dimensions,
    trained_parameters,
)
from covey.llm.model.loading import find_chat, find_model
from covey.llm.native.bindings import may_have_kernels
from covey.llm.reward_models.loading import count_parameters
from covey.llm.tasks import default_rewards
from covey.runtime.device import choose_device, choose_precision, device_kind, gpu_memory, total_memory_bytes
from covey.runtime.distributed import exchange_json
from covey.runtime.optimizer import fits_replicated

WITHOUT_KERNELS = "the kernels are for Llama, Qwen2 and Qwen3, compute capability 8.0 or newer, and need Triton"
NAME_WIDTH, COLUMN_WIDTH = 28, 14
SHARED = "ppo, shared"  # the column of a critic on the policy's trunk
LEAST_VLLM_BYTES = 3 << 30  # beside its weights: CUDA context and graphs, activations, keys and values


@dataclass(frozen=True)
class Column:
    """One run of the table."""

    name: str
    config: RunConfig
    plan: MemoryPlan


@dataclass(frozen=True)
class Place:
    """Device that a run would use."""

    device: str  # `device_kind`
    dtype: torch.dtype
    memory: int | None  # bytes; None if this machine has no such device
    has_kernels: bool = True  # for the models that covey's kernels support
    card: str = ""  # the name of a GPU that is planned for; empty: the device of this machine
    name: str = ""  # of the device in the report; empty: its kind

    @classmethod
    def of(cls, config: RunConfig) -> Place:
        """The device and precision that a run would choose here; a GPU may be planned for if there is none."""
        if config.device == "cuda" and not torch.cuda.is_available():
            dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
            return cls("cuda", dtype, None, may_have_kernels("cuda"))
        device = choose_device(config.device)
        dtype, kernels = choose_precision(config.precision, device), may_have_kernels(device.type)
        return cls(device_kind(device), dtype, total_memory_bytes(device), kernels, name=device.type)

    @classmethod
    def of_cluster(cls, config: RunConfig, memory: int) -> Place:
        """A device with this memory: a GPU, unless the config says otherwise."""
        dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
        return cls("cpu" if config.device == "cpu" else "cuda", dtype, memory)

    @classmethod
    def of_card(cls, name: str) -> Place:
        """A GPU by its name.

        Raises:
            ConfigError: if it is not known.
        """
        name, card = find_card(name)
        dtype = torch.bfloat16 if card.has_bf16 else torch.float32
        return cls("cuda", dtype, card.gib << 30, card.has_bf16, name)

    @property
    def precision(self) -> str:
        """Its name in a recipe."""
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"


def plan_memory(
    model: str,
    fields: Sequence[str] = (),
    *,
    algorithms: Sequence[str] = ("grpo", "ppo"),
    critic_trunk: str | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    reward_model: str | None = None,
    card: str | None = None,
) -> str:
    """The report of `covey plan`.

    Args:
        model: a model's name as in a recipe, or the path of a config.json.
        fields: `--field value` words, as for `covey train`.
        algorithms: one column each; PPO has two, one for each trunk of its critic, unless `critic_trunk` selects one.
        reward_model: a reward model's name, whose weights are counted.
        card: the name of a GPU to plan for, with the time of a step; None: the device of this machine.

    Raises:
        ConfigError: for invalid arguments, or a model that is not on this machine.
    """
    if prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens must be at least 1 (is {prompt_tokens})")
    configs = read_configs(fields, algorithms, critic_trunk, reward_model)
    size = find_dimensions(model)
    first = next(iter(configs.values()))
    place = Place.of_card(card) if card else Place.of(first)

    def planned(config: RunConfig) -> MemoryPlan:
        return plan_of(size, config, place, prompt_tokens)

    columns = [Column(name, config, planned(config)) for name, config in configs.items()]
    sampling = first.sampling
    title = [
        f"Predicted memory of {model} ({size.parameters / 1e6:,.1f} million weights) in {place.precision} on "
        f"{place.name or place.device}, in GiB",
        f"{plural(sampling.prompts_per_step, 'prompt')} x {plural(sampling.group_size, 'completion')} a step, "
        f"{prompt_tokens} + {plural(first.rollout_limit, 'token')}, at most "
        f"{plural(first.update.microbatch_tokens, 'token')} in a microbatch",
    ]
    rows, timed = columns[0].plan.rows, list[str]()
    if place.device == "cuda":
        path = (
            "covey's kernels, Triton"
            if place.has_kernels and size.kernels_on(place.device)
            else f"torch ({WITHOUT_KERNELS})"
        )
        title.append(f"Sampling and update: {path}; {plural(rows, 'completion')} decoded together")
    if place.card and first.algorithm in CRITIC_FREE:
        timed = [*time_lines(size, first, rows, prompt_tokens, place.card), ""]
    advice = _advice(columns, place, planned, _next_command(model, fields))
    return "\n".join([*title, "", *memory_table(columns), "", *timed, *_comparison(columns), advice])


def find_dimensions(model: str) -> Dimensions:
    """The dimensions of a model by its name as in a recipe, or by the path of a config.json.

    Raises:
        ConfigError: if its config.json is not on this machine.
    """
    model_config = find_model_config(model)
    if model_config is None:
        raise ConfigError(
            f"there is no config.json of {model} on this machine: give its path (it is a few hundred bytes on the "
            "model's page), a model folder, a .gguf file, or smollm2-135m"
        )
    return read_dimensions(model_config, model)


def check_memory(config: RunConfig) -> str:
    """The predicted memory of a recipe's run, by part, on the device and in the precision of this machine."""
    plan = _plan_here(config)
    if plan is None:
        return f"estimated memory: unknown until {config.model} has been downloaded"
    lines = [f"  {name:<{NAME_WIDTH}} {size / 2**30:6.2f} GiB" for name, size in plan.parts.items() if size]
    return "\n".join(
        [f"estimated memory: {plan.peak / 2**30:.1f} GiB at the most (sampling and update do not overlap)", *lines]
    )


def fits_this_machine(config: RunConfig) -> bool:
    """False if the predicted memory of a recipe's run is more than the device has."""
    plan, memory = _plan_here(config), Place.of(config).memory
    return plan is None or memory is None or plan.peak <= memory


def _plan_here(config: RunConfig) -> MemoryPlan | None:
    """None for a model that has not been downloaded."""
    model_config = find_model_config(config.model)
    if model_config is None:
        return None
    size = read_dimensions(model_config, config.model)
    return plan_of(size, config, Place.of(config), _prompt_tokens(config))


def _prompt_tokens(config: RunConfig) -> int:
    """PROMPT_TOKENS, or as many as the first prompt with images of the data has, if that is more."""
    if not isinstance(config.task, DatasetConfig):
        return PROMPT_TOKENS
    rows = read_rows(config.task.sources[0], config.task.columns)
    prompts = [row.prompt for row in rows if isinstance(row.prompt, ImagePrompt)]
    found = find_chat(config.model) if prompts else None
    if found is None:
        return PROMPT_TOKENS
    return max(PROMPT_TOKENS, len(found[0].with_config(config.chat).encode(prompts[0])))


def sampling_room(config: RunConfig) -> int | None:
    """Bytes of the GPU of a run that are free between updates, by its plan; None on a CPU."""
    place = Place.of(config)
    if place.device != "cuda" or place.memory is None:
        return None
    plan = _plan_here(config)
    return None if plan is None else int(TIGHT * place.memory) - plan.staying


def plan_of(size: Dimensions, config: RunConfig, place: Place, prompt_tokens: int = PROMPT_TOKENS) -> MemoryPlan:
    """The plan of a run, with its reward models and its other processes."""
    return predict(
        size,
        config,
        device=place.device,
        width=place.dtype.itemsize,
        prompt_tokens=prompt_tokens,
        reward_model_parameters=count_reward_models(config),
        processes=process_bytes_of(config),
        memory=place.memory,
        has_kernels=place.has_kernels,
    )


def count_reward_models(config: RunConfig) -> int:
    """Number of weights of the config's reward models; one that has not been downloaded counts as 0."""
    return sum(count_parameters(reward.model) or 0 for reward in config.rewards if reward.model)


def process_bytes_of(config: RunConfig) -> int:
    """Bytes of the processes of the config's rewards, or of its task's own reward, of the function that splits steps,
    and of the task; a task from Python counts as 0.
    """
    default = default_rewards(config.task) if config.task is not None else ()
    rewards = sum(reward.process_bytes for reward in config.rewards or default)
    return rewards + config.process.process_bytes + getattr(config.task, "process_bytes", 0)


def read_configs(
    fields: Sequence[str], algorithms: Sequence[str], critic_trunk: str | None, reward_model: str | None
) -> dict[str, RunConfig]:
    """The config of every column, by its title."""

    def read(algorithm: str, trunk: str | None) -> RunConfig:
        tables: dict[str, object] = {"algorithm": algorithm}
        tables |= {"rewards": [{"model": reward_model}]} if reward_model else {}
        words = ["--critic.trunk", trunk] if trunk else []
        apply_overrides(tables, split_overrides([*fields, *words]))
        config = config_from_dict(tables)
        assert isinstance(config, RunConfig)
        return config

    configs: dict[str, RunConfig] = {}
    for algorithm in algorithms:
        own = "adapter" if read(algorithm, None).lora.is_used else "own"
        trunks = [critic_trunk] if critic_trunk else [own, "policy"]
        for trunk in trunks if algorithm == "ppo" else [None]:
            config = read(algorithm, trunk)
            validate(config, own_task=True)
            configs[SHARED if trunk == "policy" else algorithm] = config
    return configs


def memory_table(columns: Sequence[Column]) -> list[str]:
    """One line per part of any column: first the permanent parts, then those of sampling and of the update."""

    def line(name: str, sizes: Sequence[int], indent: int = 2) -> str:
        cells = (f"{size / 2**30:{COLUMN_WIDTH}.2f}" if size else " " * (COLUMN_WIDTH - 1) + "-" for size in sizes)
        return f"{' ' * indent + name:<{NAME_WIDTH + 2}}{''.join(cells)}"

    update = columns[0].plan.update
    parts = [name for name in columns[0].plan.parts if any(column.plan.parts[name] for column in columns)]
    phases = (
        ("all the time", [name for name in parts if name not in (*SAMPLING, *update)]),
        ("while sampling", [name for name in parts if name in SAMPLING]),
        ("during the update", [name for name in parts if name in update]),
    )
    lines = [" " * (NAME_WIDTH + 2) + "".join(f"{column.name:>{COLUMN_WIDTH}}" for column in columns)]
    for title, names in phases:
        lines += [title] if names else []
        lines += [line(name, [column.plan.parts[name] for column in columns]) for name in names]
    return [*lines, line("at the most", [column.plan.peak for column in columns], indent=0)]


def _comparison(columns: Sequence[Column]) -> list[str]:
    """Memory that the first column saves beside each other column, as a fraction of the other."""
    first, *others = columns
    saved = [f"{1 - first.plan.peak / other.plan.peak:.0%} less than {other.name}" for other in others]
    lines = [f"{first.name} needs {', '.join(saved)}."] if saved else []
    if SHARED in [column.name for column in columns]:
        lines.append(f"{SHARED}: the critic is a value head on the policy's decoder (critic.trunk = policy).")
    return lines


def _advice(
    columns: Sequence[Column], place: Place, planned: Callable[[RunConfig], MemoryPlan], next_command: str
) -> str:
    """Columns that fit, and the fields to lower for those that do not."""
    largest = max(columns, key=lambda column: column.plan.peak)
    if place.memory is None:
        return f"There is no GPU here to compare with: take one with more than {largest.plan.peak / 2**30:.1f} GiB."
    room = int(TIGHT * place.memory)
    where = "GPU" if place.device == "cuda" else "machine"
    has = f"{f'The {place.card}' if place.card else f'This {where}'} has {place.memory / 2**30:.1f} GiB"
    tight = [column for column in columns if column.plan.peak > room]
    if not tight:
        return f"{has}: {'it fits' if len(columns) == 1 else 'all fit'}. Next: {next_command}"
    smallest = min(tight, key=lambda column: column.plan.peak)
    names = ", ".join(column.name for column in tight)
    return f"{has}, too little for: {names}. {_what_to_lower(smallest, planned, room)}"


def _what_to_lower(column: Column, planned: Callable[[RunConfig], MemoryPlan], room: int) -> str:
    """The largest microbatch with which a run fits, if necessary with the smallest number of rows at once, and, if no
    microbatch is small enough, with recomputed layers, with 8-bit moments, with LoRA and with weights in 4 bits.
    """
    whole = column.config
    few_rows = replace(whole.sampling, rows_at_once=whole.sampling.group_size)
    for config, lora_words in _smaller_models(whole):
        for changed, sampling in itertools.product(_smaller_updates(config), (whole.sampling, few_rows)):
            if planned(replace(config, update=changed, sampling=sampling)).peak <= room:
                words = [*lora_words, *(f"--{name} {value}" for name, value in _differences(whole.update, changed))]
                words += [f"--rows-at-once {sampling.rows_at_once}"] if sampling is few_rows else []
                return f"With {' '.join(words)} {column.name} fits."
    return f"No microbatch is small enough for {column.name}: choose a smaller model."


def _smaller_models(config: RunConfig) -> Iterator[tuple[RunConfig, list[str]]]:
    """The run, with LoRA if all weights are trained, and with LoRA in 4 bits; the options that make it so."""
    yield config, []
    adapted, words = config, []
    if not config.lora.is_used:
        adapted, words = replace(config, lora=LoRAConfig(rank=ADAPTER_RANK)), [f"--rank {ADAPTER_RANK}"]
        if config.algorithm == "ppo" and config.critic.trunk == "own":
            adapted = replace(adapted, critic=replace(config.critic, trunk="adapter"))
            words.append("--trunk adapter")
        yield adapted, words
    if not config.lora.load_in_4bit:
        yield replace(adapted, lora=replace(adapted.lora, load_in_4bit=True)), [*words, "--load-in-4bit true"]


def _differences(update: UpdateConfig, changed: UpdateConfig) -> Iterator[tuple[str, str]]:
    """Options and values of the fields that differ."""
    if changed.microbatch_tokens != update.microbatch_tokens:
        yield "microbatch-tokens", str(changed.microbatch_tokens)
    if changed.recompute and not update.recompute:
        yield "recompute", "true"
    if changed.eight_bit_moments and not update.eight_bit_moments:
        yield "eight-bit-moments", "true"


def _smaller_updates(config: RunConfig) -> Iterator[UpdateConfig]:
    """Updates with ever smaller microbatches, then with recomputed layers, then with 8-bit moments."""
    update, shortest = config.update, config.rollout_limit
    halves = [update.microbatch_tokens]
    while halves[-1] > shortest:
        halves.append(halves[-1] // 2)
    for eight_bit, recompute in itertools.product(
        sorted({update.eight_bit_moments, True}), sorted({update.recompute, True})
    ):
        for tokens in halves:
            yield replace(update, microbatch_tokens=tokens, recompute=recompute, eight_bit_moments=eight_bit)


def _next_command(model: str, fields: Sequence[str]) -> str:
    path = Path(model)
    folder = str(path.parent) if path.name == "config.json" else model
    return shlex.join(["covey", "train", "arithmetic_grpo", "--model", folder, *fields])


def with_vllm_memory(config: RunConfig, device: torch.device) -> RunConfig:
    """The config with the fraction of the GPU that the run leaves to the vLLM that it starts, if it starts one there;
    unchanged before the model has been downloaded.

    Raises:
        ConfigError: if that is less than vLLM needs.
    """
    sampler = config.sampler
    if device.type != "cuda" or sampler.kind != "vllm" or not sampler.started or sampler.vllm_memory:
        return config
    plan = _plan_here(config)
    if plan is None:
        return config
    whole, usable = gpu_memory(device)
    left, weights = int(TIGHT * usable) - plan.staying, plan.parts["weights"]
    if left < weights + LEAST_VLLM_BYTES:
        raise ConfigError(
            f"vLLM beside the run needs at least {(weights + LEAST_VLLM_BYTES) / 2**30:.1f} GiB, and the run leaves "
            f"{max(left, 0) / 2**30:.1f} of the GPU's {usable / 2**30:.1f} GiB (covey plan): train an adapter "
            f"(lora.rank = {ADAPTER_RANK}), set update.eight_bit_moments = true, or remove sampler.kind"
        )
    return replace(config, sampler=replace(sampler, vllm_memory=math.floor(1000 * left / whole) / 1000))


def must_shard(config: RunConfig | RewardModelTraining, team: Team, parameters: int | None = None) -> bool:
    """Whether the ranks must divide the weights, because they do not fit on the device of each; the same on all ranks.

    Downloads the model if it is on a hub. `parameters` is as for `covey.experiment.job.team_for`.

    Raises:
        ConfigError: if the model is not found.
    """
    device = choose_device(config.device)
    memory = total_memory_bytes(device) if device.type == "cuda" else _share_of_machine()
    width = choose_precision(config.precision, device).itemsize
    trained, frozen = _parameters(config) if isinstance(config, RunConfig) else (parameters or 0, 0)
    eight_bit_moments = isinstance(config, RunConfig) and config.update.eight_bit_moments
    shards = team.shards // team.size
    fits = memory is None or fits_replicated(
        trained, frozen, width, shards, memory, eight_bit_moments=eight_bit_moments
    )
    return any(exchange_json(team, not fits))


def _parameters(config: RunConfig) -> tuple[int, int]:
    """The numbers of weights that a run trains, and that it only evaluates."""
    model_config = find_model_config(config.model)
    if model_config is None:
        find_model(config.model)
        model_config = find_model_config(config.model)
    if model_config is None:
        raise ConfigError(f"there is no config.json of {config.model}: set cluster.weights")
    size = read_dimensions(model_config, config.model)
    if config.algorithm == SFT_ALGORITHM:
        return size.parameters, 0
    frozen = frozen_parameters(size, config) + count_reward_models(config)
    return trained_parameters(size, config) + critic_weights_of(size, config), frozen


def _share_of_machine() -> int | None:
    memory = memory_bytes()
    return None if memory is None else memory // ranks_of_machine()


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
