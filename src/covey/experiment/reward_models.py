"""Trains and evaluates reward models: `covey reward-model train` and `covey reward-model eval`.

runs/reward_model-001/
  config.toml                   data and settings; its algorithm is reward_model
  origin.json                   how it was called, checksums of the data, the evaluation before training
  metrics.jsonl                 one line per optimizer step; the last of an epoch has the held-out metrics too
  checkpoints/                  for `covey reward-model train --resume`
  model/                        the trained model in the format of transformers, with the scale of its scores
  summary.json, reliability.png the result
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.config import CheckpointConfig, ConfigError, RewardConfig, RunConfig, RunError, UpdateConfig
from covey.config.fields import plural
from covey.config.files import faults_of, read_file, user_path
from covey.config.model_sources import MODEL_FOLDER
from covey.config.recipe import config_to_dict
from covey.config.rewards import BUILT_IN_REWARDS
from covey.config.sft import (
    REWARD_MODEL_ALGORITHM,
    RewardModelConfig,
    RewardModelKind,
    RewardModelTraining,
    check_training,
    locate_reward_model,
)
from covey.data import Group
from covey.experiment.advice import Launch
from covey.experiment.job import Experiment, begun
from covey.experiment.models import LoadedPolicy, divide_alone, load_policy
from covey.experiment.problem import build_problem
from covey.experiment.supervised import SupervisedBuilder, build_trainer
from covey.llm.data.reward_examples import Example, read_examples
from covey.llm.data.rows import Split, divide, encode_split
from covey.llm.model.architecture import position_limit, shortest
from covey.llm.model.loading import resolve_checkpoint
from covey.llm.reward_models.examples import (
    REWARD_OPTIONS,
    EncodedExample,
    Objective,
    choose_objective,
    encode_example,
    encode_examples,
    kind_of_examples,
)
from covey.llm.reward_models.graded_groups import LabelledCompletion, PairSource, StepLabeller, graded_completions
from covey.llm.reward_models.loading import begin_reward_model, load_reward_model
from covey.llm.reward_models.model import RewardModel
from covey.llm.reward_models.training import Quality, RewardCriterion, by_prompt, evaluate
from covey.llm.rewards.step_splitter import StepSplitter
from covey.runtime.device import Machine, build_machine
from covey.runtime.distributed import describe_team, joined_ranks
from covey.runtime.rng import batches_per_epoch, shuffled_batches
from covey.runtime.variables import check_ranks
from covey.tracking.console import Display, RunResult
from covey.tracking.curve import draw_reliability
from covey.tracking.run_folder import write_atomically
from covey.tracking.run_store import RunStore, encode
from covey.tracking.wording import REWARD_MODEL
from covey.train.pace import Pace
from covey.train.supervised import SupervisedTrainer

RELIABILITY_FILE = "reliability.png"


@dataclass(frozen=True)
class Data:
    """Examples of a training."""

    split: Split[Example]
    objective: Objective
    kind: RewardModelKind
    inputs: dict[str, str]  # SHA-256 of the files


def read_training_data(config: RewardModelTraining) -> Data:
    """Read and split the data, and check that the settings fit them, before a model is loaded.

    Raises:
        ConfigError: naming the first line that is unusable.
    """
    inputs = {}
    for name in filter(None, (config.data, config.held_out)):
        with faults_of(name), open(name, "rb") as file:
            inputs[name] = hashlib.file_digest(file, "sha256").hexdigest()
    examples = read_examples(config.data, config.grade_column)
    held_out = read_examples(config.held_out, config.grade_column) if config.held_out else []
    if held_out and type(held_out[0]) is not type(examples[0]):
        raise ConfigError(f"{config.held_out} has another kind of data than {config.data}")
    split = divide(
        examples,
        held_out,
        config.held_out_fraction,
        paths=(config.data, config.held_out),
        drop=config.overlap == "drop",
        remedy=": add --overlap drop",
        one_prompt="the data have only one prompt, so none is left for evaluation: add prompts",
    )
    objective = choose_objective([*split.training, *split.held_out], config.grade_loss, config.center)
    return Data(split, objective, kind_of_examples(split.training), inputs)


def train_reward_model(
    config: RewardModelTraining, run_dir: str | Path | Callable[[], Path], launch: Launch
) -> RunResult | None:
    """Train a reward model into a new run folder.

    Args:
        config: the settings with the names of the data.
        run_dir: the new run folder, or a function that creates it.
        launch: the command that started it.

    Returns:
        the content of summary.json; None if it was stopped before its end.

    Raises:
        ConfigError: for the first mistake, before the model is loaded.
    """
    check_training(config)
    check_ranks(config)
    held_out = _absolute_file(config.held_out) if config.held_out else ""
    config = replace(config, model=_absolute(config.model), data=_absolute_file(config.data), held_out=held_out)
    data = read_training_data(config)
    with joined_ranks():
        builder = RewardModelBuilder(config, data, build_machine(config.device, config.precision, config.threads))
        with begun(builder.team, run_dir, builder.config, launch) as job:
            return job.run(builder, data.inputs)


class RewardModelBuilder(SupervisedBuilder):
    """Builder of the training of a reward model."""

    algorithm_name = REWARD_MODEL_ALGORITHM
    command = "reward-model train"
    wording = REWARD_MODEL
    saves_if_stopped = False

    def __init__(self, config: RewardModelTraining, data: Data, machine: Machine) -> None:
        """Load the model, because its limit decides which examples are trained.

        Raises:
            ConfigError: if the model cannot be loaded, or an example is too long.
        """
        self.model = begin_reward_model(config.model, data.kind, dtype=machine.dtype, device=machine.device)
        parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        super().__init__(config, data, machine, parameters)
        reads_end = data.kind is RewardModelKind.PROCESS
        self.model.scale = replace(self.model.scale, step_separator=config.step_separator, reads_end=reads_end)
        self.found = notes = list[str]()
        self.examples, self.held_out = encode_split(
            data.split,
            partial(encode_example, encoder=self.model.encoder),
            shortest(config.max_tokens or None, self.model.longest),
            drop=config.long_examples == "drop",
            options=REWARD_OPTIONS,
            notes=notes,
        )
        self.config = replace(config, steps=config.epochs * self.per_epoch)
        self.patience = config.patience
        self._quality: Quality | None = None  # the last one that was measured

    @classmethod
    def read(cls, config: Any, run_dir: Path) -> Data:
        check_training(config)
        return read_training_data(config)

    @property
    def counts(self) -> dict[str, int]:
        return {"training": len(self.examples), "held_out": len(self.held_out)}

    @property
    def per_epoch(self) -> int:
        return batches_per_epoch(len(self.examples), self.config.batch_size)

    def describe(self) -> str:
        config = self.config
        return (
            f"{self.data.kind.noun} on {config.model}: {plural(len(self.examples), 'example')} to train on, "
            f"{len(self.held_out):,} held out, {plural(config.steps, 'step')} of {config.batch_size}; "
            f"{self.machine.describe()}{describe_team(self.team)}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Build the components."""
        config, model = self.config, self.model
        model.team, model.weights = self.team, divide_alone(model, config.model, config, self.team)
        return self.experiment(
            store,
            display,
            trainer=build_reward_trainer(model, config, self.data.objective, config.steps),
            batches=self._batches,
            measured=self._measured,
            collect=self._collect,
            facts=self._facts,
            backend={},
            checkpoint=CheckpointConfig(config.checkpoint_every, config.checkpoint_keep, config.checkpoint_best),
        )

    def _batches(self, done: int) -> Iterator[list[EncodedExample]]:
        config = self.config
        return shuffled_batches(
            by_prompt(self.examples), config.batch_size, seed=config.seed, epochs=config.epochs, done=done
        )

    def _measured(self) -> dict[str, float]:
        self._quality = evaluate(self.model, self.held_out, self.data.objective)
        return self._quality.metrics

    def _collect(self) -> Callable[[Path], None]:
        """Measure the scale of the scores; returns a function that writes the model."""
        self.model.measure_scale([row for one in self.examples for row in one.rows])
        write = self.model.collect()
        return lambda run_dir: write(run_dir / MODEL_FOLDER)

    def _facts(self) -> dict[str, Any]:
        scale, quality = self.model.scale, self._quality
        return {
            "kind": self.model.kind.noun,
            "held_out": quality.metrics if quality is not None else {},
            "scale": {"mean": scale.mean, "deviation": scale.deviation},
        }

    def draw(self, store: RunStore) -> None:
        """Draw the reliability diagram of the last evaluation."""
        if self._quality is not None and self._quality.reliability is not None:
            title = f"{self.model.kind.noun}, {plural(len(self.held_out), 'held-out example')}"
            draw_reliability(store.run_dir / RELIABILITY_FILE, self._quality.reliability, title)

    def measures(self) -> str:
        return f"held out: {self._quality.describe()}" if self._quality is not None else ""


