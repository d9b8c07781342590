"""Whole runs on environments: in Python and by the command, their evaluation, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

import covey
from covey.algorithms import KLInLoss, KLInReward, KLToBehavior
from covey.cli.main import main
from covey.config.recipe import write_config
from covey.control import rollout_buffer
from covey.control.policy import load_policy
from covey.core import kl
from covey.experiment.algorithm import build_algorithm
from covey.experiment.control import ControlBuilder, evaluate_run
from covey.tracking.run_store import read_metrics
from helpers import counting_environment, toy_envs

PPO = {
    "algorithm": "ppo",
    "steps": 3,
    "environment": {"id": "CartPole-v1"},
    "policy": {"hidden": [16], "normalise_observations": True},
    "rollouts": {"kind": "fragments", "environments": 4, "fragment_steps": 50},
    "update": {"learning_rate": 0.003},
    "evaluation": {"episodes": 5},
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    counting_environment.register()
    toy_envs.register()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, as a script makes one."""
    where = tmp_path_factory.mktemp("runs") / "cart"
    config = covey.ControlConfig(
        run_dir=str(where),
        steps=6,
        seed=2,
        environment=covey.EnvironmentConfig("CartPole-v1"),
        rollouts=covey.RolloutsConfig(starts_per_step=3, group_size=6),
        update=covey.ControlUpdateConfig(learning_rate=0.005),
        evaluation=covey.ControlEvaluationConfig(episodes=10, every=2, expected_return=475.0),
    )
    summary = covey.run(config)
    assert summary is not None
    assert summary == json.loads((where / "summary.json").read_text())
    return where


def test_a_run_in_python_records_what_it_did(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = read_metrics(run_dir)
    assert (summary["domain"], summary["environment"], summary["expected_return"]) == ("control", "CartPole-v1", 475.0)
    assert summary["episodes"] == metrics[-1]["environment/episodes"] == 6 * 3 * 6
    assert summary["environment_steps"] == metrics[-1]["environment/steps"] == summary["decisions_sampled"]
    assert [line["step"] for line in metrics if "eval/score" in line] == [2, 4, 6]
    (evaluation,) = summary["evaluations"]
    assert evaluation["before"]["count"] == evaluation["after"]["count"] == 10
    assert evaluation["after"]["score"] == metrics[-1]["eval/score"]
    for name in ("curve.png", "config.toml", "rollouts/step_000006.jsonl", "model/policy.safetensors"):
        assert (run_dir / name).is_file()


def test_an_evaluation_repeats_itself(run_dir: Path) -> None:
    """From the folder alone; without a seed it is the run's own last evaluation."""
    result = evaluate_run(run_dir, episodes=10)
    assert result == evaluate_run(run_dir, episodes=10)
    after = json.loads((run_dir / "summary.json").read_text())["evaluations"][0]["after"]
    assert {name: result[name] for name in ("score", "low", "high", "count")} == {
        name: after[name] for name in ("score", "low", "high", "count")
    }
    assert len(result["returns"]) == 10
    assert result["score"] == pytest.approx(np.mean(result["returns"]))
    assert "picture" not in result
    seeded = evaluate_run(run_dir, episodes=10, seed=2)
    assert seeded == evaluate_run(run_dir, episodes=10, seed=2)
    assert seeded["returns"] != result["returns"]
    assert evaluate_run(run_dir, episodes=4)["returns"] == result["returns"][:4]


def test_the_scales_that_move_with_a_run_are_recorded(tmp_path: Path) -> None:
    (first, *_, last) = run_short(
        tmp_path,
        environment={"id": toy_envs.TARGET},
        policy={"initial_std": 0.5},
        rollouts={"reward_scaling": "running_std"},
    )
    assert first["policy/std"] == pytest.approx(0.5, rel=0.05)
    assert first["policy/std"] != last["policy/std"]
    assert first["reward_scale"] > 0
    assert first["reward_scale"] != last["reward_scale"]


def test_more_episodes_than_copies_are_played(run_dir: Path) -> None:
    result = evaluate_run(run_dir, episodes=130)
    assert result["count"] == 130
    assert result["returns"][:10] == evaluate_run(run_dir, episodes=10)["returns"]


@pytest.mark.slow
def test_the_command_draws_the_agent(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_dir), "--episodes", "3", "--render"]) == 0
    out = capsys.readouterr().out
    assert "over 3 episodes" in out
    picture = Path(out.partition("a picture of one episode is in ")[2].splitlines()[0])
    assert picture.parent == run_dir
    with Image.open(picture) as film:
        assert film.format == "GIF"
        frames = []
        for index in range(film.n_frames):
            film.seek(index)
            frames.append(np.asarray(film.convert("RGB")))
    assert len(frames) >= 5
    assert any((frame != frames[0]).any() for frame in frames[1:]), "something moves"


