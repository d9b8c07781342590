"""Recipes for control: what is read, what is written back, and what is refused."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from covey.config import (
    ConfigError,
    ControlConfig,
    ControlEvaluationConfig,
    ControlLossConfig,
    ControlUpdateConfig,
    EnvironmentConfig,
    PolicyConfig,
    RolloutsConfig,
    RunConfig,
)
from covey.config.fields import iter_fields
from covey.config.recipe import (
    PACKAGED_RECIPES,
    changes_to_toml,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    find_recipe,
    read_recipe,
)

ENVIRONMENT = '[environment]\nid = "CartPole-v1"\n'
GOOD = ControlConfig(environment=EnvironmentConfig("CartPole-v1"))
KINDS = ("episodes", "branches", "fragments")
CREDITS = ("outcome", "reward_to_go", "reward_to_go_by_step", "within_episode")
FRAGMENTS = RolloutsConfig(kind="fragments")


def read(folder: Path, toml: str, *overrides: str) -> RunConfig | ControlConfig:
    path = folder / "recipe.toml"
    path.write_text(toml)
    return read_recipe(path, overrides)


def message(folder: Path, toml: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, toml, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_rollouts(**fields: object) -> ControlConfig:
    return replace(GOOD, rollouts=RolloutsConfig(**fields))


def with_credit(credit: str, config: ControlConfig = GOOD) -> ControlConfig:
    return replace(config, loss=ControlLossConfig(credit=credit))


# ---- what is right is read as it was meant ----


def test_a_table_environment_makes_a_recipe_one_for_control(tmp_path: Path) -> None:
    config = read(
        tmp_path, 'algorithm = "ppo"\n' + ENVIRONMENT,
        "--kind", "fragments", "--hidden", "128,32", "--gamma", "1", "--critic-learning-rate", "1e-3",
        "--rollouts.environments=16", "--expected-return", "-100", "--evaluation.every", "5",
    )  # fmt: skip
    assert config == ControlConfig(
        algorithm="ppo",
        environment=EnvironmentConfig("CartPole-v1"),
        policy=PolicyConfig(hidden=(128, 32)),
        rollouts=RolloutsConfig(kind="fragments", gamma=1.0, environments=16),
        update=ControlUpdateConfig(critic_learning_rate=1e-3),
        evaluation=ControlEvaluationConfig(expected_return=-100.0, every=5),
    )
    assert type(read(tmp_path, '[task]\nname = "arithmetic"\n')) is RunConfig


def test_the_environment_can_be_given_as_one_word(tmp_path: Path) -> None:
    assert read(tmp_path, ENVIRONMENT, "--environment", "Acrobot-v1").environment == EnvironmentConfig("Acrobot-v1")
    assert read(tmp_path, ENVIRONMENT, "--id", "mine:Env-v0").environment == EnvironmentConfig("mine:Env-v0")


def test_what_stands_for_unset_fields() -> None:
    assert with_rollouts(starts_per_step=3, group_size=5).rollouts.copies == 15
    assert with_rollouts(environments=7).rollouts.copies == 7
    assert with_rollouts(environments=33).rollouts.copies == 32
    assert replace(FRAGMENTS, environments=33).copies == 33
    assert FRAGMENTS.copies == 8
    assert GOOD.discount == 1.0
    assert replace(GOOD, algorithm="reinforce_pp").discount == 1.0
    assert [with_credit(credit).discount for credit in CREDITS[1:]] == [0.99] * 3
    assert [with_rollouts(kind=kind).discount for kind in KINDS[1:]] == [0.99] * 2
    assert replace(GOOD, algorithm="ppo").discount == 0.99
    assert with_rollouts(gamma=0.0).discount == 0.0
    branches = with_rollouts(kind="branches", horizon=7)
    assert [branches.branch_decisions, with_credit("reward_to_go", branches).branch_decisions] == [1, 7]


@pytest.mark.parametrize("path", sorted(PACKAGED_RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_packaged_recipe_is_accepted_and_written_back_equal(path: Path) -> None:
    config = read_recipe(path)
    assert config_from_dict(config_to_dict(config)) == config
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config
    assert config_from_dict(tomllib.loads(changes_to_toml(config))) == config
    if isinstance(config, ControlConfig):
        assert config.evaluation.expected_return is not None


def test_a_packaged_recipe_may_be_named_by_its_place_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("recipes/arithmetic_grpo.toml") == PACKAGED_RECIPES / "arithmetic_grpo.toml"
    with pytest.raises(ConfigError, match="did you mean 'arithmetic_grpo'"):
        find_recipe("recipes/arithmetic_grop.toml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "arithmetic_grpo.toml").write_text(ENVIRONMENT)
    assert find_recipe("recipes/arithmetic_grpo.toml") == Path("recipes/arithmetic_grpo.toml")
    (tmp_path / "mine.toml").write_text(ENVIRONMENT)
    with pytest.raises(ConfigError, match=r"mine\.toml"):  # only packaged recipes go without their ending
        find_recipe(tmp_path / "mine")


# ---- mistakes ----


def test_a_field_of_the_other_world_is_named_as_such(tmp_path: Path) -> None:
    task = '[task]\nname = "arithmetic"\n'
    language = "is for language models; a table [environment] makes a recipe one for control"
    control = "is for control; a table [environment] makes a recipe one for control"
    for toml, key in (
        (ENVIRONMENT + task, "task"),
        (ENVIRONMENT + "[loss]\nmask_truncated = true\n", "mask_truncated"),
    ):
        assert f"unknown field '{key}'" in message(tmp_path, toml)
        assert f": it {language}" in message(tmp_path, toml)
    assert f"unknown field 'policy' at the top level: it {control}" in message(tmp_path, "[policy]\nhidden = [3]\n")
    for option in ("--task", "--model", "--mask-truncated", "--sampling.group-size"):
        assert f"unknown field {option}: it {language}" in message(tmp_path, ENVIRONMENT, option, "1")
    for option in ("--environment.id", "--horizon", "--rollouts.kind"):
        assert f"unknown field {option}: it {control}" in message(tmp_path, task, option, "1")


def test_a_field_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    others = {"int": "7", "float": "0.25", "bool": "false", "tuple": "7"}
    fragments = ("--algorithm", "ppo", "--kind", "fragments")
    users = {("ppo",): fragments, ("fragments",): fragments, ("branches",): ("--kind", "branches")}
    tried = 0
    for where, item, *_ in iter_fields(ControlConfig()):
        if command := users.get(item.metadata["used_by"]):
            value = "7" if item.default is None else others[type(item.default).__name__]
            read(tmp_path, ENVIRONMENT, f"--{where}", value, *command)
            refusal = message(tmp_path, ENVIRONMENT, f"--{where}", value)
            assert refusal.startswith(f"{where} is set, but not used with ")
            tried += 1
    assert tried > 8
