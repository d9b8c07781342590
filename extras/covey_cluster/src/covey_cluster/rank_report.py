"""The report of `covey plan MODEL --ranks N`: memory of one rank, ranks and nodes that suffice, seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from covey.config import RunConfig
from covey.config.fields import plural
from covey.experiment.plan import (
    COLUMN_WIDTH,
    NAME_WIDTH,
    Column,
    Place,
    count_reward_models,
    memory_table,
    process_bytes_of,
)
from covey.llm.memory import (
    TIGHT,
    Dimensions,
    MemoryPlan,
    critic_weights_of,
    frozen_parameters,
    largest_group,
    microbatches_of_shard,
    predict,
    shards_of_rank,
    trained_parameters,
)
from covey.runtime.optimizer import LARGEST_REPLICA, fits_replicated, replica_bytes
from covey_cluster.communication import (
    Passes,
    Traffic,
    gather_seconds,
    handover_seconds,
    sharded_traffic,
    whole_weights_traffic,
)
from covey_cluster.rank_memory import predict_sharded, rollout_bytes, without_sampling
from covey_cluster.report import DevicesConfig, check_planned_ranks, memory_size
from covey_cluster.throughput import TrainerSpeed, computing_seconds, evaluations_of_a_token

REPLICATED, SHARDED, SHARDED_EXACT = "replicated", "FSDP2", "FSDP2, exact"
MOST_RANKS = 4096


@dataclass(frozen=True)
class RankPlanner:
    """Predicts a rank of a run on any number of ranks."""

    size: Dimensions
    config: RunConfig
    devices: DevicesConfig
    place: Place  # with the memory of a device
    prompt_tokens: int

    @classmethod
    def of(
        cls, size: Dimensions, config: RunConfig, devices: DevicesConfig, ranks: int, prompt_tokens: int
    ) -> RankPlanner:
        """The planner of a config. Without `device_memory`, the devices are this machine's; ranks on CPUs share its
        memory.

        Raises:
            ConfigError: for ranks that cannot train the config.
        """
        check_planned_ranks(ranks, config)
        place = Place.of(config)
        if devices.device_memory:
            place = Place.of_cluster(config, memory_size(devices.device_memory))
        elif place.device == "cpu" and place.memory is not None:
            place = Place(place.device, place.dtype, place.memory // ranks)
        return cls(size, config, devices, place, prompt_tokens)

    @property
    def in_process(self) -> DevicesConfig:
        """The devices of a run whose ranks sample."""
        return replace(self.devices, external_sampler=False)

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return self.place.dtype.itemsize

    @property
    def trained(self) -> int:
        """Numbers that are trained: of the policy and of a critic."""
        return trained_parameters(self.size, self.config) + critic_weights_of(self.size, self.config)

    @property
    def gathered(self) -> int:
        """Frozen weights that are gathered for a pass of the policy and one of a critic with an adapter."""
        return self.size.parameters + (self.size.trunk_parameters if self.config.critic.trunk == "adapter" else 0)

    @property
    def computed(self) -> int:
        """Weights with which a token is computed: of the policy and of a critic."""
        return self.gathered + critic_weights_of(self.size, self.config)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of the weights. With LoRA the frozen weights are sharded, unless they are in 4 bits, and all sums of
        gradients are exact."""
        if self.config.lora.load_in_4bit:
            return (REPLICATED,)
        return (REPLICATED, SHARDED) if self.config.lora.is_used else (REPLICATED, SHARDED_EXACT, SHARDED)

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may use; infinite if unknown."""
        return float("inf") if self.place.memory is None else TIGHT * self.place.memory

    def memory(self, layout: str, ranks: int) -> MemoryPlan:
        """The memory of one of `ranks` ranks."""
        sharded = partial(predict_sharded, is_exact=layout == SHARDED_EXACT)
        predicted: Callable[..., MemoryPlan] = predict if layout == REPLICATED else sharded
        plan = predicted(
            self.size,
            self.config,
            ranks=ranks,
            device=self.place.device,
            width=self.width,
            prompt_tokens=self.prompt_tokens,
            reward_model_parameters=count_reward_models(self.config),
            processes=process_bytes_of(self.config),
        )
        return without_sampling(plan) if self.devices.external_sampler else plan

    def fewest_ranks(self, layout: str) -> int | None:
        """The smallest number of ranks of which each fits, or None."""
        ranks = 1
        while ranks <= MOST_RANKS:
            if self.memory(layout, ranks).peak <= self.room:
                return ranks
            ranks *= 2
        return None

    def traffic(self, layout: str, ranks: int) -> Traffic:
        """Seconds of communication in a step."""
        update = self.config.update
        microbatches = shards_of_rank(self.config, ranks) * len(
            microbatches_of_shard(self.config, self.prompt_tokens, ranks)
        )
        evaluations = evaluations_of_a_token(self.config) * microbatches * update.minibatches
        passes = Passes(update.minibatches * update.epochs, microbatches, evaluations)
        given = self.trained, self.width, passes, self.devices, ranks
        if self.config.lora.is_used:
            return replace(
                whole_weights_traffic(*given),
                during_passes=gather_seconds(self.gathered, *given[1:]) if layout == SHARDED else 0.0,
                weights=handover_seconds(self.size.parameters, self.width, self.devices),
            )
        return (
            whole_weights_traffic(*given)
            if layout == REPLICATED
            else sharded_traffic(*given, is_exact=layout == SHARDED_EXACT)
        )

    def trainer(self, layout: str, ranks: int, completion_tokens: float) -> TrainerSpeed:
        """Seconds of an update on completions of this mean length."""
        sampling = self.config.sampling
        groups = sampling.prompts_per_step + self.config.replay.groups
        tokens = groups * (largest_group(self.config) * completion_tokens + self.prompt_tokens)
        computing = computing_seconds(self.computed, tokens, self.config, self.devices, ranks)
        return TrainerSpeed(computing, self.traffic(layout, ranks))

    @property
    def frozen(self) -> int:
        """Weights that are not trained: of the reference, of reward models, and with LoRA of the model."""
        return frozen_parameters(self.size, self.config) + count_reward_models(self.config)

    def automatic(self, ranks: int) -> str:
        """The layout of `cluster.weights = "auto"` on `ranks` ranks."""
        memory, shards = self.place.memory, shards_of_rank(self.config, ranks)
        whole = (
            memory is None
            or self.layouts == (REPLICATED,)
            or fits_replicated(
                self.trained,
                self.frozen,
                self.width,
                shards,
                memory,
                eight_bit_moments=self.config.update.eight_bit_moments,
            )
        )
        return REPLICATED if whole else self._sharded

    def chosen(self, ranks: int) -> str:
        """The layout of the config's `cluster.weights` on `ranks` ranks."""
        fixed = {"replicate": REPLICATED, "fsdp": self._sharded}
        return fixed.get(self.config.cluster.weights) or self.automatic(ranks)

    @property
    def _sharded(self) -> str:
        return SHARDED_EXACT if SHARDED_EXACT in self.layouts and self.config.cluster.exact else SHARDED


