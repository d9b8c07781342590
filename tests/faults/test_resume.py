"""Runs of every kind, killed anywhere and resumed: the bits of an uninterrupted run; the lock holds until a kill."""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covey.config.recipe import write_config
from helpers import guessing, toy_envs
from helpers.cases import slow_unless
from helpers.examples import write_examples
from helpers.iterative_runs import STEPS as ITERATIVE_STEPS
from helpers.iterative_runs import WAYS, write_iterative_recipes
from helpers.kills import Draw, Kills, anywhere, inside
from helpers.run_helpers import (
    CALLS_OF_A_STEP,
    Moment,
    assert_same_run,
    covey,
    files,
    reproducible_metrics,
    write_recipe,
)
from helpers.tiny_models import calling_folder, tiny_folder
from helpers.vision_models import colour_rows, vision_folder

STEPS = 8
PROMPTS = 80
PPO = "tiny.toml --algorithm ppo --critic-warmup-steps 2 --critic-epochs 1 --critic-learning-rate 3e-3"
GATHERING = (
    "two_digits.toml --task dataset --path prompts.jsonl --epochs 1 --group-size 6 --max-new-tokens 5 "
    "--evaluation.every 1 --patience 20 --checkpoint.best true --record.tokens true"
)
REFERENCE = (
    "tiny.toml --kl-coefficient 0.1 --kl-estimator exact --adaptive-kl-target 0.01 --adaptive-kl-horizon 40 "
    "--kl-warmup-steps 2 --importance-cap 2.0 --refresh-every 2 --checkpoint.every 3"
)
CONTROL = {
    "steps": STEPS,
    "seed": 3,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 60},
    "update": {"learning_rate": 0.0003, "schedule": "linear"},
    "policy": {"normalise_observations": True},
    "evaluation": {"episodes": 3, "every": 3},
    "checkpoint": {"every": 2},
}
FRAGMENTS = {"kind": "fragments", "environments": 4, "fragment_steps": 40, "reward_scaling": "running_std"}
CONVERSATION = """
[conversation]
environment = "{environment}"
turns = 3
total_tokens = 60
"""
SAMPLES = (
    "sft tiny.toml --data samples --count 12 --samples-per-prompt 4 --min-reward 0.2 --keep all --sft.batch-size 1 "
    "--sft.learning-rate 1e-2"
)
REWARD_MODEL = (
    "reward-model train {data}.jsonl --model model --precision fp32 --threads 1 --batch-size 4 --learning-rate 1e-3 "
    "--epochs 2 --checkpoint-every 2"
)
# Right or wrong, so that some groups are all alike.
TWO_DIGITS = """
def two_digits(completions, **columns):
    return [float(sum(c.isdigit() for c in completion) >= 2) for completion in completions]
"""

Metrics = list[dict[str, Any]]


def rollouts_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


# ---- what an uninterrupted run shows, so that each part of its state matters ----


def learns(run_dir: Path, metrics: Metrics) -> None:
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert len({line["loss"] for line in metrics}) > STEPS // 2, "the run learns something at every step"


def learns_from_examples(run_dir: Path, metrics: Metrics) -> None:
    name = next(name for name in metrics[0] if name.endswith("/loss"))
    assert len({line[name] for line in metrics}) > len(metrics) // 2


def has_examples(run_dir: Path, metrics: Metrics) -> None:
    assert (run_dir / "examples.jsonl").read_text().count("\n") > STEPS


def converses(run_dir: Path, metrics: Metrics) -> None:
    assert len(metrics) == STEPS
    assert all("messages" in record for record in rollouts_of(run_dir, STEPS))


def trains_a_critic(run_dir: Path, metrics: Metrics) -> None:
    assert [line["update/optimizer_steps"] for line in metrics] == [0, 0, *[4] * (STEPS - 2)]
    assert [line["update/critic_steps"] for line in metrics] == [6] * STEPS
    assert metrics[0]["value/mean"] == 0, "values begin at zero"
    assert metrics[-1]["value/mean"] != 0
    assert all(line["groups/zero_advantage_fraction"] == 0 for line in metrics)
    assert json.loads((run_dir / "summary.json").read_text())["algorithm"] == "ppo"


