"""Rejection sampling: examples are the model's own completions or conversations that earned enough reward.

keep = "best"   the one with the highest reward of each prompt: RAFT (arXiv 2304.06767)
keep = "all"    every different one: STaR (2203.14465), RFT (2308.01825), the filter of ReST (2308.08998)

An example has the tokens that were sampled; what a conversation's environment wrote is not trained. A line of
`examples.jsonl` has the texts as a row that `covey sft` reads, and the tokens:

>>> {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4", "reward": 1.0, "reward_parts": {...},
...  "end": "stop", "held_out": False, "token_ids": {"prompt": [5, 9], "completion": [4, 2], "undecided": []}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.files import LARGEST_RECORDS, read_below
from covey.config.sft import SFTConfig
from covey.data import Group, Rollout
from covey.llm.data.sft_examples import Example
from covey.llm.sampler import GivenPrompt
from covey.llm.sft.encoding import EncodedExample
from covey.tracking.records import encode


@dataclass(frozen=True)
class Sample:
    """A completion or a conversation of the model, with its tokens."""

    place: str  # for messages
    example: EncodedExample
    record: Mapping[str, Any]  # its line in examples.jsonl, without `held_out`

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts."""
        prompt, tools = self.record["prompt"], self.record.get("tools", ())
        if not isinstance(prompt, str):
            prompt = tuple(prompt)
        return Example(self.place, prompt, "", tuple(tools)).content


def select(
    groups: Iterable[Group], sft: SFTConfig, prompt_of: Callable[[Any, str], GivenPrompt], *, remedy: str = ""
) -> list[Sample]:
    """The samples that are trained, in the order of their prompts; those of equal prompts are compared together.

    Args:
        groups: graded. A rollout without a reward is left out, as is one with the tokens of another.
        prompt_of: what the model was given, for a start's prompt and a first observation (`LanguageSampler.prompt_of`).
        remedy: end of the message of the error.

    Raises:
        ConfigError: if none has the reward; the message has the highest one.
    """
    samples = 0
    highest: float | None = None
    passed: dict[str, dict[tuple[int, ...], Sample]] = {}  # by prompt, then by tokens
    for group in groups:
        for place, rollout in enumerate(group.rollouts):
            samples += 1
            if rollout.reward is None:
                continue
            highest = rollout.reward if highest is None else max(highest, rollout.reward)
            if rollout.reward >= sft.min_reward:
                where = f"sample {place + 1} of prompt {group.start.index + 1}"
                sample = _sample(where, rollout, prompt_of(group.start.prompt, rollout.observation))
                passed.setdefault(sample.content, {}).setdefault(sample.example.actions, sample)
    if not passed:
        known = "none could be graded" if highest is None else f"the highest is {highest:g}"
        raise ConfigError(
            f"no example: of {plural(samples, 'sample')} none has a reward of at least {sft.min_reward:g} ({known}); "
            f"lower sft.min_reward{remedy}"
        )
    kept: list[Sample] = []
    for different in passed.values():
        best = max(different.values(), key=lambda sample: sample.record["reward"])
        kept += different.values() if sft.keep == "all" else [best]
    return kept


def _sample(place: str, rollout: Rollout, prompt: GivenPrompt) -> Sample:
    messages, tools = prompt
    actions = tuple(int(action) for action in rollout.actions)
    decided = (True,) * len(actions) if rollout.decided is None else tuple(map(bool, rollout.decided))
    record = {
        "prompt": messages if isinstance(messages, str) else list(messages),
        **({"tools": list(tools)} if tools else {}),
        "completion": rollout.text if rollout.messages is None else list(rollout.messages),
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "end": str(rollout.end),
        "token_ids": {
            "prompt": list(rollout.context),
            "completion": list(actions),
            "undecided": [place for place, decides in enumerate(decided) if not decides],
        },
    }
    return Sample(place, EncodedExample(tuple(rollout.context), actions, decided), record)


def tokens_of(samples: Iterable[Sample]) -> list[EncodedExample]:
    """The tokens of samples."""
    return [sample.example for sample in samples]


def written(samples: Sequence[Sample], held_out: Sequence[Sample]) -> bytes:
    """The content of examples.jsonl."""
    lines = [{**sample.record, "held_out": False} for sample in samples]
    lines += [{**sample.record, "held_out": True} for sample in held_out]
    return b"".join(encode(line) + b"\n" for line in lines)


def read_back(path: Path) -> tuple[list[Sample], list[Sample]]:
    """The training and the held-out examples of an examples.jsonl.

    Raises:
        ConfigError: if it is missing or damaged.
    """
    found: dict[bool, list[Sample]] = {False: [], True: []}
    try:
        for number, line in enumerate(read_below(path.parent, path.name, most=LARGEST_RECORDS).splitlines(), start=1):
            row = json.loads(line)
            ids = row["token_ids"]
            undecided = set(ids["undecided"])
            decided = tuple(place not in undecided for place in range(len(ids["completion"])))
            example = EncodedExample(tuple(ids["prompt"]), tuple(ids["completion"]), decided)
            found[row.pop("held_out")].append(Sample(f"{path} line {number}", example, row))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is missing or damaged: sample the examples again") from error
    return found[False], found[True]
