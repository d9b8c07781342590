"""The embedded SmolLM2-135M: the fast ways give its own numbers, and it loads from every kind of name."""

from pathlib import Path

import pytest
import torch

from covey.data import Start, collate
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.gguf import EMBEDDED, embedded_file
from covey.llm.model.loading import find_model, load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import Arithmetic

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def starts() -> list[Start]:
    return Arithmetic().held_out(4)


@pytest.fixture(scope="module")
def exact():
    return load_model(EMBEDDED, dtype=torch.float32, device=CPU)


def sampled(loaded, starts, *, new_tokens: int = 24, seed: int = 1):
    policy = LanguagePolicy(loaded.module)
    assert policy.shares_prompts
    groups = LanguageSampler(LocalGenerator(policy), loaded.chat, seed=seed, max_new_tokens=new_tokens).sample(
        starts, 4, step=1
    )
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number)
    return policy, groups


def test_fp32_behavior_logprobs_are_within_1e_4_of_a_full_forward(exact, starts):
    policy, groups = sampled(exact, starts)
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([*rollout.context, *rollout.actions])
            with torch.no_grad():
                logits = policy.module(input_ids=tokens[None]).logits[0, len(rollout.context) - 1 : -1]
            expected = logits.log_softmax(1).gather(1, tokens[len(rollout.context) :, None])[:, 0]
            assert torch.tensor(rollout.behavior_logprobs) == pytest.approx(expected, abs=1e-4)


def test_bf16_gradients_point_where_fp32_gradients_do(exact, starts):
    """Nearer than those of transformers' own bf16, summed over some batches: of one, the cosine goes from 0.9987 to
    0.9993, and that of transformers from 0.998 to 0.9991."""
    policy = LanguagePolicy(exact.module)
    batches = [collate(sampled(exact, starts, new_tokens=8, seed=seed)[1]) for seed in (1, 2, 3)]
    low, plain = (LanguagePolicy(load_model(EMBEDDED, dtype=torch.bfloat16, device=CPU).module) for _ in range(2))
    for part in plain.module.modules():
        vars(part).pop("forward", None)  # what `fuse` gave it
    gradients = []
    for one, evaluate in ((policy, policy.evaluate), (low, low.evaluate), (plain, plain._evaluate_rows)):
        for batch in batches:
            weights = torch.where(batch.mask_BT, batch.reward_B[:, None] - 1.5, 0.0)
            (evaluate(batch).logprobs_BT * weights).sum().backward()
        gradients.append([p.grad.double() for p in one.module.parameters()])
        one.module.zero_grad()

    def product(some, others) -> float:  # in fp64: a sum of 135 million numbers
        return sum(float((a * b).sum()) for a, b in zip(some, others, strict=True))

    truth, *rounded = gradients
    ours, theirs = (product(truth, one) / (product(truth, truth) * product(one, one)) ** 0.5 for one in rounded)
    assert 0.9985 < ours < 1
    assert 1 - ours < 0.9 * (1 - theirs)


def test_it_talks_in_its_chat_template_and_knows_its_end(exact, starts):
    text = exact.chat.tokenizer.decode(exact.chat.encode(starts[0].prompt))
    assert starts[0].prompt[0]["content"] in text
    assert text.endswith("<|im_start|>assistant\n")
    assert exact.chat.end_ids == {exact.chat.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_a_gguf_file_by_its_path_is_the_same_model(exact, monkeypatch, tmp_path):
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    loaded = load_model(str(embedded_file()), dtype=torch.float32, device=CPU)
    for (name, ours), (_, theirs) in zip(
        exact.module.named_parameters(), loaded.module.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_converted_folder_is_made_once():
    folder = Path(find_model(EMBEDDED))
    before = (folder / "config.json").stat().st_mtime_ns
    assert find_model(EMBEDDED) == str(folder)
    assert (folder / "config.json").stat().st_mtime_ns == before