def has_a_trunk_and_a_head(run_dir: Path, metrics: Metrics) -> None:
    trains_a_critic(run_dir, metrics)
    assert set(files(run_dir / "critic")) == {"value_head.safetensors", "config.json", "model.safetensors"}


def has_a_head(run_dir: Path, metrics: Metrics) -> None:
    trains_a_critic(run_dir, metrics)
    assert set(files(run_dir / "critic")) == {"value_head.safetensors"}


def has_an_adapter(run_dir: Path, metrics: Metrics) -> None:
    learns(run_dir, metrics)
    assert files(run_dir / "adapter")
    assert files(run_dir / "architecture")


def refreshes_the_reference(run_dir: Path, metrics: Metrics) -> None:
    learns(run_dir, metrics)
    state = json.loads((run_dir / f"checkpoints/step-{STEPS:08d}/state.json").read_text())
    assert "reference" in state
    assert state["kl_coefficient"]["next"] != 0.1
    coefficients = [line["kl_coefficient"] for line in metrics]
    assert coefficients[:2] == [0.05, 0.1]
    assert len(set(coefficients[1:])) > 3
    assert all(line["mismatch/capped_fraction"] == 0 for line in metrics if "mismatch/capped_fraction" in line)


def learns_from_a_teacher(run_dir: Path, metrics: Metrics) -> None:
    learns(run_dir, metrics)
    assert all(0 < line["teacher/rollouts"] < 1 and line["teacher/divergence"] > 0 for line in metrics)


def copies_the_policy(run_dir: Path, metrics: Metrics) -> None:
    refreshes_the_reference(run_dir, metrics)
    after_a_refresh, between = ([line["kl"] for line in metrics[first::2]] for first in (0, 1))
    assert max(after_a_refresh) < 1e-5 < min(between)


def records_every_rollout_once(run_dir: Path, metrics: Metrics) -> None:
    assert max(line["replay/groups"] for line in metrics) > 0
    for line in metrics:
        rollouts = rollouts_of(run_dir, line["step"])
        assert len(rollouts) == 4 * 6
        assert sum(record["decisions"] for record in rollouts) == line["decisions/sampled"]


def follows_its_budget(run_dir: Path, metrics: Metrics) -> None:
    assert max(line["groups/size_max"] for line in metrics) > 12
    for line, size in zip(metrics, (6, 7, 8, 9, 9, 10, 11, 12), strict=True):
        assert 4 * line["groups/size_mean"] + line["groups/unused_budget"] == 4 * size
        assert len(rollouts_of(run_dir, line["step"])) == 4 * line["groups/size_mean"]


def meets_every_prompt_once(run_dir: Path, metrics: Metrics) -> None:
    """In a pass over the file; every rollout is recorded, of dropped groups too."""
    assert max(line["groups/resamples"] for line in metrics) > 0
    drawn: list[str] = []
    for line in metrics:
        rollouts = rollouts_of(run_dir, line["step"])
        groups = {record["group"]: record for record in rollouts}
        assert len(groups) == line["groups/drawn"]
        assert sum(record["decisions"] for record in rollouts) == line["decisions/sampled"]
        for number in groups:
            mine = [record for record in rollouts if record["group"] == number]
            assert len(mine) == 6
            if mine[0].get("dropped"):
                assert len({record["reward"] for record in mine}) == 1
        drawn += [groups[number]["prompt"] for number in sorted(groups)]
    training = PROMPTS - PROMPTS // 10
    assert set(Counter(drawn[:training]).values()) == {1}
    assert any(record.get("dropped") for line in metrics for record in rollouts_of(run_dir, line["step"]))


class Kind(NamedTuple):
    settings: str | dict[str, Any]  # recipe of a tiny language model with options, or tables of a recipe of CartPole
    shows: Callable[[Path, Metrics], None] = learns
    draws: Sequence[Draw] = (anywhere, anywhere)
    command: str = "train"


