"""Several ranks end with the bits of one: weights, moments, metrics, rollouts and held-out answers."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from covey.llm.model.loading import load_model
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_folder import holds_run
from covey.tracking.run_store import read_metrics
from helpers import rank_cases
from helpers.rank_cases import ADAPTERS, CONVERSATIONS, IN_BF16, IN_FP32, QUICK, start_ranks
from helpers.rank_runs import LIMIT, MOMENTS, compare, files_of, finish, trained
from helpers.tiny_models import calling_folder, tiny_folder

pytestmark = [pytest.mark.timeout(3000), pytest.mark.alone]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow  # the tests below have its case
def test_two_ranks_have_the_bits_of_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    compare(model, tmp_path_factory, [(2, "fsdp")], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "size", "weights"),
    [
        ("fp32", 2, "replicate"),
        ("fp32", 2, "fsdp"),
        ("fp32", 4, "replicate"),
        ("fp32", 4, "fsdp"),
        ("bf16", 2, "replicate"),
        ("bf16", 2, "fsdp"),
        ("bf16", 4, "replicate"),
        ("bf16", 4, "fsdp"),
    ],
)
def test_every_algorithm_and_every_collector_has_the_bits_of_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory, precision: str, size: int, weights: str
) -> None:
    names = {"fp32": IN_FP32, "bf16": IN_BF16}[precision]
    compare(model, tmp_path_factory, [(size, weights)], [name for name in names if "inexact" not in name])


@pytest.mark.slow
def test_four_ranks_with_sharded_weights_have_the_bits_of_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compare(model, tmp_path_factory, [(4, "fsdp")], ["grpo_once"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])  # tied output layer; biases
def test_other_models_are_sharded(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    folder = tiny_folder(tmp_path_factory.mktemp("model") / kind, kind)
    compare(folder, tmp_path_factory, [(2, "fsdp")], ["grpo_once", "grpo_bf16"])


@pytest.mark.slow
def test_without_exact_the_gradient_is_the_same_up_to_rounding(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ["grpo_inexact"]
    folders = [trained(model, tmp_path_factory.mktemp(f"ranks{size}"), size, names, "fsdp") for size in (1, 2)]
    one, two = (read_metrics(folder / "grpo_inexact") for folder in folders)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5, abs=1e-6)


RESUMED = [(1, "fsdp"), (4, "fsdp"), (2, "replicate"), (4, "replicate")]  # ranks and weights


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return files_of(trained(model, tmp_path_factory.mktemp("whole"), 1, ["grpo"]) / "grpo")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MOMENTS)))
def test_after_a_rank_was_killed_the_run_goes_on_with_other_ranks_and_weights(
    model: Path, tmp_path: Path, uninterrupted: dict[str, str], number: int
) -> None:
    killed, moment = MOMENTS[number]
    began = ("fsdp", "replicate")[number % 4 == 3]
    words = [rank_cases.__file__, str(tmp_path), str(model), '["grpo"]', began]
    ranks = start_ranks(words, 2, tmp_path, KILLED_AT=f"{killed}:{moment}")
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert ranks[killed].returncode in (0, -signal.SIGKILL), errors[killed]
    size, weights = RESUMED[number % len(RESUMED)]
    config = tmp_path / "grpo" / "config.toml"
    if ranks[killed].returncode and holds_run(tmp_path / "grpo"):  # else it was killed before its first step
        assert f"rank {1 - killed} has lost another rank" in errors[1 - killed]
        config.write_text(re.sub('weights = "[a-z]*"', f'weights = "{weights}"', config.read_text()))
        finish(start_ranks(["-m", "covey", "train", "--resume", str(tmp_path / "grpo")], size, tmp_path))
    if (tmp_path / "grpo" / "summary.json").is_file():
        assert files_of(tmp_path / "grpo") == uninterrupted


@pytest.mark.slow
def test_a_sharded_checkpoint_is_a_model_and_its_damage_is_found(model: Path, tmp_path: Path) -> None:
    run = trained(model, tmp_path, 2, ["grpo_bf16"], "fsdp") / "grpo_bf16"
    checkpoints = CheckpointFolder(run / "checkpoints")
    newest = checkpoints.latest()
    assert newest == 3
    parts = sorted(path.name for path in checkpoints.folder(3).glob("*.safetensors"))
    assert parts == ["tensors-00001-of-00002.safetensors", "tensors-00002-of-00002.safetensors"]
    cpu = torch.device("cpu")
    of_checkpoint, of_run = (
        load_model(str(name), dtype=torch.bfloat16, device=cpu).module.state_dict()
        for name in (checkpoints.folder(3), run)
    )
    assert all(torch.equal(of_checkpoint[name], of_run[name]) for name in of_run)
    (checkpoints.folder(3) / parts[1]).unlink()
    assert checkpoints.latest() == 2


DISAGREEING = """
import os
from covey import run
from covey.config import ClusterConfig
from helpers.rank_cases import BASE
from dataclasses import replace
import sys