def plan_ranks(planner: RankPlanner, model: str, ranks: int) -> str:
    """The report."""
    layouts = planner.layouts
    columns = [Column(layout, planner.config, planner.memory(layout, ranks)) for layout in layouts]
    place, sampling = planner.place, planner.config.sampling
    lines = [
        f"Predicted memory of one of {plural(ranks, 'rank')} that train {model} "
        f"({planner.size.parameters / 1e6:,.1f} million weights) in {place.precision} on {place.device}, in GiB",
        f"{plural(sampling.prompts_per_step, 'prompt')} x {plural(sampling.group_size, 'completion')} a step, "
        f"{planner.prompt_tokens} + {plural(sampling.max_new_tokens, 'token')}, at most "
        f"{plural(planner.config.update.microbatch_tokens, 'token')} in a microbatch, "
        f"{plural(planner.config.cluster.shards or ranks, 'shard')}",
        "",
        *memory_table(columns),
        *_fitting(planner, columns, ranks),
        "",
        *_seconds(planner, layouts, ranks),
        "",
        *_notes(planner, ranks),
    ]
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str], indent: int = 0) -> str:
    return f"{' ' * indent + name:<{NAME_WIDTH + 2}}{''.join(f'{cell:>{COLUMN_WIDTH}}' for cell in cells)}"


