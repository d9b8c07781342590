"""Recipes for control: what is read, what is written back, and what is refused."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    describe_fields,
    find_recipe,
    read_recipe,
)
from covey.config.rules import validate

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


@pytest.mark.slow
@given(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    st.lists(st.integers(1, 512), min_size=1),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(1e-300, 1e300),
    st.none() | st.floats(-1e300, 1e300),
    st.booleans(),
)
@settings(max_examples=200)
def test_what_is_written_reads_back_equal(
    name: str, hidden: list[int], gamma: float | None, clip: float | None, expected: float | None, flag: bool
) -> None:
    config = ControlConfig(
        algorithm="ppo",
        environment=EnvironmentConfig(name),
        policy=PolicyConfig(hidden=tuple(hidden), normalise_observations=flag),
        rollouts=RolloutsConfig(kind="fragments", gamma=gamma),
        loss=ControlLossConfig(value_clip=clip, clip_high=clip, whiten=flag),
        update=ControlUpdateConfig(target_kl=clip),
        evaluation=ControlEvaluationConfig(expected_return=expected),
    )
    assert config_from_dict(config_to_dict(config)) == config
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config
    assert config_from_dict(tomllib.loads(changes_to_toml(config))) == config


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


def test_every_field_has_help() -> None:
    rows = describe_fields(ControlConfig)
    named = {f"{row.section}.{row.name}".removeprefix(".") for row in rows}
    assert named == {where for where, *_ in iter_fields(ControlConfig())}
    assert all(row.text and row.type for row in rows)


@pytest.mark.parametrize("path", sorted(PACKAGED_RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_packaged_recipe_is_accepted(path: Path) -> None:
    config = read_recipe(path)
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


def test_unknown_fields_get_a_suggestion(tmp_path: Path) -> None:
    cases = {
        "[enviroment]\nid = 'x'\n": "unknown field 'enviroment' at the top level (did you mean 'environment'?)",
        ENVIRONMENT + "[rollouts]\nenvironment = 4\n": "in [rollouts] (did you mean 'environments'?)",
        ENVIRONMENT + "[rollouts]\nsteps = 4\n": "('steps' belongs at the top, before the first [table])",
        ENVIRONMENT + "[update]\ngamma = 0.9\n": "('gamma' belongs in [rollouts])",
        ENVIRONMENT + "[rollouts]\nkind = 'episode'\n": "did you mean 'episodes'?",
        ENVIRONMENT + "[rollouts]\ngroups = 'episodes'\n": "('groups' belongs in [replay])",
        ENVIRONMENT + "[rollouts]\ncompare = 'step'\n": "unknown field 'compare' in [rollouts]",
        ENVIRONMENT + "[loss]\ncredit = 'reward_to_go_by_steps'\n": "did you mean 'reward_to_go_by_step'?",
        'environment = "CartPole-v1"\n': "[environment] must be a table with fields below it",
    }
    for toml, expected in cases.items():
        assert expected in message(tmp_path, toml)
    assert "did you mean --group-size?" in message(tmp_path, ENVIRONMENT, "--group-sizes", "3")
    assert "write --evaluation.every or --checkpoint.every" in message(tmp_path, ENVIRONMENT, "--every", "3")
    assert "did you mean --rollouts.kind?" in message(tmp_path, ENVIRONMENT, "--rollouts.kinds", "3")


def test_the_defaults_and_the_edges_are_accepted() -> None:
    validate(GOOD)
    validate(replace(GOOD, algorithm="ppo", rollouts=FRAGMENTS, update=ControlUpdateConfig(minibatches=1024)))
    validate(replace(GOOD, algorithm="rloo", update=ControlUpdateConfig(epochs=1, minibatches=3)))
    validate(replace(GOOD, update=ControlUpdateConfig(minibatches=3)))
    validate(with_credit("within_episode", with_rollouts(group_size=1)))
    validate(with_rollouts(kind="branches", horizon=3))
    validate(with_credit("reward_to_go", with_rollouts(gamma=0.0)))
    validate(replace(GOOD, algorithm="reinforce_pp", rollouts=RolloutsConfig(group_size=1)))
    validate(replace(GOOD, seed=2**32 - 1, update=ControlUpdateConfig(minibatches=4)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ControlConfig(), "give the table [environment] an id"),
        (with_credit("within_episode"), "rollouts.group_size is 8, but loss.credit = 'within_episode'"),
        (with_rollouts(group_size=1), "rollouts.group_size is 1, but loss.credit = 'outcome' compares the rollouts"),
        (with_credit("reward_to_go", with_rollouts(group_size=1)), "set group_size to 2 or more"),
        (with_rollouts(kind="branches", group_size=1), "set group_size to 2 or more"),
        (replace(GOOD, algorithm="rloo"), "update.epochs is 4, but rloo has no ratio"),
        (
            replace(GOOD, algorithm="reinforce", update=ControlUpdateConfig(epochs=2)),
            "set epochs to 1, or choose grpo",
        ),
        (with_rollouts(kind="branches", environments=3), "rollouts.environments is set, but not used with branches"),
        (
            replace(GOOD, algorithm="ppo", rollouts=replace(FRAGMENTS, group_size=1)),
            "rollouts.group_size is set, but not used with fragments: remove it",
        ),
        (
            replace(GOOD, algorithm="ppo", rollouts=replace(FRAGMENTS, starts_per_step=8)),
            "rollouts.starts_per_step is set, but not used with fragments",
        ),
        (
            replace(GOOD, algorithm="ppo", rollouts=FRAGMENTS, update=ControlUpdateConfig(minibatches=3)),
            "(1024) cannot be split evenly into update.minibatches (3); set minibatches to 2",
        ),
        (replace(GOOD, environment=EnvironmentConfig("X-v0", action_repeat=0)), "action_repeat must be at least 1"),
        (
            replace(GOOD, algorithm="rloo", loss=ControlLossConfig(clip_low=0.2)),
            "clip_low is set, but not used with",
        ),
        (replace(GOOD, seed=2**32), "seed must be at most 4294967295 (is 4294967296)"),
        (with_rollouts(gamma=1.01), "rollouts.gamma must be at most 1"),
        (replace(GOOD, policy=PolicyConfig(hidden=())), "policy.hidden is empty"),
        (replace(GOOD, policy=PolicyConfig(hidden=(64, 0))), "policy.hidden must be at least 1"),
        (replace(GOOD, evaluation=ControlEvaluationConfig(episodes=0)), "evaluation.episodes must be at least 1"),
    ],
)
def test_impossible_values_are_refused(config: ControlConfig, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vectorization", ["async"])
def test_branches_need_the_environment_in_this_process(vectorization: str) -> None:
    config = replace(with_rollouts(kind="branches"), environment=EnvironmentConfig("X-v0", vectorization=vectorization))
    with pytest.raises(ConfigError, match="set it to 'auto' or 'sync'"):
        validate(config)


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