def run_short(tmp_path: Path, tables: dict[str, Any] = PPO, **sections: Any) -> list[dict[str, float]]:
    toy_envs.train_quietly(toy_envs.read(tables, **sections), tmp_path / "run")
    return read_metrics(tmp_path / "run")


def test_the_critic_warms_up_alone(tmp_path: Path) -> None:
    steps = run_short(tmp_path, steps=3, update={"learning_rate": 0.003, "critic_warmup_steps": 2})
    assert [step["update/optimizer_steps"] > 0 for step in steps] == [False, False, True]
    assert all(step["update/critic_steps"] > 0 for step in steps)


def test_the_placement_of_the_kl_follows_from_its_estimator() -> None:
    """docs/mathematics.md: k1 in the loss and k3 in the reward have no gradient to speak of."""
    for name in ("grpo", "dr_grpo", "rloo", "reinforce", "ppo"):
        options = {"max_length": 10} if name == "dr_grpo" else {}
        for estimator, placement in {"k1": KLInReward, "k2": KLInLoss, "k3": KLInLoss, "exact": KLInLoss}.items():
            loss = covey.ControlLossConfig(kl_coefficient=0.1, kl_estimator=estimator)
            to_reference = build_algorithm(name, loss, **options).kl.placement
            assert (type(to_reference), to_reference.estimator) == (placement, getattr(kl, estimator))
            to_behavior = build_algorithm(name, replace(loss, kl_to="behavior"), **options).kl.placement
            assert (type(to_behavior), to_behavior.estimator) == (KLToBehavior, getattr(kl, estimator))


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "exact"])
def test_a_kl_to_the_reference_holds_ppo_back(estimator: str | None, tmp_path: Path) -> None:
    """Against the same run without one. Unset is k1."""
    loss = {"kl_coefficient": 5.0, "kl_estimator": estimator}
    moved = {}
    for name, tables in (("held", {"loss": loss}), ("free", {})):
        policy = toy_envs.train_quietly(toy_envs.read(PPO, steps=8, **tables), tmp_path / name).policy
        metrics = read_metrics(tmp_path / name)
        assert all(np.isfinite(value) for line in metrics for value in line.values())
        watched = [line["kl"] for line in metrics if "kl" in line]
        if name == "held":
            assert len(watched) == 8
            assert watched[0] < 1e-10 < watched[-1]
        else:
            assert not watched
        moved[name] = toy_envs.mean_kl_from_even(policy)
    assert moved["held"] < 0.7 * moved["free"]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_a_kl_to_who_acted_shortens_every_step(estimator: str, tmp_path: Path) -> None:
    loss = {"kl_coefficient": 50.0, "kl_estimator": estimator, "kl_to": "behavior"}
    moved = {}
    for name, tables in (("held", {"loss": loss}), ("free", {})):
        metrics = run_short(tmp_path / name, PPO, steps=6, update={"epochs": 10}, **tables)
        assert all("kl" not in line for line in metrics), "there is no reference"
        moved[name] = sum(line["kl/behavior"] for line in metrics)
    assert moved["held"] < 0.3 * moved["free"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["Pendulum-v1", toy_envs.TARGET])
@pytest.mark.parametrize("estimator", [None, "k3"])
def test_continuous_actions_with_a_kl_run(name: str, estimator: str | None, tmp_path: Path) -> None:
    metrics = run_short(
        tmp_path, environment={"id": name}, loss={"kl_coefficient": 0.1, "kl_estimator": estimator}, steps=2
    )
    assert metrics[-1]["kl"] > 0


def test_dr_grpo_divides_by_the_longest_rollout() -> None:
    def longest(**sections: Any) -> int | None:
        world = ControlBuilder(
            toy_envs.read({"algorithm": "dr_grpo", "environment": {"id": "CartPole-v1"}}, **sections)
        )
        try:
            return world.longest_rollout
        finally:
            world.close()

    assert longest() == 500
    assert longest(environment={"max_episode_steps": 70, "action_repeat": 4}) == 18
    assert longest(rollouts={"kind": "branches"}) == 1
    assert longest(rollouts={"kind": "branches", "horizon": 7}, loss={"credit": "reward_to_go"}) == 7
    with pytest.raises(covey.ConfigError, match=r"has none: set environment\.max_episode_steps"):
        longest(environment={"id": toy_envs.TARGET})
    assert longest(environment={"id": toy_envs.TARGET, "max_episode_steps": 10}) == 10


