"""`sampling.min_new_tokens` of a recipe reaches the sampler, the policy and everything that is made of it."""

from pathlib import Path

import torch

from covey.config import ArithmeticConfig, LoRAConfig, RunConfig, SamplingConfig
from covey.data import Start, collate
from covey.experiment.models import adapt, load_policy
from covey.llm.model.logprobs import MinimumLength
from covey.llm.sampler import greedy
from covey.runtime.device import build_machine
from helpers.tiny_models import tiny_folder


def test_sampler_policy_and_reference_of_a_recipe_have_its_minimum(tmp_path: Path) -> None:
    folder = str(tiny_folder(tmp_path / "model"))
    for lora in (LoRAConfig(), LoRAConfig(rank=2)):
        config = RunConfig(
            model=folder, task=ArithmeticConfig(), lora=lora,
            sampling=SamplingConfig(min_new_tokens=20, max_new_tokens=24, temperature=1.3),
        )  # fmt: skip
        loaded = load_policy(config, build_machine("cpu", "fp32", 1))
        policy, adaptation = adapt(loaded.policy, config)
        minimum = MinimumLength(20, loaded.chat.end_ids)
        assert policy.minimum == adaptation.reference(policy).minimum == minimum
        groups = loaded.sampler.sample([Start(0, "1+2="), Start(1, "ab")], 16, 1)
        groups += greedy(loaded.sampler, 24).sample([Start(2, "7-")], 1, 1)
        assert min(len(rollout.actions) for group in groups for rollout in group.rollouts) > 20
        batch = collate(groups[:2])
        with torch.no_grad():
            difference_BT = policy.evaluate(batch).logprobs_BT - batch.behavior_logprobs_BT
        assert float(difference_BT.abs().max()) < 1e-4