def build_reward_trainer(
    model: RewardModel, config: RewardModelConfig, objective: Objective, steps: int = 0
) -> SupervisedTrainer:
    """The trainer of a reward model; `steps` is the number of optimizer steps over which the learning rate falls."""
    criterion = RewardCriterion(model, objective, config.microbatch_tokens)
    update = UpdateConfig(weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)
    restarts = config.schedule_restarts if isinstance(config, RewardModelTraining) else ()
    return build_trainer(criterion, model.module, config, update, steps, model.team, model.weights, Pace(), restarts)


def evaluate_reward_model(
    name: str, data: str, *, config: RewardModelConfig, picture: Path | None = None
) -> tuple[Quality, int]:
    """Measure a reward model on a data set; returns the quality and the number of examples.

    Args:
        name: a reward model's folder, the run folder of its training, or a hub name.
        data: preference pairs, grades or step labels, as for its training.
        config: grade_loss, grade_column, max_tokens, long_examples and the machine are used.
        picture: file of the reliability diagram.

    Raises:
        ConfigError: if the data do not fit the model.
    """
    examples = read_examples(data, config.grade_column)
    objective = choose_objective(examples, config.grade_loss)
    machine = build_machine(config.device, config.precision, config.threads)
    model = load_reward_model(name, dtype=machine.dtype, device=machine.device)
    kind = kind_of_examples(examples)
    if kind is not model.kind:
        raise ConfigError(
            f"{data} has data of {kind.with_article}, and {name} is {model.kind.with_article}: name other data"
        )
    longest = shortest(config.max_tokens or None, model.longest)
    encoded = encode_examples(examples, model.encoder, longest, drop=config.long_examples == "drop")
    quality = evaluate(model, encoded, objective)
    if picture is not None and quality.reliability is not None:
        draw_reliability(picture, quality.reliability, f"{model.kind.noun}, {plural(len(encoded), 'example')}")
    return quality, len(encoded)


