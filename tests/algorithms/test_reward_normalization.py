"""Each reward normalised within its group before the sum (GDPO), by hand and from a recipe."""

import math
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.algorithms import ALGORITHMS, grpo
from covey.algorithms.advantages import outcome_of_each_reward
from covey.config import ArithmeticConfig, ConfigError, LossConfig, RewardConfig, RunConfig, SamplingConfig
from covey.config.recipe import config_from_dict
from covey.config.rules import DIVIDES_BY_GROUP_STD, validate
from covey.core import baselines
from covey.data import Group, Rollout, Start, collate
from covey.experiment.llm import build_llm_algorithm
from covey.experiment.problem import build_problem
from covey.llm.grader import build_grader
from covey.train.prepare import has_signal
from helpers.tabular_policy import rollout


def graded(parts: dict[str, float | None], *, failed: bool = False, length: int = 2) -> Rollout:
    one = rollout([1] * length, None if failed else 0.0)
    one.reward_parts = parts
    return one


def groups_of(*groups: list[dict[str, float | None]]) -> list[Group]:
    return [Group(Start(i, "p"), [graded(parts) for parts in group]) for i, group in enumerate(groups)]


def advantages(groups: list[Group], weights: dict[str, float]) -> list[float]:
    found = outcome_of_each_reward(weights)(baselines.group_zscore)(collate(groups)).advantages_BT
    assert torch.equal(found, found[:, :1].expand_as(found)), "all decisions of a rollout have its advantage"
    return found[:, 0].tolist()


def named(right: list[float | None], length: list[float | None]) -> list[dict[str, float | None]]:
    return [{"right": one, "length": other} for one, other in zip(right, length, strict=True)]


WEIGHTS = {"right": 1.0, "length": 0.5}


def test_decoupled_normalization_by_hand():
    """z-scores (1, -1, -1, 1) and (1, -1, 1, -1), with weights 1 and 1/2: sums 3/2, -3/2, -1/2, 1/2 of variance 5/4."""
    found = advantages(groups_of(named([1, 0, 0, 1], [0, -80, 0, -80])), WEIGHTS)
    assert found == pytest.approx([x / math.sqrt(5) for x in (3, -3, -1, 1)], abs=1e-5)


def test_a_constant_reward_leaves_the_others_their_say_and_the_batch_is_whitened_as_one():
    """The second group agrees on one reward: its sums are (1/2, 1/2, -1/2, -1/2), and all eight have variance 3/4."""
    groups = groups_of(named([1, 0, 0, 1], [0, -80, 0, -80]), named([1, 1, 1, 1], [0, 0, -3, -3]))
    found = advantages(groups, WEIGHTS)
    assert found == pytest.approx([x / math.sqrt(3) for x in (3, -3, -1, 1, 1, 1, -1, -1)], abs=1e-5)


def test_a_group_without_any_difference_has_no_advantage_at_all():
    groups = groups_of(named([1, 0, 0], [0, -8, -8]), named([1, 1, 1], [-3, -3, -3]), named([0.1 + 0.2] * 3, [0] * 3))
    groups[2].rollouts[1].reward_parts["right"] = 0.3  # differs by rounding only
    found = advantages(groups, WEIGHTS)
    assert found[3:] == [0.0] * 6
    batch = collate(groups)
    signal_G = has_signal(batch, outcome_of_each_reward(WEIGHTS)(baselines.group_zscore)(batch).advantages_BT)
    assert signal_G.tolist() == [True, False, False]


def test_failed_rollouts_count_in_no_mean_and_have_no_advantage():
    whole = groups_of(named([1, 0, 0, 1], [0, -80, 0, -80]))
    with_failed = groups_of(named([1, 0, 0, 1], [0, -80, 0, -80]))
    for place, parts in ((1, {"right": None, "length": -70.0}), (4, {"right": 1.0, "length": -1000.0})):
        with_failed[0].rollouts.insert(place, graded(parts, failed=True))
    found = advantages(with_failed, WEIGHTS)
    assert found.pop(4) == found.pop(1) == 0.0
    assert found == pytest.approx(advantages(whole, WEIGHTS), abs=1e-6)


