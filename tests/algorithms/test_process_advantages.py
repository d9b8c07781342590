"""Process supervision: both normalisations by hand and from the formula, their special cases, and a run that learns."""

from statistics import fmean, pstdev

import pytest
import torch

from covey.algorithms import ALGORITHMS, KLInReward, KLPenalty, grpo, rloo
from covey.algorithms.advantages import process, process_by_step, process_return_to_go
from covey.config import CRITIC_FREE, ConfigError, EvaluationConfig, LossConfig, RunConfig, SamplingConfig, UpdateConfig
from covey.core import kl, schedules
from covey.core.baselines import group_centered, group_zscore, leave_one_out
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.experiment.run import run
from covey.llm.tasks import Arithmetic
from helpers.credits import REFERENCE_SEED, gradient_of, ready
from helpers.gradients import same
from helpers.tabular_policy import ToyPolicy, generator, random_groups
from helpers.tiny_models import tiny_folder

CREDITS = {"process": process, "process_by_step": process_by_step, "process_return_to_go": process_return_to_go}
COMPARISONS = {"zscore": group_zscore, "mean": group_centered, "leave_one_out": leave_one_out}


def stepped(length: int, rewards: dict[int, float], *, context: int = 0, failed: bool = False) -> Rollout:
    """A rollout of `length` decisions whose steps end at the keys and earn the values."""
    return Rollout(
        context=context,
        actions=[(context + t) % 5 for t in range(length)],
        behavior_logprobs=[-1.0] * length,
        end=EndReason.STOP,
        step_rewards=[rewards.get(t, 0.0) for t in range(length)],
        step_ends=list(rewards),
        reward=None if failed else float(sum(rewards.values())),
    )


def group(*rollouts: Rollout, index: int = 0) -> Group:
    return Group(Start(index, index), list(rollouts))


def advantages(estimate, *groups: Group) -> list[list[float]]:
    return estimate(collate(list(groups))).advantages_BT.tolist()


def random_steps(seed: int = 0) -> list[Group]:
    """Rollouts of random lengths with random steps; the last decision ends one, a rollout of the second group failed,
    one of the third goes on after its last step."""
    source = generator(50 + seed)
    groups = random_groups(seed, count=3, size=4, longest=8)
    for one in groups:
        for item in one.rollouts:
            length = len(item.actions)
            ends = [t for t in range(length - 1) if torch.rand((), generator=source) < 0.4]
            item.step_ends = [*ends, length - 1]
            item.step_rewards = torch.randn(length, generator=source).tolist()  # within steps too, as a KL would be
            item.reward = sum(item.step_rewards)
    groups[1].rollouts[2].reward = None
    short = groups[2].rollouts[0]
    short.actions, short.behavior_logprobs = [1, 2, 3, 4], [-1.0] * 4
    short.step_ends, short.step_rewards, short.reward = [0, 2], [1.0, 0.5, -2.0, 7.0], 6.5
    return groups


def step_rewards(item: Rollout) -> list[tuple[int, float]]:
    """(last decision, reward) of every step."""
    first, found = 0, []
    for end in item.step_ends or []:
        found.append((end, sum(item.step_rewards[first : end + 1])))
        first = end + 1
    return found


def worth(item: Rollout, name: str) -> list[tuple[int, float]]:
    """(last decision, what is compared) of every step."""
    steps = step_rewards(item)
    if name != "process_return_to_go":
        return steps
    return [(end, sum(reward for _, reward in steps[k:])) for k, (end, _) in enumerate(steps)]


def by_formula(groups: list[Group], name: str) -> list[list[float]]:
    """DeepSeekMath 4.1.3 and its relatives, one group, rollout and decision at a time."""
    width = max(len(item.actions) for one in groups for item in one.rollouts)
    rows = []
    for one in groups:
        graded = [worth(item, name) for item in one.rollouts if item.reward is not None]
        for item in one.rollouts:
            row = [0.0] * width
            for k, (end, reward) in enumerate(worth(item, name) if item.reward is not None else []):
                siblings = [r for steps in graded for j, (_, r) in enumerate(steps) if name == "process" or j == k]
                normalised = (reward - fmean(siblings)) / (pstdev(siblings) + 1e-6)
                begin = 0 if name == "process" or k == 0 else step_rewards(item)[k - 1][0] + 1
                for t in range(begin, end + 1):
                    row[t] += normalised
            rows.append(row)
    return rows


