"""Labels of steps by continuations: estimates by hand, the prefixes and seeds that are asked for, and failures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import main
from covey.config import ConfigError, RewardConfig
from covey.config.recipe import config_from_dict
from covey.data import EndReason, Group, Rollout, Start
from covey.experiment.reward_models import verifier_of
from covey.llm.data.reward_examples import Steps, read_examples
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationResult, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.grader import RewardGrader
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.reward_models.graded_groups import StepLabeller
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.sampler import LanguageSampler
from covey.runtime.rng import CONTINUING, SAMPLING, uniforms
from helpers.run_helpers import covey
from helpers.tiny_models import tiny_folder, tiny_model, tiny_tokenizer

END = 1
TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def completion(text: str, *, ended: bool = True) -> Completion:
    tokens = ids(text) + [END] * ended
    return Completion(tokens, [0.0] * len(tokens), EndReason.STOP if ended else EndReason.LENGTH, 0)


def rollout(text: str, prompt: str = "2+3=") -> Rollout:
    actions = [*ids(text), END]
    return Rollout(tuple(ids(prompt)), actions, [0.0] * len(actions), EndReason.STOP, text=text)


class Scripted:
    """A generator that continues each prefix by given texts, and keeps what it was asked for."""

    def __init__(self, continuations: dict[str, list[Completion]]) -> None:
        self.continuations, self.requests = continuations, []  # type: ignore[var-annotated]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self.requests += requests
        return [self.continuations[TOKENIZER.decode(request.prompt)] for request in requests]

    def refresh(self, version: int) -> None:
        raise AssertionError


def ends_with_5(completions: list[str], **columns: Any) -> list[float | None]:
    """Right if the text ends with 5; the verifier fails on a question mark."""
    return [None if "?" in text else float(text.strip().endswith("5")) for text in completions]


def make(generator: Any, verifier: Callable[..., Any] = ends_with_5, **settings: Any) -> StepLabeller:
    chat = Chat(TOKENIZER, frozenset({END}))
    splitter = StepSplitter("line")
    splitter.chat = chat
    grader = RewardGrader([WeightedReward.from_function(verifier, binary=True)])
    sampler = LanguageSampler(generator, chat, 3, settings.pop("max_new_tokens", 12))
    return StepLabeller(sampler, splitter, grader, **({"continuations": 4} | settings))


def test_estimates_by_hand() -> None:
    """One of four continuations of the first step is right, none of the second step's."""
    generator = Scripted(
        {
            "2+3=a\n": [completion(text) for text in ("5", "6", "b\n6", "c 7")],
            "2+3=a\nb\n": [completion(text) for text in ("6", "7", "8", "")],
        }
    )
    (found,) = make(generator).label([Group(Start(4, "2+3="), [rollout("a\nb\n6")])], iteration=2)
    assert found.steps == ("a\n", "b\n", "6")
    assert found.soft == (0.25, 0.0, 0.0)
    assert found.hard == (1.0, 0.0, 0.0)
    assert not found.right
    assert [request.completions for request in generator.requests] == [4, 4]
    keys = [request.key for request in generator.requests]
    assert keys[0] == RandomKey(3, 2, 4, 0, CONTINUING)
    assert keys[1] == RandomKey(3, 2, 4, 256, CONTINUING)


def test_the_last_step_is_as_right_as_its_completion() -> None:
    generator = Scripted({"2+3=a\n": [completion("6")] * 4})
    group = Group(Start(0, "2+3="), [rollout("a\n5"), rollout("7"), rollout("5")])
    found = make(generator).label([group])
    assert [one.soft for one in found] == [(0.0, 1.0), (0.0,), (1.0,)]
    assert [one.right for one in found] == [True, False, True]
    assert [one.rollout for one in found] == [0, 1, 2]
    assert [r.score for r in group.rollouts] == [None] * 3  # those of the caller are as they were


