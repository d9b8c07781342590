"""Names of other libraries get an answer, on the command line and in a recipe, in one line."""

from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.recipe import describe_fields, foreign_names, read_recipe


def fields_of(root: type) -> set[str]:
    return {f"{row.section.split()[0]}.{row.name}" if row.section else row.name for row in describe_fields(root)}


LANGUAGE, CONTROL = fields_of(RunConfig), fields_of(ControlConfig)


def test_every_name_leads_to_fields_that_exist_or_to_a_reason() -> None:
    for name, found in foreign_names().items():
        assert set(found.fields) <= LANGUAGE | CONTROL, name
        assert found.fields or found.note, name
        own = {field.rpartition(".")[2] for field in LANGUAGE & CONTROL}
        assert name not in own, f"{name} is a field of both kinds of recipe"
    assert len(foreign_names()) > 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["arithmetic_grpo", "cartpole_grpo"])
def test_every_name_is_answered_on_the_command_line(recipe: str) -> None:
    known, answered = (LANGUAGE, CONTROL)[recipe.startswith("cartpole")], 0
    for name, found in foreign_names().items():
        with pytest.raises(ConfigError) as caught:
            read_recipe(recipe, [f"--{name.replace('_', '-')}", "1"])
        line = str(caught.value)
        assert "\n" not in line
        assert len(line) < 250, line
        if f"{found.libraries}: {name}" in line:
            answered += 1
            here = [field for field in found.fields if field in known]
            assert all(field in line for field in here), line
            assert ("in recipes for" in line) == bool(found.fields and not here), line
    assert answered == len(foreign_names())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("arithmetic_grpo --num-generations 8", "TRL: num_generations is covey's sampling.group_size"),
        ("arithmetic_grpo --beta 0.1", "TRL: beta is covey's loss.kl_coefficient"),
        ("arithmetic_grpo --epsilon=0.1", "TRL: epsilon is covey's loss.clip_low and loss.clip_high"),
        ("arithmetic_grpo --actor_rollout_ref.rollout.n 8", "verl: n is covey's sampling.group_size"),
        ("arithmetic_grpo --algorithm.adv-estimator grpo", "verl: adv_estimator is covey's algorithm"),
        ("arithmetic_grpo --n-steps 8", "is covey's rollouts.fragment_steps, in recipes for control; it goes with"),
        ("cartpole_ppo --n-steps 8", 'is covey\'s rollouts.fragment_steps; it goes with rollouts.kind = "fragments"'),
        ("cartpole_ppo --num-generations 8", "TRL: num_generations is covey's rollouts.group_size"),
        (
            "cartpole_ppo --max-completion-length 8",
            "is covey's sampling.max_new_tokens, in recipes for language models",
        ),
        (
            "arithmetic_grpo --use-peft true",
            "TRL: use_peft is covey's lora.rank; an adapter is trained if it is above 0",
        ),
        ("arithmetic_grpo --top-p 0.9", "top_p has no counterpart; the update needs log-probabilities of the whole"),
    ],
)
def test_the_command_says_the_field_or_the_reason(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_a_recipe_is_answered_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    for text, told in {
        '[task]\nname = "arithmetic"\n[sampling]\nnum_generations = 8\n': "is covey's sampling.group_size",
        'ppo_epochs = 4\n[environment]\nid = "CartPole-v1"\n': "is covey's update.epochs",
        '[task]\nname = "arithmetic"\n[loss]\nbeta = 0.1\n': "is covey's loss.kl_coefficient",
        '[task]\nname = "dataset"\ndataset_name = "x"\n': "is covey's task.path; a JSONL or Parquet file",
    }.items():
        recipe.write_text(text)
        assert main(["check", str(recipe)]) == 2
        assert told in capsys.readouterr().err
