"""Runs whose prompts have images: three steps, what is refused before a model loads, what covey check shows."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config import ConfigError, RunConfig, SamplingConfig
from covey.config.recipe import config_from_dict
from covey.experiment.evaluation import sample_model
from covey.experiment.llm import LLMBuilder
from covey.experiment.plan import check_memory
from covey.experiment.problem import build_problem
from covey.experiment.run import check, open_builder, resume, run
from covey.trainers.base import read_prompts
from helpers.tiny_models import tiny_folder
from helpers.vision_models import colour_rows, picture, vision_folder

REWARD = """
def number_of_text(completions, **columns):
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]
"""


def tables(folder: Path, **more: Any) -> dict[str, Any]:
    """A recipe on the colours of pictures beside `colours.jsonl`; no model is there yet."""
    (folder / "reward.py").write_text(REWARD)
    return {
        "model": str(folder / "model"), "steps": 3, "seed": 1, "run_dir": str(folder / "run"), "precision": "fp32",
        "device": "cpu", "threads": 1, "task": {"name": "dataset", "path": str(colour_rows(folder))},
        "rewards": [{"function": f"{folder}/reward.py:number_of_text"}],
        "sampling": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4}, "evaluation": {"problems": 1},
    } | more  # fmt: skip


def config_of(folder: Path, **more: Any) -> RunConfig:
    config = config_from_dict(tables(folder, **more))
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2_vl", {"loss": {"kl_coefficient": 0.05}}),
        ("gemma3", {"lora": {"rank": 2}, "update": {"recompute": True}}),
        ("idefics3", {"precision": "bf16", "algorithm": "reinforce_pp"}),
    ],
)
def test_three_steps_have_the_log_probabilities_of_the_sampler(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    vision_folder(tmp_path / "model", kind)
    run(config_of(tmp_path, **more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert max(line["mismatch/mean"] for line in lines) < (0.05 if "precision" in more else 1e-5)
    rollouts = (tmp_path / "run" / "rollouts").iterdir()
    assert any("<image>" in file.read_text() for file in rollouts if file.suffix == ".jsonl")
    again = config_of(tmp_path, model=str(tmp_path / "run"), run_dir=str(tmp_path / "again"), steps=1)
    run(again)  # the model of a run has the files of its processor


def test_check_shows_the_images_of_a_prompt_and_tries_them(tmp_path: Path) -> None:
    vision_folder(tmp_path / "model", "idefics3")
    config = config_of(tmp_path)
    notes = "\n".join(check(config))
    assert re.search(r"with 1 image \((16|24) x 16 pixels\):", notes)
    assert re.search(r"<image> x \d+ ", notes)
    assert "Idefics3ForConditionalGeneration: update: by row; sampling: cache by length" in notes
    assert "estimated memory" in check_memory(config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"algorithm": "ppo"}, 'a critic does not read: set algorithm = "grpo"'),
        ({"sampler": {"kind": "covey", "servers": ["http://127.0.0.1:1"], "token_file": "t"}}, "servers are not"),
        ({"teacher": {"model": "reference"}}, r"a teacher does not read: remove \[teacher\]"),
        ({"replay": {"groups": 2}}, r"replay does not keep: remove \[replay\]"),
        ({"lora": {"rank": 2, "load_in_4bit": True}}, "are not tried with weights in 4 bits"),
        ({"rewards": [{"model": "rm"}]}, "a reward model does not read: name another reward"),
    ],
)  # fmt: skip
def test_what_takes_no_images_is_refused_before_a_model_loads(more: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^the prompts have images, which {message}.*, or remove the column"):
        build_problem(config_of(tmp_path, **more), rewards=[lambda completions, **columns: [0.0] * len(completions)])


def test_ranks_trainers_and_other_commands_refuse_images(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=str(tiny_folder(tmp_path / "model")))
    with pytest.raises(ConfigError, match="which several ranks do not exchange: start one"):
        LLMBuilder(config, team=SimpleNamespace(size=2, rank=0))
    with pytest.raises(ConfigError, match=r"prompts\[0\] has images, which trainers do not read"):
        read_prompts([{"prompt": [{"role": "user", "content": "a"}], "image": picture("red")}])
    with pytest.raises(ConfigError, match="which covey sft does not read: use covey train"):
        build_problem(config).refuse_images("covey sft")


def test_a_model_that_reads_text_only_is_one_line_with_the_row(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=str(tiny_folder(tmp_path / "model")))
    with pytest.raises(
        ConfigError, match=r"colours.jsonl line \d+: the prompt has images, and a model of the type llama"
    ):
        open_builder(config)


def test_a_broken_file_is_one_line_with_its_row_before_weights_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=str(vision_folder(tmp_path / "model", "qwen2_vl")))
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "green-4.png").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"colours.jsonl line 5: the image 'green-4.png' in .* is none of PNG, "):
        open_builder(config)


def test_a_vision_language_model_without_images_says_what_it_needs(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, model=str(vision_folder(tmp_path / "model", "qwen2_vl")), task={"name": "arithmetic"}, rewards=[]
    )
    with pytest.raises(ConfigError, match=r"is not a causal language model: .*, or give it prompts with images$"):
        check(config)


def test_a_changed_image_is_refused_at_a_resume_and_a_long_prompt_names_its_images(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=str(vision_folder(tmp_path / "model", "llava")), steps=1)
    run(config)
    [line, *_] = (tmp_path / "run" / "rollouts").glob("*.jsonl")
    assert json.loads(line.read_text().splitlines()[0])["columns"]["images"][0].endswith(".png")
    image = tmp_path / "red-0.png"
    image.write_bytes(image.read_bytes()[:-1] + b"x")  # of the same size
    with pytest.raises(ConfigError, match=r"^an image of .*colours.jsonl has changed since the run began"):
        resume(tmp_path / "run", limits={"steps": 2})
    long = config_of(tmp_path, model=config.model, sampling={"max_new_tokens": 500})
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens with its images and max_new_tokens = 500 exceed"):
        open_builder(long)


def test_a_model_is_asked_with_and_without_an_image(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "model", "qwen2_vl")
    config = RunConfig(model=str(folder), precision="fp32", sampling=SamplingConfig(max_new_tokens=6))
    files = []
    for colour in ("red", "blue"):
        picture(colour).save(tmp_path / f"{colour}.png")
        files.append(tmp_path / f"{colour}.png")
    answers = {sample_model(config, "what?", 1, 0.0, images=images)[0] for images in ([], files[:1], files[1:])}
    assert len(answers) == 3
    with pytest.raises(ConfigError, match=r"^--image: 'images': there is no file 'none.png' in /.*; names"):
        sample_model(config, "what?", 1, 0.0, images=[Path("none.png")])
