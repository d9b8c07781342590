"""Scores of reward models are those of transformers' own forward pass, before and after saving."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from covey.config import ConfigError
from covey.config.sft import RewardModelKind
from covey.llm.model.chat import Chat
from covey.llm.reward_models.examples import RewardEncoder, ScoredRow
from covey.llm.reward_models.loading import begin_reward_model, load_reward_model, wrap_classifier
from covey.llm.reward_models.model import RewardModel, RunningMoments, as_batch, microbatches
from helpers.reward_models import tiny_reward_model
from helpers.tiny_models import CHARACTERS, PLAIN, SHARED, tiny_folder, tiny_tokenizer

KINDS = [RewardModelKind.OUTCOME, RewardModelKind.PROCESS]
PROMPTS = ("2+3=", "12+7=", "2+38=")


def plain(model: RewardModel, row: ScoredRow) -> Tensor:
    """transformers' own logits of one row, without padding."""
    tokens = torch.tensor([row.tokens])
    with torch.no_grad():
        logits = model.module(input_ids=tokens).logits.float()
    logits = logits if logits.dim() == 2 else logits[0, list(row.reads)]
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def some_rows(model: RewardModel) -> list[ScoredRow]:
    if model.kind is RewardModelKind.OUTCOME:
        texts = ("5", "19", "1", "", "5 or 6", "5")
        return [model.encoder.outcome(prompt, text) for prompt in PROMPTS for text in texts]
    completions = (["2+3 is 5", "5"], ["2+3 is 5", "6", "no, 5"], ["4"], ["2", "2+3 is 5"])
    return [model.encoder.process(prompt, steps) for prompt in PROMPTS for steps in completions]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", [*SHARED, "mistral"])
def test_scores_are_those_of_transformers(architecture: str, kind: RewardModelKind) -> None:
    model = tiny_reward_model(kind, architecture)
    assert model.shares_prompts == (architecture in SHARED)
    rows = some_rows(model)
    rows = rows[::2] + rows[1::2]  # the rows of a prompt do not follow each other
    expected = [plain(model, row) for row in rows]
    assert len({round(float(score_N[0]), 3) for score_N in expected}) > 8  # the scores differ
    for most_tokens in (10_000, 40, 1):
        for found, score_N in zip(model.scores(rows, most_tokens), expected, strict=True):
            torch.testing.assert_close(found, score_N, rtol=1e-4, atol=1e-5)
    alone = [model.scores([row])[0] for row in rows]
    torch.testing.assert_close(torch.cat(alone), torch.cat(expected), rtol=1e-4, atol=1e-5)


