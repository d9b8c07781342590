"""Training steps with a reward for every decision: by covey's own path, and PPO straight from its formulas."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.tabular_policy import CONTEXTS, Recorder, ToyCritic, ToyPolicy, generator, random_groups
from helpers.updates import one_update

REFERENCE_SEED = 2
ENDS = (EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.STOP, EndReason.CUT)


def episode(rewards: Sequence[float], *, context: int = 0, end: EndReason = EndReason.TERMINATED) -> Rollout:
    """A rollout that earned these rewards, with actions of no importance."""
    count = len(rewards)
    return Rollout(
        context=context,
        actions=[(context + t) % 5 for t in range(count)],
        behavior_logprobs=[-1.0] * count,
        end=end,
        step_rewards=list(rewards),
        reward=float(sum(rewards)),
    )


def group(*rollouts: Rollout, index: int = 0) -> Group:
    return Group(Start(index, index), list(rollouts))


def random_episodes(seed: int = 0, count: int = 3, size: int = 3) -> list[Group]:
    """Groups of rollouts of random lengths, each decision with a random reward, that ended in every way."""
    source = generator(100 + seed)
    groups = random_groups(seed, count, size)
    for g, group in enumerate(groups):
        for i, item in enumerate(group.rollouts):
            item.step_rewards = torch.randn(len(item.actions), generator=source).tolist()
            item.reward = sum(item.step_rewards)
            item.end = ENDS[(g + i) % len(ENDS)]
    return groups


def moved(rows: int = 1000, padding: float = 0.0) -> ToyPolicy:
    """The policy of seed 1 after an update: some of its ratios lie beyond the clip range."""
    policy = ToyPolicy(seed=1, rows=rows, padding=padding)
    with torch.no_grad():
        policy.table.add_(0.4 * torch.randn(policy.table.shape, generator=generator(7)))
    return policy


def moved_critic(padding: float = 0.0) -> ToyCritic:
    critic = ToyCritic(padding=padding)
    with torch.no_grad():
        critic.table.add_(0.4 * torch.randn(critic.table.shape, generator=generator(8)))
    return critic


def ready(
    groups: list[Group] | Batch, algorithm: Algorithm, *, rows: int = 1000, padding: float = 0.0, old: bool = True
) -> tuple[Batch, dict[str, float]]:
    """The annotated batch, sampled by the policy of seed 1; `old` keeps that policy's log-probabilities."""
    return prepare_batch(
        groups if isinstance(groups, Batch) else collate(groups),
        ToyPolicy(seed=1, rows=rows, padding=padding),
        algorithm,
        reference=ToyPolicy(seed=REFERENCE_SEED, rows=rows, padding=padding),
        critics=(ToyCritic(padding=padding),) if algorithm.needs_critic else (),
        kl_coefficient=algorithm.kl.coefficient(1),
        optimizer_steps=2 if old else 1,
    )


