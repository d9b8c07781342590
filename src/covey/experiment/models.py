"""The models of a run: policy, reference and critic, what of them is trained, and how ranks divide their weights.

All weights are trained, or an adapter (LoRA) of frozen weights:

| part             | all weights                 | an adapter                                                          |
|------------------|-----------------------------|---------------------------------------------------------------------|
| reference        | a copy of the model         | the model without its adapter, or with a copy of the adapter        |
| critic's decoder | a copy, or the policy's     | the policy's with an adapter of its own, or as the policy uses it   |
| sharded by FSDP2 | all weights                 | the frozen weights; every rank has the whole adapter                |
| saved            | `model/`                    | `model/` with merged weights, `adapter/` in peft's format           |

A run whose KL coefficient is always 0 has no reference, unless it is the teacher. The teacher is the policy, the
reference, or another model, which is frozen. The reference has a copy of the adapter if the run begins with
an adapter, or refreshes its reference.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from covey.algorithms import Algorithm, KLFromOutput
from covey.config import ClusterConfig, ConfigError, RunConfig
from covey.config.model_sources import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS_FILE,
    CRITIC_FOLDER,
    MODEL_FOLDER,
    adapter_folder,
    base_name,
    check_four_bit,
    find_origin,
    resolved,
)
from covey.data import Team
from covey.llm.critic import AdapterCritic, LanguageCritic, SharedTrunkValues
from covey.llm.data.images import ImagePrompt
from covey.llm.generation.backend import Backend, Sampling, choose_backend, find_kernels
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import Truncation
from covey.llm.model.chat import Chat
from covey.llm.model.files import CAUSAL, IMAGES
from covey.llm.model.images import never_sample_places
from covey.llm.model.loading import find_skeleton, load_chat, load_checkpoint_weights, load_model
from covey.llm.model.logprobs import MinimumLength
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
    quantized_share,
    save_adapter,
    save_adapter_config,
    save_base,
    saved_shapes,
)
from covey.llm.model.recompute import recompute_layers
from covey.llm.model.stop_strings import stop_strings
from covey.llm.policy import DivergenceToTeacher, ExtraOutput, KLToReference, LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.teacher import check_tokens
from covey.runtime.device import Machine
from covey.runtime.distributed import WHOLE, ShardedTeam, Weights, exchange_json, is_sharded
from covey.tracking.console import Display


class Division(Protocol):
    """Divides the weights of a model among the ranks (`covey.runtime.fsdp.shard`)."""

    def __call__(self, module: nn.Module, *, whole: Collection[nn.Parameter] = ()) -> Weights:
        """The weights; every rank keeps the parameters of `whole`."""


class Packed(Protocol):
    """A policy or a reward model."""

    module: Any  # a model of transformers

    @property
    def shares_prompts(self) -> bool:
        """Whether a microbatch is one forward pass."""


class AllWeights:
    """All weights of a policy's model are trained."""

    def reference(self, policy: LanguagePolicy) -> LanguagePolicy:
        """The policy as it is now, to be evaluated while the policy changes."""
        return _frozen(copy.deepcopy(policy.module), policy, policy.backend)

    def critic(self, policy: LanguagePolicy, trunk: str) -> LanguageCritic:
        """A new critic; `trunk` is critic.trunk."""
        return LanguageCritic(policy, own_trunk=trunk == "own")

    def divide(
        self, policy: LanguagePolicy, reference: LanguagePolicy | None, shard: Division
    ) -> tuple[LanguagePolicy, LanguagePolicy | None]:
        """The policy and its reference after the ranks have divided their weights."""
        reference = reference and reference.with_outputs(weights=shard(reference.module))
        return policy.with_outputs(weights=shard(policy.module)), reference

    def checksum(self, policy: LanguagePolicy) -> str:
        """The checksum of the weights of the model as it was loaded, without an adapter."""
        return checksum_of_base(policy.module)

    def check_architecture(self, folder: Path) -> None:
        """Refuse to resume a run with other frozen weights; `folder` is that of `save_architecture`.

        Raises:
            ConfigError: if they have changed.
        """

    def save_architecture(self, folder: Path) -> None:
        """Write what a checkpoint needs besides config and tokenizer of the model."""

    def folders(self) -> list[tuple[str, Callable[[Path], None]]]:
        """Further folders of a finished run, and functions that write them."""
        return []


@dataclass(frozen=True)
class AdapterOnly(AllWeights):
    """An adapter of frozen weights is trained."""

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
        self, policy: LanguagePolicy, reference: LanguagePolicy | None, shard: Division
    ) -> tuple[LanguagePolicy, LanguagePolicy | None]:
        _ = self.adapter.base.checksum  # computed and kept now, because a rank has only parts of the weights later
        base = shard(policy.module, whole=all_factors(policy.module))
        name = REFERENCE if self.copies_reference else None
        reference = reference and reference.with_outputs(weights=AdapterWeights(policy.module, name, base))
        return policy.with_outputs(weights=base), reference

    def checksum(self, policy: LanguagePolicy) -> str:
        return self.adapter.base.checksum

    def check_architecture(self, folder: Path) -> None:
        if (folder / BASE_FILE).is_file():
            fix = "put them back as they were, or start a new run"
            check_base(folder, self.adapter.base.checksum, fix)

    def save_architecture(self, folder: Path) -> None:
        save_adapter_config(self.adapter, self.base, folder)
        save_base(self.base, self.adapter, folder)

    def folders(self) -> list[tuple[str, Callable[[Path], None]]]:
        return [(ADAPTER_FOLDER, partial(save_adapter, self.adapter, self.base))]


