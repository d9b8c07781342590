"""What a script may hand to `covey.run`: its own prompts and rewards in every form, and mistakes in one line."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import covey
from covey import (
    ArithmeticConfig,
    ConfigError,
    ControlConfig,
    DatasetConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
)
from covey.llm.grader import build_grader
from covey.llm.tasks import Arithmetic, PromptDataset, Rows, task_of
from helpers.tiny_models import tiny_folder

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n), "level": n} for n in range(12)]
SMALL = SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=3)


def even(completions: list[str], level: list[int], **columns: Any) -> list[float]:
    return [float(number % 2) for number in level]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    tiny_folder(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text(
        "def even(completions, level, **columns):\n    return [float(n % 2) for n in level]\n"
    )
    return folder


class Dataset:
    """Behaves as a data set of the package `datasets`: a length, items, and iteration over dicts."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]


def forms(folder: Path) -> dict[str, tuple[Any, Any]]:
    """The same run, its task and rewards given in different forms."""
    path, function = folder / "data.jsonl", f"{folder / 'mine.py'}:even"
    return {
        "a list of dicts": (ROWS, [even]),
        "a data set": (Dataset(), even),
        "a path": (path, RewardConfig(function=function)),
        "the path's name": (str(path), function),
        "a config": (DatasetConfig(path=str(path)), [function]),
        "a task": (PromptDataset(path=str(path)), (even,)),
    }


@pytest.mark.slow
def test_every_form_of_task_and_rewards_trains_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    seen = {}
    for name, (task, rewards) in forms(folder).items():
        config = RunConfig(model="model", steps=1, precision="fp32", threads=1, sampling=SMALL)
        summary = covey.run(config, task=task, rewards=rewards)
        assert summary is not None
        run_dir = Path(summary["run_dir"])
        [rollouts] = [file.read_text() for file in sorted((run_dir / "rollouts").iterdir())]
        held_out = (run_dir / "held_out" / "step_000001.jsonl").read_text()
        seen[name] = (rollouts, held_out)
    first = seen["a list of dicts"]
    assert '"level"' in first[0]
    assert {name for name, other in seen.items() if other != first} == set()


def test_rows_hold_out_what_the_same_file_holds_out(folder: Path) -> None:
    rows, file = (
        Rows(ROWS, held_out_fraction=0.3),
        PromptDataset(path=str(folder / "data.jsonl"), held_out_fraction=0.3),
    )
    assert rows.held_out(99) == file.held_out(99)
    assert len(rows.held_out(99)) == 4
    assert rows.draw(3, 2, 4) == file.draw(3, 2, 4)
    assert rows.describe() == "task: 8 different prompts to train on, 4 held out (task.held_out_fraction = 0.3)"


def test_rows_may_hold_arrays_of_numpy_as_pandas_reads_them() -> None:
    """Also for rewards in a process of their own, which get the columns as JSON."""

    def row(number: int, form: Any) -> dict[str, Any]:
        chat = [{"role": "user", "content": f"What is {number}?"}]
        return {"prompt": form(chat), "answer": numpy.int64(number), "steps": numpy.arange(2), "x": numpy.float32(0.5)}

    plain = Rows([row(number, list) for number in range(6)])
    grader = build_grader([RewardConfig(name="format", pattern="[0-9]")], ())
    for form in (tuple, lambda chat: numpy.array(chat, dtype=object)):
        task = Rows([row(number, form) for number in range(6)])
        starts = task.draw(0, 1, 4)
        assert [start.prompt for start in starts] == [start.prompt for start in plain.draw(0, 1, 4)]
        grader.check(starts)
    grader.close()


