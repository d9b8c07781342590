"""Faults of environments: the run goes on, and the gradient of the clean rollouts is bitwise that without the others.

Every fault has a group of its own, in which the environment of one of six conversations is at fault.
"""

import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from covey.algorithms import KLPenalty, grpo
from covey.data import EndReason, Group, Start, collate
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.processes import EnvironmentProcesses
from covey.llm.conversation.sampler import ConversationSampler
from covey.llm.conversation.styles import Style
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.grader import build_grader
from covey.llm.policy import LanguagePolicy
from covey.runtime.optimizer import StepResult
from covey.train.prepare import prepare_batch
from helpers import guessing
from helpers.chat_models import tiny_chat
from helpers.tiny_models import END, PAD, tiny_model
from helpers.updates import one_update

pytestmark = pytest.mark.slow

FILE = str(Path(guessing.__file__))
SIZE, FAULTY, TURNS = 6, 2, 3
ENDED = "its process ended before it answered"
FAULTS = [  # (method of `Breaking`, moment, argument) -> the reason; "" if the conversation goes on
    (("raise", 0, "RuntimeError"), "RuntimeError: broken"),
    (("raise", 1, "ValueError"), "ValueError: broken"),
    (("raise", 3, "KeyError"), "KeyError: "),
    (("raise", 2, "KeyboardInterrupt"), "KeyboardInterrupt: broken"),
    (("raise", 2, "SystemExit"), "SystemExit: broken"),
    (("raise", 2, "MemoryError"), "MemoryError: broken"),
    (("recursion", 2, ""), "RecursionError: "),
    (("hang", 0, ""), "took longer than"),
    (("hang", 2, ""), "took longer than"),
    (("busy", 1, ""), "took longer than"),
    (("exit", 0, 0), ENDED),
    (("exit", 2, 7), ENDED),
    (("kill", 1, 9), ENDED),
    (("kill", 2, 11), ENDED),
    (("close", 2, ""), ENDED),
    (("return", 0, 42), "reset returned int 42 instead of a text"),
    (("return", 1, ["ok", 1.0]), "instead of a reply, a reward and whether it is over"),
    (("return", 2, [None, 1.0, False]), "step returned None instead of a text"),
    (("return", 2, ["ok", "high", False]), "the reward str 'high'"),
    (("return", 2, ["ok", 1.0, "no"]), "as the third value: True or False is needed"),
    (("bytes", 2, ""), "instead of a text"),
    (("number", 2, "nan"), "the reward float nan: a finite number is needed"),
    (("number", 3, "inf"), "the reward float inf: a finite number is needed"),
    (("attribute", 2, ""), "ZeroDivisionError: "),
    (("reply", 2, "x"), ""),  # a megabyte
    (("reply", 2, f"a{END}b{PAD}{END}"), ""),
    (("reply", 1, "\ud800"), ""),
    (("reply", 2, ""), ""),
    (("print", 1, ""), ""),
]
PATIENT = {"hang", "busy"}


class Mixed:
    """Environments of which every sixth is at fault."""

    def __init__(self, clean, faulty, hanging):
        self.clean, self.faulty, self.hanging = clean, faulty, hanging
        self.opened = 0

    def open(self, seed):
        group, place = divmod(self.opened, SIZE)
        self.opened += 1
        if place != FAULTY:
            return self.clean.open(seed)
        (name, _, _), _ = FAULTS[group]
        return (self.hanging if name in PATIENT else self.faulty).open(seed)

    def close(self):
        """The pools are closed by their fixture."""


@pytest.fixture(scope="module")
def pools():
    found = [EnvironmentProcesses(f"{FILE}:{name}", seconds, 12) for name, seconds in
             (("Steady", 60.0), ("Breaking", 60.0), ("Breaking", 0.5))]  # fmt: skip
    yield found
    for pool in found:
        pool.close()