def _fitting(planner: RankPlanner, columns: Sequence[Column], ranks: int) -> list[str]:
    """Whether each layout fits, and the fewest ranks and nodes on which it does."""
    if planner.place.memory is None:
        return []
    fits = ["yes" if column.plan.peak <= planner.room else "no" for column in columns]
    fewest = [planner.fewest_ranks(column.name) for column in columns]
    nodes = [one and -(-one // planner.devices.devices_per_node) for one in fewest]
    return [
        _row(f"fits in {planner.place.memory / 2**30:.1f} GiB", fits),
        _row("fewest ranks that fit", [str(one or "none") for one in fewest]),
        _row(f"nodes of {plural(planner.devices.devices_per_node, 'device')}", [str(one or "none") for one in nodes]),
    ]


def _seconds(planner: RankPlanner, layouts: Sequence[str], ranks: int) -> list[str]:
    """The parts of an update, with all completions at the token limit."""
    speeds = [planner.trainer(layout, ranks, planner.config.sampling.max_new_tokens) for layout in layouts]

    def line(name: str, values: Sequence[float], indent: int = 2) -> str:
        return _row(name, [f"{value:.2f}" for value in values], indent)

    lines = [
        _row("seconds of a step", layouts),
        line("reduction of gradients", [speed.traffic.gradients for speed in speeds]),
        line("gathers of weights", [speed.traffic.during_passes for speed in speeds]),
    ]
    if planner.place.device == "cuda":
        lines.append(line("computing", [speed.computing for speed in speeds]))
        lines.append(line("update", [speed.seconds for speed in speeds], indent=0))
    if planner.devices.external_sampler or planner.config.sampler.kind != "local":
        lines.append(line("weights to the samplers", [speed.traffic.weights for speed in speeds], indent=0))
    return lines


def _notes(planner: RankPlanner, ranks: int) -> list[str]:
    config, devices, memory = planner.config, planner.devices, planner.place.memory
    where = "node" if ranks <= devices.devices_per_node else "network"
    speed = devices.node_link if where == "node" else devices.network_link
    lines = [
        f"host memory of a rank: {rollout_bytes(config) / 2**30:.1f} GiB for the rollouts of a step at the token "
        "limit, of all ranks",
        f"links: {speed:g} GB/s a device (--{where}-link), weights to samplers {devices.weights_link:g} GB/s "
        "(--weights-link); latency is not counted",
    ]
    if planner.layouts == (REPLICATED,):
        return [*lines, "with lora.load_in_4bit every rank has all weights"]
    if config.lora.is_used:
        lines.append("with LoRA the ranks divide the frozen weights, and every rank has the whole adapter")
    if memory is not None:
        shards, chosen = shards_of_rank(config, ranks), planner.automatic(ranks)
        whole = replica_bytes(
            planner.trained,
            planner.frozen,
            planner.width,
            shards,
            eight_bit_moments=planner.config.update.eight_bit_moments,
        )
        relation = "at most" if chosen == REPLICATED else "more than"
        lines.append(
            f'cluster.weights = "auto" chooses {chosen}: whole weights with their optimizer and the '
            f"reference take {whole / 2**30:.1f} GiB, {relation} {LARGEST_REPLICA:.0%} of a device"
        )
    return lines