def test_no_two_steps_have_the_same_random_numbers() -> None:
    texts = {f"2+3={text}": [completion("5")] * 4 for text in ("a\n", "a\nb\n", "c\n", "c\nd\n")}
    generator = Scripted(texts)
    groups = [Group(Start(number, "2+3="), [rollout("a\nb\n5"), rollout("c\nd\n5")]) for number in (0, 1)]
    make(generator).label(groups)
    words = [(request.key.group, request.key.first_rollout + i) for request in generator.requests for i in range(4)]
    assert len(set(words)) == len(words) == 2 * 2 * 2 * 4
    assert {request.key.stream for request in generator.requests} == {CONTINUING}
    assert uniforms(3, 1, 0, 0, 0, stream=CONTINUING)[0] != uniforms(3, 1, 0, 0, 0)[0]


def test_the_token_limit_holds_for_a_prefix_with_its_continuation() -> None:
    """The limit is 6 tokens: after "a" and the line end 4 are left, so the last two of six are cut."""
    generator = Scripted({"2+3=a\n": [completion("123455", ended=False), completion("1235", ended=False)]})
    (found,) = make(generator, max_new_tokens=6, continuations=2).label([Group(Start(0, ""), [rollout("a\n7")])])
    assert found.soft == (0.5, 0.0)
    assert generator.requests[0].settings.max_new_tokens == 4
    # Where the model has the positions, all requests have the limit of the shortest prefix, which makes one batch.
    texts = {"2+3=a\n": [completion("5")] * 2, "2+3=a\nbb\n": [completion("5")] * 2}
    for positions, limits in ((None, [4, 4]), (11, [4, 1]), (10, [4, 1]), (13, [4, 4])):
        generator = Scripted(texts)
        make(generator, max_new_tokens=6, continuations=2, positions=positions).label(
            [Group(Start(0, ""), [rollout("a\nbb\n7")])]
        )
        assert [request.settings.max_new_tokens for request in generator.requests] == limits, positions


def test_a_failed_verifier_is_not_a_wrong_continuation() -> None:
    generator = Scripted(
        {
            "2+3=a\n": [completion(text) for text in ("5", "?", "6", "?")],
            "2+3=b\n": [completion("?")] * 4,
        }
    )
    many = [rollout("5") for _ in range(20)]  # a run stops if more than a fifth fails
    texts = {f"2+3={n}\n": [completion("5")] * 4 for n in range(10)}
    generator.continuations |= texts
    groups = [
        Group(Start(0, ""), [rollout("a\n5"), rollout("b\n5"), rollout("what?"), *many]),
        Group(Start(1, ""), [rollout(f"{n}\n5") for n in range(10)] * 4),
    ]
    found = make(generator).label(groups)
    assert found[0].soft == (0.5, 1.0)
    assert {one.rollout for one in found if one.group == 0} == {0, *range(3, 23)}
    assert len(found) == 1 + 20 + 40


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    return LanguagePolicy(tiny_model("llama", dtype=torch.float32))


def test_labels_are_those_of_single_requests(policy: LanguagePolicy) -> None:
    """By the real generator, one prefix and one continuation at a time; a digit is right."""

    def has_a_digit(completions: list[str], **columns: Any) -> list[float]:
        return [float(any(c.isdigit() for c in text.rpartition("\n")[2][1:])) for text in completions]

    groups = [
        Group(Start(number, prompt), [rollout(text, prompt) for text in ("a\nb\n5", "c\n")])
        for number, prompt in enumerate(("2+3=", "11+4="))
    ]
    labeller = make(LocalGenerator(policy), has_a_digit, continuations=6, max_new_tokens=10)
    found = labeller.label(groups, iteration=5)
    expected = []
    for group in groups:
        for place, one in enumerate(group.rollouts):
            ends = [i for i, token in enumerate(one.actions[:-2]) if token == ids("\n")[0]]
            soft = []
            for step, end in enumerate(ends):
                right = 0.0
                for number in range(6):
                    key = RandomKey(3, 5, group.start.index, (place * 4096 + step) * 256 + number, CONTINUING)
                    settings = labeller_settings(labeller, 10 - end - 1)
                    request = GenerationRequest((*one.context, *one.actions[: end + 1]), 1, key, settings)
                    ((tokens,),) = [[c.tokens for c in r] for r in LocalGenerator(policy).generate([request])]  # type: ignore[union-attr]
                    text = TOKENIZER.decode([*one.actions[: end + 1], *tokens], skip_special_tokens=True)
                    right += has_a_digit([text])[0]
                soft.append(right / 6)
            expected.append((*soft, has_a_digit([one.text])[0]))
    assert [one.soft for one in found] == expected
    assert len({share for one in found for share in one.soft}) > 2
    alone = [labeller.label([group], iteration=5) for group in groups]
    assert [one.soft for part in alone for one in part] == expected
    again = labeller.label(groups, iteration=6)
    assert [one.soft for one in again] != expected


