"""Lengths of prompts of conversations count the descriptions of tools and the first observation."""

import io
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from covey.config import (
    ConfigError,
    Conversation,
    ConversationConfig,
    DatasetConfig,
    EvaluationConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
)
from covey.config.conversation import with_conversation
from covey.config.rules import validate_sft
from covey.config.sft import SFTConfig
from covey.data import Start
from covey.experiment.llm import LLMBuilder
from covey.experiment.problem import build_rollout_kind, text_notes
from covey.experiment.run import check, run
from covey.experiment.sft import read_data
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat, TokenPrompt
from covey.llm.model.loading import load_chat
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.tracking.rollout_text import RolloutPrinter
from covey.tracking.run_reader import RunReader
from covey.watch.rollouts import group_page
from helpers import guessing
from helpers.chat_models import tiny_chat
from helpers.tiny_models import CHAT_TEMPLATE, PAD, tiny_folder, tiny_model, tiny_tokenizer
from helpers.tool_templates import UNMARKED, chat_with

TOTAL = 20


def kind_of(environment: Any) -> Any:
    sampling = SamplingConfig(max_new_tokens=4)
    config = RunConfig(sampling=sampling)
    return build_rollout_kind(*with_conversation(config, Conversation(environment, total_tokens=TOTAL, turns=2)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("environment", [guessing.Greeting, guessing.Dice])
def test_a_prompt_has_the_tokens_that_the_model_reads(environment):
    """Up to the last position: 256, less those of the conversation after its prompt."""
    kind = kind_of(environment)
    try:
        for length in (9, 7):
            kind.example(Start(0, "1", {"length": length}))
        chat, model = tiny_chat(), tiny_model()
        limit = kind.prompt_limit(chat, model.config, TOTAL, drop=False)
        sampler = kind.sampler(LanguageSampler(LocalGenerator(LanguagePolicy(model)), chat, 0, 4))
        for prompt in ("12", [{"role": "user", "content": "12"}]):
            [group] = sampler.sample([Start(0, prompt, {"length": 7})], 2, step=1)
            read = len(group.rollouts[0].context)
            assert len(limit.encode(prompt)) == read
        longest = 2 + 256 - TOTAL - read
        assert limit.fault("1" * longest) == ""
        fault = limit.fault("1" * (longest + 1))
    finally:
        kind.close()
    without = len(chat.encode([{"role": "user", "content": "12"}]))
    what = "the descriptions of tools" if environment is guessing.Dice else "the environment's first observation"
    assert fault == (
        f"a prompt of 237 tokens ({read - without} for {what}) and conversation.total_tokens = 20 exceed the model's "
        "256 positions: shorten the prompt or lower conversation.total_tokens"
    )


@pytest.mark.slow
def test_a_line_that_is_too_long_with_the_observation_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n} {'x' * (225 if n == 3 else 9)}", "length": 30} for n in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def built(policy: str, total_tokens: int) -> LLMBuilder:
        config = RunConfig(
            task=DatasetConfig(path=str(path)), model=str(tiny_folder(tmp_path / "model")), threads=1,
            conversation=ConversationConfig(f"{guessing.__file__}:Greeting", total_tokens=total_tokens),
            sampling=SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=4, long_prompts=policy),
            rewards=(RewardConfig(name="environment"),),
        )  # fmt: skip
        return LLMBuilder(config)

    with pytest.raises(
        ConfigError, match=r"rows.jsonl line 4: a prompt of 259 tokens \(31 for the environment's first"
    ):
        built("refuse", 20)
    with pytest.raises(ConfigError, match="leaves no room for prompts in the model's 256 positions: lower conv"):
        built("refuse", 256)
    world = built("drop", 20)
    world.close()
    assert any("1 line dropped as too long for the model" in note for note in world.notes)


