"""A reward model as a reward of a run: its scores, options, failures, and runs that it trains."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import ConfigError, RewardConfig
from covey.config.sft import RewardModelKind
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import RewardGrader, build_grader
from covey.llm.reward_models.loading import load_reward_model
from covey.llm.reward_models.model import RewardModel, ScoreScale
from helpers.reward_models import tiny_reward_model
from helpers.tiny_models import tiny_folder

TEXTS = ("5", "six", "7\n8 or\n9", "")
CPU = torch.device("cpu")


def saved(folder: Path, kind: RewardModelKind, scale: ScoreScale | None = None) -> RewardModel:
    model = tiny_reward_model(kind)
    model.scale = scale or model.scale
    model.save(folder)
    return load_reward_model(str(folder), dtype=torch.float32, device=CPU)


def groups(texts: tuple[str, ...] = TEXTS) -> list[Group]:
    def rollout(text: str) -> Rollout:
        return Rollout((1, 2), [5, 6, 1], [0.0, 0.0, 0.0], EndReason.STOP, text=text)

    return [Group(Start(number, prompt), list(map(rollout, texts))) for number, prompt in enumerate(("2+3=", "1+1="))]


def grader(**fields: Any) -> RewardGrader:
    return build_grader([RewardConfig(**fields)], [], device="cpu", precision="fp32")


def graded(**fields: Any) -> list[Rollout]:
    return [rollout for group in grader(**fields).grade(groups()) for rollout in group.rollouts]


def rewards(**fields: Any) -> list[float | None]:
    return [rollout.reward for rollout in graded(**fields)]


@pytest.mark.slow
def test_an_outcome_score_is_standardised_and_clipped(tmp_path: Path) -> None:
    model = saved(tmp_path, RewardModelKind.OUTCOME, ScoreScale(mean=0.5, deviation=2.0, count=9))
    assert model.scale == ScoreScale(mean=0.5, deviation=2.0, count=9)
    raw = torch.cat(
        model.scores([model.encoder.outcome(group.start.prompt, r.text) for group in groups() for r in group.rollouts])
    )
    standard = (raw - 0.5) / 2
    bound = float(standard.abs().median())

    def close(found: list[float | None], expected: torch.Tensor) -> bool:
        return torch.allclose(torch.tensor(found), expected, atol=1e-5)

    name = str(tmp_path)
    assert close(rewards(model=name), standard)
    assert close(rewards(model=name, standardise=True), standard)
    assert close(rewards(model=name, standardise=False), raw)
    assert close(rewards(model=name, clip=bound), standard.clamp(-bound, bound))
    assert bool((standard < -bound).any() or (standard > bound).any())
    assert close(rewards(model=name, weight=-3.0), -3 * standard)


def test_the_raw_scores_are_metrics_of_the_run(tmp_path: Path) -> None:
    model = saved(tmp_path, RewardModelKind.OUTCOME, ScoreScale(mean=0.5, deviation=2.0, count=9))
    found = grader(model=str(tmp_path)).grade(groups())
    row = model.encoder.outcome("2+3=", "5")
    assert found[0].logged["reward_model/raw_score"][0] == pytest.approx(float(model.scores([row])[0]), abs=1e-5)


@pytest.mark.slow
def test_a_step_is_paid_the_probability_that_it_is_right(tmp_path: Path) -> None:
    model = saved(tmp_path, RewardModelKind.PROCESS)
    expected = model.scores([model.encoder.process("2+3=", ["7\n", "8 or\n", "9"])])[0].sigmoid()
    assert len(expected) == 3
    name = str(tmp_path)
    parts = graded(model=name, per_step=True)[2]
    assert parts.reward == pytest.approx(float(expected.sum()), abs=1e-5)
    # The differences add up to the last score.
    assert rewards(model=name, per_step=True, step_differences=True)[2] == pytest.approx(float(expected[-1]), abs=1e-5)
    for aggregate, value in {
        "": expected.min(),
        "min": expected.min(),
        "product": expected.prod(),
        "mean": expected.mean(),
        "last": expected[-1],
    }.items():
        assert rewards(model=name, aggregate=aggregate)[2] == pytest.approx(float(value), abs=1e-5), aggregate


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"standardise": False}])
def test_a_score_that_is_not_finite_is_a_failure_and_no_reward(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, RewardModelKind.OUTCOME, ScoreScale(mean=0.0, deviation=1.0, count=2))
    scores = RewardModel.scores

    def one_nan(model: RewardModel, rows: list[Any], *more: Any) -> list[torch.Tensor]:
        return [torch.tensor([math.nan]), *scores(model, rows, *more)[1:]]

    monkeypatch.setattr(RewardModel, "scores", one_nan)
    with pytest.raises(ConfigError, match="has a score that is NaN or infinite: set precision to fp32"):
        grader(model=str(tmp_path), **options).check([Start(0, "2+3=")])
    first, *others = graded(model=str(tmp_path), **options)
    assert first.reward is None
    assert all(other.reward is not None for other in others)


def test_a_completion_beyond_the_models_limit_is_not_graded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, RewardModelKind.OUTCOME)
    (config := json.loads((tmp_path / "config.json").read_text()))["max_position_embeddings"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [
        r.reward
        for group in grader(model=str(tmp_path)).grade(groups(("5", "1", "2", "3", "4", "987654")))
        for r in group.rollouts
    ]
    assert [reward is None for reward in found] == [False] * 5 + [True] + [False] * 5 + [True]
    assert "2 of 12 completions are not graded" in caplog.text
    assert "it has 11 tokens, and the model takes at most 8" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RewardModelKind))
def test_a_completion_that_the_chat_template_refuses_is_not_graded(kind: RewardModelKind, tmp_path: Path) -> None:
    """A policy may write an empty completion in any step: the run goes on without it."""
    saved(tmp_path, kind)
    template = "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{{ m.content }}"
    (tmp_path / "chat_template.jinja").write_text(template + "{% endfor %}")
    question = [{"role": "user", "content": "2+3="}]

    def rewards_of(*texts: str) -> list[float | None]:
        asked = [Group(Start(0, question), group.rollouts) for group in groups(texts)[:1]]
        return [rollout.reward for rollout in grader(model=str(tmp_path)).grade(asked)[0].rollouts]

    found, whole = rewards_of("5", "", "7", "8", "9"), rewards_of("5", "7", "8", "9")
    refused = [1] if kind is RewardModelKind.OUTCOME else []  # a process model's template gets the prompt alone
    assert [number for number, reward in enumerate(found) if reward is None] == refused
    assert found[:1] + found[2:] == pytest.approx(whole, abs=1e-5)
    with pytest.raises(ConfigError, match=r"chat template refuses the messages: empty .*in a dry run"):
        grader(model=str(tmp_path)).check([Start(0, [{"role": "user", "content": ""}])])


@pytest.mark.slow
def test_the_model_is_loaded_in_the_dry_run_and_mistakes_are_one_line(tmp_path: Path) -> None:
    outcome, process = tmp_path / "outcome", tmp_path / "process"
    saved(outcome, RewardModelKind.OUTCOME)
    saved(process, RewardModelKind.PROCESS)
    language = tiny_folder(tmp_path / "language")
    starts = [Start(0, "2+3=", {"answer": "5"})]

    def refused(message: str, **fields: Any) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            grader(**fields).check(starts)
        assert "\n" not in str(caught.value)

    refused("is a language model, no reward model: train one with", model=str(language))
    refused("there is no folder", model=str(tmp_path / "nothing" / "here"))
    refused("outcome reward model, which scores whole completions", model=str(outcome), per_step=True)
    refused("has no mean and deviation", model=str(outcome), standardise=True)
    refused("aggregate is for process reward models", model=str(outcome), aggregate="mean")
    refused("clip is for outcome reward models", model=str(process), per_step=True, clip=1.0)
    refused("standardise is for outcome reward models", model=str(process), standardise=True)
    refused("step_differences = true needs per_step = true", model=str(process), step_differences=True)
    refused("aggregate is set, but per_step", model=str(process), aggregate="min", per_step=True)
    grader(model=str(outcome)).check(starts)
    grader(model=str(process), per_step=True).check(starts)
