"""Ranks that train conversations or adapters end with the bits of one."""

import signal
from pathlib import Path

import pytest

from covey.tracking.run_folder import holds_run
from helpers import rank_cases
from helpers.rank_cases import ADAPTERS, CONVERSATIONS, start_ranks
from helpers.rank_runs import LIMIT, MOMENTS, compare, files_of, finish, trained
from helpers.tiny_models import calling_folder, tiny_folder

pytestmark = [pytest.mark.timeout(3000), pytest.mark.alone]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "weights", "names"),
    [
        (2, "replicate", ["conversation_tools_lora"]),
        (2, "replicate", list(CONVERSATIONS)),
        (4, "replicate", list(CONVERSATIONS)),
        (2, "fsdp", list(CONVERSATIONS)),
    ],
)
def test_conversations_have_the_bits_of_one(
    tmp_path_factory: pytest.TempPathFactory, size: int, weights: str, names: list[str]
) -> None:
    model = calling_folder(tmp_path_factory.mktemp("model") / "calling")
    compare(model, tmp_path_factory, [(size, weights)], names)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["replicate", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_more_runs_with_adapters_have_the_bits_of_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory, size: int, weights: str
) -> None:
    compare(model, tmp_path_factory, [(size, weights)], list(ADAPTERS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])  # tied output layer, transposed weights; biases
def test_adapters_of_other_sharded_models_have_the_bits_of_one(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    folder = tiny_folder(tmp_path_factory.mktemp("model") / kind, kind)
    compare(folder, tmp_path_factory, [(2, "fsdp")], ["lora_grpo_bf16", "lora_ppo_adapter"])


RESUMED = [(1, "fsdp"), (4, "fsdp"), (2, "replicate"), (2, "fsdp")]  # ranks and weights


@pytest.mark.slow
@pytest.mark.parametrize("began", ["replicate", "fsdp"])
@pytest.mark.parametrize("number", range(4))
def test_after_a_rank_was_killed_a_run_with_an_adapter_goes_on_with_other_ranks_and_weights(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, number: int, began: str
) -> None:
    whole = files_of(trained(model, tmp_path_factory.mktemp("whole"), 1, ["lora_ppo_adapter"]) / "lora_ppo_adapter")
    killed, moment = MOMENTS[number]
    words = [rank_cases.__file__, str(tmp_path), str(model), '["lora_ppo_adapter"]', began]
    ranks = start_ranks(words, 2, tmp_path, KILLED_AT=f"{killed}:{moment}")
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert ranks[killed].returncode == -signal.SIGKILL, errors[killed]
    run = tmp_path / "lora_ppo_adapter"
    if holds_run(run):
        size, weights = RESUMED[number]
        config = run / "config.toml"
        config.write_text(config.read_text().replace(f'weights = "{began}"', f'weights = "{weights}"'))
        finish(start_ranks(["-m", "covey", "train", "--resume", str(run)], size, tmp_path))
        assert files_of(run) == whole
        newest = max((run / "checkpoints").glob("step-*"))
        assert [path.name for path in newest.glob("*.safetensors")] == ["tensors.safetensors"]