@pytest.mark.slow
def test_examples_have_the_prompt_of_the_rollouts_of_their_recipe(tmp_path: Path) -> None:
    """`covey sft` and `covey train` describe the same tools, for a prompt that is a text and for messages."""
    tiny_folder(tmp_path / "tiny")
    prompts = [
        "12",
        [{"role": "user", "content": "34"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ]
    rows = [json.dumps({"prompt": prompt, "completion": "5"}) + "\n" for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    environment = f"{guessing.__file__}:Dice"
    config = RunConfig(
        model=str(tmp_path / "tiny"),
        conversation=ConversationConfig(environment),
        sft=SFTConfig(data=str(tmp_path / "rows.jsonl"), held_out_fraction=0),
    )
    validate_sft(config)
    examples = read_data(config).training
    kind = build_rollout_kind(config)
    try:
        chat, _ = load_chat(config.model)
        sampler = kind.sampler(LanguageSampler(None, chat, 0, 4))
        assert [example.prompt for example in examples] == [sampler.context_of(prompt, "") for prompt in prompts]
        assert "roll" in chat.decode(examples[0].prompt)
    finally:
        kind.close()
    with pytest.raises(ConfigError, match=r"conversation.environment: there is no environment 'dic'"):
        validate_sft(replace(config, conversation=ConversationConfig("dic")))


def test_a_template_whose_calls_nothing_reads_is_refused_before_the_model_is_loaded() -> None:
    chat = chat_with("hermes")
    chat.tokenizer.chat_template = UNMARKED
    refused = pytest.raises(ConfigError, match="writes calls of tools in a format that covey cannot read")
    with closing(kind_of(guessing.Dice)) as kind, refused:
        kind.prompt_limit(chat, tiny_model().config, TOTAL, drop=False)


@pytest.mark.parametrize(
    ("prompt", "template", "told"),
    [
        ("Name a fruit.", CHAT_TEMPLATE, True),
        ("Name a fruit.", None, False),
        (f"Name a fruit.{PAD}", CHAT_TEMPLATE, False),  # rendered by the user
        ([{"role": "user", "content": "Name a fruit."}], CHAT_TEMPLATE, False),
        (TokenPrompt("Name", [5, 6]), CHAT_TEMPLATE, False),
    ],
)
def test_a_text_for_a_chat_model_is_told(prompt: Any, template: str | None, told: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert (
        any("without its chat template" in note for note in text_notes([prompt], Chat(tokenizer, frozenset()))) == told
    )


@pytest.mark.slow
def test_the_prompt_that_the_model_reads_is_shown_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In check, the first rollout of a group, show and the page; a text that a template has rendered is told."""
    monkeypatch.chdir(tmp_path)
    tiny_folder(tmp_path / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = PAD
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{PAD} $A", special_tokens=[(PAD, 0)])
    tokenizer.save_pretrained(tmp_path / "tiny")
    rows = [{"prompt": f"{PAD}{n}+1=", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        model="tiny", steps=1, precision="fp32", task=DatasetConfig(path="rows.jsonl"),
        sampling=SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=2),
        evaluation=EvaluationConfig(problems=1), rewards=(RewardConfig(name="numeric"),), run_dir="run",
    )  # fmt: skip
    notes = check(config)
    assert notes[0].startswith("the model reads the first held-out prompt as 6 tokens:")
    assert any(note.startswith(PAD + PAD) for note in notes)
    assert any("begin with '<pad>', and the tokenizer adds it" in note for note in notes)
    taught = check(replace(config, teacher=TeacherConfig("policy", prompt="{answer}+{prompt}")))
    assert [taught[i + 1] for i, note in enumerate(taught) if "reads the first" in note][1] == f"{PAD}3+{PAD}2+1="
    run(config)
    reader = RunReader(tmp_path / "run")
    groups, _ = reader.groups(1)
    for group in groups:
        first, second = group.rollouts
        assert first["model_prompt"]["text"] == f"{PAD}{first['prompt']}"
        assert first["model_prompt"]["ids"][:2] == [tokenizer.bos_token_id] * 2
        assert "model_prompt" not in second, "once for a group"
        assert group.model_prompt(1) == f"{PAD}{first['prompt']}"
        assert group_page(1, group)["model_prompt"] == f"{PAD}{first['prompt']}"
    console = Console(file=io.StringIO())
    RolloutPrinter(console).group(1, groups[0])
    assert f"model read {PAD}{PAD}" in console.file.getvalue()
