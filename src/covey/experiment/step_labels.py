"""Writes a data set of step labels: `covey reward-model label`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RewardConfig, RunConfig, RunError
from covey.config.fields import plural
from covey.config.llm import BINARY_REWARDS
from covey.data import Group
from covey.experiment.llm import build_machine, build_problem, fit_prompts, load_policy
from covey.llm.model.architecture import position_limit
from covey.llm.reward_models.continuation_labels import LabelledCompletion, StepLabeller
from covey.llm.rewards.step_splitter import StepSplitter
from covey.tracking.console import Display
from covey.tracking.run_folder import write_atomically
from covey.tracking.run_store import encode


@dataclass(frozen=True)
class LabelOptions:
    """Options of `covey reward-model label`."""

    prompts: int = 64
    completions: int = 4  # of each prompt
    continuations: int = 8  # of each step
    estimate: str = "hard"  # the column "labels": hard or soft


@dataclass(frozen=True)
class Labelled:
    """Result of a labelling."""

    completions: int  # that were written
    left_out: int  # because the verifier failed
    steps: int
    right_steps: int  # by the hard estimate
    right: int  # completions


def label_steps(config: RunConfig, options: LabelOptions, output: Path) -> Labelled:
    """Sample completions of the task's training prompts and label their steps.

    Args:
        config: task, verifier, model, sampling limits, step boundary, seed and machine are used.
        output: JSONL file, which does not exist yet: TRL's stepwise format with the columns of the prompt and both
            estimates.

    Raises:
        ConfigError: if the config has no reward that is 1 or 0; for the first mistake in it.
        RunError: if nothing could be labelled.
    """
    config = replace(config, rewards=verifier_of(config), loss=replace(config.loss, credit="outcome"))
    problem = build_problem(config)
    splitter = StepSplitter(config.process.boundary)
    display = Display(title="covey: step labels")
    try:
        if problem.grader.score_kind != "accuracy":
            raise ConfigError(
                "the task's reward is not always 1 or 0, so it cannot verify completions: name a binary reward in "
                "[[rewards]], such as numeric, or your own function with binary = true"
            )
        loaded = load_policy(config, build_machine(config.device, config.precision, config.threads))
        module_config = loaded.policy.module.config
        problem = fit_prompts(problem, config, loaded.chat, module_config, display.note)
        splitter.chat = loaded.chat
        sampling = config.sampling
        labeller = StepLabeller(
            loaded.sampler.generator, loaded.chat, splitter, problem.grader, config.seed, sampling.max_new_tokens,
            sampling.temperature, options.continuations, max_rows=sampling.rows_at_once,
            positions=position_limit(module_config),
        )  # fmt: skip
        display.note(
            f"{plural(options.prompts, 'prompt')} x {plural(options.completions, 'completion')}, "
            f"{plural(options.continuations, 'continuation')} from every step; {loaded.policy.backend.describe()}"
        )
        records: list[dict[str, Any]] = []
        found: list[LabelledCompletion] = []
        with display, display.progress("labelling", options.prompts) as advance:
            for first in range(0, options.prompts, sampling.prompts_per_step):
                count = min(sampling.prompts_per_step, options.prompts - first)
                starts = problem.task.draw(config.seed, 1, count, first=first, before=first)
                groups = loaded.sampler.sample(starts, options.completions, 1)
                labelled = labeller.label(groups, iteration=1)
                found += labelled
                records += [_record(groups, one, options.estimate) for one in labelled]
                advance(count)
    finally:
        problem.grader.close()
        splitter.close()
    if not records:
        raise RunError("no completion could be labelled, because the verifier failed on all of them")
    write_atomically(output, b"".join(encode(record) + b"\n" for record in records))
    return Labelled(
        len(found),
        options.prompts * options.completions - len(found),
        sum(len(one.steps) for one in found),
        sum(int(label) for one in found for label in one.hard),
        sum(one.right for one in found),
    )


def verifier_of(config: RunConfig) -> tuple[RewardConfig, ...]:
    """The reward that verifies completions: the binary one with score = true, else the first binary one; empty for the
    task's own reward, if the config names none.

    Raises:
        ConfigError: if the config has rewards, but none that is 1 or 0.
    """
    binary = [reward for reward in config.rewards if reward.is_binary]
    if config.rewards and not binary:
        raise ConfigError(
            f"no reward of the recipe is always 1 or 0, so none can verify completions: add a [[rewards]] table with "
            f'name = "{BINARY_REWARDS[0]}" (weight = 0.0 and score = true), or your own function with binary = true'
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
