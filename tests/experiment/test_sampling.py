"""`covey sample` with environments: conversations of a prompt, and graded ones of a held-out problem."""

from dataclasses import replace

import pytest

from covey.config import ArithmeticConfig, ConfigError, ConversationConfig, RewardConfig, RunConfig, SamplingConfig
from covey.experiment import evaluation
from covey.experiment.evaluation import sample_groups
from helpers import guessing
from helpers.tiny_models import tiny_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return RunConfig(
        model=str(tiny_folder(tmp_path_factory.mktemp("model"))), precision="fp32",
        task=ArithmeticConfig(digits=(1,)), rewards=(RewardConfig(name="environment", weight=2.0),),
        conversation=ConversationConfig(f"{guessing.__file__}:Greeting", turns=3, total_tokens=60),
        sampling=SamplingConfig(max_new_tokens=5),
    )  # fmt: skip


def test_conversations_of_a_prompt(config: RunConfig) -> None:
    """They are not graded, because there is no row of the data; turns have their rewards."""
    sampled = sample_groups(config, 3, 1.0, prompt="1+2", columns={"length": 4})
    assert sampled.notes == []
    first = sampled.records()[0]
    assert [message["role"] for message in first["messages"]] == ["assistant", "user"] * 2 + ["assistant", "user"]
    assert len(first["turn_rewards"]) == 3
    assert first["reward"] is None
    assert len({record["text"] for record in sampled.records()}) == 3


def test_an_environment_that_needs_a_column_is_one_line(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="reset asks for 'length', but the data has only no columns; --columns gives"):
        sample_groups(config, 2, 1.0, prompt="1+2")


@pytest.mark.slow
def test_a_held_out_problem_is_graded(config: RunConfig) -> None:
    steady = replace(config, conversation=replace(config.conversation, environment=f"{guessing.__file__}:Steady"))
    one, other = (sample_groups(steady, 2, 1.0, problem=number).records() for number in (0, 1))
    assert one[0]["prompt"] != other[0]["prompt"]
    for record in (*one, *other):
        assert record["reward"] == 2 * sum(record["turn_rewards"])
    with pytest.raises(ConfigError, match="there is no held-out problem 999: the last is"):
        sample_groups(steady, 1, 1.0, problem=999)


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused_before_the_model_is_loaded(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "load_policy", None)  # would fail
    for prompt, problem in (("1+2" * 80, 0), (None, 1)):
        limit = 250 if prompt is None else 60
        steady = replace(config.conversation, environment=f"{guessing.__file__}:Steady", total_tokens=limit)
        long = replace(config, conversation=steady)
        with pytest.raises(ConfigError, match=rf"and conversation.total_tokens = {limit} exceed the model's 256 pos"):
            sample_groups(long, 2, 1.0, prompt=prompt, columns={"length": 4}, problem=problem)
