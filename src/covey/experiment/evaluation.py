"""Evaluates a language model by greedy answers to held-out problems."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from covey.config import ConfigError, EvaluationConfig, RunConfig, RunError
from covey.config.fields import plural
from covey.config.model_sources import ModelKind, find_origin, locate_model
from covey.config.recipe import config_from_dict
from covey.data import Group, Rollout, RolloutCredit, SamplerWeights, Start, Team, decode_groups, encode_groups
from covey.experiment.job import Evaluation
from covey.experiment.models import load_policy
from covey.experiment.plan import fits_this_machine
from covey.experiment.problem import Completions, build_problem, build_rollout_kind, opened_problem
from covey.llm.data.images import ImagePrompt
from covey.llm.data.rows import row_of
from covey.llm.generation.token_sampling import WHOLE, Truncation
from covey.llm.grader import RewardGrader
from covey.llm.model.chat import Chat
from covey.llm.model.files import IMAGES, cached_folder, family_of
from covey.llm.model.loading import find_chat, resolve_checkpoint
from covey.llm.sampler import LanguageSampler, greedy
from covey.runtime.device import build_machine
from covey.runtime.distributed import ALONE, exchange_json, lost_together
from covey.tracking.console import Display
from covey.tracking.run_folder import checkpoint_steps, last_step
from covey.tracking.run_store import RunStore, answer_record, rollout_record
from covey.tracking.statistics import Estimate
from covey.tracking.wording import SCORE_KINDS, ScoreKind

PIECE = 128  # problems per call of the sampler
SHARE = 8  # an evaluation takes at most this part of a time budget, if it can


class HeldOut:
    """Greedy answers to the held-out problems, at one or more token limits.

    Args:
        seconds: of an evaluation. If the first piece of the first evaluation shows that all problems would take longer,
            all evaluations have only as many pieces as fit, at least one.
        measured: the first evaluation of a resumed run, whose problems are those of the others.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        starts: Sequence[Start],
        grader: RewardGrader,
        sampler: LanguageSampler,
        display: Display,
        store: RunStore,
        team: Team,
        weights: SamplerWeights,
        seconds: float = math.inf,
        measured: Sequence[Evaluation] = (),
    ) -> None:
        self.every = config.every
        # The token limit of training is first, because the curve and the advice refer to it.
        self.limits = list(dict.fromkeys([sampler.max_new_tokens, *config.token_limits]))
        self.starts, self.seconds = starts, seconds
        self.grader, self.sampler, self.display, self.store = grader, sampler, display, store
        self.team, self.weights = team, weights
        self._latest: dict[int, Evaluation] = {}  # by token limit, for the version of the weights below
        self._answers: dict[int, list[Group]] = {}  # by token limit too
        self._version = sampler.version
        if seconds < math.inf:
            counts = [one["count"] + one.get("unscored", 0) for one in measured[:1]]
            for count in exchange_json(team, counts)[0]:
                self.starts, self.seconds = starts[:count], math.inf

    def measure(self, label: str) -> list[Evaluation]:
        """One result per token limit: the score, its 95 % interval, mean length, seconds."""
        return self._at(self.limits, label)

    def due(self, step: int) -> dict[str, float]:
        """The metric `eval/score` after a step at which the config requests an evaluation."""
        if not self.every or step % self.every:
            return {}
        (result,) = self._at(self.limits[:1], f"after step {step}")
        return {"eval/score": result["score"]}

    def _at(self, limits: list[int], label: str) -> list[Evaluation]:
        if self._version != self.sampler.version:
            self._latest, self._answers, self._version = {}, {}, self.sampler.version
        new = [limit for limit in limits if limit not in self._latest]  # the last step may have been evaluated already
        if new:
            self._measure(new, f"held-out {self.grader.score_kind} {label}, at most {plural(max(new), 'token')}")
            self.store.record_evaluation(self._version, answer_records(self._version, self._answers))
        return [self._latest[limit] for limit in limits]

    def _measure(self, limits: list[int], label: str) -> None:
        """Sample answers with the largest limit and truncate them: a greedy answer is a prefix of a longer one."""
        began = time.perf_counter()
        graded: dict[int, list[Group]] = {limit: [] for limit in limits}
        own = _places(len(self.starts), self.team.rank, self.team.size)
        with self.display.progress(label, len(own)) as advance, self.weights.gathered():

            def sampled(group: Group) -> None:
                advance(1)
                self.display.show_answer(group)

            sampler = greedy(self.sampler, max(limits), sampled)
            first = PIECE * self.team.size  # a piece of each rank
            for part in (slice(first), slice(first, None)):
                for piece in answers(sampler, self.starts[part], 1, self.team):
                    for limit in limits:
                        graded[limit] += self.grader.grade(sampler.truncated(piece, limit))
                self._fit(first, time.perf_counter() - began)
        graded = {limit: self._gathered(groups) for limit, groups in graded.items()}
        seconds = (time.perf_counter() - began) / len(limits)
        for limit, groups in graded.items():
            self._answers[limit] = groups
            self._latest[limit] = self._result(limit, groups) | {"seconds": seconds}

    def _fit(self, first: int, seconds: float) -> None:
        """Leave out the problems that have no time, once; every rank calls it. `first` problems took `seconds`."""
        if math.isinf(self.seconds):
            return
        fitting: int = first * max(1, exchange_json(self.team, int(self.seconds / seconds))[0])
        self.seconds = math.inf
        if fitting < len(self.starts):
            self.starts = self.starts[:fitting]
            self.display.note(f"the time budget allows evaluations of {fitting:,} held-out problems on this machine")

    def _gathered(self, groups: list[Group]) -> list[Group]:
        """The answers of all ranks, in the order of the problems."""
        if self.team.size == 1:
            return groups
        placed: dict[int, Group] = {}
        for rank, message in enumerate(self.team.exchange(encode_groups(groups))):
            places = _places(len(self.starts), rank, self.team.size)
            found = decode_groups(message, [self.starts[place] for place in places])
            placed |= zip(places, found, strict=True)
        return [placed[place] for place in sorted(placed)]

    def _result(self, limit: int, groups: list[Group]) -> Evaluation:
        rollouts = [group.rollouts[0] for group in groups]
        scores = scores_of(rollouts)
        if not scores:
            raise RunError(nothing_scored(self.grader))
        if len(scores) < len(rollouts):
            self.display.note(f"{unscored(len(rollouts) - len(scores), len(rollouts))}")
        kind = SCORE_KINDS[self.grader.score_kind].within(self.grader.score_range)
        return {
            "max_new_tokens": limit,
            **kind.estimate(scores),
            **by_kind(groups, kind),
            "unscored": len(rollouts) - len(scores),
            "mean_tokens": sum(rollout.decisions for rollout in rollouts) / len(rollouts),
        }