def test_continuations_do_not_repeat_the_draws_of_training(policy: LanguagePolicy) -> None:
    settings = labeller_settings(make(LocalGenerator(policy)), 12)
    sampled, continued = (
        GenerationRequest(tuple(ids("2+3=")), 4, replace(RandomKey(3, 5, 0), stream=stream), settings)
        for stream in (SAMPLING, CONTINUING)
    )
    one, other = (LocalGenerator(policy).generate([request])[0] for request in (sampled, continued))
    assert one != other


def labeller_settings(labeller: StepLabeller, most: int) -> Any:
    from covey.llm.generation.generator import GenerationSettings

    return GenerationSettings(most, labeller.sampler.temperature, labeller.sampler.chat.end_ids, 0)


def test_the_verifier_of_a_recipe() -> None:
    def config(*rewards: RewardConfig) -> Any:
        found = config_from_dict({"task": {"name": "running_total"}})
        return replace(found, rewards=rewards)  # type: ignore[arg-type]

    numeric = RewardConfig(name="numeric", weight=0.0, score=True)
    steps = RewardConfig(name="step_numbers", answer_column="totals")
    exact = RewardConfig(name="exact")
    assert verifier_of(config()) == ()
    assert verifier_of(config(steps, exact, numeric)) == (replace(numeric, weight=1.0),)
    assert verifier_of(config(exact, RewardConfig(name="format", pattern="."))) == (replace(exact, score=True),)
    with pytest.raises(ConfigError, match="no reward of the recipe is always 1 or 0"):
        verifier_of(config(steps))


