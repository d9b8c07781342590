"""The report of `covey plan --ranks`."""

from __future__ import annotations

from collections.abc import Sequence

from covey.config.planning import DevicesConfig, SimulationConfig
from covey.experiment.plan import find_dimensions, read_configs
from covey_cluster.rank_report import RankPlanner, plan_ranks
from covey_cluster.simulated_report import ClusterPlanner, plan_cluster


def plan(
    model: str,
    fields_given: Sequence[str],
    *,
    algorithm: str,
    critic_trunk: str | None,
    reward_model: str | None,
    prompt_tokens: int,
    ranks: int,
    devices: DevicesConfig,
    simulation: SimulationConfig | None,
) -> str:
    """The memory of ranks, or with `simulation` the cluster that they form with servers.

    Raises:
        ConfigError: if it cannot be planned.
    """
    config = next(iter(read_configs(list(fields_given), [algorithm], critic_trunk, reward_model).values()))
    planner = RankPlanner.of(find_dimensions(model), config, devices, ranks, prompt_tokens)
    if simulation is None:
        return plan_ranks(planner, model, ranks)
    return plan_cluster(ClusterPlanner.of(planner, simulation, ranks))