def test_a_task_of_covey_is_taken_as_it_is() -> None:
    task = Arithmetic()
    assert task_of(task) is task
    assert isinstance(task_of(ArithmeticConfig(digits=(1,))), Arithmetic)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (["a", "b"], "task[0] is of type str: give dicts"),
        ([{"prompt": "a"}, {"text": "b"}], "task[1]: there is no 'prompt' and no 'question' (columns: 'text'); rename"),
        ([{"prompt": "a"}, {"prompt": ""}], "task[1]: 'prompt' is empty"),
        ([{"prompt": "a", "completions": 1}], "task[0]: the column name 'completions' is reserved"),
        (
            [{"prompt": "a"}, {"prompt": {"b"}}],
            "this is of type set",
        ),
        (
            [{"prompt": "a"}, {"prompt": numpy.int64(5)}],
            "task[1]: 'prompt' must be a string or a list of chat messages",
        ),
        (
            [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b\ud800"}]}],
            "has half of a surrogate pair",
        ),
        ([{"prompt": "a"}, {"prompt": "a"}], "task has only one prompt"),
        ([], "task is empty: give at least two prompts"),
        ({"prompt": ["a", "b"]}, "task is of type dict: give a list of dicts"),
        (5, "task is of type int: give a list of dicts"),
        ("nowhere.jsonl", "there is no file nowhere.jsonl"),
    ],
)
def test_a_task_that_is_none_is_one_line(task: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        covey.run(RunConfig(model="smollm2-135m"), task=task, rewards=[even])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        (5, "a reward is of type int: give a function"),
        ([None], "a reward is of type NoneType"),
        ("numericc", "did you mean 'numeric'?"),
        (["nowhere.py:mine"], "nowhere.py"),
        ({"mine": even}, "a reward is of type dict"),
    ],
)
def test_a_reward_that_is_none_is_one_line(rewards: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        covey.run(RunConfig(model="smollm2-135m"), task=ROWS, rewards=rewards)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("cartpole_grpo", "the config is of type str: give a RunConfig or a ControlConfig"),
        (None, "the config is of type NoneType"),
        (RunConfig, "the config is of type type"),
        (RunConfig(sampling={"group_size": 4}), "sampling must be SamplingConfig(...) (is {'group_size': 4})"),
        (RunConfig(loss=None), "loss must be LossConfig(...) (is None)"),
        (RunConfig(rewards=(even,)), "the rewards of a config are RewardConfig(...), and one is of type function"),
        (RunConfig(rewards=even), "the rewards of a config are RewardConfig(...), and one is of type function"),
        (RunConfig(task="arithmetic"), "task must be one of the task configs"),
        (RunConfig(steps="5"), "steps must be an integer (is '5')"),
        (RunConfig(model=None), "model must be text (is None)"),
        (ControlConfig(environment="CartPole-v1"), "environment must be EnvironmentConfig(...) (is 'CartPole-v1')"),
    ],
)
def test_a_config_that_is_none_is_one_line(config: Any, told: str) -> None:
    own = {} if isinstance(config, ControlConfig) or getattr(config, "task", None) else {"task": ROWS}
    with pytest.raises(ConfigError) as caught:
        covey.run(config, **own)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in "):
        covey.evaluate_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no run to resume in "):
        covey.resume(tmp_path / "nowhere")


TEXT, CHAT = "{} + 2 =", [{"role": "user", "content": "{} + 2 ="}]


@pytest.mark.parametrize(
    ("prompt", "reward", "form"),
    [
        (TEXT, lambda completion: completion[0]["content"], "is a string here"),
        (TEXT, lambda completion: completion["content"], "is a string here"),
        (CHAT, lambda completion: completion.strip(), "is a list with one message here"),
        (CHAT, lambda completion: completion[1]["content"], "is a list with one message here"),
    ],
)
def test_a_reward_that_expects_another_form_of_completion_is_told_which_one_it_gets(
    folder: Path, prompt: Any, reward: Any, form: str
) -> None:
    rows = [json.loads(json.dumps({"prompt": prompt}).replace("{}", str(n))) for n in range(4)]

    def length(completions: list[Any], **columns: Any) -> list[int]:
        return [len(reward(completion)) for completion in completions]

    with pytest.raises(ConfigError, match=rf"in a dry run on the right answer: .*; a completion {form}"):
        covey.run(RunConfig(model=str(folder / "model"), steps=1, sampling=SMALL), task=rows, rewards=length)
