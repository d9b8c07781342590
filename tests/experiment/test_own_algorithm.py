"""`covey.run(..., algorithm=...)`: an algorithm that the user composes, in both worlds, resumed, and with mistakes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey import ConfigError, ControlConfig, RunConfig
from covey.algorithms import ALGORITHMS, Algorithm, KLInReward, KLPenalty, grpo, ppo, rloo
from covey.algorithms.advantages import Advantages
from covey.cli.main import main
from covey.core import schedules
from covey.core.policy_losses import Surrogate
from covey.data import Batch
from covey.experiment import control
from covey.experiment.algorithm import check_own
from covey.experiment.job import Experiment
from covey.llm.tasks import Arithmetic
from covey.tracking.metrics import is_reproducible
from covey.tracking.run_overview import overview
from covey.train.loop import train
from helpers.tiny_models import tiny_folder

CONTROL = ControlConfig(
    environment=covey.EnvironmentConfig("CartPole-v1"), steps=2, loss=covey.ControlLossConfig(),
    update=covey.ControlUpdateConfig(epochs=1), evaluation=covey.ControlEvaluationConfig(episodes=2),
)  # fmt: skip
MINE = replace(grpo(), name="mine")


def lengths(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, Any]]:
    config = RunConfig(
        model=str(tiny_folder(tmp_path_factory.mktemp("own") / "model")), steps=2, threads=1, precision="fp32",
        show_rollouts_every=0, sampling=covey.SamplingConfig(prompts_per_step=2, group_size=3, max_new_tokens=4),
        evaluation=covey.EvaluationConfig(problems=2),
    )  # fmt: skip
    return config, {"task": Arithmetic(digits=(1,)), "rewards": [lengths]}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def repeating(run_dir: Path) -> list[Any]:
    """The metrics of a run that repeat."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: v for name, v in line.items() if name != "step" and is_reproducible(name)} for line in lines]