task = [{"question": f"What is {n} + {os.environ['RANK']}?", "answer": "1"} for n in range(40)]
run(replace(BASE, model=sys.argv[1], run_dir="run", task=None, cluster=ClusterConfig(2)), task=task)
"""


@pytest.mark.slow
def test_ranks_with_other_prompts_are_found_in_the_first_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "disagree.py").write_text(DISAGREEING)
    path = os.pathsep.join(sys.path)
    ranks = start_ranks(["disagree.py", str(model)], 2, tmp_path, PYTHONPATH=path)
    for rank in ranks:
        _, err = rank.communicate(timeout=LIMIT)
        assert rank.returncode
        assert "rank 1 has drawn other prompts than rank 0 in step 1" in err


BREAKING = """
import sys
from dataclasses import replace
from covey import run
from covey.config import ClusterConfig
from helpers.rank_cases import BASE

class Breaks:
    def record(self, step):
        if step.step == 2:
            raise ValueError("mine")

run(replace(BASE, model=sys.argv[1], run_dir="run", cluster=ClusterConfig(2, "fsdp")), observers=[Breaks()])
"""


@pytest.mark.slow
def test_an_observer_that_fails_stops_all_ranks_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    ranks = start_ranks(["breaking.py", str(model)], 2, tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert "the observer Breaks raised ValueError (mine) in step 2, which is recorded and saved" in errors[0]
    assert [rank.returncode for rank in ranks] == [1, 0], errors
    assert CheckpointFolder(tmp_path / "run/checkpoints").latest() == 2
    assert json.loads((tmp_path / "run/stopped.json").read_text())["step"] == 2


FAULTY = """
import sys
from dataclasses import replace
import torch
from covey import run
from covey.config import ClusterConfig
from covey.runtime.optimizer import MasterAdamW
from covey.runtime.variables import own_rank
from helpers.rank_cases import BASE

step = MasterAdamW.step

def faulty(self, learning_rate):
    result = step(self, learning_rate)
    if own_rank():  # one bit of one weight
        next(iter(self.masters.values())).detach().view(torch.int32).view(-1)[3] ^= 1
    return result

MasterAdamW.step = faulty
run(replace(BASE, model=sys.argv[1], run_dir="run", cluster=ClusterConfig(2)))
"""


@pytest.mark.slow
def test_a_rank_whose_weights_differ_by_one_bit_is_found_in_the_same_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    for rank in start_ranks(["faulty.py", str(model)], 2, tmp_path, PYTHONPATH=os.pathsep.join(sys.path)):
        _, err = rank.communicate(timeout=LIMIT)
        assert rank.returncode
        assert "rank 1 has another result than rank 0 in step 1 (weights of the optimizer)" in err


OTHER_MODEL = """
import sys
from dataclasses import replace
import covey.experiment.llm as llm
from covey import run
from covey.config import ClusterConfig, LoRAConfig
from covey.runtime.variables import own_rank
from helpers.rank_cases import BASE

load = llm.load_policy

def load_another(*arguments):
    loaded = load(*arguments)
    if own_rank():
        loaded.policy.module.base_model.layers[0].mlp.down_proj.weight.data[0, 0] += 0.1
    return loaded

llm.load_policy = load_another
weights, rank = sys.argv[2:]
run(replace(BASE, model=sys.argv[1], run_dir="run", cluster=ClusterConfig(2, weights), lora=LoRAConfig(int(rank))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "rank"), [("fsdp", 0), ("replicate", 4)])
def test_a_rank_that_has_loaded_another_model_is_found(model: Path, tmp_path: Path, weights: str, rank: int) -> None:
    (tmp_path / "other.py").write_text(OTHER_MODEL)
    arguments = ["other.py", str(model), weights, str(rank)]
    for one in start_ranks(arguments, 2, tmp_path, PYTHONPATH=os.pathsep.join(sys.path)):
        _, err = one.communicate(timeout=LIMIT)
        assert one.returncode
        assert f"rank 1 has loaded other weights of {model} than rank 0" in err