def _frozen(module: Any, policy: LanguagePolicy, backend: Backend | None = None) -> LanguagePolicy:
    """A model that is evaluated as a policy is, and not trained."""
    frozen = LanguagePolicy(
        module,
        temperature=policy.temperature,
        microbatch_tokens=policy.microbatch_tokens,
        backend=backend,
        minimum=policy.minimum,
    )
    module.requires_grad_(False)
    return frozen


def load_teacher(config: RunConfig, policy: LanguagePolicy, chat: Chat, machine: Machine) -> LanguagePolicy | None:
    """The teacher of a run if it is another model; None for the policy and the reference.

    Raises:
        ConfigError: if it cannot be found or loaded, or has another tokenizer.
    """
    name = config.teacher.model
    if not config.teacher.is_own_model:
        return None
    check_tokens(chat, load_chat(name)[0], name)
    return _frozen(load_model(name, dtype=machine.dtype, device=machine.device).module, policy)


def adapt(policy: LanguagePolicy, config: RunConfig) -> tuple[LanguagePolicy, AllWeights]:
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
    """Compare the adapter with which training begins with the model, whose weights are not read, and count the weights
    that will be quantized.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: if it does not fit the model, or the model has no layers that can be quantized.
    """
    if not (config.lora.adapter or config.lora.load_in_4bit):
        return ()
    if config.lora.load_in_4bit:
        check_four_bit()
    module = find_skeleton(config.model)
    notes = [quantized_share(module)] if config.lora.load_in_4bit and module is not None else []
    if not config.lora.adapter:
        return notes
    folder = adapter_folder(config.lora.adapter)
    if module is not None:
        check_shapes(add_adapter(module, resolved(config.lora)), saved_shapes(folder), folder / ADAPTER_WEIGHTS_FILE)
    base = base_name(folder)
    if (folder / BASE_FILE).is_file() or Path(base).name.lower() in ("", Path(config.model).name.lower()):
        return notes  # that file has a checksum, which is compared when the weights are loaded
    return (
        *notes,
        f"lora.adapter: {folder / ADAPTER_CONFIG_FILE} names the base model {base}, and model is {config.model}: make "
        "sure that they have the same weights, on which the adapter depends",
    )


