"""The report of `covey plan MODEL --ranks N --cluster`: predicted throughput with stragglers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from covey.config import ConfigError
from covey.config.fields import plural
from covey.llm.generation.decoder import token_bytes
from covey.llm.memory import decoded_rows, largest_group
from covey_cluster.lengths import Lengths, LogNormalLengths, recorded_lengths
from covey_cluster.rank_report import RankPlanner
from covey_cluster.report import SimulationConfig
from covey_cluster.simulation import (
    ONE_AHEAD,
    SYNCHRONOUS,
    Cluster,
    Outcome,
    Workload,
    fifo,
    simulate,
)
from covey_cluster.throughput import ServerPlan, plan_server

HEADER = (
    f"{'samplers':<10}{'schedule':<20}{'tokens/s':>10}{'seconds':>9}{'trainer':>9}{'samplers':>10}{'age':>6}{'lost':>7}",
    f"{'':<10}{'':<20}{'trained':>10}{'a step':>9}{'busy':>9}{'busy':>10}{'mean':>6}{'':>7}",
)


@dataclass(frozen=True)
class ClusterPlanner:
    """Simulates a run on any number of sampler devices."""

    ranks: int
    planner: RankPlanner
    plan: SimulationConfig
    lengths: Lengths

    @classmethod
    def of(cls, planner: RankPlanner, plan: SimulationConfig, ranks: int) -> ClusterPlanner:
        """The planner of a config.

        Raises:
            ConfigError: if the lengths cannot be read, or the memory of a device is unknown.
        """
        if planner.place.memory is None:
            raise ConfigError("--cluster needs the memory of a device: give --device-memory, such as 80GiB")
        limit = plan.limit or planner.config.sampling.max_new_tokens
        if plan.mean_tokens > limit:
            raise ConfigError(
                f"--mean-tokens {plan.mean_tokens:g} is above the token limit of {limit}: raise --limit or "
                "--max-new-tokens"
            )
        lengths = recorded_lengths(plan.lengths) if plan.lengths else None
        return cls(ranks, planner, plan, lengths or LogNormalLengths(plan.mean_tokens, plan.sigma, limit))

    @property
    def workload(self) -> Workload:
        """What the run samples."""
        config = self.planner.config
        size = largest_group(config)
        return Workload(self.lengths, config.sampling.prompts_per_step, size, self.plan.simulated_steps, config.seed)

    @property
    def layout(self) -> str:
        """The layout of the trainer: that of `cluster.weights` if it fits, else the first one that does.

        Raises:
            ConfigError: if none fits.
        """
        layouts = dict.fromkeys((self.planner.chosen(self.ranks), *self.planner.layouts[1:]))
        for layout in layouts:
            if self.planner.memory(layout, self.ranks).peak <= self.planner.room:
                return layout
        raise ConfigError(
            f"no layout of the weights fits on {plural(self.ranks, 'rank')}: covey plan without --cluster shows the "
            "memory by part and the fewest ranks that fit"
        )

    def server(self) -> ServerPlan:
        """An external server."""
        memory = self.planner.place.memory
        assert memory is not None
        context = self.planner.prompt_tokens + self.lengths.mean
        return plan_server(self.planner.size, self.planner.width, context, memory, self.planner.devices, self.plan)

    def cluster(self, devices: int, server: ServerPlan) -> Cluster:
        """The trainer and servers on so many devices.

        Raises:
            ConfigError: if the devices are not a whole number of servers.
        """
        if devices % server.devices:
            raise ConfigError(
                f"--sampler-devices {devices} is not a multiple of the {server.devices} devices of a server: give "
                f"{-(-devices // server.devices) * server.devices}, or set --devices-per-server"
            )
        update = self.planner.trainer(self.layout, self.ranks, self.lengths.mean)
        return Cluster(
            servers=devices // server.devices,
            slots=server.slots,
            speed=server.speed,
            trained_tokens_per_second=self.step_tokens / update.seconds,
            weights_seconds=update.traffic.weights,
            crash_every_seconds=self.plan.crash_every or math.inf,
            restart_seconds=self.plan.restart,
        )

    @property
    def step_tokens(self) -> float:
        """Mean tokens of the completions of a step."""
        return self.workload.prompts * self.workload.group_size * self.lengths.mean

    def colocated(self, server: ServerPlan) -> Cluster | None:
        """The ranks as servers of their own groups, as covey's sampler in process generates them: whole groups, in as
        many rows as it decodes together. None if a rank cannot hold the gathered weights.
        """
        planner, sampling = self.planner, self.planner.config.sampling
        inside = RankPlanner(planner.size, planner.config, planner.in_process, planner.place, planner.prompt_tokens)
        if inside.memory(self.layout, self.ranks).peak > inside.room:
            return None
        size, workload = planner.size, self.workload
        rows = decoded_rows(
            token_bytes(size.layers, size.attention_heads, planner.width),
            requests=-(-workload.prompts // self.ranks),
            completions=workload.group_size,
            max_rows=sampling.rows_at_once,
            max_new_tokens=sampling.max_new_tokens,
            device=planner.place.device,
        )
        return replace(
            self.cluster(self.ranks * server.devices, server),
            servers=self.ranks,
            slots=rows,
            weights_seconds=0.0,
            whole_requests=True,
            crash_every_seconds=math.inf,
        )


def plan_cluster(cluster: ClusterPlanner) -> str:
    """The report."""
    server = cluster.server()
    schedules = (SYNCHRONOUS, ONE_AHEAD, *(fifo(bound) for bound in cluster.plan.staleness))
    rows = []
    if server.devices == 1 and (colocated := cluster.colocated(server)):
        rows.append(_row("the ranks", "synchronous", simulate(cluster.workload, colocated, SYNCHRONOUS)))
    for devices in cluster.plan.sampler_devices or (cluster.ranks,):
        for schedule in schedules:
            outcome = simulate(cluster.workload, cluster.cluster(devices, server), schedule)
            rows.append(_row(str(devices), schedule.name, outcome))
    return "\n".join([*_assumptions(cluster, server), "", *HEADER, *rows, "", *_explanation()])


def _row(devices: str, schedule: str, outcome: Outcome) -> str:
    lost = outcome.lost_tokens / outcome.generated_tokens
    age = sum(outcome.ages) / len(outcome.ages)
    return (
        f"{devices:<10}{schedule:<20}{outcome.tokens_per_second:>10,.0f}{outcome.seconds / outcome.steps:>9.1f}"
        f"{outcome.trainer_busy:>9.0%}{outcome.servers_busy:>10.0%}{age:>6.1f}{lost:>7.1%}"
    )


def _assumptions(cluster: ClusterPlanner, server: ServerPlan) -> list[str]:
    some = cluster.cluster(server.devices, server)
    workload = cluster.workload
    lines = [
        "Simulated throughput: a prediction of a model, not a measurement",
        f"a step: {plural(workload.prompts, 'prompt')} x {plural(workload.group_size, 'completion')}, "
        f"{cluster.lengths.describe()}; mean {cluster.lengths.mean:,.0f} within the limit",
        f"trainer: {plural(cluster.ranks, 'rank')}, {cluster.layout}, {some.trained_tokens_per_second:,.0f} "
        f"tokens/s; new weights reach the samplers in {some.weights_seconds:.1f} s",
        f"server: {plural(server.devices, 'device')}, {plural(server.slots, 'slot')}, {server.speed.alone:,.0f} "
        f"tokens/s for one completion, {server.speed.full:,.0f} if full",
    ]
    if cluster.plan.crash_every:
        lines.append(
            f"a server crashes every {cluster.plan.crash_every:g} s and is back after {cluster.plan.restart:g} s"
        )
    return lines


def _explanation() -> list[str]:
    return [
        "synchronous: sample, then train. one step ahead: a step is sampled while the one before is trained.",
        "continuous: groups begin at any time, with weights that lack at most S updates when they are trained.",
    ]