def answers(
    sampler: LanguageSampler, starts: Sequence[Start], samples: int, team: Team = ALONE
) -> Iterator[list[Group]]:
    """Sample answers to this rank's part of `starts`, `samples` each, PIECE problems at a time. Their random numbers
    are those of step 0, because training begins at 1. Every rank samples equally often, if necessary for no problem.
    """
    places, most = _places(len(starts), team.rank, team.size), _places(len(starts), 0, team.size)
    for i in range(0, len(most), PIECE):
        with lost_together(team):
            piece = sampler.sample([starts[place] for place in places[i : i + PIECE]], samples, step=0)
        if piece:
            yield piece


def _places(problems: int, rank: int, ranks: int) -> list[int]:
    """The problems of a rank: every so many pieces one, so that a piece is the same for any number of ranks."""
    return [place for place in range(problems) if place // PIECE % ranks == rank]


def answer_records(step: int, graded: dict[int, list[Group]]) -> list[dict[str, Any]]:
    """The records of a file of answers, from the graded groups by token limit."""
    return [
        answer_record(step, limit, group.start, rollout)
        for limit, groups in graded.items()
        for group in groups
        for rollout in group.rollouts
    ]


def scores_of(rollouts: Sequence[Rollout]) -> list[float]:
    """The scores of the graded rollouts; a failed grading is not a wrong answer."""
    return [rollout.score for rollout in rollouts if rollout.score is not None]


def by_kind(groups: Sequence[Group], kind: ScoreKind) -> dict[str, dict[str, Estimate]]:
    """{"by_kind": the mean score of every kind of problem}; {} if there are not at least two kinds. The scores of the
    answers to one problem are averaged first.
    """
    scores: dict[str, list[float]] = {}
    for group in groups:
        if found := scores_of(group.rollouts):
            scores.setdefault(group.start.kind, []).append(fmean(found))
    if len(scores) < 2:
        return {}
    single = all(len(group.rollouts) == 1 for group in groups)
    estimate = kind.estimate if single else kind.estimate_best
    return {"by_kind": {name: estimate(scores[name]) for name in sorted(scores)}}


def unscored(count: int, total: int) -> str:
    """Message about answers without a score."""
    return f"{count} of {plural(total, 'answer')} without a score, because their reward failed or was None: left out"


def nothing_scored(grader: RewardGrader) -> str:
    """Message for an evaluation without any score."""
    return (
        f"no held-out answer has a score, because the reward {grader.score_name!r} was None for each: set score = true "
        "for another reward"
    )


@dataclass(frozen=True)
class ModelEvaluation:
    """Graded answers of a model to held-out problems."""

    groups: list[Group]  # one per problem
    kind: ScoreKind  # of their scores
    max_new_tokens: int
    notes: list[str]  # notes on the data for the user
    step: int  # of the training that the weights are from; 0 without one

    @property
    def scores(self) -> list[list[float]]:
        """For every problem the scores of its answers, without those that could not be graded."""
        return [scores_of(group.rollouts) for group in self.groups]

    @property
    def by_kind(self) -> dict[str, Estimate]:
        """The mean score of every kind of problem; empty if there are not at least two."""
        return by_kind(self.groups, self.kind).get("by_kind", {})

    def records(self) -> list[dict[str, Any]]:
        """The answers as records of a file, from `covey.tracking.run_store.answer_record`."""
        return answer_records(self.step, {self.max_new_tokens: self.groups})


def evaluate_model(
    config: RunConfig,
    *,
    samples: int,
    temperature: float,
    truncation: Truncation = WHOLE,
) -> ModelEvaluation:
    """Sample and grade a model's answers to held-out problems.

    Args:
        config: model, task, rewards, chat, token limit, stop strings, number of problems, seed and machine are used.
        samples: number of answers to each problem.
        temperature: 0 is greedy.
        truncation: tokens that may not be drawn.

    Raises:
        ConfigError: as `build_problem` and `load_policy` do.
        RunError: if no answer has a score.
    """
    left_out: list[str] = []
    groups: list[Group] = []
    with opened_problem(config) as problem:
        machine = build_machine(config.device, config.precision, config.threads)
        loaded = load_policy(config, machine, problem.image_prompt)
        problem = problem.fit(loaded.chat, loaded.policy.module.config, left_out.append, training=False)
        sampler = replace(problem.kind.sampler(loaded.sampler), temperature=temperature, truncation=truncation)
        with Display() as display, display.progress("answering", len(problem.held_out)) as advance:
            for piece in answers(sampler, problem.held_out, samples):
                groups += problem.grader.grade(piece)
                advance(len(piece))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    missing = len(rollouts) - len(scores_of(rollouts))
    if missing == len(rollouts):
        raise RunError(nothing_scored(problem.grader))
    notes = [*problem.notes(config.evaluation.problems, "--problems"), *problem.kind.notes()]
    return ModelEvaluation(
        groups,
        SCORE_KINDS[problem.grader.score_kind].within(problem.grader.score_range),
        config.sampling.max_new_tokens,
        [*notes, *left_out, *([unscored(missing, len(rollouts))] if missing else [])],
        _step_of(config.model),
    )


def _step_of(model: str) -> int:
    """The training step that the weights are from; 0 if no run trained them."""
    origin = locate_model(model).origin
    if origin is None:
        return 0
    if not origin.from_checkpoint:
        return last_step(origin.run_dir)
    return origin.step or max(checkpoint_steps(origin.run_dir), default=0)


def sample_model(
    config: RunConfig,
    prompt: str,
    n: int,
    temperature: float,
    truncation: Truncation = WHOLE,
    *,
    images: Sequence[Path] = (),
) -> list[str]:
    """Sample `n` answers to a user's message with the model's chat template, if it has one.

    Args:
        config: model, chat, token limit, stop strings, seed and precision are used.
        images: files of the message.

    Raises:
        ConfigError: as `load_policy` does; if an image cannot be used.
    """
    asked: Any = [{"role": "user", "content": prompt}]
    example: ImagePrompt | None = None
    described = find_chat(config.model)
    if images:
        asked = example = row_of("--image", {"prompt": asked, "images": [*map(str, images)]}, Path.cwd()).prompt
    elif described is not None and family_of({"model_type": described[1].model_type}) is IMAGES:
        asked = example = ImagePrompt(asked)
    loaded = load_policy(config, build_machine("auto", config.precision, 0), example)
    sampler = replace(loaded.sampler, temperature=temperature, truncation=truncation)
    asked = asked if example is not None or loaded.chat.tokenizer.chat_template else prompt
    (group,) = sampler.sample([Start(0, asked)], n, step=0)
    return [rollout.text for rollout in group.rollouts]


@dataclass(frozen=True)
class Sampled:
    """Rollouts of one prompt."""

    group: Group
    notes: list[str]  # for the user

    def records(self) -> list[dict[str, Any]]:
        """The rollouts as lines of a rollouts file."""
        return [rollout_record(0, self.group, rollout, RolloutCredit(None, None)) for rollout in self.group.rollouts]


def sample_groups(
    config: RunConfig,
    n: int,
    temperature: float,
    truncation: Truncation = WHOLE,
    *,
    prompt: str | None = None,
    columns: Mapping[str, Any] = MappingProxyType({}),
    problem: int = 0,
) -> Sampled:
    """Sample `n` completions or conversations of a prompt, or of a held-out problem, which are then graded.

    Args:
        config: model, conversation, chat, token limits, stop strings, seed and precision are used, of a held-out
            problem also task and rewards.
        n: number of rollouts.
        temperature: 0 is greedy.
        truncation: tokens that may not be drawn.
        prompt: the user's message; None: the held-out problem.
        columns: of the data, for the environment of `prompt`.
        problem: the number of the held-out problem, from 0.

    Raises:
        ConfigError: as `build_problem` and `load_policy` do; if there is no such problem, the prompt is too long, or
            every environment failed.
    """
    kind = build_rollout_kind(config)
    graders: list[RewardGrader] = []
    notes: list[str] = []
    example: ImagePrompt | None = None
    try:
        if prompt is not None:
            start = Start(0, [{"role": "user", "content": prompt}], dict(columns))
        else:
            found = build_problem(config, kind=kind)
            graders.append(found.grader)
            if problem >= len(found.held_out):
                raise ConfigError(f"there is no held-out problem {problem}: the last is {len(found.held_out) - 1}")
            start = found.held_out[problem]
            example = found.image_prompt
        if (described := find_chat(config.model)) is not None:
            _refuse_long(config, kind, start, *described)
        loaded = load_policy(config, build_machine("auto", config.precision, 0), example)
        sampler = replace(kind.sampler(loaded.sampler), temperature=temperature, truncation=truncation)
        (group,) = sampler.sample([start], n, step=0)
        failures = [rollout.failure for rollout in group.rollouts if rollout.failure]
        if len(failures) == n:
            raise ConfigError(f"{failures[0]}{'' if graders else '; --columns gives the columns of the data'}")
        notes += failures
        for grader in graders:
            grader.use_chat(loaded.chat)
            ungraded, _, why = grader.grade_part([group], 5 * n)  # failures of all of them do not end it
            notes += [why] if ungraded > len(failures) else []
    finally:
        for grader in graders:
            grader.close()
        kind.close()
    return Sampled(group, notes)


def _refuse_long(config: RunConfig, kind: Completions, start: Start, chat: Chat, model_config: Any) -> None:
    """Refuse a prompt that leaves no room in the model's positions.

    Raises:
        ConfigError: with the numbers of tokens.
    """
    limit = kind.prompt_limit(chat.with_config(config.chat), model_config, config.rollout_limit, drop=False)
    if fault := limit.fault(start.prompt):
        raise ConfigError(fault)


def precision_of(model: str) -> str:
    """Precision of the run that a model is from; "auto" if it is from none."""
    origin = find_origin(model)
    config = None if origin is None else config_from_dict(origin.config_tables)
    return config.precision if isinstance(config, RunConfig) else "auto"


def report_backend(config: RunConfig, example: ImagePrompt | None) -> str:
    """Load the model of a run and describe the backend that is chosen for it. Nothing is downloaded.

    Args:
        config: of the run.
        example: as of `load_trainable`.

    Raises:
        ConfigError: if the model cannot be loaded or trained.
    """
    later = "the code that computes it is chosen when the model is loaded"
    if locate_model(resolve_checkpoint(config.model)).kind is ModelKind.HUB:
        folder = cached_folder(config.model)
        if folder is None:
            return f"{config.model} is not on this machine yet: {later}"
        config = replace(config, model=str(folder))
    if not fits_this_machine(config):
        return f"{config.model} was not loaded, because a run needs more memory than this machine has: {later}"
    machine = build_machine(config.device, config.precision, config.threads)
    return load_policy(config, machine, example).policy.backend.describe()
