"""The estimate of a step's time on a GPU: its arithmetic by hand, and the command that prints it."""

from dataclasses import replace

import pytest

from covey.cli.main import main
from covey.config import ConfigError, LoRAConfig, LossConfig, RunConfig, SamplingConfig, UpdateConfig
from covey.experiment.plan import CARDS, READING, Card, Work, decoding_step, find_card, step_seconds, update
from covey.llm.memory import adapter_parameters, read_dimensions

FIELDS = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 200, "tie_word_embeddings": True,
}  # fmt: skip
SIZE = read_dimensions(FIELDS)
LAYERS = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96)  # weights of the layers' products
HEAD = 200 * 64
CARD = Card(80, bandwidth=1, tflops=1)
CONFIG = RunConfig(
    sampling=SamplingConfig(prompts_per_step=3, group_size=4, max_new_tokens=11),
    loss=LossConfig(kl_coefficient=0.0),
    update=UpdateConfig(microbatch_tokens=10_000),
)


def test_a_decoding_step_reads_weights_keys_and_logits() -> None:
    work = decoding_step(SIZE, rows=8, group=4, prompt_tokens=20, new_tokens=10, card=CARD)
    token = 2 * 2 * 2 * 16 * 2  # keys and values of two layers, of two heads of 16 numbers in bf16
    assert work.bytes == 2 * (LAYERS + HEAD) + token * (2 * 20 + 8 * 5) + 2 * 8 * 200 * 2
    assert work.flops == 8 * (2 * (LAYERS + HEAD) + 4 * 2 * 64 * 25)
    assert work.launches == 2 * 11 + 16
    old = decoding_step(SIZE, rows=8, group=4, prompt_tokens=20, new_tokens=10, card=replace(CARD, has_bf16=False))
    assert old.bytes == 4 * (LAYERS + HEAD) + 2 * token * (8 * 20 + 8 * 5) + 2 * 8 * 200 * 4
    assert old.launches == 2 * 48 + 16


@pytest.mark.parametrize(
    ("fields", "of_layers", "of_attention", "of_head"),
    [
        ({}, 6, 7, 8),
        ({"update": replace(CONFIG.update, recompute=True)}, 8, 9, 8),
        ({"lora": LoRAConfig(rank=2)}, 4, 7, 6),
        ({"loss": LossConfig(kl_coefficient=0.1)}, 8, 9, 10),
        ({"update": replace(CONFIG.update, epochs=2)}, 2 * 6 + 2, 2 * 7 + 2, 2 * 8 + 2),
    ],
)
def test_an_update_multiplies_every_weight_in_every_pass(
    fields: dict[str, object], of_layers: int, of_attention: int, of_head: int
) -> None:
    config = replace(CONFIG, **fields)  # type: ignore[arg-type]
    work = update(SIZE, config, prompt_tokens=20, card=CARD)
    tokens, decisions, pairs = 3 * 20 + 12 * 10, 12 * 11, 3 * 200 + 12 * 11 * 25.5
    expected = of_layers * LAYERS * tokens + of_attention * 2 * 2 * 64 * pairs + of_head * HEAD * decisions
    # A forward pass has 2 operations for each weight and 4 for each pair; attention's backward pass has 10.
    assert work.flops == pytest.approx(expected)
    trained = adapter_parameters(SIZE, config) if config.lora.is_used else SIZE.parameters
    assert work.bytes == 42 * trained * config.update.epochs


def test_the_limit_is_the_longer_of_bytes_and_operations() -> None:
    assert Work(2e9, 1e12).limit(CARD) == 2
    assert Work(2e9, 3e12).limit(CARD) == 3
    assert Work(2e9, 1e9, launches=4).expected(CARD) == pytest.approx(2 / READING + 1e-5)
    (least, expected), _ = step_seconds(SIZE, CONFIG, 4, 20, CARD).values()
    whole = step_seconds(SIZE, CONFIG, 12, 20, CARD)["sampling"]
    assert whole[0] < least < expected, "fewer rows at a time take more steps"


def test_cards_are_found_by_name() -> None:
    assert [find_card(name)[0] for name in ("h100", "4090", "RTX-5090", "rtx 3090", "T4")] == [
        "H100", "RTX 4090", "RTX 5090", "RTX 3090", "T4",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--time V100 is not a known GPU: choose one of T4, L4"):
        find_card("V100")
    assert not CARDS["T4"].has_bf16


def test_the_command_plans_for_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algorithm", "grpo", "--group-size", "64", "--prompts-per-step", "64", "--max-new-tokens", "2048"]
    assert main(["plan", "smollm2-135m", "--time", "4090", *words]) == 0
    said = capsys.readouterr().out
    assert "Sampling and update: covey's kernels, Triton;" in said
    assert "Time of a step, RTX 4090 (1,008 GB/s, 165 TFLOP/s in bf16), an estimate that no GPU has confirmed:" in said
    assert "The RTX 4090 has 24.0 GiB: it fits." in said
    assert main(["plan", "smollm2-135m", "--time", "T4", *words]) == 0
    said = capsys.readouterr().out
    assert "Sampling and update: torch (the kernels are for Llama, Qwen2 and Qwen3" in said
    assert "in fp32, because it has no bf16" in said