# --- by hand and from the formula ---

# Steps of the group earn 1, 0, 3 and 0, 1: mean 1, variance (0 + 1 + 4 + 1 + 0) / 5 = 1.2.
TWO = group(stepped(5, {1: 1.0, 2: 0.0, 4: 3.0}), stepped(4, {0: 0.0, 3: 1.0}))


def test_process_by_hand():
    found = advantages(process(group_centered), TWO)
    assert found[0] == pytest.approx([1, 1, 1, 2, 2])  # 0 - 1 + 2, then -1 + 2, then 2
    assert found[1] == pytest.approx([-1, 0, 0, 0, 0])
    scaled = advantages(process(group_zscore), TWO)
    assert scaled[0] == pytest.approx([a / 1.2**0.5 for a in (1, 1, 1, 2, 2)], abs=1e-5)


def test_process_by_step_by_hand():
    # first steps 1 and 0, second ones 0 and 1, the third has no sibling; the tokens of a step share its advantage
    found = advantages(process_by_step(group_centered), TWO)
    assert found == [[0.5, 0.5, -0.5, 0, 0], [-0.5, 0.5, 0.5, 0.5, 0]]
    assert advantages(process_by_step(group_zscore), TWO)[0] == pytest.approx([1, 1, -1, 0, 0], abs=1e-5)


def test_process_return_by_hand():
    # from the first step on 4 and 1, from the second 3 and 1; the third has no sibling
    found = advantages(process_return_to_go(group_centered), TWO)
    assert found == [[1.5, 1.5, 1, 0, 0], [-1.5, -1, -1, -1, 0]]


def test_stopping_early_looks_good_to_the_sum_and_bad_to_the_return():
    """What happened on the embedded model (docs/process.md): every first step right, later ones half the time."""
    stopped = [stepped(1, {0: 1.0}) for _ in range(2)]
    went_on = [stepped(2, {0: 1.0, 1: right}) for right in (1.0, 0.0)]
    first = {name: [row[0] for row in advantages(CREDITS[name](group_centered), group(*stopped, *went_on))]
             for name in CREDITS}  # fmt: skip
    assert first["process"][0] > fmean(first["process"][2:])
    assert first["process_by_step"] == [0, 0, 0, 0]
    assert first["process_return_to_go"][0] < 0 < fmean(first["process_return_to_go"][2:])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CREDITS)
