"""A tiny language model learns what a reward function of one's own pays for, and unlearns it when it is negated."""

import pytest

from covey.config import (
    CheckpointConfig,
    CriticConfig,
    EvaluationConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
)
from covey.experiment.run import run
from covey.llm.tasks import Arithmetic
from helpers.tiny_models import tiny_folder


def share_of_digits(completions, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def no_digits(completions, **columns):
    return [1 - share for share in share_of_digits(completions, **columns)]


def train(folder, name: str, reward, algorithm: str = "grpo", **options) -> tuple[float, float]:
    """Held-out share of digits or of others, before and after."""
    config = RunConfig(
        model=str(folder / "model"),
        algorithm=algorithm,
        steps=25,
        run_dir=str(folder / name),
        precision="fp32",
        threads=1,
        show_rollouts_every=0,
        sampling=SamplingConfig(prompts_per_step=4, group_size=8, max_new_tokens=8),
        update=UpdateConfig(learning_rate=3e-3),
        evaluation=EvaluationConfig(problems=8),
        checkpoint=CheckpointConfig(every=100),
        **options,
    )
    summary = run(config, task=Arithmetic(digits=(1,)), rewards=[reward])
    assert summary is not None
    first = summary["evaluations"][0]
    return first["before"]["score"], first["after"]["score"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    tiny_folder(folder / "model")
    return folder


@pytest.fixture(scope="module")
def learnt(folder) -> tuple[float, float]:
    """The share before and after a training with grpo in the run folder learn-grpo."""
    return train(folder, "learn-grpo", share_of_digits)


def test_a_tiny_model_learns(learnt):
    before, after = learnt
    assert after > before + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "reinforce", "ppo"])
def test_a_tiny_model_learns_with_other_algorithms(folder, algorithm):
    before, after = train(folder, f"learn-{algorithm}", share_of_digits, algorithm)
    assert after > before + 0.3


@pytest.mark.slow
def test_a_tiny_model_learns_with_the_critic_on_its_trunk(folder):
    before, after = train(folder, "learn-shared", share_of_digits, "ppo", critic=CriticConfig(trunk="policy"))
    assert after > before + 0.3


@pytest.mark.slow
def test_with_the_reward_negated_it_unlearns(folder):
    before, after = train(folder, "unlearn", no_digits)
    assert after >= before
    assert after > 0.97, "hardly a digit is left"
