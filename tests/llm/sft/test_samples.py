"""Rejection sampling: which samples become examples, and that their tokens are those that were sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import ConfigError
from covey.config.sft import SFTConfig
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.conversation.sampler import ConversationSampler
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tools import describe_tools
from covey.llm.data.sft_examples import check_rows, read_rows
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.grader import build_grader
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.sft.encoding import EncodedExample, ExampleEncoder, batch_of, read_back, select, tokens_of, written
from helpers.chat_models import tiny_chat
from helpers.in_threads import EnvironmentThreads
from helpers.tiny_models import tiny_model


def group(number: int, prompt: str, *samples: tuple[float | None, list[int]]) -> Group:
    rollouts = [
        Rollout((7, 8), actions, [-1.0] * len(actions), EndReason.STOP, text=str(actions), reward=reward)
        for reward, actions in samples
    ]
    return Group(Start(number, prompt), rollouts)


GROUPS = [
    group(0, "a", (0.5, [1]), (0.9, [2]), (None, [3]), (0.9, [4]), (0.9, [2])),
    group(1, "b", (0.1, [5]), (0.4, [6])),
    group(2, "a", (1.0, [9]), (0.5, [1])),  # the first prompt again
    group(3, "c", (0.5, [6, 6])),
]


def chosen(**fields: Any) -> list[tuple[int, ...]]:
    samples = select(GROUPS, SFTConfig(**fields), lambda prompt, observation: (prompt, ()))
    return [sample.example.actions for sample in samples]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_reward": 0.5}, [(9,), (6, 6)]),
        ({"min_reward": 0.5, "keep": "all"}, [(1,), (2,), (4,), (9,), (6, 6)]),
        ({"min_reward": 0.4}, [(9,), (6,), (6, 6)]),
        ({"min_reward": 0.41}, [(9,), (6, 6)]),
        ({"min_reward": 0.9, "keep": "all"}, [(2,), (4,), (9,)]),
        ({}, [(9,)]),  # a least reward of 1
        ({"min_reward": -1.0, "keep": "all"}, [(1,), (2,), (4,), (9,), (5,), (6,), (6, 6)]),
    ],
)
def test_samples_with_enough_reward_become_examples(fields: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    assert chosen(**fields) == expected


def test_the_first_of_equally_good_samples_is_the_best() -> None:
    samples = select([GROUPS[0]], SFTConfig(min_reward=0.0), lambda prompt, observation: (prompt, ()))
    assert [sample.example.actions for sample in samples] == [(2,)]
    assert samples[0].place == "sample 2 of prompt 1"


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (GROUPS, r"of 10 samples none has a reward of at least 3 \(the highest is 1\); lower sft.min_reward or x"),
        ([group(0, "a", (None, [1]))], r"of 1 sample none has a reward of at least 3 \(none could be graded\)"),
    ],
)
def test_no_sample_with_enough_reward_is_one_line(groups: list[Group], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        select(groups, SFTConfig(min_reward=3.0), lambda prompt, observation: (prompt, ()), remedy=" or x")


class Echo:
    """Answers with the length of the message."""

    def reset(self):
        return "Begin"

    def step(self, message):
        return f"{len(message)} (a)", float(len(message)), False


class Adder:
    """Can add."""

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: first
            b: second
        """
        return a + b


def sampled(kind: str) -> tuple[LanguageSampler, list[Group], LanguagePolicy]:
    """Two groups of completions, or of conversations with `step` or with tools."""
    policy, chat = LanguagePolicy(tiny_model("llama")), tiny_chat()
    sampler = LanguageSampler(LocalGenerator(policy), chat, seed=5, max_new_tokens=6)
    if kind != "completion":
        style = Style(chat, "step") if kind == "step" else Style(chat, "tools", describe_tools(Adder()))
        environments = EnvironmentThreads(Echo if kind == "step" else Adder, 100)
        sampler = ConversationSampler(**vars(sampler), environments=environments, style=style, turns=3, total_tokens=60)
    starts = [Start(0, [{"role": "user", "content": "1+2"}], {"answer": "3"}), Start(1, "7-5", {"answer": "2"})]
    groups = sampler.sample(starts, 4, step=1)
    return sampler, build_grader(["digits"], ()).grade(groups), policy