def test_advantages_are_those_of_the_formula(name, seed):
    groups = random_steps(seed)
    found = CREDITS[name](group_zscore)(collate(groups)).advantages_BT
    torch.testing.assert_close(found, torch.tensor(by_formula(groups, name)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compare", COMPARISONS.values(), ids=COMPARISONS)
@pytest.mark.parametrize("credit", CREDITS.values(), ids=CREDITS)
def test_a_single_step_is_outcome_supervision(credit, compare):
    rewards = [2.0, 0.0, 1.0]
    groups = [group(*(stepped(3, {2: reward}) for reward in rewards))]
    expected = compare(torch.tensor(rewards), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    found = credit(compare)(collate(groups)).advantages_BT
    torch.testing.assert_close(found, expected[:, None].expand(3, 3))


# --- special cases ---


@pytest.mark.parametrize("credit", CREDITS.values(), ids=CREDITS)
def test_what_follows_the_last_step_is_credited_with_nothing(credit):
    found = advantages(credit(group_centered), group(stepped(4, {1: 1.0}), stepped(4, {1: 0.0})))
    assert found == [[0.5, 0.5, 0, 0], [-0.5, -0.5, 0, 0]]


@pytest.mark.parametrize("credit", [process, process_by_step])
def test_steps_that_all_earn_the_same_teach_nothing(credit):
    groups = [group(stepped(4, {1: 0.1, 3: 0.1}), stepped(3, {0: 0.1, 1: 0.1, 2: 0.1}))]
    batch, metrics = ready(groups, grpo(kl=KLPenalty(), credit=credit))
    assert metrics["groups/zero_advantage_fraction"] == 1
    assert not len(batch)


def test_equal_totals_from_different_steps_teach():
    groups = [group(stepped(2, {0: 1.0, 1: 0.0}), stepped(2, {0: 0.0, 1: 1.0}))]
    assert ready(groups, grpo(kl=KLPenalty()))[1]["groups/zero_advantage_fraction"] == 1
    for credit in CREDITS.values():
        assert ready(groups, grpo(kl=KLPenalty(), credit=credit))[1]["groups/zero_advantage_fraction"] == 0


@pytest.mark.parametrize("credit", CREDITS.values(), ids=CREDITS)
def test_failed_rollouts_change_nothing(credit):
    good = [stepped(3, {0: 1.0, 2: 0.0}), stepped(2, {0: 0.0, 1: 0.5})]
    found = advantages(credit(group_zscore), group(good[0], stepped(3, {0: 9.0, 1: 9.0, 2: 9.0}, failed=True), good[1]))
    assert found[1] == [0, 0, 0]
    assert [found[0], found[2]] == advantages(credit(group_zscore), group(*good))


@pytest.mark.parametrize("name", CREDITS)
def test_a_kl_in_the_reward_is_charged_to_the_step_of_its_tokens(name):
    groups = [group(stepped(4, {1: 1.0, 3: 0.0}), stepped(4, {2: 0.0, 3: 1.0}, context=1))]
    algorithm = grpo(kl=KLPenalty(schedules.constant(0.5), KLInReward(kl.k1)), credit=CREDITS[name])
    batch, _ = ready(groups, algorithm)
    known = ToyPolicy(seed=REFERENCE_SEED).evaluate(collate(groups)).logprobs_BT.detach()
    for item, row in zip(groups[0].rollouts, known.tolist(), strict=True):
        item.step_rewards = [r - 0.5 * (-1 - ref) for r, ref in zip(item.step_rewards, row, strict=True)]
    torch.testing.assert_close(batch.advantages_BT, torch.tensor(by_formula(groups, name)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("credit", CREDITS.values(), ids=CREDITS)
def test_rows_in_any_order_padding_and_microbatches_change_nothing(credit):
    groups = random_steps(1)
    algorithm = rloo(kl=KLPenalty(), credit=credit)
    whole = gradient_of(groups, algorithm)
    same(gradient_of([Group(one.start, one.rollouts[::-1]) for one in groups[::-1]], algorithm), whole)
    same(gradient_of(groups, algorithm, rows=2, padding=9.0), whole)


@pytest.mark.parametrize("name", [name for name in CRITIC_FREE if name != "reinforce_pp"])
@pytest.mark.parametrize("credit", CREDITS.values(), ids=CREDITS)
def test_every_group_algorithm_takes_it(credit, name):
    options = {"max_length": 8} if name == "dr_grpo" else {}
    algorithm = ALGORITHMS[name](kl=KLPenalty(), credit=credit, **options)
    gradient = gradient_of(random_steps(2), algorithm)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


# --- steps in a batch ---


def test_without_steps_the_whole_rollout_is_one():
    groups = [group(stepped(3, {0: 1.0, 2: 1.0}), stepped(2, {1: 1.0}))]
    groups[0].rollouts[1].step_ends = None
    assert collate(groups).step_end_BT.tolist() == [[True, False, True], [False, True, False]]


# --- a run ---


def config(folder, name: str, **fields) -> RunConfig:
    values = {
        "model": str(folder / "model"), "steps": 20, "run_dir": str(folder / name), "precision": "fp32", "threads": 1,
        "show_rollouts_every": 0, "sampling": SamplingConfig(prompts_per_step=4, group_size=8, max_new_tokens=8),
        "update": UpdateConfig(learning_rate=3e-3), "evaluation": EvaluationConfig(problems=8),
    }  # fmt: skip
    return RunConfig(**(values | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    tiny_folder(folder / "model")
    return folder


def test_a_script_without_a_step_reward_is_refused_before_the_model_loads(folder):
    chosen = config(folder, "refused", loss=LossConfig(credit="process"))
    with pytest.raises(ConfigError, match="no reward is paid by step"):
        run(chosen, task=Arithmetic(digits=(1,)), rewards=[lambda completions, **_: [0.0] * len(completions)])