@pytest.mark.slow
def test_an_interrupted_command_continues_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the second part of the prompts is labelled, and while a line of the draft is written."""
    words: list[object] = [
        "reward-model", "label", "process_grpo", "--model", tiny_folder(tmp_path / "tiny"), "--prompts", "40",
        "--completions", "2", "--continuations", "2", "--max-new-tokens", "8", "--precision", "fp32", "--threads", "1",
    ]  # fmt: skip
    code, said = covey(*words, "--output", "whole.jsonl", cwd=tmp_path)
    assert code == 0, said
    label = StepLabeller.label
    calls = 0

    def dies(labeller: StepLabeller, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return label(labeller, *arguments, **options)

    monkeypatch.setattr(StepLabeller, "label", dies)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([*map(str, words), "--output", "killed.jsonl"]) == 130
    draft = tmp_path / "killed.jsonl.unfinished"
    assert len(draft.read_text().splitlines()) == 2
    with open(draft, "a") as file:
        file.write('{"done": 32, "rec')
    code, said = covey(*words, "--output", "killed.jsonl", "--seed", "9", cwd=tmp_path)
    assert code == 2
    assert "labels of a command with other settings" in said
    code, said = covey(*words, "--output", "killed.jsonl", cwd=tmp_path)
    assert code == 0, said
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not draft.exists()


@pytest.mark.slow
def test_the_command_writes_data_to_train_on(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "tiny")
    words = [
        "reward-model", "label", "process_grpo", "--model", model, "--prompts", "5", "--completions", "3",
        "--continuations", "3", "--max-new-tokens", "12", "--precision", "fp32", "--threads", "1",
        "--prompts-per-step", "2",
    ]  # fmt: skip
    code, said = covey(*words, "--output", "soft.jsonl", "--estimate", "soft", cwd=tmp_path)
    assert code == 0, said
    assert said.strip().splitlines()[-1] == f"Next: covey reward-model train soft.jsonl --model {model}"
    examples = read_examples(str(tmp_path / "soft.jsonl"))
    assert len(examples) == 15
    assert all(isinstance(one, Steps) for one in examples)
    records = [json.loads(line) for line in (tmp_path / "soft.jsonl").read_text().splitlines()]
    assert len({json.dumps(record["prompt"]) for record in records}) == 5
    for record in records:
        assert record["labels"] == record["soft"]
        assert record["hard"] == [float(share > 0) for share in record["soft"]]
        assert record["soft"][-1] == float(record["right"])
        assert record["columns"]["answer"]
    code, said = covey(*words, "--output", "hard.jsonl", cwd=tmp_path)
    assert code == 0, said
    hard = [json.loads(line) for line in (tmp_path / "hard.jsonl").read_text().splitlines()]
    assert [record | {"labels": [bool(x) for x in record["hard"]]} for record in records] == hard

    def refused(message: str, *more: object) -> None:
        code, said = covey(*more, cwd=tmp_path)
        assert code == 2
        assert message in said
        assert "Traceback" not in said

    refused("the file is there already", *words, "--output", "hard.jsonl")
    refused("at most 256", *words, "--output", "x.jsonl", "--continuations", "257")
    refused("--prompts: must be at least 1", *words, "--output", "x.jsonl", "--prompts", "0")
    refused("is a recipe for control", "reward-model", "label", "cartpole_grpo", "--output", "x.jsonl")
    refused("are required: --output", "reward-model", "label", "process_grpo")
    assert not (tmp_path / "x.jsonl").exists()


EVEN = """
def even(completions, **columns):
    return [float(sum(map(ord, text[0]["content"])) % 2 == 0) for text in completions]


def thirds(text):
    return list(range(3, len(text), 3))
"""
EVEN_RECIPE = """
rewards = [{ function = "even.py:even", binary = true }, { name = "step_numbers", answer_column = "totals" }]
precision = "fp32"
threads = 1
[task]
name = "running_total"
[sampling]
max_new_tokens = 14
[process]
boundary = "even.py:thirds"
"""


@pytest.mark.slow
def test_another_model_continues_the_steps(tmp_path: Path) -> None:
    """Completions and the labels of their last steps stay the same; a completer of the same weights changes none."""
    model = tiny_folder(tmp_path / "tiny")
    tiny_folder(tmp_path / "same")
    tiny_folder(tmp_path / "other", seed=1)
    tiny_folder(tmp_path / "stranger")
    tokenizer = json.loads((tmp_path / "stranger" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (tmp_path / "stranger" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "even.py").write_text(EVEN)
    (tmp_path / "even.toml").write_text(EVEN_RECIPE)
    words: list[object] = [
        "reward-model", "label", "even.toml", "--model", model, "--prompts", "12", "--completions", "4",
        "--continuations", "5",
    ]  # fmt: skip

    def label(name: str, *more: object) -> list[dict[str, Any]]:
        code, said = covey(*words, *more, "--output", name, cwd=tmp_path)
        assert code == 0, said
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    own = label("own.jsonl")
    assert label("same.jsonl", "--completer", "same") == own
    others = label("other.jsonl", "--completer", "other")
    assert [one["completions"] for one in others] == [one["completions"] for one in own]
    assert [one["soft"][-1] for one in others] == [one["soft"][-1] for one in own]
    assert sum(one["soft"] != two["soft"] for one, two in zip(own, others, strict=True)) > 5

    for name, message in (("stranger", "has another tokenizer than"), ("nowhere/model.gguf", "nowhere")):
        code, said = covey(*words, "--output", "x.jsonl", "--completer", name, cwd=tmp_path)
        assert code == 2, said
        assert message in said
        assert "Traceback" not in said
    assert not list(tmp_path.glob("x.jsonl*"))
