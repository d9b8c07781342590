"""Fields of a recipe that follow what the command line changes: every packaged recipe with every single change."""

import logging
from dataclasses import Field
from pathlib import Path
from typing import Any

import pytest

from covey.config import TASK_CONFIGS, ConfigError, ControlConfig, ReplayConfig, RunConfig
from covey.config.fields import check_limits, iter_fields, plain_type
from covey.config.recipe import PACKAGED_RECIPES, get, read_recipe

RECIPES = sorted(path.stem for path in PACKAGED_RECIPES.glob("*.toml"))
NUMBERS = {int: (0, 1, 2, 3, 1000), float: (0.0, 0.5, 1.0, 3.0), bool: ("true", "false")}


def tried(item: Field[Any], hint: Any) -> list[str]:
    """Values that a field takes by itself: its choices, or small and large ones within its limits."""
    kind, _, _ = plain_type(hint)
    values = []
    for value in item.metadata["choices"] or NUMBERS.get(kind, ()):
        try:
            check_limits("", item.metadata["limits"], value)
        except (ConfigError, TypeError):
            continue
        values.append(str(value))
    return values


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", RECIPES)
def test_a_single_change_is_only_refused_for_its_own_sake(name: str) -> None:
    """What is refused names the field that was given, so nothing that the recipe has beside it stands in the way."""
    base = read_recipe(name)
    needy = {"dataset"} if isinstance(base, RunConfig) and base.has_conversations else {"dataset", "environment"}
    tasks = [("task", task) for task in TASK_CONFIGS if task not in needy] if isinstance(base, RunConfig) else []
    fields = [(where, item, hint) for where, item, hint, _ in iter_fields(base) if not where.startswith("rewards")]
    changes = tasks + [(where, value) for where, item, hint in fields for value in tried(item, hint)]
    assert len(changes) > 100
    refused = {change: said for change in changes if (said := refusal(name, *change))}
    strangers = {change: said for change, said in refused.items() if change[0].rpartition(".")[2] not in said}
    assert not strangers
    assert not {change for change in refused if change[0] in ("steps", "task")}
    assert len(refused) < 0.4 * len(changes)


def refusal(name: str, where: str, value: str) -> str:
    """What is said of a recipe with one change; empty if it can be trained."""
    try:
        read_recipe(name, [f"--{where}", value])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_work_with_every_recipe(name: str, steps: int) -> None:
    config = read_recipe(name, ["--steps", str(steps)])
    assert config.steps == steps
    assert config.update.warmup_steps < max(steps, 1)
    assert config.evaluation.every <= steps or config.evaluation.every == type(config.evaluation)().every


def test_a_group_size_that_is_given_is_that_of_every_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covey")
    config = read_recipe("arithmetic_grpo", ["--group-size", "8", "--steps", "30"])
    assert isinstance(config, RunConfig)
    assert (config.sampling.group_size, config.sampling.final_group_size) == (8, None)
    assert config.evaluation.every == 15, "the evaluation between stays in the run"
    assert config.update.warmup_steps == 3
    [record] = caplog.records
    assert record.getMessage() == (
        "--group-size, --steps: so the recipe's evaluation.every = 15 (was 40), "
        "sampling.final_group_size = unset (was 12)"
    )


def test_only_options_that_changed_something_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covey")
    read_recipe("cartpole_grpo", ["--seed", "3", "--environment", "Acrobot-v1", "--evaluation.episodes", "9"])
    [record] = caplog.records
    assert record.getMessage() == "--environment: so the recipe's evaluation.expected_return = unset (was 475.0)"


def test_what_is_given_itself_does_not_follow() -> None:
    config = read_recipe(
        "arithmetic_grpo", ["--group-size", "8", "--final-group-size", "32", "--evaluation.every", "9"]
    )
    assert isinstance(config, RunConfig)
    assert (config.sampling.final_group_size, config.evaluation.every) == (32, 9)