def test_a_reward_without_a_value_is_left_out_for_its_rollout():
    """`right` is compared among three: (1, 0, 1/2) has the z-scores (sqrt(3/2), -sqrt(3/2), 0)."""
    found = advantages(groups_of(named([1, 0, 0.5, None], [0, 0, 0, 0])), WEIGHTS)
    assert found == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0], abs=1e-5)


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.tuples(*[st.one_of(st.none(), st.integers(-3, 3))] * 3, st.booleans()), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.tuples(*[st.integers(-2, 2)] * 3),
)
def test_advantages_are_those_of_the_formula(rows, weights):
    """A plain loop over rewards, groups and rollouts; None and failed rollouts in any place."""
    names = ["a", "b", "c"]
    groups = [
        Group(Start(i, "p"), [graded(dict(zip(names, row[:3], strict=True)), failed=row[3]) for row in group])
        for i, group in enumerate(rows)
    ]
    sums: dict[tuple[int, int], float] = {}
    for i, group in enumerate(rows):
        for j, row in enumerate(group):
            if not row[3]:
                sums[i, j] = 0.0
        for k, weight in enumerate(weights):
            known = {j: row[k] for j, row in enumerate(group) if row[k] is not None and not row[3]}
            for j, value in known.items():
                spread = pstdev(known.values())
                sums[i, j] += weight * (value - fmean(known.values())) / (spread + 1e-6) if spread else 0.0
    sums = {place: total if abs(total) > 1e-4 else 0.0 for place, total in sums.items()}  # terms that cancel out
    spread = pstdev(sums.values()) if sums else 0.0
    expected = [
        sums[i, j] / (spread + 1e-6) if (i, j) in sums else 0.0
        for i, group in enumerate(rows) for j in range(len(group))
    ]  # fmt: skip
    found = advantages(groups, dict(zip(names, map(float, weights), strict=True)))
    assert found == pytest.approx(expected, abs=2e-3)


def test_rewards_that_cancel_out_leave_no_residue():
    """Their z-scores are opposite up to eps and rounding, which a division by their own deviation would blow up."""
    groups = groups_of(named([0, 1], [0, -2]), named([0, 0.3, 0.1], [0, -0.03, -0.01]))
    assert advantages(groups, {"right": 1.0, "length": 1.0}) == [0.0] * 5


def test_the_scale_of_a_reward_does_not_matter():
    right, length = [1, 0, 0, 1], [-3, -8, 0, -1]
    small = advantages(groups_of(named(right, length)), WEIGHTS)
    large = advantages(groups_of(named(right, [1000 * value for value in length])), WEIGHTS)
    assert small == pytest.approx(large, abs=1e-5)


# ---- from a recipe ----


def config(algorithm: str = "grpo", **loss: object) -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        task=ArithmeticConfig(),
        rewards=(
            RewardConfig(name="numeric", weight=2.0),
            RewardConfig(name="digits", weight=0.25),
            RewardConfig(name="numeric", weight=-1.0, answer_column="answer"),
        ),
        sampling=SamplingConfig(overlong_tokens=8),
        loss=LossConfig(normalize_rewards="each", **loss),  # type: ignore[arg-type]
    )


def test_a_run_normalises_every_reward_with_its_own_weight():
    """The grader's names and weights reach the advantage, also those of a repeated name and of the run's own term."""
    chosen = config()
    problem = build_problem(chosen)
    assert problem.grader.weights == {"numeric": 2.0, "digits": 0.25, "numeric_2": -1.0, "overlong": 1.0}
    (start,) = problem.task.draw(0, 1, 1)
    right = start.columns["answer"]
    texts = [right, f"{right}0", "no", right]
    rollouts = [rollout([1] * length, None) for length in (3, 60, 64, 62)]
    for one, text in zip(rollouts, texts, strict=True):
        one.text = text
    groups = problem.grader.grade([Group(start, rollouts)])
    algorithm = build_llm_algorithm(chosen, problem.grader.weights)
    found = algorithm.advantage(collate(groups)).advantages_BT[:, 0].tolist()
    columns = {name: [one.reward_parts[name] for one in rollouts] for name in problem.grader.weights}
    z_scores = {
        name: [(value - fmean(values)) / (pstdev(values) + 1e-6) for value in values]
        for name, values in columns.items()
    }
    sums = [sum(weight * z_scores[name][row] for name, weight in problem.grader.weights.items()) for row in range(4)]
    assert len({round(value, 3) for value in columns["overlong"]}) > 2
    assert found == pytest.approx([value / pstdev(sums) for value in sums], abs=1e-4)
    whole = build_llm_algorithm(RunConfig(), {}).advantage(collate(groups)).advantages_BT[:, 0].tolist()
    assert whole != pytest.approx(found, abs=1e-2)


