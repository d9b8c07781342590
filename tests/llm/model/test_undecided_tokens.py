"""Tokens that the policy did not decide (a tool's output), in every evaluation of a language model.

The expected numbers are those of a plain forward pass over each whole sequence, read at the decisions alone.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from covey.algorithms import KLInLoss, KLInReward, KLPenalty, grpo, ppo
from covey.core import kl, schedules
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.llm.generation import backend
from covey.llm.model import prefix_attention
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.plain_passes import Kept, gradients_of, plain, plain_values, same_gradients
from helpers.tiny_models import PLAIN, SHARED, tiny_model
from helpers.updates import one_update

TEMPERATURE = 0.8
PROMPTS = ((20, 31, 42), (9, 8, 7, 6, 5), (20, 31, 42, 12, 60, 61, 62, 63, 64, 70))

# Of every rollout its tokens, and beside them "d" at decisions. The first group: siblings that share decisions and a
# tool's output, an output of its own, the same tokens with other masks, a prefix of a sibling, an output before the
# first decision and one after the last. The second: the same tool answers everyone. The third has one rollout.
SIBLINGS = [
    [
        ([11, 12, 50, 51, 13, 14], "dd..dd"),
        ([11, 12, 50, 51, 13, 15], "dd..dd"),
        ([11, 12, 54, 51, 13, 14], "dd..dd"),
        ([11, 12, 50, 51, 13, 14], "d.dd.d"),
        ([11, 12, 50, 51, 13, 14], "dd...."),
        ([11, 12, 50], "ddd"),
        ([50, 51, 11, 12, 52, 53], "..dd.."),
        ([11, 16, 50, 51, 17], "dd..d"),
    ],
    [([33, 40, 41, 42, 34], "d...d"), ([35, 40, 41, 42, 34], "d...d"), ([33, 40, 41, 42, 36, 40, 37], "d...d.d")],
    [([71, 72, 73, 74], ".d.d")],
]


def groups_of(written: Sequence[Sequence[tuple[list[int], str]]]) -> list[Group]:
    """Rollouts to the prompts, with rewards and log-probabilities of their own; every second one was cut."""
    groups = []
    for index, rows in enumerate(written):
        rollouts = []
        for number, (tokens, marks) in enumerate(rows):
            decided = [mark == "d" for mark in marks]
            logprobs = [-0.3 * (t + 1) - 0.1 * number if chosen else math.nan for t, chosen in enumerate(decided)]
            end = (EndReason.STOP, EndReason.LENGTH)[number % 2]
            reward = float((number * number + index) % 5)
            rollouts.append(Rollout(PROMPTS[index], tokens, logprobs, end, decided=decided, reward=reward))
        groups.append(Group(Start(index, ""), rollouts))
    return groups


def some_batch() -> Batch:
    return collate(groups_of(SIBLINGS))


def weights_of(batch: Batch, columns: int = 1) -> Tensor:
    """A weight for every column, the undecided ones too: theirs must make no difference."""
    size = (columns, *batch.mask_BT.shape)
    return torch.randn(size, generator=torch.Generator().manual_seed(4)).squeeze(0)


# --- log-probabilities, entropies and their gradients ---


def compare_with_plain(kind: str, batch: Batch, **options) -> LanguagePolicy:
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE, **options)
    model = tiny_model(kind)
    expected = plain(model, batch, TEMPERATURE)
    weights, more = weights_of(batch, 2)
    (expected.logprobs_BT * weights + expected.entropy_BT * more).sum().backward()
    ways = (policy._evaluate_packed, policy._evaluate_rows) if policy.shares_prompts else (policy._evaluate_rows,)
    for evaluate in ways:
        policy.module.zero_grad()
        found = evaluate(batch)
        torch.testing.assert_close(found.logprobs_BT, expected.logprobs_BT, atol=2e-5, rtol=0)
        torch.testing.assert_close(found.entropy_BT, expected.entropy_BT, atol=2e-5, rtol=0)
        assert not found.logprobs_BT[~batch.mask_BT].any()
        assert not found.entropy_BT[~batch.mask_BT].any()
        (found.logprobs_BT * weights + found.entropy_BT * more).sum().backward()
        same_gradients(gradients_of(policy.module), gradients_of(model))
    return policy


@pytest.mark.sampled(15)
@pytest.mark.parametrize("way", ["kernels", "products", "fused"])
@pytest.mark.parametrize("kind", SHARED)
def test_packed_evaluation_is_that_of_a_plain_forward(kind, way, monkeypatch):
    if way != "kernels":
        monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
        monkeypatch.setattr(prefix_attention, "SCORES_LIMIT", {"products": 1 << 40, "fused": 0}[way])
    assert compare_with_plain(kind, some_batch()).shares_prompts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", PLAIN)
def test_evaluation_row_by_row_is_that_of_a_plain_forward(kind):
    assert not compare_with_plain(kind, some_batch()).shares_prompts


TOKENS = st.lists(st.tuples(st.sampled_from([11, 12, 50]), st.booleans()), min_size=1, max_size=7).filter(
    lambda row: any(chosen for _, chosen in row)
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=3), st.sampled_from(["llama", "gpt2"]))
@example([[[(11, True), (50, False), (12, True)], [(11, True), (50, True), (12, False)]]], "llama")
def test_random_masks(written, kind):
    marked = [
        [([token for token, _ in row], "".join("d" if chosen else "." for _, chosen in row)) for row in group]
        for group in written
    ]
    batch = collate(groups_of(marked))
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE)
    with torch.no_grad():
        expected, found = plain(policy.module, batch, TEMPERATURE), policy.evaluate(batch)
    torch.testing.assert_close(found.logprobs_BT, expected.logprobs_BT, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.entropy_BT, expected.entropy_BT, atol=2e-5, rtol=0)


def test_undecided_tokens_are_seen_by_the_decisions_after_them():
    policy = LanguagePolicy(tiny_model(), temperature=TEMPERATURE)
    batch, other = some_batch(), some_batch()
    other.actions_BT[0, 3] = 52
    for evaluate in (policy._evaluate_packed, policy._evaluate_rows):
        first, second = evaluate(batch).logprobs_BT, evaluate(other).logprobs_BT
        torch.testing.assert_close(first[0, :2], second[0, :2], atol=2e-5, rtol=0)
        assert bool(((first - second)[0, 4:6].abs() > 1e-3).all())
        torch.testing.assert_close(first[1:], second[1:], atol=2e-5, rtol=0)


# --- what is fed ---


def tokens_fed(policy: LanguagePolicy, batch: Batch) -> int:
    """Tokens that pass through the model in one evaluation."""
    counted = []
    hook = policy.module.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: counted.append(output.shape[:-1].numel())
    )
    with torch.no_grad():
        policy.evaluate(batch)
    hook.remove()
    return sum(counted)


def distinct_prefixes(batch: Batch) -> int:
    """Prompts, and beginnings of completions that differ, up to the token before the last decision."""
    beginnings = set()
    for row, prompt in enumerate(batch.context):
        last = int(batch.mask_BT[row].nonzero()[-1])
        actions = batch.actions_BT[row, :last].tolist()
        beginnings |= {(*prompt, *actions[:end]) for end in range(1, last + 1)}
    return sum(map(len, set(batch.context))) + len(beginnings)


def test_shared_tokens_are_fed_once_decided_or_not_and_none_after_the_last_decision():
    batch = some_batch()
    policy = LanguagePolicy(tiny_model())
    assert tokens_fed(policy, batch) == distinct_prefixes(batch)
    alone = sum(distinct_prefixes(batch.select(torch.tensor([row]))) for row in range(len(batch)))
    assert distinct_prefixes(batch) < 0.6 * alone
    rows = LanguagePolicy(tiny_model("bloom"))
    assert tokens_fed(rows, batch) == alone


@pytest.mark.sampled(3)
@pytest.mark.parametrize("limit", [1, 12, 16, 20, 25, 4096])
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_microbatches_hold_undecided_tokens_too(kind, limit):
    batch = some_batch()
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE, microbatch_tokens=limit)
    with torch.no_grad():
        whole = policy.evaluate(batch)
    pieces = list(policy.microbatches(batch))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(batch)))
    for rows in pieces:
        part = batch.select(rows)
        assert len(rows) == 1 or kind == "bloom" or tokens_fed(policy, part) <= limit
        with torch.no_grad():
            found = policy.evaluate(part)
        width = part.mask_BT.shape[1]
        torch.testing.assert_close(found.logprobs_BT, whole.logprobs_BT[rows, :width], atol=2e-5, rtol=0)
        assert not whole.logprobs_BT[rows, width:].any()


@pytest.mark.parametrize(("second", "tokens"), [(50, 6), (51, 8)])
def test_siblings_share_undecided_tokens_only_if_they_are_the_same(second, tokens):
    batch = collate(groups_of([[([11, 50, 12], "d.d"), ([11, second, 12], "d.d")]]))
    for limit, pieces in ((tokens, 1), (tokens - 1, 2)):
        policy = LanguagePolicy(tiny_model(), microbatch_tokens=limit)
        assert len(list(policy.microbatches(batch))) == pieces


# --- exact KL ---


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_the_exact_kl_is_that_of_a_plain_forward(kind):
    batch = some_batch()
    reference = LanguagePolicy(tiny_model(kind, seed=1).requires_grad_(False), temperature=TEMPERATURE)
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE).with_outputs(KLToReference(reference))
    model, other = tiny_model(kind), tiny_model(kind, seed=1).requires_grad_(False)
    ours, theirs = plain(model, batch, TEMPERATURE).all_logprobs, plain(other, batch, TEMPERATURE).all_logprobs
    expected_N = torch.cat([kl.exact(new, old) for new, old in zip(ours, theirs, strict=True)])
    weights = weights_of(batch)
    (expected_N * weights[batch.mask_BT]).sum().backward()
    ways = (policy._evaluate_packed, policy._evaluate_rows) if policy.shares_prompts else (policy._evaluate_rows,)
    for evaluate in ways:
        policy.module.zero_grad()
        kl_BT = evaluate(batch).kl_BT
        assert kl_BT is not None
        torch.testing.assert_close(kl_BT[batch.mask_BT], expected_N, atol=2e-5, rtol=0)
        assert not kl_BT[~batch.mask_BT].any()
        (kl_BT * weights).sum().backward()
        same_gradients(gradients_of(policy.module), gradients_of(model))


# --- the critic ---


def with_critic(kind: str, *, own_trunk: bool) -> tuple[LanguagePolicy, LanguageCritic]:
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE)
    critic = LanguageCritic(policy, own_trunk=own_trunk)
    torch.manual_seed(3)
    nn.init.normal_(critic.head.linear.weight, std=0.3)
    nn.init.normal_(critic.head.linear.bias)
    return policy if own_trunk else policy.with_outputs(SharedTrunkValues(critic)), critic


# --- whole updates ---


BETA, GAMMA, LAMBDA = 0.3, 0.9, 0.8


def ppo_loss(batch: Batch, model: nn.Module, reference: nn.Module, head: nn.Linear, trunk: nn.Module) -> Tensor:
    """PPO's loss of both on the first optimizer step: GAE over the decisions of each row, in Python floats."""
    with torch.no_grad():
        known = plain(reference, batch, TEMPERATURE).logprobs_BT
        values = plain_values(trunk, head, batch)
    new_BT, values_BT = plain(model, batch, TEMPERATURE).logprobs_BT, plain_values(trunk, head, batch)
    loss = torch.zeros(())
    for row in range(len(batch)):
        columns = batch.mask_BT[row].nonzero()[:, 0].tolist()
        later, following = 0.0, 0.0  # nothing follows, whether the policy stopped or the limit did
        for column in reversed(columns):
            reward = -BETA * float(batch.behavior_logprobs_BT[row, column] - known[row, column])
            reward += float(batch.reward_B[row]) if column == columns[-1] else 0.0
            value = float(values[row, column])
            later = reward + GAMMA * following - value + GAMMA * LAMBDA * later
            following = value
            loss = loss - later * (new_BT[row, column] - new_BT[row, column].detach()).exp()
            loss = loss + 0.5 * (values_BT[row, column] - (later + value)) ** 2
    return loss / batch.mask_BT.sum()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tokens", [4096, 20])