RECIPE = """
steps = 40
token_budget = 1000
[task]
name = "arithmetic"
[sampling]
prompts_per_step = 8
max_new_tokens = 20
min_new_tokens = 10
overlong_tokens = 10
{sampling}
[loss]
kl_coefficient = 0.1
kl_warmup_steps = 4
adaptive_kl_target = 0.1
adaptive_kl_horizon = 50
entropy_coefficient = 0.01
entropy_target = 0.5
entropy_gain = 0.3
clip_cov_fraction = 0.1
clip_cov_bounds = [0.5, 2.0]
kl_cov_fraction = 0.1
kl_cov_coefficient = 0.5
{loss}
[update]
warmup_steps = 10
critic_warmup_steps = 0
minibatches = 4
[reference]
refresh_every = 20
refresh_fraction = 0.5
[evaluation]
token_limits = [20, 40]
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--steps 4", {"update.warmup_steps": 1, "loss.kl_warmup_steps": 0, "reference.refresh_every": 2}),
        ("--steps 80", {"token_budget": 2000, "update.warmup_steps": 10}),
        (
            "--kl-coefficient 0",
            {"loss.kl_warmup_steps": 0, "loss.adaptive_kl_target": None, "loss.adaptive_kl_horizon": 10_000},
        ),
        ("--adaptive-kl-target none", {"loss.adaptive_kl_horizon": 10_000}),
        ("--entropy-coefficient 0", {"loss.entropy_target": None, "loss.entropy_gain": 0.2}),
        ("--entropy-target none", {"loss.entropy_gain": 0.2}),
        ("--minibatches 1", {"loss.kl_cov_fraction": 0.0, "loss.kl_cov_coefficient": 1.0, "loss.entropy_target": 0.5}),
        ("--clip-cov-fraction 0", {"loss.clip_cov_bounds": (1.0, 5.0)}),
        ("--refresh-every 0", {"reference.refresh_fraction": 1.0}),
        (
            "--max-new-tokens 8",
            {"sampling.min_new_tokens": 4, "sampling.overlong_tokens": 4, "evaluation.token_limits": (8, 40)},
        ),
        (
            "--max-new-tokens 40",
            {"sampling.min_new_tokens": 10, "sampling.overlong_tokens": 10, "evaluation.token_limits": (40,)},
        ),
        ("--max-new-tokens 1", {"sampling.min_new_tokens": 0}),
        ("--digits 1", {"sampling.min_new_tokens": 0}),
        ("--task countdown", {"sampling.min_new_tokens": 0}),
        ("--model elsewhere", {"sampling.min_new_tokens": 0}),
        ("--examples 1+1,2", {"sampling.min_new_tokens": 0}),
        ("--sampler.kind covey --sampler.start 1", {"sampling.min_new_tokens": 10}),
        ("--prompts-per-step 6", {"update.minibatches": 3}),
        ("--group-size 2", {"sampling.initial_group_size": 2, "sampling.max_group_size": 40}),
        ("--group-size 50", {"sampling.initial_group_size": 8, "sampling.max_group_size": 50}),
        ("--adaptive false", {"sampling.initial_group_size": 4, "sampling.max_group_size": None}),
        ("--max-resamples 2", {"sampling.adaptive": False, "sampling.initial_group_size": 4}),
        ("--algorithm dapo", {"sampling.adaptive": True, "sampling.max_resamples": 0}),
        ("--algorithm ppo", {"sampling.adaptive": False, "sampling.max_group_size": None, "loss.clip_low": 0.1}),
        ("--algorithm rloo", {"loss.clip_low": None, "sampling.adaptive": True}),
    ],
)
def test_what_a_change_brings_with_it(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "whole.toml"
    adaptive = "adaptive = true\ninitial_group_size = 8\nmax_group_size = 40"
    path.write_text(RECIPE.format(sampling=adaptive, loss="clip_low = 0.1"))
    config = read_recipe(path, words.split())
    assert {name: get(config, name) for name in expected} == expected


def test_vllm_as_the_sampler_has_no_minimum_length(tmp_path: Path) -> None:
    recipe, token = tmp_path / "whole.toml", tmp_path / "token"
    recipe.write_text(RECIPE.format(sampling="", loss=""))
    token.touch(0o600)
    token.write_text("a" * 40)
    words = ["--sampler.kind", "vllm", "--servers", "http://127.0.0.1:8801", "--token-file", str(token)]
    assert get(read_recipe(recipe, words), "sampling.min_new_tokens") == 0


def test_rewards_follow_the_task() -> None:
    """Those that cannot grade it go; steps are compared only where a reward pays them."""
    config = read_recipe("process_grpo", ["--task", "arithmetic"])
    assert isinstance(config, RunConfig)
    assert [reward.name for reward in config.rewards] == ["numeric"]
    assert config.loss.credit == "outcome"
    config = read_recipe("arithmetic_grpo", ["--task", "countdown"])
    assert isinstance(config, RunConfig)
    assert config.rewards == (), "the task's own"


def test_control_follows_its_groups_and_its_environment() -> None:
    config = read_recipe("cartpole_grpo", ["--kind", "fragments", "--algorithm", "ppo", "--environment", "Acrobot-v1"])
    assert isinstance(config, ControlConfig)
    assert (config.rollouts.starts_per_step, config.evaluation.expected_return) == (4, None)
    config = read_recipe("cartpole_ppo", ["--algorithm", "grpo", "--kind", "episodes"])
    assert isinstance(config, ControlConfig)
    assert (config.update.critic_learning_rate, config.rollouts.fragment_steps) == (None, 128)
    config = read_recipe("cartpole_ppo", ["--environments", "3", "--fragment-steps", "5"])
    assert config.update.minibatches == 3
    config = read_recipe("cartpole_articles", ["--epochs", "1"])
    assert config.loss.kl_coefficient == 0, "with one pass there is no KL to the policy that sampled"
    config = read_recipe("cartpole_articles", ["--credit", "outcome"])
    assert isinstance(config, ControlConfig)
    assert config.rollouts.group_size == 8
    config = read_recipe("cartpole_grpo", ["--credit", "within_episode"])
    assert isinstance(config, ControlConfig)
    assert config.rollouts.group_size == 1
    config = read_recipe("cartpole_articles", ["--kind", "branches"])
    assert isinstance(config, ControlConfig)
    assert (config.loss.credit, config.rollouts.group_size) == ("outcome", 8)
    config = read_recipe("cartpole_reward_to_go", ["--kind", "branches"])
    assert isinstance(config, ControlConfig)
    assert config.loss.credit == "reward_to_go_by_step", "what goes together stays"
    config = read_recipe("cartpole_articles", ["--algorithm", "reinforce_pp"])
    assert isinstance(config, ControlConfig)
    assert (config.loss.credit, config.rollouts.group_size) == ("outcome", 1)


def test_a_change_of_the_algorithm_takes_replay_out(tmp_path: Path) -> None:
    recipe = tmp_path / "replayed.toml"
    recipe.write_text('[environment]\nid = "CartPole-v1"\n\n[replay]\ngroups = 4\nmax_age = 2\n')
    assert read_recipe(recipe, ["--algorithm", "rloo", "--epochs", "1"]).replay == ReplayConfig(groups=4, max_age=2)
    assert read_recipe(recipe, ["--algorithm", "reinforce_pp"]).replay == ReplayConfig()