def test_a_step_reward_counts_with_its_sum():
    def two_steps(completions, steps, **columns):
        return [[float(len(text)) for text in texts] for texts in steps]

    from covey.llm.rewards.weighted_reward import WeightedReward

    grader = build_grader([WeightedReward.from_function(two_steps, per_step=True)], ())
    rollouts = [rollout([1, 1], None) for _ in range(3)]
    for one, text in zip(rollouts, ("a\nb", "aaa\nb", "a"), strict=True):
        one.text = text
    groups = grader.grade([Group(Start(0, "p"), rollouts)])
    assert collate(groups).reward_parts_BR.tolist() == [[3.0], [5.0], [1.0]]
    assert advantages(groups, grader.weights) == pytest.approx([0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-5)


def test_algorithms_that_divide_by_the_deviation_of_a_group():
    """For the others the sum of compared rewards is the compared sum, so the setting would change nothing."""
    generator = torch.Generator().manual_seed(0)
    group_B, valid_B = torch.arange(12) // 4, torch.ones(12, dtype=torch.bool)
    parts_BR = torch.randn(12, 2, generator=generator)
    linear = set()
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce"):
        compared = []

        def spy(credit_compare, compared=compared):  # the baseline that the algorithm's builder chooses
            compared.append(credit_compare)
            return lambda batch: None

        ALGORITHMS[name](credit=spy, **({"max_length": 3} if name == "dr_grpo" else {}))
        apart = sum(compared[0](part_B, group_B, valid_B) for part_B in parts_BR.T)
        if torch.allclose(compared[0](parts_BR.sum(dim=1), group_B, valid_B), apart, atol=1e-5):
            linear.add(name)
    assert set(ALGORITHMS) - linear - {"ppo", "reinforce_pp"} == set(DIVIDES_BY_GROUP_STD)
    assert linear


def test_combinations_without_meaning_are_refused():
    for wrong, message in [
        (config("dr_grpo"), "dr_grpo does not divide by the deviation of a group"),
        (config("ppo"), "ppo does not divide"),
        (config("reinforce_pp"), "choose grpo, dapo, gspo or cispo"),
        (config(credit="process"), "compares whole completions, and loss.credit is 'process'"),
        (config(kl_estimator="k1"), 'set kl_estimator = "k3"'),
    ]:
        with pytest.raises(ConfigError, match=message):
            validate(wrong)
    for fine in (config(), config("dapo"), config(kl_estimator="k1", kl_coefficient=0.0)):
        validate(fine)
    with pytest.raises(ConfigError, match=r"loss.normalize_rewards.*normalize_then_sum is \"each\""):
        config_from_dict({"loss": {"multi_objective_aggregation": "normalize_then_sum"}})


def test_the_parts_stay_with_their_rows_when_columns_are_cut():
    groups = groups_of(named([1, 0, 0], [0, -80, 0]))
    batch = collate(groups)
    part = batch.select(torch.tensor([2, 0]))
    assert part.reward_names == ("right", "length")
    assert part.reward_parts_BR.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    short = collate([Group(Start(0, "p"), [graded({"a": 1, "b": 2, "c": 3}, length=1), graded({"b": 5}, length=1)])])
    assert short.select(torch.tensor([0, 1])).reward_parts_BR.shape == (2, 3)
    assert short.reward_parts_BR[1].isnan().tolist() == [True, False, True]
    assert collate([Group(Start(0, "p"), [rollout([1], 1.0)])]).reward_parts_BR is None
    assert grpo().advantage(batch).advantages_BT.shape == (3, 2)