def in_a_short_step(rng: random.Random, step: int) -> Moment:
    """As `anywhere`, in a training on examples, which calls fewer functions in a step."""
    return Moment(step, rng.randrange(CALLS_OF_A_STEP // 10))


DURING_A_CONVERSATION = (
    inside("covey.runtime.worker.sessions.Session.ask", 60),
    inside("covey.runtime.checkpoint.CheckpointFolder.save", 400),
    inside("covey.train.update.update", 2000),
    anywhere,
)
KINDS = {
    "GRPO": Kind("tiny.toml"),
    "PPO with a critic": Kind(f"{PPO} --trunk own --precision bf16", has_a_trunk_and_a_head),
    "PPO with the policy's trunk": Kind(f"{PPO} --trunk policy --precision bf16", has_a_head),
    "adapter": Kind("tiny.toml --rank 2 --precision bf16", has_an_adapter),
    "adapter, 4 bits": Kind(
        "tiny.toml --rank 2 --load-in-4bit true --kl-coefficient 0.02 --recompute true --precision bf16", has_an_adapter
    ),
    "adapter, refreshed": Kind(
        "tiny.toml --rank 2 --refresh-every 2 --refresh-fraction 0.5 --precision bf16",
        has_an_adapter,
    ),
    "PPO with adapters": Kind(f"{PPO} --rank 2 --trunk adapter"),
    "max_resamples": Kind(f"{GATHERING} --algorithm dapo --max-resamples 2", meets_every_prompt_once),
    "selection": Kind(f"{GATHERING} --selection.candidates 3"),
    "replay": Kind(f"{GATHERING} --replay.groups 3 --max-age 2", records_every_rollout_once),
    "adaptive": Kind(
        f"{GATHERING} --adaptive true --initial-group-size 3 --final-group-size 12",
        follows_its_budget,
    ),
    "reference, copied": Kind(REFERENCE, copies_the_policy),
    "reference, averaged": Kind(f"{REFERENCE} --refresh-fraction 0.3", refreshes_the_reference),
    "reference, averaged in bf16": Kind(
        f"{REFERENCE} --refresh-fraction 0.3 --precision bf16",
        refreshes_the_reference,
    ),
    "teacher": Kind(
        "tiny.toml --teacher.model reference --teacher.prompt {answer}{best_sibling} --refresh-every 2 "
        "--refresh-fraction 0.3 --divergence jensen_shannon --replay.groups 2",
        learns_from_a_teacher,
    ),
    "images": Kind("colours.toml --model vision --task dataset --path colours.jsonl --record.tokens true"),
    "step": Kind("Guess.toml", converses, DURING_A_CONVERSATION),
    "step, ppo": Kind("Guess.toml --algorithm ppo --critic-learning-rate 3e-3", converses, DURING_A_CONVERSATION),
    "step, lora": Kind("Guess.toml --rank 2 --precision bf16 --kl-coefficient 0.02", converses, DURING_A_CONVERSATION),
    "tools, ppo, lora": Kind(
        "Adder.toml --model calling --algorithm ppo --rank 2 --trunk adapter", converses, DURING_A_CONVERSATION
    ),
    "tools": Kind("Adder.toml --model calling", converses, DURING_A_CONVERSATION),
    "sft": Kind("sft sums.toml", learns_from_examples, command="sft"),
    "sft on samples": Kind(SAMPLES, has_examples, command="sft"),
    **{
        f"reward model of {data}": Kind(
            REWARD_MODEL.format(data=data), learns_from_examples, (in_a_short_step,) * 2, "reward-model train"
        )
        for data in ("pairs", "grades", "steps")
    },
    "CartPole groups": Kind({"rollouts": {"starts_per_step": 4, "group_size": 4}}),
    "CartPole fragments": Kind(
        {
            "algorithm": "ppo",
            "rollouts": FRAGMENTS,
            "update": {"learning_rate": 0.002, "minibatches": 2, "critic_epochs": 2, "target_kl": 0.05},
        }
    ),
    "CartPole replay": Kind({"rollouts": {"starts_per_step": 2, "group_size": 4}, "replay": {"groups": 2}}),
    "CartPole reward to go": Kind(
        {
            "algorithm": "rloo",
            "rollouts": {"starts_per_step": 4, "group_size": 4, "environments": 5},
            "loss": {"credit": "reward_to_go_by_step", "kl_coefficient": 0.01},
            "update": {"epochs": 1},
        }
    ),
    "CartPole branches": Kind(
        {
            "rollouts": {
                "kind": "branches",
                "starts_per_step": 6,
                "group_size": 4,
                "horizon": 20,
                "reward_scaling": "running_std",
            }
        }
    ),
    "CartPole entropy": Kind(
        {
            "algorithm": "ppo",
            "rollouts": FRAGMENTS,
            "loss": {
                "entropy_target": 0.6,
                "entropy_controller": "clip",
                "clip_cov_fraction": 0.05,
                "clip_cov_bounds": [0.1, 9.0],
                "kl_cov_fraction": 0.05,
            },
            "update": {"learning_rate": 0.002, "minibatches": 2},
        }
    ),
    "Taxi, masks": Kind(
        {"algorithm": "ppo", "environment": {"id": "Taxi-v4"}, "rollouts": FRAGMENTS, "update": {"minibatches": 2}}
    ),
    "CartPole memory": Kind(
        {
            "algorithm": "ppo",
            "environment": {"frame_stack": 2},
            "policy": {"memory": 6},
            "rollouts": FRAGMENTS,
            "update": {"learning_rate": 0.002, "minibatches": 2},
        }
    ),
    "Pendulum": Kind(
        {
            "algorithm": "ppo",
            "environment": {"id": "Pendulum-v1"},
            "rollouts": FRAGMENTS | {"environments": 3, "fragment_steps": 47},
            "policy": {"normalise_observations": True, "hidden": [16]},
            "update": {"learning_rate": 0.002, "critic_learning_rate": 0.01},
        }
    ),
}
MANY = ("GRPO", "PPO with a critic", "CartPole groups", "CartPole fragments", "sft", "reward model of steps")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("resume")
    recipe = write_recipe(place, tiny_folder(place / "model"), STEPS)
    lines = [json.dumps({"prompt": f"{number}+{number % 7}", "answer": "1"}) for number in range(PROMPTS)]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    (place / "two_digits.py").write_text(TWO_DIGITS)
    text = recipe.read_text().replace('[[rewards]]\nname = "digits"\n', "")
    (place / "colours.toml").write_text(text)
    (place / "two_digits.toml").write_text(text.replace("rewards.py:count_digits", "two_digits.py:two_digits"))
    calling_folder(place / "calling")
    vision_folder(place / "vision", "qwen2_vl")
    colour_rows(place, PROMPTS)
    for environment in ("Guess", "Adder"):
        name = f"{Path(guessing.__file__)}:{environment}"
        own = recipe.read_text().partition("[[rewards]]")
        rest = own[2].partition("[sampling]")
        (place / f"{environment}.toml").write_text(
            own[0] + "[sampling]" + rest[2] + CONVERSATION.format(environment=name)
        )
    write_examples(place, "model")
    return place


def runs(name: str, place: Path) -> Kills:
    kind = KINDS[name]
    if isinstance(kind.settings, str):
        words = kind.settings.split()
        return Kills(name, words if kind.command != "train" else ["train", *words], STEPS, place, kind.command)
    recipe = place / f"{name}.toml"
    write_config(toy_envs.read(CONTROL, **kind.settings), recipe)
    return Kills(name, ["train", recipe], STEPS, place)


@pytest.mark.parametrize("name", slow_unless(["GRPO"], KINDS))
def test_killed_runs_end_with_the_same_bits(name: str, place: Path) -> None:
    """Anywhere in a step: sampling, updating, writing a checkpoint."""
    made = runs(name, place)
    KINDS[name].shows(made.whole, reproducible_metrics(made.whole))
    made.kill(KINDS[name].draws)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [10, 100])
@pytest.mark.parametrize("name", MANY)
def test_runs_killed_many_times_end_with_the_same_bits(name: str, kills: int, place: Path) -> None:
    runs(name, place).kill([anywhere] * kills)


@pytest.mark.parametrize("name", slow_unless(["GRPO"], KINDS))
def test_a_finished_run_that_goes_on_ends_with_the_bits_of_a_longer_run(name: str, place: Path) -> None:
    """Killed in the added steps; a falling schedule begins again in both."""
    made, policy = runs(name, place), KINDS[name].command == "train"
    shorter, longer = (["--steps", STEPS // 2], ["--steps", STEPS]) if policy else (["--epochs", 1], ["--epochs", 2])
    same = ["--schedule", "constant"] if made.command == "reward-model train" else []
    run_dir, whole = place / f"{name} goes on", place / f"{name} longer"
    code, output = covey(*made.words, *same, *shorter, "--run-dir", run_dir, cwd=place)
    assert code == 0, output
    done = json.loads((run_dir / "summary.json").read_text())["steps"]
    resume = [*made.command.split(), "--resume", run_dir]
    if name in MANY:
        code, output = covey(*resume, *longer, cwd=place, moment=Moment(done + 1))
        assert code == -signal.SIGKILL, output
        assert f"the finished run goes on after step {done} with" in output
        longer = []
    code, output = covey(*resume, *longer, cwd=place)
    assert code == 0, output
    restart = [] if same else ["--schedule-restarts", done]
    code, output = covey(
        *made.words, *same, *restart, *([] if policy else ["--epochs", 2]), "--run-dir", whole, cwd=place
    )
    assert code == 0, output
    (run_dir / f"held_out/step_{done:06d}.jsonl").unlink(missing_ok=True)  # of its first end
    (whole / f"held_out/step_{done:06d}.jsonl").unlink(missing_ok=True)
    assert_same_run(run_dir, whole)


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_a_run_that_starts_from_another_takes_over_its_critic(trunk: str, place: Path) -> None:
    before = runs("PPO with a critic" if trunk == "own" else "PPO with the policy's trunk", place).whole
    words = ("--algorithm", "ppo", "--trunk", trunk, "--steps", "1", "--model", before)
    code, output = covey("train", "tiny.toml", *words, "--run-dir", f"next {trunk}", cwd=place)
    assert code == 0, output
    assert "the critic continues from" in output
    assert reproducible_metrics(place / f"next {trunk}")[0]["value/mean"] != 0


@pytest.mark.slow
def test_a_run_is_resumed_on_its_own_base_and_adapter_alone(place: Path, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    words = ("--rank", "2", "--steps", "1", "--model", model, "--run-dir", "a")
    code, output = covey("train", place / "tiny.toml", *words, cwd=tmp_path)
    assert code == 0, output
    words = ("--adapter", "a", "--model", model, "--run-dir", "b")
    code, output = covey("train", place / "tiny.toml", *words, cwd=tmp_path, moment=Moment(3))
    assert code == -signal.SIGKILL, output
    tiny_folder(model, seed=1)
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 2, output
    assert "the model's weights are not those of" in output
    tiny_folder(model)
    adapter = tmp_path / "a" / "adapter" / "adapter_model.safetensors"
    saved = adapter.read_bytes()
    adapter.write_bytes(saved[:-4] + b"\0\0\0\0")
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 2, output
    assert "adapter_model.safetensors has changed since the run began" in output
    adapter.write_bytes(saved)
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 0, output


# ---- iterative runs ----


def anywhere_in_an_iteration(rng: random.Random, step: int) -> Moment:
    """Also while the reward model is measured or trained."""
    return Moment(step, rng.randrange(8 * CALLS_OF_A_STEP))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_killed_iterative_runs_end_with_the_same_bits(way: str, tmp_path: Path) -> None:
    """Policy, reward model, history and records; each way trains, measures and writes what it promises."""
    write_iterative_recipes(tmp_path)
    made = Kills(way, ["iterate", f"{way}.toml"], ITERATIVE_STEPS, tmp_path)
    records = [json.loads(line) for line in (made.whole / "iterations.jsonl").read_text().splitlines()]
    assert [(record["iteration"], record["step"]) for record in records] == [(1, 2), (2, 4), (3, 6)]
    assert (made.whole / "iterations.png").stat().st_size > 10_000
    for record in records:
        assert {"proxy_reward", "accuracy", "auc"} <= record["before"].keys() & record["after"].keys()
        assert (record["before"] == record["after"]) == (way == "frozen")
        assert (record["optimizer_steps"] == 0) == (way == "frozen")
    assert records[0]["replayed"] == 0
    assert all((record["replayed"] > 0) == (way != "frozen") for record in records[1:])
    if way == "pairs":  # the reference of an iteration is the policy at its beginning
        kl = {line["step"]: line["kl"] for line in reproducible_metrics(made.whole)}
        assert max(kl[step] for step in (1, 3, 5)) < 1e-6 < min(kl[step] for step in (2, 4, 6))
    made.kill([anywhere_in_an_iteration] * 20)
