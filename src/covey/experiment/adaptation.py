"""What a run on a language model trains: all weights, or an adapter (LoRA) of frozen weights.

| part             | all weights                 | an adapter                                                          |
|------------------|-----------------------------|---------------------------------------------------------------------|
| reference        | a copy of the model         | the model without its adapter, or with a copy of the adapter        |
| critic's decoder | a copy, or the policy's     | the policy's with an adapter of its own, or as the policy uses it   |
| sharded by FSDP2 | all weights                 | the frozen weights; every rank has the whole adapter                |
| saved            | `model/`                    | `model/` with merged weights, `adapter/` in peft's format           |

The reference has a copy of the adapter if the run begins with an adapter, or refreshes its reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import nn

from covey.config import RunConfig
from covey.config.model_sources import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, adapter_folder, base_name, resolved
from covey.llm.critic import AdapterCritic, LanguageCritic
from covey.llm.model.loading import find_skeleton
from covey.llm.model.lora import (
    BASE_FILE,
    CRITIC,
    REFERENCE,
    Adapter,
    AdapterWeights,
    add_adapter,
    all_factors,
    check_base,
    check_shapes,
    checksum_of_base,
    copy_adapter,
    load_adapter,
    save_adapter,
    save_adapter_config,
    save_base,
    saved_shapes,
)
from covey.llm.policy import LanguagePolicy
from covey.runtime.sharding import Weights
from covey.tracking.run_store import ADAPTER_FOLDER


class Division(Protocol):
    """Divides the weights of a model among the ranks (`covey.runtime.fsdp.shard`)."""

    def __call__(self, module: nn.Module, *, whole: Collection[nn.Parameter] = ()) -> Weights:
        """The weights; every rank keeps the parameters of `whole`."""


class Adaptation(Protocol):
    """The trained part of a policy's model."""

    def reference(self, policy: LanguagePolicy) -> LanguagePolicy:
        """The policy as it is now, to be evaluated while the policy changes."""

    def critic(self, policy: LanguagePolicy, trunk: str) -> LanguageCritic:
        """A new critic; `trunk` is critic.trunk."""

    def divide(
        self, policy: LanguagePolicy, reference: LanguagePolicy, shard: Division
    ) -> tuple[LanguagePolicy, LanguagePolicy]:
        """The policy and its reference after the ranks have divided their weights."""

    def checksum(self, policy: LanguagePolicy) -> str:
        """The checksum of the weights of the model as it was loaded, without an adapter."""

    def check_architecture(self, folder: Path) -> None:
        """Refuse to resume a run with other frozen weights; `folder` is that of `save_architecture`.

        Raises:
            ConfigError: if they have changed.
        """

    def save_architecture(self, folder: Path) -> None:
        """Write what a checkpoint needs besides config and tokenizer of the model."""

    def folders(self) -> list[tuple[str, Callable[[Path], None]]]:
        """Further folders of a finished run, and functions that write them."""


class AllWeights:
    """All weights of the model are trained; implements `Adaptation`."""

    def reference(self, policy: LanguagePolicy) -> LanguagePolicy:
        return LanguagePolicy(
            copy.deepcopy(policy.module).requires_grad_(False),
            temperature=policy.temperature,
            microbatch_tokens=policy.microbatch_tokens,
            backend=policy.backend,
            minimum=policy.minimum,
        )

    def critic(self, policy: LanguagePolicy, trunk: str) -> LanguageCritic:
        return LanguageCritic(policy, own_trunk=trunk == "own")

    def divide(
        self, policy: LanguagePolicy, reference: LanguagePolicy, shard: Division
    ) -> tuple[LanguagePolicy, LanguagePolicy]:
        reference = reference.with_outputs(weights=shard(reference.module))
        return policy.with_outputs(weights=shard(policy.module)), reference

    def checksum(self, policy: LanguagePolicy) -> str:
        return checksum_of_base(policy.module)

    def check_architecture(self, folder: Path) -> None:
        """All weights are in the checkpoints."""

    def save_architecture(self, folder: Path) -> None:
        """Nothing to write."""

    def folders(self) -> list[tuple[str, Callable[[Path], None]]]:
        return []


