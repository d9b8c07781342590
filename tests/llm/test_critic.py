"""The critic of a language model: its values, whom its loss moves, what it learns, and that it is kept."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel

from covey.algorithms import KLInReward, KLPenalty, ppo
from covey.config import ConfigError
from covey.core import kl, schedules
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.llm.policy import LanguagePolicy
from covey.runtime.optimizer import MasterAdamW
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.plain_passes import Kept, gradients_of, plain_values, same_gradients
from helpers.tiny_models import PLAIN, SHARED, tiny_model
from helpers.updates import one_update

KINDS = SHARED + PLAIN
ENDS = (EndReason.STOP, EndReason.LENGTH)


def some_groups(seed: int = 0, counts: tuple[int, ...] = (3, 2, 1)) -> list[Group]:
    """Groups of completions of different lengths; every second one was cut by the token limit."""
    source = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 80, (count,), generator=source).tolist()

    groups = []
    for index, count in enumerate(counts):
        prompt = tuple(tokens(3 + 2 * index))
        rollouts = []
        for number in range(count):
            actions = tokens(1 + (3 * number + index) % 6)
            logprobs = (-3 * torch.rand(len(actions), generator=source)).tolist()
            reward = float(torch.randn((), generator=source))
            rollouts.append(Rollout(prompt, actions, logprobs, ENDS[number % 2], reward=reward))
        groups.append(Group(Start(index, ""), rollouts))
    return groups


def make(
    kind: str = "llama", *, own_trunk: bool = True, random_head: bool = True
) -> tuple[LanguagePolicy, LanguageCritic]:
    policy = LanguagePolicy(tiny_model(kind, dtype=torch.float64))
    critic = LanguageCritic(policy, own_trunk=own_trunk)
    if random_head:
        torch.manual_seed(3)
        nn.init.normal_(critic.head.linear.weight, std=0.3)
        nn.init.normal_(critic.head.linear.bias)
    return policy if own_trunk else policy.with_outputs(SharedTrunkValues(critic)), critic


# --- values ---


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own_trunk", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_plain_forward(kind, own_trunk):
    policy, critic = make(kind, own_trunk=own_trunk)
    assert critic.packed == (kind in SHARED)
    batch = collate(some_groups())
    model = tiny_model(kind, dtype=torch.float64)
    expected = plain_values(model.base_model, critic.head.linear, batch).detach()
    assert float(expected[batch.mask_BT].std()) > 0.1
    torch.testing.assert_close(critic.values(batch), expected, rtol=1e-5, atol=1e-5)
    told = policy.evaluate(batch).values_BT
    if own_trunk:
        assert told is None
    else:
        assert told is not None
        torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_begin_at_zero_and_are_at_least_fp32(dtype):
    critic = LanguageCritic(LanguagePolicy(tiny_model(dtype=dtype)))
    values_BT = critic.values(collate(some_groups()))
    assert values_BT.dtype == torch.float32
    assert not values_BT.any()
    assert critic.trunk.dtype == dtype


def test_values_do_not_depend_on_the_pieces_of_a_batch():
    policy, critic = make()
    policy.microbatch_tokens = 12
    batch = collate(some_groups())
    whole_BT = critic.values(batch)
    pieces = list(policy.microbatches(batch))
    assert len(pieces) > 2
    for rows in pieces:
        part = batch.select(rows)
        torch.testing.assert_close(critic.values(part), whole_BT[rows][:, : part.mask_BT.shape[1]])


@pytest.mark.parametrize("kind", SHARED)
def test_packed_and_plain_critics_have_the_same_gradients(kind):
    _, critic = make(kind)
    batch = collate(some_groups())
    loss_weights_BT = torch.linspace(-1, 1, batch.mask_BT.numel()).view_as(batch.mask_BT)
    found = []
    for packed in (True, False):
        critic.packed = packed
        (critic.values(batch) * loss_weights_BT).sum().backward()
        found.append(gradients_of(critic.module))
        critic.module.zero_grad()
    same_gradients(*found)


# --- returns ---


def test_returns_and_advantages_over_tokens_with_the_kl_in_the_reward():
    policy, critic = make()
    reference = LanguagePolicy(tiny_model(seed=1, dtype=torch.float64))
    groups = some_groups()
    gamma, lam, beta = 0.9, 0.8, 0.3
    algorithm = ppo(gamma=gamma, lam=lam, whiten=False, kl=KLPenalty(schedules.constant(beta), KLInReward(kl.k1)))
    batch, metrics = prepare_batch(
        collate(groups), policy, algorithm, reference=reference, critics=(critic,), kl_coefficient=beta
    )
    assert batch.returns_BT is not None
    assert batch.advantages_BT is not None
    values = plain_values(policy.module.base_model, critic.head.linear, batch).tolist()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.end for rollout in rollouts} == set(ENDS)
    all_values, all_returns = [], []
    for row, rollout in enumerate(rollouts):
        known = reference.evaluate(batch.select(torch.tensor([row]))).logprobs_BT[0].tolist()
        later, following = 0.0, 0.0  # nothing follows, whether the policy stopped or the limit did
        for t in reversed(range(len(rollout.actions))):
            reward = -beta * (rollout.behavior_logprobs[t] - known[t])
            reward += rollout.reward if t == len(rollout.actions) - 1 else 0.0
            later = reward + gamma * following - values[row][t] + gamma * lam * later
            following = values[row][t]
            assert float(batch.advantages_BT[row, t]) == pytest.approx(later, abs=1e-5)
            assert float(batch.returns_BT[row, t]) == pytest.approx(later + following, abs=1e-5)
            all_values.append(following)
            all_returns.append(later + following)
    assert metrics["value/mean"] == pytest.approx(sum(all_values) / len(all_values), abs=1e-5)
    assert metrics["value/returns_mean"] == pytest.approx(sum(all_returns) / len(all_returns), abs=1e-5)


def test_a_reward_is_not_paid_twice_where_the_token_limit_cut():
    """gamma = lambda = 1: the return of every token is the reward, however high the values are."""
    policy, critic = make()
    nn.init.constant_(critic.head.linear.bias, 100.0)
    groups = some_groups()
    batch, _ = prepare_batch(collate(groups), policy, ppo(gamma=1.0, lam=1.0, whiten=False), critics=(critic,))
    assert batch.returns_BT is not None
    expected_BT = torch.where(batch.mask_BT, batch.reward_B[:, None], 0.0)
    torch.testing.assert_close(batch.returns_BT, expected_BT, atol=1e-4, rtol=0)


# --- whom the losses move ---


def annotated(policy: LanguagePolicy, critic: LanguageCritic, algorithm) -> Batch:
    batch, _ = prepare_batch(collate(some_groups()), policy, algorithm, critics=(critic,), optimizer_steps=2)
    return batch


def gradients_of_update(kind: str, *, own_trunk: bool, plan: UpdatePlan = UpdatePlan(), coefficient=0.7, tokens=4096):  # noqa: B008
    policy, critic = make(kind, own_trunk=own_trunk)
    policy.microbatch_tokens = tokens
    algorithm = ppo(value_coefficient=coefficient)
    batch = annotated(policy, critic, algorithm)
    kept, of_critic = Kept(policy.module), Kept(critic.module)
    metrics = one_update(
        policy,
        kept,
        algorithm,
        batch,
        plan,
        critic=critic,
        critic_optimizer=of_critic,
        learning_rate=0.1,
        critic_learning_rate=0.1,
        seed=0,
        step=1,
    )
    return policy, critic, algorithm, batch, kept.found, of_critic.found, metrics


def alone(kind: str, batch: Batch, algorithm, loss: str, *, own_trunk: bool) -> tuple[dict, dict]:
    """The gradients of one of the two losses in the policy and in the critic, from one backward of its own."""
    policy, critic = make(kind, own_trunk=own_trunk)
    if loss == "policy":
        algorithm.loss(policy.evaluate(batch), batch, 0.0).loss.backward()
    else:
        values_BT = critic.values(batch) if own_trunk else policy.evaluate(batch).values_BT
        algorithm.critic_loss(values_BT, batch).backward()
    return gradients_of(policy.module), gradients_of(critic.module)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_with_its_own_trunk_neither_loss_reaches_the_other_model(kind):
    _, _, algorithm, batch, (of_policy,), (of_critic,), _ = gradients_of_update(kind, own_trunk=True)
    expected, _ = alone(kind, batch, algorithm, "policy", own_trunk=True)
    same_gradients(of_policy, expected)
    nothing, expected = alone(kind, batch, algorithm, "value", own_trunk=True)
    assert not nothing
    same_gradients(of_critic, expected)
    assert any(name.startswith("trunk.") and gradient.any() for name, gradient in of_critic.items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tokens", [4096, 12])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_on_the_policys_trunk_the_gradient_is_the_sum_of_both(kind, tokens):
    _, _, algorithm, batch, (of_policy,), (of_head,), _ = gradients_of_update(kind, own_trunk=False, tokens=tokens)
    by_policy, _ = alone(kind, batch, algorithm, "policy", own_trunk=False)
    by_value, expected_head = alone(kind, batch, algorithm, "value", own_trunk=False)
    assert any(gradient.any() for gradient in by_value.values())
    same_gradients(of_policy, {name: g + by_value.get(name, 0.0) for name, g in by_policy.items()})
    same_gradients(of_head, expected_head)


def test_value_coefficient_matters_on_the_policys_trunk():
    low, high = (gradients_of_update("llama", own_trunk=False, coefficient=c) for c in (0.5, 5.0))
    by_value, _ = alone("llama", low[3], low[2], "value", own_trunk=False)
    expected = {name: low[4][0][name] + 9 * by_value.get(name, 0.0) for name in low[4][0]}
    same_gradients(high[4][0], expected)


def test_further_epochs_on_the_policys_trunk_move_the_head_alone():
    plan = UpdatePlan(minibatches=3, critic_epochs=2)
    policy, _, _, _, of_policy, of_head, metrics = gradients_of_update("llama", own_trunk=False, plan=plan)
    assert (len(of_policy), len(of_head)) == (3, 9)
    assert metrics["update/optimizer_steps"] == 3
    assert metrics["update/critic_steps"] == 9
    assert not gradients_of(policy.module), "what only the head learns from must leave no gradient in the trunk"
    # The weights did not move, so each pass over the minibatches has the same loss: one of the joint ones.
    same = gradients_of_update("llama", own_trunk=False, plan=UpdatePlan())
    assert metrics["loss/value"] == pytest.approx(same[-1]["loss/value"], rel=1e-9)


# --- warm-up ---


@pytest.mark.sampled(2)
@pytest.mark.parametrize("own_trunk", [True, False])
def test_warm_up_leaves_the_policy_as_it_is(own_trunk, monkeypatch):
    policy, critic = make(own_trunk=own_trunk)
    policy.module.float()
    critic.module.float()
    algorithm = ppo()
    optimizer, of_critic = MasterAdamW(policy.module, lr=0.1), MasterAdamW(critic.module, lr=0.1)
    options = {"critic": critic, "critic_optimizer": of_critic, "critic_learning_rate": 0.1}
    batch = annotated(policy, critic, algorithm)
    plan = UpdatePlan(epochs=2, minibatches=2, critic_epochs=1, critic_warmup_steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    head = critic.head.linear.weight.detach().clone()

    def forbidden(batch: Batch):
        raise AssertionError("the policy is not needed while the critic warms up")

    monkeypatch.setattr(policy, "evaluate", forbidden)
    for step in (1, 2):
        metrics = one_update(policy, optimizer, algorithm, batch, plan, step=step, **options)
        assert metrics["update/optimizer_steps"] == metrics["update/epochs"] == 0
        assert metrics["update/critic_steps"] == 6
    after = optimizer.state_dict()
    assert after["step"] == before["step"] == {}
    for name, master in before["masters"].items():
        torch.testing.assert_close(after["masters"][name], master, rtol=0, atol=0)
    assert not torch.equal(critic.head.linear.weight, head)
    monkeypatch.undo()
    metrics = one_update(policy, optimizer, algorithm, batch, plan, step=3, **options)
    assert metrics["update/optimizer_steps"] == 4
    assert metrics["update/critic_steps"] == 6


def test_value_loss_of_a_warm_up_is_the_mean_over_its_passes():
    policy, critic = make()
    algorithm = ppo(value_coefficient=0.5)
    batch = annotated(policy, critic, algorithm)
    assert batch.returns_BT is not None
    expected = 0.5 * float(((critic.values(batch) - batch.returns_BT)[batch.mask_BT] ** 2).detach().mean())
    plan = UpdatePlan(epochs=2, minibatches=3, critic_epochs=1, critic_warmup_steps=1)
    metrics = one_update(
        policy, Kept(policy.module), algorithm, batch, plan, critic=critic, critic_optimizer=Kept(critic.module)
    )
    assert metrics["loss/value"] == pytest.approx(expected, rel=1e-5)


# --- learning ---


@pytest.mark.slow
@pytest.mark.parametrize("own_trunk", [True, False])
def test_the_critic_learns_to_foresee(own_trunk):
    """The reward is a function of the prompt: a critic can know it before the first token."""
    torch.manual_seed(0)
    policy = LanguagePolicy(tiny_model())
    critic = LanguageCritic(policy, own_trunk=own_trunk)
    if not own_trunk:
        policy = policy.with_outputs(SharedTrunkValues(critic))
    groups = some_groups(counts=(4, 4, 4, 4))
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = (1.0, 0.0, 3.0, 2.0)[group.start.index]
    algorithm = ppo(gamma=1.0, lam=1.0)
    optimizer, of_critic = MasterAdamW(policy.module, lr=0.0), MasterAdamW(critic.module, lr=0.0)
    explained, plan = [], UpdatePlan(critic_warmup_steps=1000)
    for step in range(1, 80):
        batch, metrics = prepare_batch(collate(groups), policy, algorithm, critics=(critic,))
        explained.append(metrics["value/explained_variance"])
        rate = 3e-3 if own_trunk else 5e-2
        one_update(
            policy, optimizer, algorithm, batch, plan, learning_rate=0.0, critic=critic, critic_optimizer=of_critic,
            critic_learning_rate=rate, step=step,
        )  # fmt: skip
    assert explained[0] == 0
    assert explained[-1] > 0.9


# --- kept ---


@pytest.mark.parametrize("own_trunk", [True, False])
def test_a_saved_critic_says_the_same_again(own_trunk, tmp_path):
    _, critic = make(own_trunk=own_trunk)
    if own_trunk:
        torch.manual_seed(1)
        for parameter in critic.trunk.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    batch = collate(some_groups())
    expected = critic.values(batch).detach()
    critic.save(tmp_path / "critic")
    fresh = LanguageCritic(LanguagePolicy(tiny_model(dtype=torch.float64)), own_trunk=own_trunk)
    assert not fresh.values(batch).any()
    fresh.load(tmp_path / "critic")
    torch.testing.assert_close(fresh.values(batch).detach(), expected, rtol=0, atol=0)
    if own_trunk:
        by_others = AutoModel.from_pretrained(tmp_path / "critic")
        for name, parameter in by_others.named_parameters():
            torch.testing.assert_close(parameter, critic.trunk.get_parameter(name), rtol=0, atol=0, check_dtype=False)


def test_a_critic_that_does_not_fit_is_refused_in_one_line(tmp_path):
    _, own = make()
    _, shared = make(own_trunk=False)
    own.save(tmp_path / "own")
    shared.save(tmp_path / "shared")
    with pytest.raises(ConfigError, match=r"has a trunk of its own: set critic\.trunk = 'own'"):
        shared.load(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"has no trunk of its own: set critic\.trunk = 'policy'"):
        own.load(tmp_path / "shared")
    _, other = make("qwen2")
    with pytest.raises(ConfigError, match="does not fit"):
        other.load(tmp_path / "own")
    Path(tmp_path / "own" / "value_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="does not fit"):
        own.load(tmp_path / "own")