def _absolute(model: str) -> str:
    """The model's name in a form that is valid in any working directory."""
    return resolve_checkpoint(locate_reward_model(model).name)


def _absolute_file(name: str) -> str:
    return str(user_path(name).absolute())


PROMPTS_AT_ONCE = 16  # whose completions and continuations are sampled together


@dataclass(frozen=True)
class LabelOptions:
    """Options of `covey reward-model label`."""

    prompts: int = 64
    completions: int = 4  # of each prompt
    data: str = "steps"  # steps (a process reward model), pairs or grades (an outcome one)
    continuations: int = 8  # of each step
    estimate: str = "hard"  # the column "labels": hard or soft
    completer: str = ""  # model that continues the steps; empty: the one that samples the completions


@dataclass(frozen=True)
class Labelled:
    """Result of a labelling."""

    completions: int  # that were graded
    left_out: int  # because the verifier failed
    right: int  # completions
    examples: int  # that were written
    steps: int  # of step labels
    right_steps: int  # by the hard estimate


def label_completions(config: RunConfig, options: LabelOptions, output: Path) -> Labelled:
    """Sample completions of the task's training prompts, and write examples for a reward model.

    Of preference pairs, a prompt has at most as many as completions, drawn evenly from all pairs of a right and a wrong
    completion.

    Args:
        config: task, verifier, model, sampling limits, step boundary, seed and machine are used.
        output: JSONL file, which does not exist yet, in the format of `covey.llm.data.reward_examples`; steps also have
            the columns of the prompt and both estimates. An interrupted call with the same arguments is continued.

    Raises:
        ConfigError: if the config has no reward that is 1 or 0; if the completer has another tokenizer; for the first
            mistake in the config.
        RunError: if nothing could be labelled.
    """
    config = replace(config, rewards=verifier_of(config), loss=replace(config.loss, credit="outcome"))
    problem = build_problem(config)
    splitter = StepSplitter(config.process.rule)
    display = Display(title=f"covey: {options.data} for a reward model")
    try:
        if problem.grader.score_kind != "accuracy":
            raise ConfigError(
                "the task's reward is not always 1 or 0, so it cannot verify completions: name a binary reward in "
                "[[rewards]], such as numeric, or your own function with binary = true"
            )
        problem.refuse_images("covey reward-model")
        machine = build_machine(config.device, config.precision, config.threads)
        loaded = load_policy(config, machine)
        completer = _completer(config, options.completer, machine, loaded)
        module_config = loaded.policy.module.config
        problem = problem.fit(loaded.chat, module_config, display.note)
        splitter.chat = loaded.chat
        labeller = StepLabeller(
            completer.sampler, splitter, problem.grader, options.continuations,
            position_limit(completer.policy.module.config),
        )  # fmt: skip
        continuations = plural(options.continuations, "continuation")
        continued = f", {continuations} from every step" if options.data == "steps" else ""
        display.note(
            f"{plural(options.prompts, 'prompt')} x {plural(options.completions, 'completion')}{continued}; "
            f"{loaded.policy.backend.describe()}"
        )
        draft = _Draft(output, config, options)
        with display, display.progress("labelling", options.prompts) as advance:
            advance(draft.done)
            for first in range(draft.done, options.prompts, PROMPTS_AT_ONCE):
                count = min(PROMPTS_AT_ONCE, options.prompts - first)
                starts = problem.task.draw(config.seed, 1, count, first=first, before=first)
                groups = loaded.sampler.sample(starts, options.completions, 1)
                draft.add(first + count, _examples(groups, options, labeller))
                advance(count)
    finally:
        problem.grader.close()
        splitter.close()
    if not draft.graded:
        raise RunError("no completion could be labelled, because the verifier failed on all of them")
    if not draft.records:
        raise RunError(
            f"no prompt has both a right and a wrong completion ({draft.right:,} of {draft.graded:,} are right): raise "
            "--prompts or --completions, or write --data grades"
        )
    draft.publish()
    hard = [label for record in draft.records for label in record.get("hard", ())]
    left_out = options.prompts * options.completions - draft.graded
    return Labelled(draft.graded, left_out, draft.right, len(draft.records), len(hard), int(sum(hard)))