@pytest.mark.parametrize("own_trunk", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_an_update_of_ppo_is_that_of_its_formulas(kind, own_trunk, tokens):
    policy, critic = with_critic(kind, own_trunk=own_trunk)
    policy.microbatch_tokens = tokens
    reference = LanguagePolicy(tiny_model(kind, seed=1), temperature=TEMPERATURE)
    penalty = KLPenalty(schedules.constant(BETA), KLInReward(kl.k1))
    algorithm = ppo(gamma=GAMMA, lam=LAMBDA, whiten=False, kl=penalty)
    raw = some_batch()
    batch, _ = prepare_batch(raw, policy, algorithm, reference=reference, critics=(critic,), kl_coefficient=BETA)
    kept, of_critic = Kept(policy.module), Kept(critic.module)
    one_update(
        policy, kept, algorithm, batch, kl_coefficient=BETA, critic=critic, critic_optimizer=of_critic,
        critic_learning_rate=0.1,
    )  # fmt: skip

    model, head = tiny_model(kind), nn.Linear(*critic.head.linear.weight.shape[::-1])
    head.load_state_dict(critic.head.linear.state_dict())
    trunk = tiny_model(kind).base_model if own_trunk else model.base_model
    ppo_loss(raw, model, tiny_model(kind, seed=1), head, trunk).backward()
    same_gradients(kept.found[0], gradients_of(model))
    prefix = "linear." if not own_trunk else "head.linear."
    expected = {f"{prefix}{name}": gradient for name, gradient in gradients_of(head).items()}
    if own_trunk:
        expected |= {f"trunk.{name}": gradient for name, gradient in gradients_of(trunk).items()}
    same_gradients(of_critic.found[0], expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_an_update_of_grpo_is_that_of_its_formulas(kind):
    """z-scores of the rewards; each rollout's decisions are averaged first, then the rollouts; k3 in the loss."""
    batch, algorithm = some_batch(), grpo(kl=KLPenalty(schedules.constant(BETA), KLInLoss(kl.k3)))
    policy = LanguagePolicy(tiny_model(kind), temperature=TEMPERATURE, microbatch_tokens=20)
    reference = LanguagePolicy(tiny_model(kind, seed=1), temperature=TEMPERATURE)
    ready, _ = prepare_batch(batch, policy, algorithm, reference=reference, kl_coefficient=BETA, optimizer_steps=2)
    kept = Kept(policy.module)
    metrics = one_update(policy, kept, algorithm, ready, UpdatePlan(epochs=2), kl_coefficient=BETA)

    model = tiny_model(kind)
    new_BT = plain(model, batch, TEMPERATURE).logprobs_BT
    known_BT = plain(tiny_model(kind, seed=1), batch, TEMPERATURE).logprobs_BT.detach()
    loss = torch.zeros(())
    for row in range(len(batch)):
        rewards = batch.reward_B[batch.group_B == batch.group_B[row]]
        if len(rewards) == 1:
            continue  # nothing to compare, so no KL either
        advantage = (batch.reward_B[row] - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        chosen_T = batch.mask_BT[row]
        gap_N = (known_BT - new_BT)[row, chosen_T]
        surrogate_N = -advantage * (new_BT - new_BT.detach())[row, chosen_T].exp()
        loss = loss + (surrogate_N + BETA * (gap_N.exp() - gap_N - 1)).mean() / len(batch)
    loss.backward()
    loss, new_BT = loss.detach(), new_BT.detach()
    for found in kept.found:
        same_gradients(found, gradients_of(model))
    decisions = int(batch.mask_BT[batch.group_B < 2].sum())
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    mismatch = (new_BT - batch.behavior_logprobs_BT)[batch.mask_BT & (batch.group_B < 2)[:, None]]
    assert metrics["mismatch/mean"] == pytest.approx(float(mismatch.abs().sum()) / decisions, rel=1e-4)
