"""`covey sft` and `covey reward-model train` on several ranks have the bits of one: weights, metrics, evaluations."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import main
from covey.config import ClusterConfig, ConfigError, RunConfig, UpdateConfig
from covey.config.sft import RewardModelConfig, RewardModelKind, RewardModelTraining, SFTConfig
from covey.data import Team
from covey.experiment.job import team_for
from covey.experiment.models import divide_alone
from covey.experiment.reward_models import build_reward_trainer
from covey.experiment.supervised import build_trainer, check_same_data
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps
from covey.llm.policy import LanguagePolicy
from covey.llm.reward_models.examples import choose_objective, encode_examples, kind_of_examples
from covey.llm.sft.encoding import EncodedExample, batch_of
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.distributed import WHOLE
from covey.runtime.variables import check_ranks
from covey.tracking.run_folder import holds_run
from covey.train.pace import Pace
from covey.train.supervised import Likelihood, SupervisedTrainer, mean_loss
from helpers import rank_cases
from helpers.rank_cases import start_ranks, write_examples
from helpers.rank_runs import LIMIT, compare, files_of, finish, trained
from helpers.reward_models import tiny_reward_model
from helpers.thread_team import on_ranks
from helpers.tiny_models import tiny_folder, tiny_model

TEXTS: list[EncodedExample] = [
    EncodedExample((5, 6, 7), (8, 9, 1), (True,) * 3),
    EncodedExample((5, 6, 7), (8, 10, 11, 1), (True,) * 4),
    EncodedExample((12, 13), (20, 21, 1, 30, 31, 22, 1), (True, True, True, False, False, True, True)),
    EncodedExample((40, 41, 42, 43, 44), tuple(range(50, 62)), (True,) * 12),
    EncodedExample((60,), (61, 1), (True, True)),
]
SUMS = [(1, 2), (2, 2), (5, 3), (2, 2), (4, 4)]
DATA: dict[str, list[Example]] = {
    "pairs": [Pair(f"{n}", f"{a}+{b}=", f"{a + b}", f"{a} or {b}"[: 2 + n]) for n, (a, b) in enumerate(SUMS)],
    "grades": [Graded(f"{n}", f"{a}+{b}=", "9" * (n + 1), float(n % 2)) for n, (a, b) in enumerate(SUMS)],
    "steps": [
        Steps(f"{n}", f"{a}+{b}=", ("add", "b", "c")[: 1 + n % 3], (1.0, 0.0, 0.0)[: 1 + n % 3])
        for n, (a, b) in enumerate(SUMS)
    ],
}
MINIBATCHES = [slice(0, 5), slice(3, 4), slice(1, 4)]  # the second is one example, so most shards are empty


def made(name: str) -> Any:
    """A policy or a reward model. Threads share the generator of its weights, so it is made before they start."""
    return LanguagePolicy(tiny_model(), microbatch_tokens=12) if name == "sft" else tiny_reward_model(kind_of(name))


def kind_of(name: str) -> RewardModelKind:
    return kind_of_examples(DATA[name])


def trainer_of(name: str, model: Any, team: Team) -> tuple[SupervisedTrainer, Sequence[Any], Any]:
    """The trainer, its examples, and a function that evaluates the model."""
    if name == "sft":
        criterion = Likelihood(model, batch_of)
        trainer = build_trainer(
            criterion, model.module, SFTConfig(learning_rate=1e-2), UpdateConfig(), 9, team, WHOLE, Pace()
        )
        return trainer, TEXTS, lambda: [mean_loss(criterion, [TEXTS[:3], TEXTS[3:]], team)]
    model.team = team
    examples = encode_examples(DATA[name], model.encoder, None)
    config = RewardModelConfig(learning_rate=1e-2, microbatch_tokens=12)
    trainer = build_reward_trainer(model, config, choose_objective(DATA[name]), 9)
    rows = [row for one in examples for row in one.rows]
    return trainer, examples, lambda: torch.cat(model.scores(rows, 20)).tolist()


def steps(name: str, model: Any, team: Team) -> tuple[list[dict[str, float]], list[float], dict[str, torch.Tensor]]:
    """Metrics of some steps, the evaluation after them, and the weights."""
    trainer, examples, evaluate = trainer_of(name, model, team)
    metrics = [trainer.train_step(examples[chosen]) for chosen in MINIBATCHES]
    return metrics, evaluate(), trainer.optimizer.state_dict()["masters"]


@pytest.mark.parametrize("name", ["sft", *DATA])
def test_several_ranks_have_the_bits_of_one_and_the_gradient_of_one_shard(name: str) -> None:
    metrics, evaluated, masters = steps(name, made(name), Team(4))
    for size in (2, 4):
        models = [made(name) for _ in range(size)]
        for found, again, weights in on_ranks(
            size, 4, lambda team, models=models: steps(name, models[team.rank], team)
        ):  # type: ignore[misc]
            assert found == metrics
            assert again == evaluated
            assert all(torch.equal(weights[key], master) for key, master in masters.items())
    whole, once, _ = steps(name, made(name), Team(1))
    for one, other in zip(whole, metrics, strict=True):
        assert other == pytest.approx(one, rel=2e-3, abs=1e-6)
    assert evaluated == pytest.approx(once, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("name", ["sft", *DATA])
def test_the_first_step_of_an_uneven_minibatch_has_the_numbers_of_one_shard(name: str) -> None:
    """AdamW has not turned rounding into whole steps yet, so nothing but rounding differs."""
    found = []
    for team in (Team(1), Team(2)):
        trainer, examples, _ = trainer_of(name, made(name), team)
        found.append(trainer.train_step(examples[:5]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_ranks_with_other_data_are_refused() -> None:
    def compared(team: Any) -> str:
        with pytest.raises(ConfigError) as error:
            check_same_data({"data.jsonl": "a" if team.rank != 1 else "b"}, team)
        return str(error.value)

    assert all(one.startswith("rank 1 has read other examples than rank 0") for one in on_ranks(2, 2, compared))
    assert on_ranks(2, 2, lambda team: check_same_data({"data.jsonl": "a"}, team)) == [None, None]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_cases.environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_ranks")
def test_what_ranks_cannot_train_is_refused() -> None:
    check_ranks(RunConfig(sft=SFTConfig(batch_size=2)), sft=True)
    check_ranks(RewardModelTraining(batch_size=2))
    for config, told in (
        (RunConfig(sft=SFTConfig(batch_size=1)), "2 shards are more than sft.batch_size = 1"),
        (RewardModelTraining(batch_size=3, shards=4), "4 shards are more than batch_size = 3"),
        (RewardModelTraining(shards=1), "2 ranks cannot divide cluster.shards = 1"),
        (RunConfig(cluster=ClusterConfig(shards=1)), "2 ranks cannot divide cluster.shards = 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_ranks(config, sft=True)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("words", [["reward-model", "eval", "m", "d"], ["iterate", "my.toml"], ["check", "my.toml"]])
def test_other_commands_refuse_torchrun(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "torchrun is for covey train, covey sft or covey reward-model train: start covey" in said


def test_weights_of_an_encoder_cannot_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_reward_model(RewardModelKind.OUTCOME)
    model.shares_prompts = False
    monkeypatch.setattr("covey.experiment.models.ShardedTeam", Team)
    with pytest.raises(ConfigError, match=r"cannot be sharded, because its rows are evaluated one by one"):
        divide_alone(model, "mine", ClusterConfig(), Team())
    assert team_for(RewardModelTraining(shards=2)).shards == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3000)
def test_two_processes_have_the_bits_of_one_with_either_kind_of_weights(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compare(model, tmp_path_factory, [(2, "replicate"), (2, "fsdp")], list(rank_cases.EXAMPLES))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "resume"), [("sft", ["sft"]), ("pairs", ["reward-model", "train"])])
def test_after_a_rank_was_killed_the_other_says_so_and_the_training_goes_on(
    name: str, resume: list[str], model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = files_of(trained(model, tmp_path_factory.mktemp("whole"), 1, [name]) / name)
    write_examples(tmp_path)
    words = [rank_cases.__file__, str(tmp_path), str(model), f'["{name}"]', "replicate"]
    ranks = start_ranks(words, 2, tmp_path, KILLED_AT="1:step5")
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, errors
    assert "error: rank 0: rank 0 has lost another rank, which has ended or does not answer" in errors[0]
    assert holds_run(tmp_path / name)
    assert CheckpointFolder(tmp_path / name / "checkpoints").latest() == 4
    finish(start_ranks(["-m", "covey", *resume, "--resume", name], 2, tmp_path))
    assert files_of(tmp_path / name) == whole