@dataclass(frozen=True)
class _Examples:
    """Examples of some prompts."""

    records: list[dict[str, Any]]
    graded: int  # completions
    right: int


def _examples(groups: list[Group], options: LabelOptions, labeller: StepLabeller) -> _Examples:
    """The examples of some groups, as records of the file."""
    if options.data == "steps":
        labelled = labeller.label(groups, iteration=1)
        records = [_record(groups, one, options.estimate) for one in labelled]
        return _Examples(records, len(labelled), sum(one.right for one in labelled))
    graded = graded_completions(labeller.verifier.grade(groups))
    right = int(sum(one.grade for one in graded))
    if options.data == "grades":
        records = [{"prompt": one.prompt, "completion": one.completion, "grade": bool(one.grade)} for one in graded]
        return _Examples(records, len(graded), right)
    pairs = PairSource(labeller.sampler.seed, options.completions).examples(groups, 1)
    records = [{"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected} for one in pairs]
    return _Examples(records, len(graded), right)


def _completer(config: RunConfig, name: str, machine: Machine, sampled: LoadedPolicy) -> LoadedPolicy:
    """The model that continues the steps of the completions that `sampled` has sampled; itself for an empty name.

    Raises:
        ConfigError: if it cannot be loaded, or reads other token ids than those of the completions.
    """
    if not name:
        return sampled
    loaded = load_policy(replace(config, model=name), machine)
    if loaded.chat.tokenizer.get_vocab() != sampled.chat.tokenizer.get_vocab():
        raise ConfigError(
            f"--completer {name} has another tokenizer than {config.model}, so it cannot continue its completions: "
            "name a model of the same family"
        )
    return loaded


class _Draft:
    """The labels so far, in a file beside the output, with which an interrupted command continues.

    Labels are a function of the settings, so that the result is the same. The first line has the settings, each further
    one the records of some prompts.
    """

    def __init__(self, output: Path, config: RunConfig, options: LabelOptions) -> None:
        """Raises ConfigError for a draft of other settings."""
        self.output = output
        self.path = output.with_name(output.name + ".unfinished")
        self.done = 0  # prompts
        self.records: list[dict[str, Any]] = []
        self.graded = self.right = 0  # completions
        settings = json.loads(json.dumps({"config": config_to_dict(config), "options": asdict(options)}))
        if not self.path.exists():
            write_atomically(self.path, encode(settings) + b"\n")
            return
        first, *lines = read_file(self.path, 1 << 32).split(b"\n")
        if _parsed(first) != settings:
            raise ConfigError(
                f"{self.path} has labels of a command with other settings: repeat that one, or delete the file"
            )
        whole = len(first) + 1
        for line in lines:
            part = _parsed(line)
            if part is None:  # the line that a crash cut
                break
            self._count(part)
            whole += len(line) + 1
        with faults_of(self.path), open(self.path, "r+b") as file:
            file.truncate(whole)

    def add(self, done: int, examples: _Examples) -> None:
        """Append the examples of the prompts up to `done`."""
        part = {"done": done, **vars(examples)}
        self._count(part)
        with faults_of(self.path), open(self.path, "ab") as file:
            file.write(encode(part) + b"\n")

    def _count(self, part: dict[str, Any]) -> None:
        self.done = part["done"]
        self.records += part["records"]
        self.graded += part["graded"]
        self.right += part["right"]

    def publish(self) -> None:
        """Write the output and remove the draft."""
        write_atomically(self.output, b"".join(encode(record) + b"\n" for record in self.records))
        with faults_of(self.path):
            self.path.unlink()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def verifier_of(config: RunConfig) -> tuple[RewardConfig, ...]:
    """The reward that verifies completions: the binary one with score = true, else the first binary one; empty for the
    task's own reward, if the config names none.

    Raises:
        ConfigError: if the config has rewards, but none that is 1 or 0.
    """
    binary = [reward for reward in config.rewards if reward.is_binary]
    if config.rewards and not binary:
        example = next(name for name, reward in BUILT_IN_REWARDS.items() if reward.binary)
        raise ConfigError(
            f"no reward of the recipe is always 1 or 0, so none can verify completions: add a [[rewards]] table with "
            f'name = "{example}" (weight = 0.0 and score = true), or your own function with binary = true'
        )
    preferred = sorted(binary, key=lambda reward: not reward.score)[:1]
    return tuple(replace(reward, weight=1.0, score=True) for reward in preferred)


def _record(groups: Sequence[Group], one: LabelledCompletion, estimate: str) -> dict[str, Any]:
    start = groups[one.group].start
    hard, soft = list(one.hard), list(one.soft)
    return {
        "prompt": start.prompt,
        "completions": list(one.steps),
        "labels": [bool(label) for label in hard] if estimate == "hard" else soft,
        "hard": hard,
        "soft": soft,
        "right": one.right,
        "columns": dict(start.columns),
    }
