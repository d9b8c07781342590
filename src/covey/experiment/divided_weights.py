"""The models of a run and the division of their weights among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from covey.config import ConfigError, RunConfig
from covey.config.model_sources import CRITIC_FOLDER, MODEL_FOLDER
from covey.data import Team
from covey.experiment.adaptation import Adaptation
from covey.llm.critic import LanguageCritic
from covey.llm.policy import LanguagePolicy
from covey.runtime.distributed import ShardedTeam, exchange_json
from covey.runtime.sharding import WHOLE, Weights, is_sharded


@dataclass(frozen=True)
class Models:
    """The policy, its reference and its critic, if there is one."""

    policy: LanguagePolicy
    reference: LanguagePolicy
    critics: Sequence[LanguageCritic]
    critic_weights: Sequence[Weights]  # of the trunks of the critics

    @property
    def trained(self) -> list[tuple[nn.Module, Weights]]:
        """The modules whose parameters have an optimizer."""
        critics = zip((critic.module for critic in self.critics), self.critic_weights, strict=True)
        return [(self.policy.trained, self.policy.weights), *critics]

    @property
    def in_parts(self) -> bool:
        """True if each rank has some rows of the trained weights only."""
        return any(is_sharded(parameter) for module, _ in self.trained for parameter in module.parameters())

    def collect(self) -> list[tuple[str, Callable[[Path], None]]]:
        """Collect the trained weights on rank 0; every rank calls it. Returns the folders of the policy and the critic,
        and functions that write them there.
        """
        critics = [
            (CRITIC_FOLDER, critic.collect(weights))
            for critic, weights in zip(self.critics, self.critic_weights, strict=True)
        ]
        return [(MODEL_FOLDER, self.policy.collect()), *critics]


def check_same_weights(policy: LanguagePolicy, adaptation: Adaptation, name: str, team: Team) -> None:
    """Compare the weights that the ranks have loaded; every rank calls it, before the ranks divide them.

    Later only trained weights are compared, and of divided weights no rank has more than its rows.

    Raises:
        ConfigError: on every rank, if they differ.
    """
    if team.size == 1:
        return
    first, *others = exchange_json(team, adaptation.checksum(policy))
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ConfigError(
                f"rank {rank} has loaded other weights of {name} than rank 0: copy the same model to every machine"
            )


def divide(
    policy: LanguagePolicy,
    reference: LanguagePolicy,
    critics: Sequence[LanguageCritic],
    adaptation: Adaptation,
    config: RunConfig,
    team: Team,
) -> Models:
    """Shard the weights, if the ranks of the team divide them.

    Raises:
        ConfigError: if the ranks have loaded different weights, or the forward passes of the model are not as many as
            its microbatches.
    """
    check_same_weights(policy, adaptation, config.model, team)
    if not isinstance(team, ShardedTeam):
        return Models(policy, reference, critics, [WHOLE for _ in critics])
    if not policy.shares_prompts:
        raise ConfigError(
            f"the weights of {type(policy.module).__name__} cannot be sharded, because its rollouts are evaluated one "
            'by one: set cluster.weights = "replicate"'
        )
    from covey.runtime.fsdp import shard  # imported here, because one process never needs it

    division = partial(shard, dtype=policy.module.dtype, team=team, exact=config.cluster.exact)
    critic_weights = [division(critic.trunk) if critic.own_trunk else WHOLE for critic in critics]
    policy, reference = adaptation.divide(policy, reference, division)
    critics = [critic if critic.own_trunk else critic.with_trunk_of(policy) for critic in critics]
    return Models(policy, reference, critics, critic_weights)
