"""A run with a judge that is killed and resumed asks nothing twice, and writes its token nowhere."""

import json
from pathlib import Path

import pytest

from helpers.judge_server import Asked, JudgeServer
from helpers.run_helpers import Moment, covey, files, reproducible_metrics
from helpers.tiny_models import tiny_folder

TOKEN = "tok-7d793037a0760186"
RECIPE = """
model = "{model}"
steps = 4
seed = 3
threads = 1
precision = "fp32"

[task]
name = "dataset"
path = "{data}"

[[rewards]]
judge = "{address}"
judge_model = "tiny"
judge_prompt = "How many letters has {{completion}}?"
judge_range = [0, 100]
judge_token_variable = "JUDGE_TOKEN"
judge_cache = "{cache}"
timeout_seconds = 300 # of hangs alone

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 5

[update]
learning_rate = 1e-3

[evaluation]
problems = 4

[checkpoint]
every = 2
"""


def letters(asked: Asked) -> None:
    """The score is the number of letters of the completion; the reply repeats the token."""
    completion = asked.question.removeprefix("How many letters has ").removesuffix("?")
    asked.say(f"To {asked.authorization}: {sum(map(str.isalpha, completion))}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_the_same_and_asks_nothing_twice(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(40)))
    with JudgeServer(letters) as server:

        def recipe(name: str) -> Path:
            file = tmp_path / f"{name}.toml"
            cache = tmp_path / f"cache_{name}"
            file.write_text(RECIPE.format(model=model, data=data, address=server.address, cache=cache))
            return file

        variables = {"JUDGE_TOKEN": TOKEN}
        code, output = covey("train", recipe("whole"), "--run-dir", "whole", cwd=tmp_path, **variables)
        assert code == 0, output
        asked = sorted(server.questions)
        assert len(set(asked)) == len(asked)
        server.questions.clear()
        killed = Moment(3)
        code, said = covey("train", recipe("cut"), "--run-dir", "cut", cwd=tmp_path, **variables, moment=killed)
        assert code == -9, said
        code, resumed = covey("train", "--resume", "cut", cwd=tmp_path, **variables)
        assert code == 0, resumed
        assert sorted(server.questions) == asked
        assert set(server.authorizations) == {f"Bearer {TOKEN}"}
    assert files(tmp_path / "cut" / "model") == files(tmp_path / "whole" / "model")
    assert reproducible_metrics(tmp_path / "cut") == reproducible_metrics(tmp_path / "whole")
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
    assert "[token]" in "".join(file.read_text() for file in (tmp_path / "cut" / "rollouts").glob("*.jsonl"))
    assert TOKEN not in output + said + resumed