def gradients(
    groups: list[Group] | Batch,
    algorithm: Algorithm,
    *,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008
    rows: int = 1000,
    padding: float = 0.0,
    step: int = 1,
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """The policy's and the critic's gradients at every optimizer step of an update that begins at the moved ones (the
    weights stay as they are), and metrics."""
    batch, found = ready(groups, algorithm, rows=rows, padding=padding)
    policy, critic = moved(rows, padding), moved_critic(padding)
    recorder, critic_recorder = Recorder(policy), Recorder(critic)
    options = {"critic": critic, "critic_optimizer": critic_recorder} if algorithm.needs_critic else {}
    learned = one_update(
        policy, recorder, algorithm, batch, plan, kl_coefficient=algorithm.kl.coefficient(1),
        critic_learning_rate=0.2, step=step, **options,
    )  # fmt: skip
    assert set(recorder.learning_rates) <= {0.1}
    assert set(critic_recorder.learning_rates) <= {0.2}
    return recorder.gradients, critic_recorder.gradients, found | learned


def gradient_of(groups: list[Group] | Batch, algorithm: Algorithm, **options) -> Tensor:
    """The policy's and the critic's gradient of a step in one piece, in one vector."""
    actor, critic, _ = gradients(groups, algorithm, **options)
    assert len(actor) == 1
    return torch.cat([gradient.flatten() for gradient in (*actor, *critic)])


def ppo_gradient(
    groups: list[Group],
    *,
    gamma: float,
    lam: float,
    whiten: bool,
    value_coefficient: float,
    value_clip: float | None,
    entropy_coefficient: float,
    kl_coefficient: float,
) -> Tensor:
    """The gradient of PPO (eq. 9), GAE and KL in the reward, decision by decision in Python floats."""
    old_policy, policy, reference = ToyPolicy(seed=1), moved(), ToyPolicy(seed=REFERENCE_SEED)
    old_critic, critic = ToyCritic(), moved_critic()
    advantages: list[float] = []
    decisions = []  # (rollout, its column, return, old value)
    for item in (item for group in groups for item in group.rollouts if item.reward is not None):
        states = list(zip([item.context] * len(item.actions), [5, *item.actions[:-1]], strict=True))
        values = [old_critic.table[place].item() for place in states]
        final = item.end in (EndReason.TERMINATED, EndReason.STOP)
        after = 0.0 if final else old_critic.following[item.context, item.actions[-1]].item()
        later, found = 0.0, []
        for t in reversed(range(len(states))):
            known = reference.table[states[t]].log_softmax(-1)[item.actions[t]].item()
            reward = item.step_rewards[t] - kl_coefficient * (item.behavior_logprobs[t] - known)
            following = values[t + 1] if t + 1 < len(states) else after
            later = reward + gamma * following - values[t] + gamma * lam * later
            found.append(later)
        found.reverse()
        advantages += found
        decisions += [(states[t], item.actions[t], found[t] + values[t], values[t]) for t in range(len(states))]
    if whiten:
        mean, std = fmean(advantages), pstdev(advantages)
        advantages = [(advantage - mean) / (std + 1e-6) for advantage in advantages]
    loss = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for advantage, (place, action, target, old_value) in zip(advantages, decisions, strict=True):
        logprobs = policy.table[place].log_softmax(-1)
        ratio = (logprobs[action] - old_policy.table[place].log_softmax(-1)[action].detach()).exp()
        clipped += not 0.8 < ratio.item() < 1.2
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = loss - entropy_coefficient * -(logprobs.exp() * logprobs).sum()
        value = critic.table[place]
        error = (value - target) ** 2
        if value_clip is not None:
            near = old_value + (value - old_value).clamp(-value_clip, value_clip)
            error = torch.maximum(error, (near - target) ** 2)
        loss = loss + value_coefficient * error
    assert clipped, "a ratio that is never clipped would prove little"
    (loss / len(decisions)).backward()
    return torch.cat([policy.table.grad.flatten(), critic.table.grad.flatten()])  # type: ignore[union-attr]


def kl_by_hand(table: list, other: list, batch: Batch, estimator: str, *, to_behavior: bool) -> float:
    """sum_{i,t} w_{i,t} KL_{i,t} in plain Python, from tables of logits as nested lists."""
    total = 0.0
    for row in range(len(batch)):
        for t in range(int(batch.mask_BT[row].sum())):
            action = int(batch.actions_BT[row, t])
            previous = 5 if t == 0 else int(batch.actions_BT[row, t - 1])
            assert 0 <= batch.context[row] < CONTEXTS
            new, base = (_softmax(logits[batch.context[row]][previous]) for logits in (table, other))
            first, second = (base, new) if to_behavior else (new, base)
            if estimator == "exact":
                kl = sum(p * math.log(p / q) for p, q in zip(first, second, strict=True))
            else:
                x = second[action] / first[action]
                kl = x - math.log(x) - 1
            assert batch.loss_weights_BT is not None
            total += float(batch.loss_weights_BT[row, t]) * kl
    return total


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]