def sampled(environments) -> list[Group]:
    chat = tiny_chat()
    sampler = ConversationSampler(
        LocalGenerator(LanguagePolicy(tiny_model())), chat, seed=5, max_new_tokens=6, environments=environments,
        style=Style(chat, "step"), turns=TURNS, total_tokens=70,
    )  # fmt: skip
    starts = [Start(index, "1+2", {"fault": list(fault)}) for index, (fault, _) in enumerate(FAULTS)]
    return sampler.sample(starts, SIZE, step=1)


@pytest.fixture(scope="module")
def broken(pools):
    return sampled(Mixed(*pools))


@pytest.fixture(scope="module")
def clean(pools):
    return sampled(pools[0])


class Recorder:
    """An optimizer that keeps the gradient and changes nothing."""

    def __init__(self, module):
        self.module, self.gradients = module, {}

    def before_last_pass(self): ...

    def step(self, learning_rate):
        self.gradients = {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad()
        return StepResult(1.0, applied=True)


def gradient_of(group: Group) -> dict[str, torch.Tensor]:
    """The gradient of a step with one group, in which the rollout at fault is not graded."""
    failure = group.rollouts[FAULTY].failure
    group.rollouts[FAULTY].failure = failure or "left out"
    build_grader(["environment"], ()).grade([group])  # raises if too many have failed
    assert [rollout.reward is None for rollout in group.rollouts] == [place == FAULTY for place in range(SIZE)]
    group.rollouts[FAULTY].failure = failure
    policy = LanguagePolicy(tiny_model())
    algorithm = grpo(kl=KLPenalty())
    batch, _ = prepare_batch(collate([group]), policy, algorithm)
    recorder = Recorder(policy.module)
    one_update(policy, recorder, algorithm, batch)
    return recorder.gradients


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[f"{name} {moment}" for (name, moment, _), _ in FAULTS])
def test_the_clean_rollouts_have_the_gradient_that_they_have_alone(broken, clean, number):
    reason = FAULTS[number][1]
    found, expected = broken[number], clean[number]
    at_fault = found.rollouts[FAULTY]
    assert [bool(rollout.failure) for rollout in found.rollouts] == [bool(reason) and k == FAULTY for k in range(SIZE)]
    assert re.search(re.escape(reason), at_fault.failure)
    assert "\n" not in at_fault.failure
    assert at_fault.end is (EndReason.CUT if reason else EndReason.LENGTH)
    for place, (one, other) in enumerate(zip(found.rollouts, expected.rollouts, strict=True)):
        if place != FAULTY:
            assert (one.context, one.actions, one.behavior_logprobs, one.turn_rewards) == (
                other.context, other.actions, other.behavior_logprobs, other.turn_rewards,
            )  # fmt: skip
    gradients, without = gradient_of(found), gradient_of(expected)
    assert any(gradient.norm() > 1e-3 for gradient in without.values()), "a gradient of zero would prove nothing"
    assert gradients.keys() == without.keys()
    assert all(torch.equal(gradient, without[name]) for name, gradient in gradients.items())


def test_replies_are_cut_and_make_no_control_tokens(broken):
    chat = tiny_chat()
    control = ConversationEncoder(chat).control_ids
    replies = {}
    for ((name, moment, argument), _), group in zip(FAULTS, broken, strict=True):
        rollout = group.rollouts[FAULTY]
        if name != "reply":
            continue
        replies[argument[:1]] = rollout.messages[2 * moment - 1]["content"]
        for decided, part in groupby(zip(rollout.decided, rollout.actions, strict=True), key=itemgetter(0)):
            ids = [token for _, token in part]
            if not decided:
                assert not control.intersection(ids[1:]), "the template's own end of a turn comes first"
    assert replies["x"] == f"{'x' * 12} ... (1,048,564 more characters)"
    assert replies["a"] == f"a{END}b{PAD}{END}"[:12] + " ... (5 more characters)"
    assert replies["\ud800"] == "?"
