"""Mistakes of the user's: one line that names the fix, exit code 2, fast, without torch."""

import gc
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    ControlConfig,
    CountdownConfig,
    DatasetConfig,
    EvaluationConfig,
    LossConfig,
    RewardConfig,
    RunConfig,
    UpdateConfig,
    WordProblemsConfig,
)
from covey.config.fields import iter_fields
from covey.config.named_modules import check_function_name
from covey.config.recipe import (
    config_from_dict,
    config_to_dict,
    describe_fields,
    first_difference,
    read_recipe,
    write_config,
)
from covey.config.rules import validate

RECIPE = """\
steps = 5
[task]
name = "arithmetic"
digits = [1, 2]
[sampling]
group_size = 4
[[rewards]]
name = "numeric"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recipe(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def message_of_toml(tmp_path: Path, toml: str) -> str:
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    return message_of(path)


# ---- what is right is read as it was meant ----


def test_reads_fields_and_overrides(recipe: Path) -> None:
    config = read_recipe(recipe, [
        "--learning-rate", "3", "--operators", "-,+", "--sampling.group_size=8", "--max_grad_norm", "1e-1",
        "--mask-truncated", "true", "--token-limits", "12,96", "--dual-clip", "3",
    ])  # fmt: skip
    assert config.task == ArithmeticConfig(digits=(1, 2), operators=("-", "+"))
    assert config.steps == 5
    assert config.sampling.group_size == 8
    assert config.update == UpdateConfig(learning_rate=3.0, max_grad_norm=0.1)
    assert type(config.update.learning_rate) is float
    assert config.loss == LossConfig(dual_clip=3.0, mask_truncated=True)
    assert config.evaluation.token_limits == (12, 96)
    assert config.rewards == (RewardConfig(name="numeric"),)


def test_a_top_level_name_wins_over_the_task_s(recipe: Path) -> None:
    config = read_recipe(recipe, ["--task", "word_problems", "--steps", "7", "--task.steps", "3,4"])
    assert config.steps == 7
    assert config.task == WordProblemsConfig(steps=(3, 4))


def test_another_task_drops_the_fields_of_the_first(recipe: Path) -> None:
    assert read_recipe(recipe, ["--task", "countdown", "--numbers", "4"]).task == CountdownConfig(numbers=4)
    assert read_recipe(recipe, ["--task", "arithmetic", "--terms", "3"]).task.digits == (1, 2)


def test_none_unsets_what_may_be_unset(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[task]\nname = "arithmetic"\n[loss]\nkl_coefficient = 0.1\n')
    assert read_recipe(path, ["--kl-coefficient", "none"]).loss.kl_coefficient is None
    assert "must be an integer" in message_of(path, "--seed", "none")


ENVIRONMENT = '[environment]\nid = "CartPole-v1"\n'
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
positive = st.floats(1e-300, 1e300, allow_nan=False)


@pytest.mark.slow
@given(texts, texts, positive, st.integers(0, 2**62), st.lists(st.integers(1, 12), min_size=1), st.none() | positive)
@settings(max_examples=200)
def test_what_is_written_reads_back_equal(
    instruction: str, pattern: str, rate: float, seed: int, digits: list[int], clip: float | None
) -> None:
    config = RunConfig(
        task=ArithmeticConfig(digits=tuple(digits), instruction=instruction),
        seed=seed,
        rewards=(RewardConfig(name="numeric", score=True), RewardConfig(name="format", pattern=pattern, weight=-0.5)),
        loss=LossConfig(clip_high=clip),
        update=UpdateConfig(learning_rate=rate),
        evaluation=EvaluationConfig(token_limits=(12, 96)),
    )
    assert config_from_dict(config_to_dict(config)) == config
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        write_config(config, path)
        import tomllib

        assert config_from_dict(tomllib.loads(path.read_text(encoding="utf-8"))) == config


def test_fields_that_went_are_read_from_run_folders_at_the_value_that_is_now_fixed(tmp_path: Path) -> None:
    task = '[task]\nname = "arithmetic"\nheld_out_digits = []\n'
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{task}[update]\nbeta1 = 0.9\n[[rewards]]\nname = 'numeric'\njudge_max_tokens = 256\n")
    config = read_recipe(recipe)
    assert first_difference({"update": {"beta1": 0.9}}, {"update": {}}) == ""
    assert first_difference({"update": {"beta1": 0.8}}, {"update": {}}) == "update.beta1"
    assert config.rewards == (RewardConfig(name="numeric"),)
    assert "unknown field 'beta1' in [update]" in message_of_toml(tmp_path, task + "[update]\nbeta1 = 0.8\n")


@pytest.mark.parametrize("root", [RunConfig, ControlConfig])
def test_every_field_has_help(root: type) -> None:
    rows = describe_fields(root)
    assert all(row.text and row.type for row in rows)
    named = {f"{row.section}.{row.name}".removeprefix(".") for row in rows}
    assert named >= {where for where, *_ in iter_fields(root())}
    assert "task (dataset).path" in named or root is ControlConfig


# ---- mistakes in the file and on the command line ----


def test_unknown_keys_get_a_suggestion(tmp_path: Path) -> None:
    task = '[task]\nname = "arithmetic"\n'
    cases = {
        task
        + "[sampling]\ngroup_sizes = 4\n": "unknown field 'group_sizes' in [sampling] (did you mean 'group_size'?)",
        "stepz = 4\n" + task: "unknown field 'stepz' at the top level (did you mean 'steps'?)",
        task + "[smapling]\ngroup_size = 4\n": "unknown field 'smapling' at the top level (did you mean 'sampling'?)",
        "group_size = 4\n" + task: "unknown field 'group_size' at the top level ('group_size' belongs in [sampling])",
        task + "digit = [2]\n": "unknown field 'digit' in [task] of arithmetic (did you mean 'digits'?)",
        task + "[[rewards]]\nnames = 'x'\n": "unknown field 'names' in [[rewards]] (did you mean 'name'?)",
        task + "[loss]\nsteps = 4\n": "unknown field 'steps' in [loss] ('steps' belongs at the top, before",
        "[task]\nname = 'arithmetics'\n": "unknown task 'arithmetics' (did you mean 'arithmetic'?)",
        "[task]\ndigits = [2]\n": "no name; tasks are arithmetic, countdown",
        "steps = 3\n": "no task: add a [task] table",
        "task = 'arithmetic'\n": "task must be a table",
        task + "[rewards]\nname = 'numeric'\n": "rewards must be a list of tables: write [[rewards]]",
        "sampling = 3\n" + task: "[sampling] must be a table",
        "steps = \n": "is not valid TOML",
        ENVIRONMENT + "[update]\ngamma = 0.9\n": "('gamma' belongs in [rollouts])",
        'environment = "CartPole-v1"\n': "[environment] must be a table with fields below it",
    }
    for toml, expected in cases.items():
        assert expected in message_of_toml(tmp_path, toml)


def test_types_are_strict(tmp_path: Path) -> None:
    task = '[task]\nname = "arithmetic"\n'
    cases = {
        "steps = '5'\n" + task: "steps must be an integer (is '5')",
        "steps = true\n" + task: "steps must be an integer (is true)",
        "steps = 5.0\n" + task: "steps must be an integer (is 5.0)",
        task + "digits = 2\n": "task.digits must be a list of integers (is 2)",
        task + "digits = [1, 'x']\n": "task.digits must be a list of integers (is [1, 'x'])",
        task + "digits = [true]\n": "task.digits must be a list of integers",
        task + "digits = []\n": "task.digits is empty",
        task + "[update]\nlearning_rate = true\n": "update.learning_rate must be a number (is true)",
        task + "[update]\nlearning_rate = nan\n": "update.learning_rate must be a finite number",
        task + "[update]\nlearning_rate = inf\n": "update.learning_rate must be a finite number",
        task + "[update]\nlearning_rate = 1" + "0" * 400 + "\n": "is an integer of more than 64 bits",
        task + "[loss]\nmask_truncated = 1\n": "loss.mask_truncated must be true or false (is 1)",
        "model = 5\n" + task: "model must be text (is 5)",
        "device = 'gpu'\n" + task: "device must be auto, cpu, cuda or mps (is 'gpu')",
        "algorithm = 'grop'\n" + task: "reinforce, reinforce_pp or ppo (is 'grop') (did you mean 'grpo'?)",
    }
    for toml, expected in cases.items():
        assert expected in message_of_toml(tmp_path, toml)


def test_command_line_mistakes(recipe: Path) -> None:
    cases = {
        ("--group-sizes", "4"): "unknown field --group-sizes (did you mean --group-size?)",
        ("--every", "4"): "--every is ambiguous: write --evaluation.every or --checkpoint.every",
        ("--steps", "abc"): "--steps must be an integer (is 'abc')",
        ("--digits", "1,a"): "--digits must be a list of integers separated by commas (is '1,a')",
        ("--mask-truncated", "maybe"): "--mask-truncated must be true or false (is 'maybe')",
        ("--steps",): "--steps needs a value",
        ("--time-budget", "8 minutes"): "time_budget must be a time above 0 such as 90s, 8min or 1.5h (is '8 minutes')",
        ("--time-budget", "0.0h"): "time_budget must be a time above 0 such as 90s, 8min or 1.5h (is '0.0h')",
        ("extra",): "'extra' is neither a field nor its value",
        ("--numbers", "3"): "--numbers belongs to the task countdown, and this run's task is arithmetic",
        ("--task", "counting"): "unknown task 'counting'",
    }
    for overrides, expected in cases.items():
        assert expected in message_of(recipe, *overrides)


def test_recipes_that_are_not_there(tmp_path: Path, recipe: Path) -> None:
    assert "did you mean" in message_of(tmp_path / "recipes.toml")
    assert "covey recipes lists the packaged ones" in message_of(Path("no_such_recipe"))
    assert "is a folder" in message_of(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in message_of(binary)


def test_a_near_file_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig(task=DatasetConfig(path=str(tmp_path / "prompt.jsonl"))))
    text = str(refused.value)
    assert f"did you mean '{tmp_path / 'prompts.jsonl'}'?" in text


# ---- the command itself ----

WITHOUT_TORCH = """
import sys
from covey.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "matplotlib"} & set(sys.modules))
print("heavy", heavy)
sys.exit(code)
"""


def processor_seconds() -> float:
    """What the children of this process have computed so far: unlike the clock, it does not depend on other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "RECIPE", "--group-sizes", "4"], "unknown field --group-sizes (did you mean --group-size?)"),
        (["train", "RECIPE", "--group-size", "1"], "a group of one has nothing to compare with"),
        (["train", "RECIPE", "--run-dir", "RECIPE"], "cannot write the run folder"),
        (["train", "RECIPE", "--run-dir", "/proc/covey"], "cannot write the run folder"),
        (["train", "--resume", "no_such_run"], "there is no run to resume in no_such_run"),
        (["check", "RECIPE", "--model", "./nowhere"], "there is no folder ./nowhere"),
        (["eval", "./nowhere", "--task", "arithmetic"], "there is no folder ./nowhere"),
        (["eval", "smollm2-135m", "--task", "arithmetics"], "did you mean 'arithmetic'?"),
        (["sample", "./nowhere", "hello"], "there is no folder ./nowhere"),
        (["serve", "smollm2-135m", "--host", "0.0.0.0"], "is reachable from other machines: name a --token-file"),
        (["serve", "smollm2-135m", "--folder", "./nowhere"], "--folder: there is no folder ./nowhere"),
        (["trian", "RECIPE"], "there is no command 'trian' (did you mean 'train'?)"),
    ],
)
def test_a_mistake_is_one_line_within_three_seconds_and_without_torch(
    words: list[str], expected: str, recipe: Path
) -> None:
    words = [word.replace("RECIPE", str(recipe)) for word in words]
    before = processor_seconds()
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=300)
    seconds = processor_seconds() - before
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert done.stdout == "heavy []\n"
    assert seconds < 3


@pytest.mark.slow
def test_debug_shows_the_traceback(recipe: Path) -> None:
    words = [sys.executable, "-m", "covey.cli.main", "train", str(recipe), "--group-size", "1", "--debug"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "Traceback" in done.stderr
    assert done.returncode != 0


@pytest.mark.slow
def test_threads_may_look_up_functions_at_once(tmp_path: Path) -> None:
    """Python 3.11 raises SystemError if two threads parse at once."""
    (tmp_path / "many.py").write_text("".join(f"def f{n}(x):\n    return [x + {n}, (x, [{n}])]\n" for n in range(400)))

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.0001)  # another thread runs; garbage is collected in the midst of parsing

    gc.callbacks.append(switch)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(check_function_name, f"{tmp_path / 'many.py'}:f{n}", "function") for n in range(24)]
    finally:
        gc.callbacks.remove(switch)
    assert [one.exception() for one in found] == [None] * 24