@dataclass(frozen=True)
class AdapterOnly:
    """An adapter is trained; implements `Adaptation`."""

    adapter: Adapter
    base: str  # the name of the model whose weights are frozen
    seed: int
    copies_reference: bool  # the reference has an adapter too

    def reference(self, policy: LanguagePolicy) -> LanguagePolicy:
        if not self.copies_reference:
            return policy.with_outputs(weights=AdapterWeights(policy.module, None))
        copied = add_adapter(policy.module, self.adapter.lora, REFERENCE, base=self.adapter.base)
        copy_adapter(self.adapter, copied)
        copied.parameters.requires_grad_(False)
        return policy.with_outputs(weights=copied.weights(), trained=copied.parameters)

    def critic(self, policy: LanguagePolicy, trunk: str) -> LanguageCritic:
        if trunk == "policy":
            return LanguageCritic(policy, own_trunk=False)
        base = self.adapter.base
        return AdapterCritic(policy, add_adapter(policy.module, self.adapter.lora, CRITIC, seed=self.seed, base=base))

    def divide(
        self, policy: LanguagePolicy, reference: LanguagePolicy, shard: Division
    ) -> tuple[LanguagePolicy, LanguagePolicy]:
        _ = self.adapter.base.checksum  # computed and kept now, because a rank has only parts of the weights later
        base = shard(policy.module, whole=all_factors(policy.module))
        name = REFERENCE if self.copies_reference else None
        reference = reference.with_outputs(weights=AdapterWeights(policy.module, name, base))
        return policy.with_outputs(weights=base), reference

    def checksum(self, policy: LanguagePolicy) -> str:
        return self.adapter.base.checksum

    def check_architecture(self, folder: Path) -> None:
        if (folder / BASE_FILE).is_file():
            fix = "put them back as they were, or start a new run"
            check_base(folder, self.adapter.base.checksum, fix)

    def save_architecture(self, folder: Path) -> None:
        save_adapter_config(self.adapter, self.base, folder)
        save_base(self.base, self.adapter.base.checksum, folder)

    def folders(self) -> list[tuple[str, Callable[[Path], None]]]:
        return [(ADAPTER_FOLDER, partial(save_adapter, self.adapter, self.base))]


def adapt(policy: LanguagePolicy, config: RunConfig) -> tuple[LanguagePolicy, Adaptation]:
    """The policy that a run trains, and its trained part. With LoRA it is the model of `policy` with an adapter.

    Raises:
        ConfigError: if the targets or the adapter with which training begins do not fit the model.
    """
    if not config.lora.is_used:
        return policy, AllWeights()
    adapter = add_adapter(policy.module, resolved(config.lora), seed=config.seed)
    if config.lora.adapter:
        load_adapter(adapter, adapter_folder(config.lora.adapter))
    adapted = policy.with_outputs(trained=adapter.parameters)
    return adapted, AdapterOnly(adapter, config.model, config.seed, config.copies_reference_adapter)


def check_first_adapter(config: RunConfig) -> Sequence[str]:
    """Compare the adapter with which training begins with the model, whose weights are not read.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: if it does not fit the model.
    """
    if not config.lora.adapter:
        return ()
    folder, module = adapter_folder(config.lora.adapter), find_skeleton(config.model)
    if module is not None:
        check_shapes(add_adapter(module, resolved(config.lora)), saved_shapes(folder), folder / ADAPTER_WEIGHTS_FILE)
    base = base_name(folder)
    if (folder / BASE_FILE).is_file() or Path(base).name.lower() in ("", Path(config.model).name.lower()):
        return ()  # that file has a checksum, which is compared when the weights are loaded
    return (
        f"lora.adapter: {folder / ADAPTER_CONFIG_FILE} names the base model {base}, and model is {config.model}: make "
        "sure that they have the same weights, on which the adapter depends",
    )