GRADED = """
import sys
from covey.config import RunError
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import build_grader
from covey.runtime.distributed import joined_ranks, team_of

def fails(completions, **columns):
    if "bad" in completions:
        raise ValueError("cannot read it")
    return [1.0] * len(completions)

def group(number, text):
    return Group(Start(number, "?"), [Rollout((1,), [1], [0.0], EndReason.STOP, text=text) for _ in range(2)])

with joined_ranks():
    team = team_of(2)
    grader = build_grader([fails], ())
    bad = int(sys.argv[1]) if team.rank else 0
    try:
        grader.grade([group(number, "bad" if number < bad else "good") for number in range(5)], team)
        print("graded")
    except RunError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "line"), [("2", "graded\n"), ("3", "6 of 20 rollouts could not be graded")])
def test_failed_gradings_are_counted_over_all_ranks(tmp_path: Path, bad: str, line: str) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    said = finish(start_ranks(["graded.py", bad], 2, tmp_path))
    assert all(line.strip() in one for one in said)


RECIPE = """
model = "{model}"
steps = 1
[task]
name = "arithmetic"
[sampling]
prompts_per_step = 4
{more}
"""


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "more", "words", "message"),
    [
        (3, "", ["train", "recipe.toml"], "the number of ranks must be a power of two, got 3"),
        (2, "[cluster]\nshards = 1", ["train", "recipe.toml"], "2 ranks cannot divide cluster.shards = 1"),
        (8, "", ["train", "recipe.toml"], "8 shards are more than sampling.prompts_per_step = 4"),
        (2, "", ["train", "cartpole_grpo"], "an agent is trained by one process"),
        (2, "", ["eval", "smollm2-135m", "--task", "arithmetic"], "torchrun is for covey train"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(
    model: Path, tmp_path: Path, ranks: int, more: str, words: list[str], message: str
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, more=more))
    variables = rank_cases.environment(0, ranks, 1)
    for rank in (0, 1):  # the other ranks are not started: the mistake is found before they meet
        found = subprocess.run(
            [sys.executable, "-m", "covey", *words],
            cwd=tmp_path,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert found.returncode == 2
        assert found.stdout == ""
        assert len(found.stderr.splitlines()) == (0 if rank else 1), found.stderr
        assert rank or f"error: rank 0: {message}" in found.stderr


@pytest.mark.slow
def test_torchrun_trains_as_it_is_documented(model: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, more="[evaluation]\nproblems = 8"))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "covey", "train", "recipe.toml"]
    found = subprocess.run(
        [sys.executable, *words, "--run-dir", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "2 ranks, 2 shards" in found.stdout
    assert len(re.findall("step 1/1", found.stdout)) == 1
    assert (tmp_path / "run" / "summary.json").is_file()


SUMS = """
import hashlib, sys
import torch
from covey.runtime.distributed import joined_ranks, team_of

with joined_ranks():
    team = team_of(4)
    generator = torch.Generator().manual_seed(team.rank)
    tensors = [torch.randn(size, generator=generator) * 10.0**team.rank for size in (1, 7, 1000, 1 << 15)]
    team.sum(tensors)
    lengths = [len(one) for one in team.exchange(b"x" * team.rank)]
    print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest(), lengths)
"""


@pytest.mark.slow
def test_the_processes_of_a_team_add_in_the_order_of_a_tree(tmp_path: Path) -> None:
    """gloo's sums and messages, beside the same tensors added here."""
    (tmp_path / "sums.py").write_text(SUMS)
    said = finish(start_ranks(["sums.py"], 4, tmp_path))
    parts = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        parts.append([torch.randn(size, generator=generator) * 10.0**rank for size in (1, 7, 1000, 1 << 15)])
    sums = [(a + b) + (c + d) for a, b, c, d in zip(*parts, strict=True)]
    expected = hashlib.sha256(b"".join(one.numpy().tobytes() for one in sums)).hexdigest()
    assert said == [f"{expected} [0, 1, 2, 3]\n"] * 4


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


RESUMED_ADAPTERS = [(1, "fsdp"), (4, "fsdp"), (2, "replicate"), (2, "fsdp")]  # ranks and weights


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
        size, weights = RESUMED_ADAPTERS[number]
        config = run / "config.toml"
        config.write_text(config.read_text().replace(f'weights = "{began}"', f'weights = "{weights}"'))
        finish(start_ranks(["-m", "covey", "train", "--resume", str(run)], size, tmp_path))
        assert files_of(run) == whole
        newest = max((run / "checkpoints").glob("step-*"))
        assert [path.name for path in newest.glob("*.safetensors")] == ["tensors.safetensors"]