@pytest.mark.parametrize("kind", ["completion", "step", "tools"])
def test_the_trained_tokens_are_those_that_were_sampled(kind: str, tmp_path: Path) -> None:
    sampler, groups, policy = sampled(kind)
    samples = select(groups, SFTConfig(min_reward=-1.0, keep="all"), sampler.prompt_of)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(samples) == len(rollouts)
    batch = batch_of(tokens_of(samples))
    with torch.no_grad():
        logprobs_BT = policy.evaluate(batch).logprobs_BT
    for row, rollout in enumerate(rollouts):
        decided_T = torch.tensor(rollout.decided or [True] * len(rollout.actions))
        count = len(decided_T)
        assert batch.context[row] == rollout.context
        assert batch.actions_BT[row, :count].tolist() == list(rollout.actions)
        assert batch.mask_BT[row, :count].equal(decided_T)
        expected = torch.tensor(rollout.behavior_logprobs)[decided_T]
        torch.testing.assert_close(logprobs_BT[row, :count][decided_T], expected, atol=2e-5, rtol=0)
    if kind == "step":
        assert not all(all(rollout.decided or ()) for rollout in rollouts), "replies are tokens too"
    file = tmp_path / "examples.jsonl"
    file.write_bytes(written(samples[1:], samples[:1]))
    training, held_out = read_back(file)
    assert (tokens_of(training), tokens_of(held_out)) == (tokens_of(samples[1:]), tokens_of(samples[:1]))
    assert written(training, held_out) == file.read_bytes()
    assert len({sample.content for sample in training}) == 2


@pytest.mark.parametrize("kind", ["completion", "step", "tools"])
def test_the_prompt_in_the_file_is_encoded_as_that_of_the_sample(kind: str) -> None:
    sampler, groups, _ = sampled(kind)
    tools = None if kind == "completion" else sampler.style.tools
    encoder = ExampleEncoder(sampler.chat, tools)
    for sample in select(groups, SFTConfig(min_reward=-1.0), sampler.prompt_of):
        prompt = sample.record["prompt"]
        completion = "x" if isinstance(prompt, str) else [{"role": "assistant", "content": "x"}]
        row = {**sample.record, "completion": completion}
        [example] = check_rows(SFTConfig(), [("row", row)])
        assert encoder.encode(example).prompt == sample.example.prompt


def test_the_file_is_data_of_another_training(tmp_path: Path) -> None:
    samples = select(GROUPS, SFTConfig(min_reward=0.5), lambda prompt, observation: (prompt, ()))
    (tmp_path / "examples.jsonl").write_bytes(written(samples, []))
    rows = read_rows(SFTConfig(), str(tmp_path / "examples.jsonl"))
    assert [(row.prompt, row.completion) for row in rows] == [("a", "[9]"), ("c", "[6, 6]")]


def test_undecided_tokens_stay_undecided(tmp_path: Path) -> None:
    rollout = Rollout((7,), [1, 2, 3, 4], [0.0] * 4, EndReason.LENGTH, text="x", decided=[True, False, False, True])
    rollout.reward = 1.0
    samples = select([Group(Start(0, "a"), [rollout])], SFTConfig(), lambda prompt, observation: (prompt, ()))
    (tmp_path / "examples.jsonl").write_bytes(written(samples, []))
    (example,), _ = map(tokens_of, read_back(tmp_path / "examples.jsonl"))
    assert example == EncodedExample((7,), (1, 2, 3, 4), (True, False, False, True))


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"held_out": false}', '{"held_out": 3, "token_ids": {"prompt": [1], "completion": [2]}}',
        '{"held_out": false, "token_ids": {"prompt": 1, "completion": [2], "undecided": []}}', "7",
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(content: str, tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    if content:
        file.write_text(json.dumps({"token_ids": {"prompt": [1], "completion": [2], "undecided": []},
                                    "held_out": False}) + "\n" + content + "\n")  # fmt: skip
    with pytest.raises(ConfigError, match=r"examples.jsonl is missing or damaged: sample the examples again"):
        read_back(file)
