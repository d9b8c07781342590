"""Builds the training of the reward model for an iterative run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from covey.config import ConfigError, RunConfig
from covey.config.fields import plural
from covey.config.rules import VERIFIER
from covey.config.sft import RewardModelConfig, RewardModelKind
from covey.data import Group, Start
from covey.experiment.reward_models import build_reward_trainer
from covey.llm.grader import RewardGrader
from covey.llm.reward_models.graded_groups import ExampleSource, GradeSource, PairSource, StepLabeller, StepSource
from covey.llm.reward_models.iteration import IteratedRewardModel, Record
from covey.llm.reward_models.model import RewardModel
from covey.llm.reward_models.reward import ModelReward
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.sampler import LanguageSampler
from covey.tracking.console import Display
from covey.tracking.run_folder import ITERATIONS_FILE
from covey.tracking.run_store import RunStore, write_records

BOUNDARY = "line"  # end of a step for a process model without per_step
MEASURING = 1 << 31  # added to an iteration for the random numbers of its evaluation, which no training step has


def build_iterated_reward_model(
    config: RunConfig,
    grader: RewardGrader,
    sampler: LanguageSampler,
    positions: int | None,
    held_out: Sequence[Start],
    store: RunStore,
    display: Display,
) -> IteratedRewardModel:
    """The training of the reward model among the run's rewards, with the reward that evaluations average as verifier.

    Args:
        sampler: samples from the run's policy.
        positions: longest sequence of the policy's model; None: any.
        held_out: problems on which the reward model is measured.

    Raises:
        ConfigError: if the rewards have not exactly one reward model and a verifier.
    """
    models = [reward for reward in grader.rewards if isinstance(reward.caller, ModelReward)]
    if len(models) != 1:
        raise ConfigError(
            f"an iterative run trains one reward model, and its rewards have {len(models)}: give one "
            "RewardConfig(model=...)"
        )
    if grader.score_kind != "accuracy":
        raise ConfigError(
            "an iterative run labels completions with a verifier, the reward with score = true, which must be always 1 "
            f"or 0: add {VERIFIER}"
        )
    (proxy,) = models
    runner = proxy.caller
    assert isinstance(runner, ModelReward)
    if runner.loaded().kind is RewardModelKind.PROCESS:
        source: ExampleSource = _step_source(config, grader, sampler, positions)
    elif config.iteration.data == "pairs":
        source = PairSource(config.seed, config.iteration.examples_per_group)
    else:
        source = GradeSource(config.seed, config.iteration.examples_per_group)

    def sample(iteration: int) -> list[Group]:
        with display.progress(f"completions of {plural(len(held_out), 'held-out problem')}", 1) as advance:
            groups = grader.grade(sampler.sample(held_out, config.sampling.group_size, MEASURING + iteration))
            advance(1)
        return groups

    training = _training_config(config, runner)
    return IteratedRewardModel(
        config.iteration,
        training,
        source,
        proxy,
        _each_time_but_first(runner),
        lambda model: build_reward_trainer(model, training, source.objective),
        sample,
        IterationMonitor(store, display),
    )


class IterationMonitor:
    """Shows trainings of the reward model on the display, and writes `iterations.jsonl`."""

    def __init__(self, store: RunStore, display: Display) -> None:
        self._store, self._display = store, display

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        return self._display.progress(label, total)

    def record(self, records: Sequence[Record], *, restored: bool = False) -> None:
        write_records(self._store.run_dir / ITERATIONS_FILE, records)
        if not restored:
            self._display.note(describe(records[-1]))


def describe(record: Record) -> str:
    """An iteration in one line."""
    parts = [f"iteration {record['iteration']}: reward model not trained"]
    if record["optimizer_steps"]:
        replayed = f" ({record['replayed']:,} replayed)" if record["replayed"] else ""
        parts = [f"iteration {record['iteration']}: reward model on {plural(record['examples'], 'example')}{replayed}"]
    for name, words in (
        ("accuracy", "accuracy"), ("auc", "AUC"), ("calibration_error", "calibration error"),
        ("rank_agreement", "rank agreement"), ("proxy_reward", "proxy reward"),
    ):  # fmt: skip
        before, after = record["before"].get(name), record["after"].get(name)
        if before is not None and after is not None:
            parts.append(
                f"{words} {before:.3f} to {after:.3f}" if record["optimizer_steps"] else f"{words} {before:.3f}"
            )
    parts += [f"true reward {record['true_reward']:.3f}"] if "true_reward" in record else []
    return ", ".join(parts)


def _each_time_but_first(runner: ModelReward) -> Callable[[], RewardModel]:
    """Loads the model of the recipe; the first call returns the one that is loaded already."""
    calls = iter([runner.loaded])
    return lambda: next(calls, runner.reload)()


def _training_config(config: RunConfig, runner: ModelReward) -> RewardModelConfig:
    iteration = config.iteration
    return RewardModelConfig(
        model=runner.config.model,
        batch_size=iteration.reward_model_batch_size,
        learning_rate=iteration.reward_model_learning_rate,
        schedule="constant",
        microbatch_tokens=config.update.microbatch_tokens,
        seed=config.seed,
    )


def _step_source(
    config: RunConfig, grader: RewardGrader, sampler: LanguageSampler, positions: int | None
) -> StepSource:
    """Labels steps with the run's verifier, which shares its processes with the run's grader."""
    splitter = grader.splitter or StepSplitter(BOUNDARY)
    splitter.chat = sampler.chat
    verifier = RewardGrader([_verifier(grader)])
    labeller = StepLabeller(sampler, splitter, verifier, config.iteration.continuations, positions)
    return StepSource(labeller, config.iteration.examples_per_group, config.iteration.estimate)


def _verifier(grader: RewardGrader) -> WeightedReward:
    (scored,) = [reward for reward in grader.rewards if reward.name == grader.score_name]
    return replace(scored, weight=1.0, score=True)