def measured(config: RunConfig | ControlConfig, algorithm: Algorithm | None = None, **given: Any) -> list[Any]:
    result = covey.run(config, algorithm=algorithm, **given)
    assert result is not None
    return repeating(result.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("is_control", [True, False])
def test_the_parts_of_an_algorithm_take_the_place_of_the_config_s(
    is_control: bool, language: tuple[RunConfig, dict[str, Any]]
) -> None:
    """A preset as `algorithm`, in a config that names another, is the preset by its name."""
    config, given = (CONTROL, {}) if is_control else language
    preset = rloo(kl=KLPenalty(schedules.constant(0.0), KLInReward())) if is_control else rloo()
    composed = measured(config, replace(preset, name="mine"), **given)
    assert composed == measured(replace(config, algorithm="rloo"), **given)
    assert composed[0]["grad_norm"] > 0


def test_the_run_has_the_name_of_its_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    result = covey.run(replace(CONTROL, run_dir="a run"), algorithm=MINE)
    assert result is not None
    said = capsys.readouterr().out
    assert said.startswith("mine on CartPole-v1")
    assert result["algorithm"] == overview(Path("a run")).algorithm == "mine"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of two steps that was stopped after one."""

    def stopped(*arguments: Any, should_stop: Callable[[], bool]) -> None:
        train(*arguments, should_stop=lambda: bool(Path("a run/metrics.jsonl").stat().st_size))

    with monkeypatch.context() as patch:
        patch.setattr(control, "Experiment", partial(Experiment, loop=stopped))
        assert covey.run(replace(CONTROL, run_dir="a run"), algorithm=MINE) is None
    assert "Go on with: import covey; covey.resume('a run', algorithm=algorithm)" in capsys.readouterr().out
    return Path("a run")


@pytest.mark.slow
def test_a_run_is_resumed_with_its_algorithm(begun: Path) -> None:
    """And continues as if it had not been stopped."""
    assert covey.resume(begun, algorithm=MINE)
    assert repeating(begun) == measured(CONTROL, MINE)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_algorithm(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(begun)]) == 2
    assert "was started from Python with algorithm=" in capsys.readouterr().err
    for algorithm, message in (
        (None, r"in the program that started it, with import covey; covey\.resume\('a run', algorithm=algorithm\)"),
        (replace(MINE, name="yours"), "algorithm is 'yours', and the run began with 'mine'"),
    ):
        with pytest.raises(ConfigError, match=message):
            covey.resume(begun, algorithm=algorithm)
    covey.run(replace(CONTROL, run_dir="plain"))
    with pytest.raises(ConfigError, match="algorithm is 'mine', and the run began with the one that its config names"):
        covey.resume("plain", algorithm=MINE)


@pytest.mark.slow
def test_the_arguments_that_a_resumed_run_needs_are_named(language: tuple[RunConfig, dict[str, Any]]) -> None:
    config, given = language
    covey.run(replace(config, run_dir="a run"), **given)
    with pytest.raises(ConfigError, match=r"Python with task= and rewards=.*resume\('a run', task=task, rewards=\["):
        covey.resume("a run")
    with pytest.raises(ConfigError, match=r"was started from Python with rewards=, which"):
        covey.resume("a run", task=given["task"])
    assert covey.resume("a run", **given)


def advantage(value: Callable[[Batch], Any]) -> Algorithm:
    return replace(MINE, advantage=value)


def surrogate(value: Callable[..., Any]) -> Algorithm:
    return replace(MINE, surrogate=value)


def test_an_advantage_with_a_network_of_its_own_is_a_constant_of_the_loss() -> None:
    """Its graph would be freed by the first minibatch, and its gradient would reach the network."""
    scale = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(scale.weight)

    def scaled(batch: Batch) -> Advantages:
        return Advantages(scale(grpo().advantage(batch).advantages_BT[..., None])[..., 0])

    config = replace(CONTROL, update=covey.ControlUpdateConfig(epochs=2, minibatches=2))
    assert measured(config, advantage(scaled)) == measured(config, MINE)
    assert scale.weight.grad is None


def raises(batch: Batch) -> Advantages:
    raise KeyError("no such thing")


def zeros(batch: Batch) -> torch.Tensor:
    return torch.zeros(batch.mask_BT.shape)


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ("dapo", {}, "algorithm is of type str: give a covey.algorithms.Algorithm"),
    (grpo, {}, "algorithm is of type function"),
    (replace(ppo(), name="mine"), {}, "has a value loss, and the config's algorithm is 'grpo'.*set algorithm = 'ppo'"),
    (MINE, {"algorithm": "ppo", "rollouts": covey.RolloutsConfig(kind="fragments")}, "has no value loss"),
    (MINE, {"loss": covey.ControlLossConfig(clip_low=0.1)}, "loss.clip_low is set, but algorithm= takes the place"),
    (MINE, {"replay": covey.ReplayConfig(groups=2)}, "replay.groups needs importance weights"),
    (advantage(raises), {}, r"in a dry run on 4 rollouts: KeyError: 'no such thing' \(.*own_algorithm.py:\d+\)"),
    (advantage(zeros), {}, r"its advantage must return Advantages\(advantages_BT\)"),
    (advantage(lambda batch: Advantages(batch.reward_B)), {}, r"its advantage returned the shape \(4,\)"),
    (advantage(lambda batch: Advantages(zeros(batch) / 0)), {}, "its advantage returned a value that is not finite"),
    (surrogate(lambda logprobs, ratio, advantages: ratio), {}, r"its surrogate must return Surrogate\(loss_BT"),
    (surrogate(lambda logprobs, ratio, advantages: Surrogate.unclipped(ratio[:, 0])), {}, r"its surrogate returned .*"),
    (surrogate(lambda logprobs, ratio, advantages: Surrogate.unclipped(advantages)), {}, "its loss has no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "changes", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_the_run_begins(algorithm: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        covey.run(replace(CONTROL, **changes), algorithm=algorithm)
    assert "\n" not in str(raised.value)
    assert not Path("runs").exists()


def test_every_preset_passes_the_dry_run() -> None:
    """As a language model's and as an agent's, so that a composition of its parts does."""
    for name, build in ALGORITHMS.items():
        algorithm = build(**({"max_length": 3} if name == "dr_grpo" else {}))
        for config in (RunConfig(algorithm=name), ControlConfig(algorithm=name)):
            assert check_own(algorithm, config) is algorithm