# The rows of a family are padded, or one at a time where padding changes its scores; its longest sequence.
OTHERS: dict[str, tuple[dict[str, Any], bool, int | None]] = {
    "bert": ({}, True, 62),
    "roberta": ({}, True, 61),  # its tokens have the positions after that of padding
    "mpnet": ({}, True, 60),
    "deberta-v2": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, True, 62),
    "bart": ({"decoder_start_token_id": 0}, False, 62),  # needs as many end tokens in every row
    "xlnet": ({"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, False, None),  # reads the last position
    "fnet": ({}, False, 62),  # has no attention mask
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_scored_as_by_transformers_up_to_their_longest_sequence(family: str) -> None:
    more, pads, longest = OTHERS[family]
    sizes = {
        "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
        "num_attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 64,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 62,
    }  # fmt: skip
    sizes = {} if family == "xlnet" else sizes
    config = AutoConfig.for_model(
        family, vocab_size=len(CHARACTERS) + 3, num_labels=1, pad_token_id=0, eos_token_id=1, **sizes, **more
    )
    torch.manual_seed(0)
    module = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model = wrap_classifier(module, Chat(tiny_tokenizer(), frozenset()), RewardModelKind.OUTCOME, family)
    assert (model.shares_prompts, model.pads, model.longest) == (False, pads, longest)
    rows = [*some_rows(model), model.encoder.outcome("2+3=", "5" * ((longest or 62) - len("2+3=") - 1))]
    expected = torch.cat([plain(model, row) for row in rows])
    assert expected.std() > 1e-2
    torch.testing.assert_close(torch.cat(model.scores(rows)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
@pytest.mark.parametrize("pad", [None, 999])
def test_without_a_padding_token_the_score_is_read_at_the_last_token(
    pad: int | None, architecture: str, tmp_path: Path
) -> None:
    """As transformers reads it; the end token does not become the padding token."""
    model = tiny_reward_model(RewardModelKind.OUTCOME, architecture)
    model.module.config.pad_token_id = pad
    model.module.save_pretrained(tmp_path)
    (tokenizer := tiny_tokenizer()).pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_reward_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.pad_id is None
    rows = some_rows(loaded)
    assert {row.reads for row in rows} == {(len(row.tokens) - 1,) for row in rows}
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = torch.cat([theirs(torch.tensor([row.tokens])).logits[0] for row in rows])
    torch.testing.assert_close(torch.cat(loaded.scores(rows)), expected, rtol=1e-4, atol=1e-5)


def test_a_model_with_two_labels_scores_by_their_difference() -> None:
    module = tiny_reward_model(RewardModelKind.PROCESS).module
    config = module.config
    config.num_labels = 2
    torch.manual_seed(1)
    two = AutoModelForTokenClassification.from_config(config)
    model = wrap_classifier(two, Chat(tiny_tokenizer(), frozenset()), RewardModelKind.PROCESS, "two")
    assert model.shares_prompts
    rows = some_rows(model)
    with torch.no_grad():
        right = [two(torch.tensor([row.tokens])).logits[0, list(row.reads)].softmax(-1)[:, 1] for row in rows]
    found = torch.cat(model.scores(rows)).sigmoid()
    torch.testing.assert_close(found, torch.cat(right), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_transformers(kind: RewardModelKind) -> None:
    model = tiny_reward_model(kind)
    rows = some_rows(model)
    weights = torch.arange(1, 1 + sum(len(row.reads) for row in rows)).float().sin()

    def gradients(total: Tensor) -> dict[str, Tensor]:
        model.module.zero_grad()
        total.backward()
        return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}

    packed = gradients((model.logits(rows) * weights).sum())
    model.shares_prompts = False
    padded = gradients((model.logits(rows) * weights).sum())
    for name, expected in padded.items():
        torch.testing.assert_close(packed[name], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()), msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_model_is_loaded_unchanged_by_transformers(kind: RewardModelKind, tmp_path: Path) -> None:
    model = tiny_reward_model(kind)
    rows = some_rows(model)
    model.save(tmp_path)
    auto: Any = {
        RewardModelKind.OUTCOME: AutoModelForSequenceClassification,
        RewardModelKind.PROCESS: AutoModelForTokenClassification,
    }[kind]
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.pad_token_id == loaded.config.pad_token_id == model.pad_id
    batch = tokenizer.pad({"input_ids": [list(row.tokens) for row in rows]}, return_tensors="pt")
    with torch.no_grad():
        logits = loaded(**batch).logits
    if kind is RewardModelKind.OUTCOME:
        found = logits[:, 0]
    else:
        found = torch.cat([logits[number, list(row.reads), 0] for number, row in enumerate(rows)])
    torch.testing.assert_close(torch.cat(model.scores(rows)), found, rtol=1e-4, atol=1e-5)
    ours = load_reward_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert ours.kind is kind
    torch.testing.assert_close(torch.cat(ours.scores(rows)), found, rtol=1e-4, atol=1e-5)


def test_where_the_end_token_is_the_padding_token_the_score_is_read_before_it() -> None:
    """As transformers reads it: the last token that is not padding."""
    tokenizer = tiny_tokenizer()
    encoder = RewardEncoder(Chat(tokenizer, frozenset()), pad_id=tokenizer.eos_token_id)
    row = encoder.outcome("2+3=", "5")
    assert row.tokens[-1] == tokenizer.eos_token_id
    assert row.reads == (len(row.tokens) - 2,)
    other = RewardEncoder(Chat(tokenizer, frozenset()), pad_id=0).outcome("2+3=", "5")
    assert other.reads == (len(other.tokens) - 1,)


def test_a_chat_is_encoded_whole_by_its_template() -> None:
    chat = Chat(tiny_tokenizer(), frozenset())
    encoder = RewardEncoder(chat, pad_id=0)
    question = [{"role": "user", "content": "2+3="}]
    assert encoder.outcome(question, "5").tokens == chat.encode("2+3=5")  # no '=' for an answer that begins
    as_messages = encoder.outcome(question, [{"role": "assistant", "content": "5"}])
    assert as_messages == encoder.outcome(question, "5")


def test_a_step_has_the_same_tokens_however_the_text_was_cut() -> None:
    encoder = RewardEncoder(Chat(tiny_tokenizer(), frozenset()), pad_id=0)
    one, other = (encoder.process("2+3=", steps) for steps in (["it is ", " 5\n"], ["it is\n", "5"]))
    assert one == other
    begin = len("2+3=")
    assert one.reads == (begin + len("it is"), begin + len("it is\n5"))
    newline = encoder.chat.encode_text("\n")[0]
    assert [one.tokens[read] for read in one.reads] == [newline, newline]


def test_the_last_step_s_score_is_read_at_an_end_token() -> None:
    chat = Chat(tiny_tokenizer(), frozenset())
    without, encoder = (RewardEncoder(chat, pad_id=0, reads_end=reads_end) for reads_end in (False, True))
    (end,) = encoder.process("2+3=", ["5"]).tokens[len(without.process("2+3=", ["5"]).tokens) :]
    assert end == chat.tokenizer.eos_token_id
    plain, ended = (one.process("2+3=", ["it is", "5", "so 5"]) for one in (without, encoder))
    assert ended.tokens == (*plain.tokens, end)
    assert ended.reads == (*plain.reads[:-1], plain.reads[-1] + 1)


def test_a_step_s_score_depends_on_whether_the_completion_ends_after_it() -> None:
    model = tiny_reward_model(RewardModelKind.PROCESS)
    model.scale = replace(model.scale, reads_end=True)
    steps = ["2+3 is 5", "5", "so 5"]
    whole, stopped = model.scores([model.encoder.process("2+3=", cut) for cut in (steps, steps[:2])])
    assert float(whole[0]) == pytest.approx(float(stopped[0]), abs=1e-5)
    assert abs(float(whole[1]) - float(stopped[1])) > 1e-3
    rows = [model.encoder.process(prompt, cut) for prompt in PROMPTS for cut in (steps, steps[:1], [""])]
    for row, score_N in zip(rows, model.scores(rows), strict=True):
        torch.testing.assert_close(score_N, plain(model, row), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_scores_zero_and_its_head_alone_has_a_gradient(kind: RewardModelKind, tmp_path: Path) -> None:
    model = begin_reward_model(str(tiny_folder(tmp_path)), kind, dtype=torch.float32, device=torch.device("cpu"))
    rows = some_rows(model)
    logit_N = model.logits(rows)
    assert logit_N.tolist() == [0.0] * len(logit_N)
    (logit_N[0] - logit_N[1]).backward()
    moved = {name for name, p in model.module.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert moved
    assert all(name.startswith("score") for name in moved)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("architecture", [*SHARED, *PLAIN])
def test_a_new_model_has_the_decoder_of_the_language_model(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path, architecture)
    if architecture == "cohere":
        with pytest.raises(ConfigError, match="transformers has no SequenceClassification for its architecture"):
            begin_reward_model(str(folder), RewardModelKind.OUTCOME, dtype=torch.float32, device=torch.device("cpu"))
        return
    model = begin_reward_model(str(folder), RewardModelKind.OUTCOME, dtype=torch.float32, device=torch.device("cpu"))
    decoder = AutoModelForCausalLM.from_pretrained(folder).base_model
    expected = dict(decoder.named_parameters())
    for name, parameter in model.module.base_model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_refused_models(tmp_path: Path) -> None:
    def load(folder: Path) -> RewardModel:
        return load_reward_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))

    language = tiny_folder(tmp_path / "language")
    with pytest.raises(ConfigError, match=r"is a language model, no reward model: train one with covey reward-model"):
        load(language)
    (config := json.loads((language / "config.json").read_text()))["architectures"] = ["LlamaForRewardModel"]
    (language / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"the class LlamaForRewardModel, which is not a sequence or token classifier"
    ):
        load(language)
    outcome = tiny_reward_model(RewardModelKind.OUTCOME)
    outcome.save(tmp_path / "outcome")
    with pytest.raises(ConfigError, match="is an outcome reward model, but these data train a process reward model"):
        begin_reward_model(
            str(tmp_path / "outcome"), RewardModelKind.PROCESS, dtype=torch.float32, device=torch.device("cpu")
        )
    outcome.module.config.num_labels = 3
    outcome.module.score = nn.Linear(32, 3, bias=False)
    outcome.module.save_pretrained(tmp_path / "three")
    tiny_tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"has 3 labels.*num_labels = 1"):
        load(tmp_path / "three")
    outcome = tiny_reward_model(RewardModelKind.OUTCOME)
    with torch.no_grad():
        outcome.module.score.weight[0, 0] = math.nan
    outcome.save(tmp_path / "damaged")
    with pytest.raises(ConfigError, match="NaN or infinite"):
        load(tmp_path / "damaged")


def test_microbatches_count_a_shared_prefix_once_and_keep_examples_whole() -> None:
    def row(tokens: str, group: str = "") -> ScoredRow:
        return ScoredRow(tuple(map(ord, tokens)), (len(tokens) - 1,), group)

    pairs = [[row("aaaab"), row("aaaac")], [row("aaaad"), row("aaaae")], [row("bbbb", "b"), row("bbbc", "b")]]
    assert list(microbatches(pairs, 8)) == [[0, 1], [2]]  # 5 + 1 + 1 + 1 tokens, then 4 + 1
    assert list(microbatches(pairs, 7)) == [[0], [1], [2]]  # 6; then 6 again; 5
    assert list(microbatches(pairs, 13)) == [[0, 1, 2]]
    assert list(microbatches(pairs, 1)) == [[0], [1], [2]]
    assert list(microbatches([], 1)) == []


def test_a_batch_decides_after_the_tokens_that_are_read() -> None:
    rows = [ScoredRow((5, 6, 7, 8), (3,), "a"), ScoredRow((5, 6, 9), (2,), "a"), ScoredRow((4, 5, 6), (0, 2), "b")]
    batch = as_batch(rows)
    assert batch.context == ((5, 6), (5, 6), (4,))
    assert batch.actions_BT.tolist() == [[7, 8, 0], [9, 0, 0], [5, 6, 0]]
    assert batch.mask_BT.int().tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 1]]
    assert batch.group_B.tolist() == [1, 1, 2]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=6))
@example([[1.0, 2.0], [], [4.0, 9.0, -3.0], [5.0]])
def test_running_moments_are_those_of_all_numbers(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.add(part)
    numbers = torch.tensor([number for part in parts for number in part], dtype=torch.float64)
    assert moments.count == len(numbers)
    if len(numbers):
        assert moments.mean == pytest.approx(float(numbers.mean()), abs=1e-9)
        assert moments.deviation == pytest.approx(float(numbers.std(correction=0)), abs=1e-7)


def test_an_empty_step_without_a_separator_has_no_token() -> None:
    """WordPiece makes no token of a line end; scores are then read at the steps' own last tokens."""
    encoder = RewardEncoder(Chat(tiny_tokenizer(), frozenset()), pad_id=0, separator="")
    assert encoder.process("2+3=", ["it", "5"]).reads == (5, 6)
    with pytest.raises(ConfigError, match="a step has no token, because it is empty"):
        encoder.process("2+3=", ["it", "", "5"])
