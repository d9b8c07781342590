"""Writes a data set for reward models from a policy's completions: `covey reward-model label`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RewardConfig, RunConfig, RunError
from covey.config.fields import plural
from covey.config.files import faults_of, read_file
from covey.config.recipe import config_to_dict
from covey.config.rewards import BUILT_IN_REWARDS
from covey.data import Group
from covey.experiment.conversations import COMPLETIONS
from covey.experiment.llm import LoadedPolicy, Machine, build_machine, load_policy
from covey.experiment.problem import build_problem, fit_prompts
from covey.llm.model.architecture import position_limit
from covey.llm.reward_models.continuation_labels import LabelledCompletion, StepLabeller
from covey.llm.reward_models.graded_groups import PairSource, graded_completions
from covey.llm.rewards.step_splitter import StepSplitter
from covey.tracking.console import Display
from covey.tracking.run_folder import write_atomically
from covey.tracking.run_store import encode

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
        machine = build_machine(config.device, config.precision, config.threads)
        loaded = load_policy(config, machine)
        completer = _completer(config, options.completer, machine, loaded)
        module_config = loaded.policy.module.config
        problem = fit_prompts(problem, config, loaded.chat, module_config, display.note, kind=COMPLETIONS)
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
    pairs = PairSource(labeller.sampler.seed, options.completions).pairs(groups, 1)
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
