"""Bugs that other implementations had with language models; tests/algorithms/test_known_bugs.py lists them all."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.config import ConfigError
from covey.config.recipe import config_from_dict
from covey.data import Group, Start, collate
from covey.llm.generation.backend import Sampling, find_kernels
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import sample_tokens
from covey.llm.model.chat import Chat
from covey.llm.model.logprobs import CHUNK, token_logprobs
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.runtime.optimizer import MasterAdamW
from helpers.tiny_models import CHARACTERS, tiny_model, tiny_tokenizer

PROMPTS = ["12+34", "a quick brown fox", "7", "(1+2)"]
VOCABULARY = len(CHARACTERS) + 3
EVERY_PATH = pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])


def make_sampler(kind: str = "llama", *, packed: bool = True, temperature: float = 1.0, seed: int = 0):
    torch.set_num_threads(1)
    policy = LanguagePolicy(tiny_model(kind, seed=seed), temperature=temperature)
    assert policy.shares_prompts
    if not packed:
        policy.backend = replace(policy.backend, sampling=Sampling.PADDED_CACHE)
    # every 6th token ends a completion, so that lengths differ
    chat = Chat(tiny_tokenizer(), frozenset(range(1, VOCABULARY, 6)))
    return LanguageSampler(LocalGenerator(policy), chat, seed=5, max_new_tokens=10, temperature=temperature)


def sampled(sampler: LanguageSampler, size: int = 4, step: int = 1) -> list[Group]:
    groups = sampler.sample([Start(i, text) for i, text in enumerate(PROMPTS)], size, step)
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number**2 % 5)
    return groups


def full_logits(sampler: LanguageSampler, prompt, actions) -> Tensor:
    """Of every decision, from one ordinary forward over the whole sequence."""
    tokens = torch.tensor([*prompt, *actions])
    with torch.no_grad():
        return sampler.generator.policy.module(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]


@pytest.mark.sampled(2)
@EVERY_PATH
def test_prime_rl_697_temperature_applied_to_logprobs(packed):
    # log_softmax(logits) / temperature is not a distribution: its probabilities do not sum to 1
    sampler = make_sampler(packed=packed, temperature=0.5)
    (group,) = sampler.sample([Start(0, "12+34")], VOCABULARY, 1)
    for token, rollout in enumerate(group.rollouts):
        rollout.actions, rollout.behavior_logprobs = [token], [0.0]
    with torch.no_grad():
        said_BT = sampler.generator.policy.evaluate(collate([group])).logprobs_BT
    assert float(said_BT.exp().sum()) == pytest.approx(1.0, abs=1e-5)

    logits_RV = full_logits(sampler, group.rollouts[0].context, [0]).expand(2000, -1)
    places = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    tokens, logprobs = sample_tokens(logits_RV, places, 0.5, find_kernels(logits_RV.device))
    probability = dict(zip(tokens.tolist(), logprobs.exp().tolist(), strict=True))
    assert sum(probability.values()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"top_k": 20}])
def test_trl_6789_sampling_from_a_part_of_the_vocabulary_is_refused(field):
    with pytest.raises(ConfigError, match="the whole distribution, so its tail is never cut"):
        config_from_dict({"task": {"name": "arithmetic"}, "sampling": field})


def test_trl_5224_completions_decoded_and_encoded_again():
    # ids that no text gives back: special tokens vanish when they are decoded
    sampler = make_sampler()
    groups = sampled(sampler, size=16)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lost = [r for r in rollouts if list(sampler.chat.encode(r.text or "0")) != list(r.actions)]
    assert len(lost) > 10, "the test needs completions that do not survive"
    batch = collate(groups)
    for row, rollout in enumerate(rollouts):
        assert batch.actions_BT[row][batch.mask_BT[row]].tolist() == list(rollout.actions)
    with torch.no_grad():
        said_BT = sampler.generator.policy.evaluate(batch).logprobs_BT
    assert float((said_BT - batch.behavior_logprobs_BT)[batch.mask_BT].abs().max()) < 1e-4


def test_nemo_rl_2176_assistant_turns_of_the_prompt_trained_on():
    sampler = make_sampler()
    talk = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    batch = collate(sampler.sample([Start(0, talk)], 3, 1))
    assert len(batch.context[0]) == len("1+122+2=")
    lengths = [int(row.sum()) for row in batch.mask_BT]
    assert max(lengths) == batch.mask_BT.shape[1] <= 10, "only what was sampled is a decision"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_PATH
def test_trl_5312_sampler_keeps_old_weights(dtype, packed):
    sampler = make_sampler(packed=packed)
    sampler.generator.policy.module.to(dtype)
    optimizer = MasterAdamW(sampler.generator.policy.module, lr=0.05)
    batch = collate(sampled(sampler))
    sampler.generator.policy.evaluate(batch).logprobs_BT.sum().backward()
    assert optimizer.step(0.05).applied
    sampler.refresh(1)
    groups = sampled(sampler, step=2)
    assert all(rollout.version == 1 for group in groups for rollout in group.rollouts)
    after = collate(groups)
    with torch.no_grad():
        gap_BT = (sampler.generator.policy.evaluate(after).logprobs_BT - after.behavior_logprobs_BT).abs()
    assert float(gap_BT[after.mask_BT].mean()) < (1e-5 if dtype == torch.float32 else 0.02)
    stale = make_sampler(packed=packed)
    with torch.no_grad():
        old_BT = (stale.generator.policy.evaluate(after).logprobs_BT - after.behavior_logprobs_BT).abs()
    assert float(old_BT[after.mask_BT].mean()) > 0.1, "the step has to be large enough to see"


def test_trl_7268_bf16_biases_the_entropy():
    # The product rounds its logits to bf16, as transformers' own does. From there on everything is fp32: the numbers
    # are those of the rounded logits, and the rounding does not move their mean.
    source = torch.Generator().manual_seed(0)
    hidden_NW = torch.randn(CHUNK, 64, generator=source).bfloat16()
    weight_VW = (0.3 * torch.randn(2000, 64, generator=source)).bfloat16()
    tokens_N = torch.randint(0, 2000, (CHUNK,), generator=source)
    said = token_logprobs(hidden_NW, weight_VW, None, tokens_N, 1.0, find_kernels(hidden_NW.device))
    rounded, exact = (hidden_NW @ weight_VW.T).double(), hidden_NW.double() @ weight_VW.double().T
    for found_N, of_rounded_N, exact_N in zip(said, told(rounded, tokens_N), told(exact, tokens_N), strict=True):
        assert float((found_N - of_rounded_N).abs().max()) < 1e-4
        assert float((found_N - exact_N).abs().max()) > 1e-3, "bf16 must be in it"
        assert abs(float((found_N - exact_N).mean())) < 2e-3


def told(logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """logprobs_N and entropy_N."""
    logp_NV = logits_NV.log_softmax(1)
    return logp_NV.gather(1, tokens_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(1)
