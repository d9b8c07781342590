"""What is recorded of a rollout: advantage, baseline and tokens, by hand, however its group was collected."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from covey.algorithms import Algorithm, dapo, grpo, ppo
from covey.algorithms.advantages import process
from covey.data import EndReason, Group, Rollout, RolloutCredit, Start, Team, TokenTable, collate
from covey.runtime.distributed import ALONE
from covey.train.collect import StepGroups
from covey.train.loop import train
from covey.train.prepare import prepare_batch, prepare_rows
from covey.train.record import RolloutRecorder, TokenRecorder
from covey.train.state import Progress
from helpers.loop_world import World, build, never
from helpers.tabular_policy import ToyCritic, ToyPolicy, rollout
from helpers.thread_team import on_ranks

OLD, REFERENCE, UPDATED = ToyPolicy(seed=1), ToyPolicy(seed=2), ToyPolicy(seed=3)
HALF = 1 / math.sqrt(5)  # z-scores of 0, 1, 2, 3 are -3, -1, 1 and 3 times this


def group(index: int, rewards: Sequence[float | None], *, length: int = 2, dropped: bool = False) -> Group:
    """Rollouts whose actions are their number, with these rewards."""
    rollouts = [rollout([place % 5] * length, reward, context=index % 4) for place, reward in enumerate(rewards)]
    return Group(Start(index, index), rollouts, dropped=dropped)


def credits_of(
    kept: Sequence[Group], dropped: Sequence[Group] = (), algorithm: Algorithm | None = None, **options: object
) -> list[list[RolloutCredit]]:
    prepared = prepare_rows(collate(list(kept)), OLD, algorithm or grpo(), reference=REFERENCE, **options)  # type: ignore[arg-type]
    return RolloutRecorder().credits(StepGroups(list(kept), list(dropped)), prepared)


def advantages(credits: list[RolloutCredit]) -> list[float | None]:
    return [credit.advantage for credit in credits]


def baselines(credits: list[RolloutCredit]) -> list[float | None]:
    return [credit.baseline for credit in credits]


def test_advantages_and_baselines_by_hand_also_of_rollouts_without_a_gradient():
    groups = [group(0, [0, 1, 2, 3]), group(1, [0.1] * 4, length=5)]
    live, dead = credits_of(groups, kl_coefficient=0.04)
    assert advantages(live) == pytest.approx([-3 * HALF, -HALF, HALF, 3 * HALF], rel=1e-5)
    assert baselines(live) == [1.5] * 4
    assert advantages(dead) == [0.0] * 4
    assert baselines(dead) == [pytest.approx(0.1, rel=1e-15)] * 4  # of the rewards themselves, not of float32
    batch, _ = prepare_batch(collate(groups), OLD, grpo(), reference=REFERENCE, kl_coefficient=0.04)
    assert len(batch) == 4  # the dead group is not in the update


def test_the_advantage_of_an_outcome_is_that_of_every_decision_exactly():
    ((*_, last),) = credits_of([group(0, [0, 1, 3], length=7)])  # in float32 the sum of seven would be rounded
    prepared = prepare_rows(collate([group(0, [0, 1, 3], length=7)]), OLD, grpo(), reference=REFERENCE)
    assert last.advantage == float(prepared.advantages_BT[2, 3])


def test_a_failed_grading_has_no_advantage_and_is_in_no_baseline():
    some, single, none = credits_of([group(0, [None, 1, 3]), group(1, [None, 2]), group(2, [None, None])])
    assert advantages(some) == [None, pytest.approx(-1, rel=1e-5), pytest.approx(1, rel=1e-5)]
    assert baselines(some) == [2.0] * 3
    assert advantages(single) == [None, 0.0]
    assert baselines(single) == [None] * 2  # one rollout is compared with no other
    assert advantages(none) == baselines(none) == [None] * 2


def test_dropped_groups_stand_in_the_order_of_the_draws_without_advantages():
    kept = [group(1, [0, 2]), group(4, [5, 3])]
    dropped = [group(0, [1, 1, 1], dropped=True), group(2, [None, 7, 7], dropped=True)]
    found = credits_of(kept, dropped)
    assert [baselines(one) for one in found] == [[1.0] * 3, [1.0] * 2, [7.0] * 3, [4.0] * 2]
    assert advantages(found[0]) == [None] * 3
    assert advantages(found[1]) == pytest.approx([-1, 1], rel=1e-5)
    assert advantages(found[2]) == [None] * 3
    assert advantages(found[3]) == pytest.approx([1, -1], rel=1e-5)


def test_groups_of_different_sizes_keep_their_rows():
    """As adaptive groups have them."""
    first, second = credits_of([group(0, [1, 1]), group(1, [0, 0, 0, 4])])
    assert advantages(first) == [0.0, 0.0]
    assert advantages(second) == pytest.approx([-HALF * math.sqrt(5 / 3)] * 3 + [math.sqrt(3)], rel=1e-5)
    assert baselines(second) == [1.0] * 4


def test_a_truncated_rollout_that_is_not_in_the_loss_has_its_advantage():
    made = group(0, [0, 2])
    made.rollouts[0].end = EndReason.LENGTH
    (found,) = credits_of([made], mask_truncated=True)
    assert advantages(found) == pytest.approx([-1, 1], rel=1e-5)


def test_the_advantage_of_steps_is_their_mean_over_the_decisions():
    """Step rewards 1 and 3 after one and three decisions, 2 after two: z-scores -1.22, 1.22 and 0."""
    first = replace(rollout([0, 1, 2], 4.0), step_rewards=[1.0, 0.0, 3.0], step_ends=[0, 2])
    second = replace(rollout([0, 1], 2.0), step_rewards=[0.0, 2.0], step_ends=[1])
    (found,) = credits_of([Group(Start(0, 0), [first, second])], algorithm=grpo(credit=process))
    z = math.sqrt(1.5)
    # The first decision has both steps, -z + z; the two after it the second step alone.
    assert advantages(found) == pytest.approx([(0 + z + z) / 3, 0.0], rel=1e-5)
    assert baselines(found) == [3.0, 3.0]


def test_with_a_critic_the_baseline_is_its_mean_value():
    critic = ToyCritic()
    made = [group(0, [1.0, None], length=3), group(1, [2.0, 5.0], length=1)]
    made[0].rollouts[0].decided = [True, False, True]
    found = credits_of(made, algorithm=ppo(gamma=1.0, lam=1.0, whiten=False), critics=(critic,))
    values_BT = critic.values(collate(made)).tolist()
    assert baselines(found[0]) == [pytest.approx((values_BT[0][0] + values_BT[0][2]) / 2, rel=1e-6), None]
    assert baselines(found[1]) == pytest.approx([values_BT[2][0], values_BT[3][0]], rel=1e-6)
    # With gamma = lambda = 1 an advantage is the reward minus the value.
    assert advantages(found[0]) == [pytest.approx(1 - (values_BT[0][0] + values_BT[0][2]) / 2, rel=1e-5), None]
    assert advantages(found[1]) == pytest.approx([2 - values_BT[2][0], 5 - values_BT[3][0]], rel=1e-5)


def test_an_advantage_that_is_not_finite_is_unknown():
    made = [group(0, [0.0, 1.0])]
    prepared = prepare_rows(collate(made), OLD, grpo(), reference=REFERENCE)
    broken = replace(prepared, advantages_BT=torch.tensor([[math.nan, 1.0], [math.inf, 1.0]]))
    assert advantages(RolloutRecorder().credits(StepGroups(made), broken)[0]) == [None, None]


def texts(ids: Sequence[int]) -> list[str]:
    return [f"<{number}>" for number in ids]


def tables(
    kept: list[Group], dropped: Sequence[Group] = (), team: Team = ALONE, coefficient: float = 0.04
) -> list[list[TokenTable | None]]:
    prepared = prepare_rows(collate(kept), OLD, grpo(), reference=REFERENCE, kl_coefficient=coefficient, team=team)
    found = TokenRecorder(UPDATED, texts, team).credits(StepGroups(kept, list(dropped)), prepared)
    assert [advantages(one) for one in found] == [
        advantages(one) for one in RolloutRecorder().credits(StepGroups(kept, list(dropped)), prepared)
    ]
    return [[credit.tokens for credit in one] for one in found]


def logprobs_of(policy: ToyPolicy, one: Rollout) -> list[float]:
    row = policy.evaluate(collate([Group(Start(0, 0), [replace(one, decided=None)])])).logprobs_BT[0]
    return [round(value, 6) for value in row.float().tolist()]


def test_the_tokens_of_a_rollout_by_hand():
    made = Group(Start(0, 0), [rollout([4, 0, 2], 0.0, logprob=-1.23456789), rollout([1], 2.0)])
    ((first, second),) = tables([made])
    assert first == TokenTable(
        ids=[4, 0, 2],
        texts=["<4>", "<0>", "<2>"],
        logprobs=[-1.234568] * 3,
        reference_logprobs=pytest.approx(logprobs_of(REFERENCE, made.rollouts[0]), abs=2e-6),  # type: ignore[arg-type]
        advantages=[pytest.approx(-1.0, abs=2e-6)] * 3,
        updated_logprobs=pytest.approx(logprobs_of(UPDATED, made.rollouts[0]), abs=2e-6),  # type: ignore[arg-type]
    )
    assert second is not None
    assert [len(column) for column in vars(second).values()] == [1] * 6  # padding is not a token


def test_undecided_tokens_have_a_text_and_no_number():
    made = [rollout([4, 0, 2, 1], 0.0), rollout([1, 1], 2.0)]
    made[0].decided = [True, False, False, True]
    ((first, _),) = tables([Group(Start(0, 0), made)])
    assert first is not None
    assert first.ids == [4, 0, 2, 1]
    assert first.texts == ["<4>", "<0>", "<2>", "<1>"]
    for column in (first.logprobs, first.reference_logprobs, first.advantages, first.updated_logprobs):
        assert column is not None
        assert [value is None for value in column] == [False, True, True, False]
    assert first.updated_logprobs is not None
    whole = logprobs_of(UPDATED, made[0])
    assert first.updated_logprobs[3] == pytest.approx(whole[3], abs=2e-6)  # the tool's output is still its context


def test_a_rollout_outside_of_the_update_has_the_log_probabilities_after_it():
    failed, dead = group(0, [None, 0, 2]), group(1, [1, 1])
    dropped = group(2, [3, 3], dropped=True)
    found = tables([failed, dead], [dropped])
    unknown = found[0][0]
    assert unknown is not None
    assert unknown.advantages == [None, None]
    assert unknown.reference_logprobs is None
    assert unknown.updated_logprobs == pytest.approx(logprobs_of(UPDATED, failed.rollouts[0]), abs=2e-6)
    without = found[1][0]
    assert without is not None
    assert without.advantages == [0.0, 0.0]
    assert without.updated_logprobs == pytest.approx(logprobs_of(UPDATED, dead.rollouts[0]), abs=2e-6)
    assert found[2][1] == TokenTable([1, 1], ["<1>", "<1>"], [-1.0, -1.0], None, [None, None], None)


def test_without_a_reference_there_are_no_reference_log_probabilities():
    ((first, _),) = tables([group(3, [0, 2])], coefficient=0.0)
    assert first is not None
    assert first.reference_logprobs is not None  # every fourth group is evaluated for the metric
    made = [group(0, [0, 2])]
    prepared = prepare_rows(collate(made), OLD, dapo())
    ((credit, _),) = TokenRecorder(UPDATED, texts).credits(StepGroups(made), prepared)
    assert credit.tokens is not None
    assert credit.tokens.reference_logprobs is None


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_record_what_one_records(size: int):
    made = [group(index, [index, 0, 1 + index % 2, None], length=1 + index) for index in range(5)]
    alone = tables(made, team=Team(4))
    for found in on_ranks(size, 4, lambda team: tables(made, team=team)):
        assert found == alone


def test_the_loop_hands_observers_one_record_after_its_update():
    """The updated log-probabilities are those after the optimizer step."""
    world = World()
    parts, settings = build(world, 2)
    train(replace(parts, recorder=TokenRecorder(parts.policy, texts)), settings, Progress(), should_stop=never)
    first, second = world.records
    assert (first.step, second.step) == (1, 2)
    assert first.metrics["reward/mean"] == 1.5
    assert first.metrics["time/record"] > 0
    seen = list(first.rollouts())
    assert [one.start.index for one, _, _ in seen] == [0] * 4 + [1] * 4
    assert [each.actions for _, each, _ in seen] == [[0], [1], [2], [3]] * 2
    assert [credit.advantage for _, _, credit in seen] == pytest.approx(
        [-3 * HALF, -HALF, HALF, 3 * HALF] * 2, rel=1e-5
    )
    for (_, _, before), (_, each, after) in zip(seen, second.rollouts(), strict=True):
        assert before.tokens is not None
        assert after.tokens is not None
        assert after.tokens.updated_logprobs == pytest.approx(logprobs_of(parts.policy, each), abs=2e-6)
        assert before.tokens.updated_logprobs != after.tokens.updated_logprobs