def test_the_saved_policy_acts_as_the_trained_one(run_dir: Path) -> None:
    policy = load_policy(run_dir / "model")
    assert policy.observation_size == 4
    assert toy_envs.mean_return(policy, "CartPole-v1", 10) == evaluate_run(run_dir, episodes=10)["score"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says of a mistake."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def recipe(folder: Path, tables: dict[str, Any], **sections: Any) -> str:
    path = folder / "bad.toml"
    write_config(toy_envs.read(tables, **sections), path)
    return str(path)


def test_exact_kl_of_continuous_actions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = {"kl_coefficient": 0.1, "kl_estimator": "exact"}
    bad = recipe(tmp_path, PPO, environment={"id": "Pendulum-v1"}, loss=loss)
    for command in (["check", bad], ["train", bad, "--run-dir", str(tmp_path / "run")]):
        assert refused(command, capsys) == (
            "error: loss.kl_estimator = 'exact' sums over all actions, and here they are continuous: use 'k3'"
        )
    assert not (tmp_path / "run").exists()


def test_branches_where_states_cannot_be_copied_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("Box2D")
    bad = recipe(tmp_path, {"environment": {"id": "LunarLander-v3"}, "rollouts": {"kind": "branches"}})
    for command in (["check", bad], ["train", bad, "--run-dir", str(tmp_path / "run")]):
        assert refused(command, capsys) == (
            "error: rollouts.kind = 'branches' needs an environment whose state can be copied, and this one's "
            "cannot: use 'episodes', with loss.credit = 'reward_to_go_by_step'"
        )
    assert not (tmp_path / "run").exists(), "nothing is left behind"


class EndsWhereItIsProbed(toy_envs.Endless):
    """Only the episode by which an environment is tried out ends."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.ends = seed == 0
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.ends, truncated, info


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["episodes", "fragments"])
def test_an_episode_without_an_end_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_buffer, "LONGEST_WAIT", 200)
    gym.registry.pop("covey-practice/NoLimit-v0", None)
    gym.register("covey-practice/NoLimit-v0", entry_point=EndsWhereItIsProbed)
    tables = PPO if kind == "fragments" else {"rollouts": {"kind": kind}, "steps": 1}
    config = toy_envs.read(tables, environment={"id": "covey-practice/NoLimit-v0"}, run_dir=str(tmp_path / "run"))
    with pytest.raises(covey.ConfigError, match=r"not ended after 200 decisions: set environment\.max_episode_steps"):
        covey.run(config)  # fragments need no end to train, but their evaluation does
    limited = replace(config, environment=replace(config.environment, max_episode_steps=150))
    toy_envs.train_quietly(limited, tmp_path / "limited")


def test_the_episode_that_branches_leave_must_end_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rollout_buffer, "LONGEST_WAIT", 5)
    config = toy_envs.read({"environment": {"id": toy_envs.ENDLESS}, "rollouts": {"kind": "branches"}, "steps": 1})
    with pytest.raises(covey.ConfigError, match="not ended after 5 decisions"):
        toy_envs.train_quietly(config, tmp_path / "run")


def test_an_unfinished_run_is_not_evaluated(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run_dir, unfinished, ignore=shutil.ignore_patterns("model"))
    assert refused(["eval", str(unfinished)], capsys) == (
        f"error: the run in {unfinished} has not saved its policy yet: finish it with covey train --resume {unfinished}"
    )


def test_rewards_of_ones_own_are_refused() -> None:
    config = toy_envs.read(PPO)
    with pytest.raises(covey.ConfigError, match="takes no task and no rewards"):
        covey.run(config, rewards=[lambda **columns: [1.0]])


@pytest.mark.slow
def test_a_run_starts_without_what_takes_seconds_to_import(run_dir: Path) -> None:
    """FSDP2 and DTensor are for several ranks, sympy is for the compiler and for tensors on the meta device."""
    heavy = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy", "transformers"}
    program = (
        "import sys\nfrom covey.cli.main import main\n"
        f"main(['eval', {str(run_dir)!r}, '--episodes', '2'])\n"
        f"sys.exit(', '.join({heavy!r} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
