"""Runs with a teacher: alone and beside rewards, and what is refused before weights are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.config import ConfigError, RunConfig, TeacherConfig
from covey.config.rules import validate
from covey.experiment import llm
from helpers.tiny_models import tiny_folder, tiny_model, tiny_tokenizer

WRONG = [{"prompt": [{"role": "user", "content": f"{number}+{number % 7}"}]} for number in range(40)]  # no answers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("teacher")
    found = {kind: str(tiny_folder(place / kind, kind)) for kind in ("llama", "bloom")}
    found["teacher"] = str(tiny_folder(place / "teacher", "llama", seed=1))
    (place / "other").mkdir()
    words = ["ab"]
    tiny_model(vocab_size=len(tiny_tokenizer(words).get_vocab())).save_pretrained(place / "other")
    tiny_tokenizer(words).save_pretrained(place / "other")
    tiny_model(max_position_embeddings=16).save_pretrained(place / "short")
    tiny_tokenizer().save_pretrained(place / "short")
    return found | {name: str(place / name) for name in ("other", "short")}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def a_run(model: str, teacher: TeacherConfig, **changes: Any) -> RunConfig:
    config = RunConfig(
        model=model, steps=2, threads=1, precision="fp32", show_rollouts_every=0, teacher=teacher,
        task=covey.ArithmeticConfig(digits=(1,)), rewards=(covey.RewardConfig(name="length", length_limit=5),),
        sampling=covey.SamplingConfig(prompts_per_step=3, group_size=3, max_new_tokens=4),
        loss=covey.LossConfig(kl_coefficient=0.0), evaluation=covey.EvaluationConfig(problems=2),
        update=covey.UpdateConfig(learning_rate=1e-3),
    )  # fmt: skip
    return replace(config, **changes)


def metrics(config: RunConfig, **given: Any) -> list[dict[str, Any]]:
    result = covey.run(config, **given)
    assert result is not None
    return [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_learns_from_its_teacher_alone(models: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Prompts without answers, in groups of one."""
    alone = a_run(
        models["llama"], TeacherConfig(models["teacher"]), task=None, rewards=(), steps=8,
        sampling=covey.SamplingConfig(prompts_per_step=16, group_size=1, max_new_tokens=4),
        update=covey.UpdateConfig(learning_rate=1e-2),
    )  # fmt: skip
    lines = metrics(alone, task=WRONG)
    assert f"to the teacher {lines[0]['teacher/divergence']:.4f}" in "".join(capfd.readouterr())
    assert lines[-1]["teacher/divergence"] < 0.5 * lines[0]["teacher/divergence"]
    assert all(line["reward/zero"] == 0 and line["groups/zero_advantage_fraction"] == 1 for line in lines)
    assert all(line["update/rows"] == 1 and "teacher/rollouts" not in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "teacher", "changes", "taught"),
    [
        ("llama", TeacherConfig("policy", prompt="{answer}"), {}, 1),
        ("llama", TeacherConfig("reference", 0.1, "forward", prompt="{best_sibling} {prompt}"), {}, None),
        ("llama", TeacherConfig("reference", prompt="{answer}"), {"lora": covey.LoRAConfig(rank=2)}, 1),
        ("llama", TeacherConfig("bloom", 1.0, "jensen_shannon", 0.3), {}, None),
        ("bloom", TeacherConfig("teacher", prompt="{prompt}={answer}"), {"replay": covey.ReplayConfig(groups=2)}, 1),
        ("bloom", TeacherConfig("policy", prompt="{feedback}"), {}, 0),
        (
            "llama",
            TeacherConfig("reference"),
            {"loss": covey.LossConfig(kl_coefficient=0.1, kl_estimator="exact")},
            None,
        ),
    ],
    ids=["policy", "best sibling", "adapters off", "by row", "replay", "no feedback", "beside the exact KL"],
)
def test_teachers_of_every_kind(
    models: dict[str, str], model: str, teacher: TeacherConfig, changes: dict[str, Any], taught: float | None
) -> None:
    named = replace(teacher, model=models.get(teacher.model, teacher.model))
    lines = metrics(a_run(models[model], named, **changes))
    assert len(lines) == 2
    for line in lines:
        assert taught == 0 or line["update/optimizer_steps"] == 1
        assert line.get("teacher/divergence", 0.0) >= 0  # without teacher and advantage there is no update
        assert taught is None or line["teacher/rollouts"] == taught
    at_0 = taught == 0 or (teacher.model == "reference" and not teacher.prompt)  # the same prompt and weights
    assert (lines[0].get("teacher/divergence", 0.0) < 1e-6) == at_0


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (TeacherConfig("other"), "other has another tokenizer than the policy: 'ab', number"),
        (TeacherConfig("policy", prompt="{anwser}"), "teacher.prompt has {anwser}, but there is only {prompt}, "),
        (TeacherConfig("policy", prompt="a" * 300), "for the teacher, a prompt of 3"),
        (
            TeacherConfig("short"),
            "for the teacher, a prompt of 43 tokens and max_new_tokens = 4 exceed the model's 16 pos",
        ),
    ],
)
def test_unfit_teachers_are_refused_before_weights_are_read(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, teacher: TeacherConfig, message: str
) -> None:
    monkeypatch.setattr(llm, "load_policy", None)  # would fail
    policy, named = models["llama"], models.get(teacher.model, teacher.model)
    if teacher.model == "other":
        policy, named = named, policy
    with pytest.raises(ConfigError) as refused:
        covey.run(a_run(policy, replace(teacher, model=named)))
    assert message.replace("other", "llama", 1) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_teacher_that_is_not_there_is_named(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^teacher\.model: "):
        validate(a_run(models["llama"], TeacherConfig("no/such/folder/here")))
