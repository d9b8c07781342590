"""Components of a run on a language model, from its config: algorithm, critic, reference, collector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from covey.algorithms import Algorithm, KLFromOutput
from covey.algorithms.advantages import (
    CreditAssignment,
    outcome,
    outcome_of_each_reward,
    process,
    process_by_step,
    process_return_to_go,
)
from covey.config import RunConfig, SelectionConfig
from covey.config.common import importance_cap
from covey.config.model_sources import find_origin
from covey.core import kl
from covey.data import ReferenceUpdater, Team
from covey.experiment.adaptation import Adaptation
from covey.experiment.build import build_algorithm
from covey.experiment.divided_weights import Models
from covey.experiment.own_algorithm import check_own
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.llm.model.chat import Chat, TokenTexts
from covey.llm.model.loading import load_checkpoint_weights
from covey.llm.policy import ExtraOutput, KLToReference, LanguagePolicy
from covey.runtime.ema import EMAWeights
from covey.tracking.console import Display
from covey.tracking.run_store import CRITIC_FOLDER
from covey.train.collect import (
    AdaptiveGroups,
    Collector,
    DynamicSampling,
    FixedGroups,
    GroupSize,
    LogGroupSizes,
    fixed_size,
    linear_size,
)
from covey.train.record import Recorder, RolloutRecorder, TokenRecorder, prompts_read
from covey.train.selection import ByExpectedSignal, FromTheData, PromptSelection
from covey.train.state import NeverUpdate

CREDITS: dict[str, CreditAssignment] = {
    "outcome": outcome,
    "process": process,
    "process_by_step": process_by_step,
    "process_return_to_go": process_return_to_go,
}


def build_critic(config: RunConfig, policy: LanguagePolicy, adaptation: Adaptation, display: Display) -> LanguageCritic:
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


def build_llm_algorithm(
    config: RunConfig, reward_weights: Mapping[str, float], own: Algorithm | None = None
) -> Algorithm:
    """The algorithm of a run. `reward_weights` has the weight of every reward that the grader calls.

    Raises:
        ConfigError: if the user's `own` algorithm does not work, or does not fit the config.
    """
    loss = config.loss
    each = loss.normalize_rewards == "each"
    algorithm = (
        check_own(own, config, tuple(reward_weights))
        if own is not None
        else build_algorithm(
            config.algorithm,
            replace(loss, kl_coefficient=config.kl_coefficient, importance_cap=importance_cap(loss, config.replay)),
            max_length=config.rollout_limit,
            entropy_coefficient=loss.entropy_coefficient,
            credit=outcome_of_each_reward(reward_weights) if each else CREDITS[loss.credit],
            gamma=loss.gamma,
            lam=loss.gae_lambda,
            whiten=loss.whiten,
            value_coefficient=loss.value_coefficient,
            value_clip=loss.value_clip,
        )
    )
    if algorithm.kl.placement.estimator is not kl.exact:
        return algorithm
    # The exact KL over a vocabulary is computed in the forward pass: the probabilities of all tokens are never stored.
    return replace(algorithm, kl=replace(algorithm.kl, placement=KLFromOutput()))


def with_outputs(models: Models, config: RunConfig, algorithm: Algorithm) -> LanguagePolicy:
    """The policy with the additional outputs that its loss needs: values, exact KL."""
    extra: list[ExtraOutput] = [SharedTrunkValues(critic) for critic in models.critics if not critic.trains_trunk]
    if isinstance(algorithm.kl.placement, KLFromOutput) and config.kl_coefficient != 0:
        extra.append(KLToReference(models.reference))
    return models.policy.with_outputs(*extra)


def build_reference_updater(config: RunConfig, models: Models) -> ReferenceUpdater:
    """In an iterative run, the reference of an iteration is the policy at its beginning."""
    every = config.reference.refresh_every or config.iteration.steps
    if not every:
        return NeverUpdate()
    reference, leader = models.reference, models.policy
    return EMAWeights(
        reference.trained,
        leader.trained,
        config.reference.refresh_fraction,
        every=every,
        division=reference.weights,
    )


def build_group_size(config: RunConfig) -> GroupSize:
    first, last = config.sampling.group_size, config.sampling.final_group_size
    return fixed_size(first) if last is None else linear_size(first, last, config.steps)


def build_recorder(config: RunConfig, policy: LanguagePolicy, chat: Chat, team: Team) -> Recorder:
    """Records the tokens of rollouts if the config says so."""
    texts = TokenTexts(chat.tokenizer)
    prompts = partial(prompts_read, texts)
    return TokenRecorder(policy, texts, team, prompts) if config.record.tokens else RolloutRecorder(prompts)


def build_selection(selection: SelectionConfig) -> PromptSelection:
    """The selection of prompts."""
    if selection.candidates == 1:
        return FromTheData()
    return ByExpectedSignal(**vars(selection))


def build_collector(config: RunConfig) -> Collector:
    sampling = config.sampling
    collector: Collector = DynamicSampling(config.max_resamples) if config.max_resamples else FixedGroups()
    if sampling.adaptive:
        collector = AdaptiveGroups(sampling.initial_group_size, sampling.max_group_size or 0)
    return collector if sampling.final_group_size is None else LogGroupSizes(collector)
