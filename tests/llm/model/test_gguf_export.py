"""GGUF files: read back by transformers, they give the same log-probabilities and tokens; what is refused, and when."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from covey.cli.export import GGUF_TYPES as NAMES
from covey.cli.main import main
from covey.config import ConfigError
from covey.llm.model.gguf import GGUF_TYPES, _read_model, plan_gguf, write_gguf
from helpers.tiny_models import CHAT_TEMPLATE, tiny_folder, tiny_model, tiny_tokenizer

TEXT = "What is 12 + 345? It's 357.\n\nDon't   <b>ask</b> Grüße 🦆<end>"
WORDS = ["What is the answer to this question?", "It's 357, don't ask again.", "the cat sat on the mat"]
ADDED = "<tool>"  # a token that is not special


def byte_level_tokenizer(*, digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as that of GPT-2, or of SmolLM, which splits digits."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>", "<begin>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_tokens([ADDED])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<begin>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def llama(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,  # more embeddings than tokens, as in many models
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-4,
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


def read_back(file: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("f32", {}),
        ("f32", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("f32", {"head_dim": 32}),  # heads that are together wider than the model
        ("f16", {}),
        ("bf16", {"tie_word_embeddings": True}),
        ("q8_0", {}),
    ],
)
def test_transformers_reads_the_same_model(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model, file = llama(tokenizer, **changes), tmp_path / "model.gguf"
    write_gguf(plan_gguf(model, tokenizer, kind), model, tokenizer, file, "mine", "mit")
    found, tokens = read_back(file)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert torch.equal(tokens(TEXT, return_tensors="pt")["input_ids"], ids)
    assert tokens.chat_template == CHAT_TEMPLATE
    _, ours = _read_model(file)
    assert (ours.eos_token, ours.bos_token) == ("<end>", "<begin>")  # before 5.18 transformers mistakes bos for eos
    if kind == "q8_0":  # blocks of 32 numbers with one scale each, so an error of 1/254, and that of the scale in fp16
        for name, parameter in model.named_parameters():
            error = (dict(found.named_parameters())[name] - parameter).abs().max()
            assert error <= (parameter.abs().max() / 220 if parameter.ndim > 1 else 0), name
        change = logprobs(model, ids).exp() * (logprobs(model, ids) - logprobs(found, ids))
        assert 0 < float(change.sum(-1).mean()) < 0.01
        return
    rounded = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # norms are always in fp32
                parameter.copy_(parameter.to(rounded))
    torch.testing.assert_close(logprobs(found, ids), logprobs(model, ids), rtol=0, atol=1e-5)


def test_the_fields_of_the_file(tmp_path: Path) -> None:
    tokenizer, file = byte_level_tokenizer(digits=True), tmp_path / "model.gguf"
    model = llama(tokenizer)
    write_gguf(plan_gguf(model, tokenizer, "q8_0"), model, tokenizer, file, "mine", "mit")
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.name": "mine",
        "general.license": "mit",
        "general.file_type": 7,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": 16,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    assert fields["tokenizer.ggml.tokens"][:2] == ["<end>", "<begin>"]
    assert fields["tokenizer.ggml.tokens"][-4:] == [ADDED, "[PAD291]", "[PAD292]", "[PAD293]"]
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]  # control, control, normal
    assert fields["tokenizer.ggml.token_type"][-4:] == [4, 5, 5, 5]  # of the user's, unused
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.1.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"


def test_a_begin_token_is_declared_if_the_tokenizer_adds_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer, file = byte_level_tokenizer(), tmp_path / "model.gguf"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", pair="<begin> $A $B", special_tokens=[("<begin>", 1)]
    )
    model = llama(tokenizer)
    write_gguf(plan_gguf(model, tokenizer, "f16"), model, tokenizer, file, "mine", "")
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert "general.license" not in fields


def scaled(tokenizer: Any) -> Any:
    return llama(tokenizer, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})


@pytest.mark.parametrize(
    ("model", "tokenizer", "kind", "message"),
    [
        (lambda _: tiny_model("qwen2"), byte_level_tokenizer, "f16", "the architecture of this model is qwen2"),
        (lambda _: tiny_model("gpt2"), byte_level_tokenizer, "f16", "the architecture of this model is gpt2"),
        (scaled, byte_level_tokenizer, "f16", "the rotary embedding of this model is scaled (linear)"),
        (lambda t: llama(t, attention_bias=True), byte_level_tokenizer, "f32", "this model has biases (model.layers.0"),
        (lambda t: llama(t, hidden_act="gelu"), byte_level_tokenizer, "f32", "the activation of this model is gelu"),
        (lambda t: llama(t, intermediate_size=80), byte_level_tokenizer, "q8_0", "q8_0 has blocks of 32 numbers, and"),
        (lambda _: tiny_model("llama"), tiny_tokenizer, "f16", "the tokenizer is not a byte-level BPE"),
    ],
)
def test_what_gguf_does_not_have_is_refused(model: Any, tokenizer: Any, kind: str, message: str) -> None:
    tokens = tokenizer()
    with pytest.raises(ConfigError) as raised:
        plan_gguf(model(tokens), tokens, kind)
    assert message in str(raised.value)
    assert "leave out --gguf" in str(raised.value)


def test_the_command_writes_nothing_for_a_model_that_gguf_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_folder(tmp_path / "model", "qwen2")
    capsys.readouterr()
    assert main(["export", str(model), str(tmp_path / "out"), "--gguf", "f16"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "the architecture of this model is qwen2" in error
    assert not (tmp_path / "out").exists()


def test_the_command_offers_every_type() -> None:
    assert tuple(GGUF_TYPES) == NAMES