@dataclass
class LoadedPolicy:
    """A policy, its chat template, and a sampler on its weights."""

    policy: LanguagePolicy
    chat: Chat
    sampler: LanguageSampler
    adaptation: AllWeights = field(default_factory=AllWeights)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in the format of transformers."""
        self.policy.save(folder)
        self.chat.save(folder)


def load_trainable(
    config: RunConfig, machine: Machine, example: ImagePrompt | None = None
) -> tuple[LanguagePolicy, Chat]:
    """The model of a config as a policy, and its chat template.

    Args:
        config: of the run.
        machine: that it runs on.
        example: a prompt of the run with images, with which the model is tried; None: there is none.

    Raises:
        ConfigError: if it cannot be found or loaded.
    """
    with ThreadPoolExecutor(1) as executor:
        executor.submit(find_kernels, machine.device, machine.dtype)  # may compile, which takes about 20 s
        in_4bit = config.lora.load_in_4bit
        family = CAUSAL if example is None else IMAGES
        loaded = load_model(config.model, dtype=machine.dtype, device=machine.device, in_4bit=in_4bit, family=family)
    chat, backend = loaded.chat.with_config(config.chat), None
    if example is not None:
        never_sample_places(loaded.module)
        backend = choose_backend(loaded.module, chat.encode(example))
    policy = LanguagePolicy(loaded.module, microbatch_tokens=config.update.microbatch_tokens, backend=backend)
    if config.update.recompute:
        recompute_layers(policy.module)
    return policy, chat


def load_policy(config: RunConfig, machine: Machine, example: ImagePrompt | None = None) -> LoadedPolicy:
    """Load the model of a run; for the arguments, see `load_trainable`.

    Raises:
        ConfigError: if it cannot be found or loaded.
    """
    policy, chat = load_trainable(config, machine, example)
    sampling = config.sampling
    policy.temperature, policy.minimum = sampling.temperature, MinimumLength(sampling.min_new_tokens, chat.end_ids)
    sampler = LanguageSampler(
        LocalGenerator(policy), chat, config.seed, sampling.max_new_tokens, sampling.temperature,
        sampling.rows_at_once, stop=stop_strings(chat, sampling.stop),
        truncation=Truncation(min_new_tokens=sampling.min_new_tokens),
    )  # fmt: skip
    return LoadedPolicy(policy, chat, sampler)


def build_critic(config: RunConfig, policy: LanguagePolicy, adaptation: AllWeights, display: Display) -> LanguageCritic:
    """The critic of a policy: a new one, or that of the run from which the policy was loaded.

    An adapter belongs to the weights that it was trained on, so a critic with one begins again.

    Raises:
        ConfigError: if the critic of that run does not fit.
    """
    critic = adaptation.critic(policy, config.critic.trunk)
    origin = find_origin(config.model)
    if origin is None:
        return critic
    if "adapter" in (config.critic.trunk, origin.config_tables.get("critic", {}).get("trunk")):
        display.note(f"the critic begins again, because an adapter is not continued from {config.model}")
        return critic
    folder = origin.run_dir / CRITIC_FOLDER
    if origin.from_checkpoint and origin.config_tables["algorithm"] == config.algorithm:
        load_checkpoint_weights(critic.module, origin, "critic_optimizer", "set critic.trunk as that run has it")
        display.note(f"the critic continues from {config.model}")
    elif not origin.from_checkpoint and folder.is_dir():
        critic.load(folder)
        display.note(f"the critic continues from {folder}")
    return critic


@dataclass(frozen=True)
class Models:
    """The policy, and its reference, its critic and its teacher, if there is one."""

    policy: LanguagePolicy
    reference: LanguagePolicy | None
    critics: Sequence[LanguageCritic]
    critic_weights: Sequence[Weights]  # of the trunks of the critics
    teacher: LanguagePolicy | None = None

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


def check_same_weights(checksum: Callable[[], str], name: str, team: Team) -> None:
    """Compare the weights that the ranks have loaded; every rank calls it, before the ranks divide them.

    Later only trained weights are compared, and of divided weights no rank has more than its rows.

    Raises:
        ConfigError: on every rank, if they differ.
    """
    if team.size == 1:
        return
    first, *others = exchange_json(team, checksum())
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ConfigError(
                f"rank {rank} has loaded other weights of {name} than rank 0: copy the same model to every machine"
            )


def sharding(model: Packed, cluster: ClusterConfig, team: Team) -> Division:
    """How FSDP2 divides the weights of a model.

    Raises:
        ConfigError: if its forward passes are not as many as its microbatches.
    """
    if not model.shares_prompts:
        raise ConfigError(
            f"the weights of {type(model.module).__name__} cannot be sharded, because its rows are evaluated one by "
            'one: set cluster.weights = "replicate"'
        )
    from covey.runtime.fsdp import shard  # imported here, because one process never needs it

    return partial(shard, dtype=model.module.dtype, team=team, exact=cluster.exact)


def divide_alone(model: Packed, name: str, cluster: ClusterConfig, team: Team) -> Weights:
    """Shard the weights of a model without reference and critic, if the ranks of the team divide them.

    Raises:
        ConfigError: as `divide`.
    """
    check_same_weights(partial(checksum_of_base, model.module), name, team)
    return sharding(model, cluster, team)(model.module) if isinstance(team, ShardedTeam) else WHOLE


def divide(
    policy: LanguagePolicy,
    reference: LanguagePolicy | None,
    critics: Sequence[LanguageCritic],
    adaptation: AllWeights,
    config: RunConfig,
    team: Team,
    teacher: LanguagePolicy | None = None,
) -> Models:
    """Shard the weights, if the ranks of the team divide them.

    Args:
        teacher: another model than policy and reference.

    Raises:
        ConfigError: if the ranks have loaded different weights, or the forward passes of the model are not as many as
            its microbatches.
    """
    check_same_weights(partial(adaptation.checksum, policy), config.model, team)
    if teacher is not None:
        check_same_weights(partial(checksum_of_base, teacher.module), config.teacher.model, team)
    critic_weights = [WHOLE for _ in critics]
    if isinstance(team, ShardedTeam):
        division = sharding(policy, config.cluster, team)
        critic_weights = [division(critic.trunk) if critic.own_trunk else WHOLE for critic in critics]
        policy, reference = adaptation.divide(policy, reference, division)
        critics = [critic if critic.own_trunk else critic.with_trunk_of(policy) for critic in critics]
        if teacher is not None:
            teacher = teacher.with_outputs(weights=sharding(teacher, config.cluster, team)(teacher.module))
    own = {"policy": policy, "reference": reference}
    return Models(policy, reference, critics, critic_weights, own.get(config.teacher.model, teacher))


def with_outputs(models: Models, algorithm: Algorithm) -> LanguagePolicy:
    """The policy with the additional outputs that its loss needs: values, exact KL, divergence to a teacher."""
    extra: list[ExtraOutput] = [SharedTrunkValues(critic) for critic in models.critics if not critic.trains_trunk]
    if isinstance(algorithm.kl.placement, KLFromOutput) and models.reference is not None:
        extra.append(KLToReference(models.reference))
    if models.teacher is None:
        return models.policy.with_outputs(*extra)
    policy = models.policy.with_outputs(*extra, DivergenceToTeacher(models.teacher, algorithm.distillation.beta))
    if not models.teacher.shares_prompts:  # rollouts are evaluated one by one, as the teacher must
        policy.backend = replace(policy.backend, sampling=Sampling.NO_CACHE)
    return policy
