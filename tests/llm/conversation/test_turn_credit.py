"""Credit per turn: the rewards of turns are those of their last decisions, and turns are compared as steps are."""

import pytest
import torch

from covey.algorithms.advantages import gae_advantage, process, process_by_step, process_return_to_go
from covey.config import ConversationConfig, LossConfig, RewardConfig, RunConfig
from covey.config.common import ConfigError
from covey.core.baselines import group_centered
from covey.data import EndReason, Group, Start, collate
from covey.experiment.problem import build_problem, build_rollout_kind
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.sampler import Conversation, Limits
from covey.llm.conversation.styles import Style
from covey.llm.generation.generator import Completion
from covey.llm.grader import build_grader
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.tasks import Arithmetic
from helpers import guessing
from helpers.chat_models import tiny_chat
from helpers.in_threads import EnvironmentThreads

PAID = ([1.0, 0.0, 3.0], [0.0, 1.0])  # the example of docs/process.md; their mean is 1
TURNS = (["11", "2", "345"], ["6", "78"])


class Paying:
    """Pays the rewards of a list, and ends after the last."""

    def reset(self, rewards=()):
        self._rewards = list(rewards)

    def step(self, message):
        return "b", self._rewards.pop(0), not self._rewards


def group_of(paid=PAID, turns=TURNS, *, weight_of_last=0.0):
    """Conversations with given turns of the model, each followed by an end token, but for the last of the first."""
    chat = tiny_chat()
    rollouts = []
    for rewards, texts in zip(paid, turns, strict=True):
        session = EnvironmentThreads(Paying).open(0)
        one = Conversation(session, Style(chat, "step"), ConversationEncoder(chat), Limits(9, 9, 99))
        one.begin("1+2", session.ask({"do": "reset", "columns": {"rewards": rewards}}))
        for text in texts:
            tokens = [*chat.encode_text(text), *((1,) if text != "345" else ())]
            completion = Completion(tokens, [-1.0] * len(tokens), EndReason.STOP, 0)
            one.answer(completion).result(60)
        one.finish(session.ask({"do": "end"}))
        rollouts.append(one.rollout((3,)))
    group = Group(Start(0, "1+2"), rollouts)
    last = WeightedReward.from_function(guessing.last, weight=weight_of_last)
    build_grader(["environment", last] if weight_of_last else ["environment"], ()).grade([group])
    return group


def by_turn(values_BT, batch):
    """Values of a batch by turn of each rollout; all decisions of a turn must have the same."""
    found = []
    for values, mask, ends in zip(values_BT, batch.mask_BT, batch.step_end_BT, strict=True):
        turns, first = [], 0
        for end in ends.nonzero()[:, 0].tolist():
            of_turn = values[first : end + 1][mask[first : end + 1]]
            assert len(of_turn.unique()) == 1
            turns.append(round(float(of_turn[0]), 6))
            first = end + 1
        assert not mask[first:].any()
        found.append(turns)
    return found


def test_the_rewards_of_turns_are_those_of_their_last_decisions():
    group = group_of()
    for rollout, paid, turns in zip(group.rollouts, PAID, TURNS, strict=True):
        assert rollout.reward == sum(paid)
        lengths = [len(text) + (text != "345") for text in turns]
        decided = [place for place, own in enumerate(rollout.decided) if own]
        ends = [decided[sum(lengths[: number + 1]) - 1] for number in range(len(turns))]
        assert rollout.step_ends == ends
        expected = [0.0] * len(rollout.actions)
        for end, reward in zip(ends, paid, strict=True):
            expected[end] = reward
        assert rollout.step_rewards == expected


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (process, [[1, 1, 2], [-1, 0]]),
        (process_by_step, [[0.5, -0.5, 0], [-0.5, 0.5]]),
        (process_return_to_go, [[1.5, 1, 0], [-1.5, -1]]),
    ],
)
def test_turns_are_compared_by_hand(credit, expected):
    batch = collate([group_of()])
    assert by_turn(credit(group_centered)(batch).advantages_BT, batch) == expected


def test_a_reward_over_the_conversation_belongs_to_the_last_turn():
    """It is the last digit that the model wrote, with a weight of 2."""
    rollouts = group_of(weight_of_last=2.0).rollouts
    paid = [[one.step_rewards[end] for end in one.step_ends] for one in rollouts]
    assert paid == [[1.0, 0.0, 3.0 + 2 * 5.0], [0.0, 1.0 + 2 * 8.0]]
    assert [one.reward for one in rollouts] == [14.0, 17.0]


def test_a_reward_function_may_pay_turns():
    group = group_of()
    grader = build_grader(
        [WeightedReward.from_function(guessing.by_turn, per_step=True, weight=4.0), "environment"], ()
    )
    group.rollouts[0].messages[0]["content"] = "1x"
    grader.grade([group])
    paid = [[one.step_rewards[end] for end in one.step_ends] for one in group.rollouts]
    assert paid == [[2.0 + 1.0, 4.0, 4.0 + 3.0], [4.0, 4.0 + 1.0]]


def test_gae_sees_the_reward_at_the_end_of_each_turn():
    """With values of 0 and lambda 1, the advantage of a decision is what is earned from it on."""
    batch = collate([group_of()])
    batch.values_BT, batch.bootstrap_value_B = torch.zeros(batch.mask_BT.shape), torch.zeros(2)
    estimate = gae_advantage(gamma=1.0, lam=1.0, whiten=False)
    assert by_turn(estimate(batch).advantages_BT, batch) == [[4, 3, 3], [1, 1]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("environment", "rewards", "fits"),
    [
        (f"{guessing.__file__}:Guess", (), True),
        (f"{guessing.__file__}:Guess", ("environment", "numeric"), True),
        ("calculator", ("environment",), False),
    ],
)
def test_an_environment_that_pays_no_turns_is_refused(environment, rewards, fits):
    config = RunConfig(
        conversation=ConversationConfig(environment=environment), loss=LossConfig(credit="process"),
        rewards=tuple(RewardConfig(name=name) for name in rewards),
    )  # fmt: skip
    kind = build_rollout_kind(config)
    try:
        if fits:
            build_problem(config, task=Arithmetic(digits=(1,)), kind=kind).grader.close()
            return
        with pytest.raises(ConfigError, match="no reward is paid by turn: use an environment with step"):
            build_problem(config, task=Arithmetic(digits=(1,)), kind=kind)
    finally:
        kind.close()
