"""The reward `math`: math-verify in worker processes."""

import json
import subprocess
import sys

import pytest

from covey.config import ArithmeticConfig, ConfigError, RewardConfig, RunConfig, rewards
from covey.config.rewards import BUILT_IN_REWARDS
from covey.config.rules import validate
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.math import math_equal
from helpers.graded import group, start


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so \\boxed{1 + x^2}", "x^2+1", 1),
        ("so \\boxed{(x+1)^2}", "$x^2 + 2x + 1$", 1),
        ("so \\boxed{x^2}", "x^2+1", 0),
        ("<answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 1),
        ("<answer>$\\frac{\\sqrt2}{2}$</answer>", "\\frac{1}{\\sqrt{2}}", 1),
        ("I get $\\frac{2}{4}$.", "\\frac{1}{2}", 1),
        ("\\boxed{\\{1, 2\\}}", "\\{2,1\\}", 1),
        ("\\boxed{(1, 2)}", "(2,1)", 0),
        ("\\boxed{50\\%}", "0.5", 1),
        ("\\boxed{57 \\text{ apples}}", "57", 1),
        ("\\boxed{0.333333}", "\\frac{1}{3}", 1),
        ("47 + 10 = 57", "57", 1),
        ("#### 2^5", "32", 1),
        ("\\boxed{B}", "B", 1),
        ("\\boxed{C}", "B", 0),
        ("no idea", "32", 0),
        ("\\boxed{\\frac{1}{", "32", 0),
        ("\\boxed{)(}", "32", 0),
        ("", "32", 0),
        ("__import__('os').system('true')", "32", 0),
    ],
)
def test_math_by_hand(completion, answer, value):
    assert math_equal([completion], answer=[answer]) == [value]


def test_an_answer_that_is_no_mathematics_is_refused():
    with pytest.raises(ValueError, match=r"the answer '' is not mathematics; use the exact reward for texts"):
        math_equal(["5"], answer=[""])


@pytest.mark.slow
def test_math_verify_never_sets_its_timer():
    """Its own timeout is an alarm signal, which fails in a thread and interrupts no computation in C."""
    program = (
        "import signal, sys\n"
        "def no_alarm(*_): raise AssertionError('an alarm')\n"
        "signal.alarm = signal.setitimer = no_alarm\n"
        "from covey.llm.rewards.math import math_equal\n"
        "print(math_equal(['\\\\boxed{(x+1)^2}'], answer=['x^2+2x+1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[1.0]\n", "")


ENDLESS = "\\boxed{9^{9^{9^{9}}}}"  # SymPy computes its digits


def grader(**options):
    return build_grader([RewardConfig(name="math", **options)], ())


@pytest.mark.slow
def test_an_endless_answer_costs_itself_alone():
    """In a batch with all kinds of answers, with one worker, which is replaced in between, and with several."""
    texts = ["\\boxed{5}", "\\boxed{x}", ENDLESS, "\\boxed{\\frac{10}{2}}", "\\boxed{2+3}", "no", "\\boxed{\\sqrt{25}}"]
    always = RewardConfig(name="length", length_limit=1000, weight=0.001)  # a rollout that it alone grades has failed
    for workers in (1, 3):
        one = build_grader([RewardConfig(name="math", workers=workers, timeout_seconds=2.0), always], ())
        try:
            (graded,) = one.grade([group(start(answer="5"), *texts)])
            rewards = [rollout.reward for rollout in graded.rollouts]
            assert [None if reward is None else round(reward) for reward in rewards] == [1, 0, None, 1, 1, 0, 1]
            assert [rollout.score for rollout in graded.rollouts] == [1, 0, None, 1, 1, 0, 1]
        finally:
            one.close()


@pytest.mark.slow
def test_too_many_endless_answers_stop_the_run_without_waiting_for_all():
    one = grader(workers=1, timeout_seconds=0.3)
    with pytest.raises(GradingError, match=r"reward 'math': took longer than 0.3 s"):
        one.grade([group(start(answer="5"), *[ENDLESS] * 9)])  # the second one is too many
    one.close()


def test_no_process_is_started_for_plain_numbers():
    one = grader()
    (graded,) = one.grade([group(start(answer="1/2"), "0.5", "\\boxed{\\frac{1}{2}}", "3", "The answer is 0.5.")])
    assert [rollout.reward for rollout in graded.rollouts] == [1, 1, 0, 1]
    pool = one.rewards[0].caller._pool
    assert [worker.child for worker in pool._workers] == [None, None]
    one.close()


@pytest.mark.slow
def test_the_dry_run_finds_answers_that_are_no_mathematics():
    one = grader()
    with pytest.raises(ConfigError, match=r"reward 'math' ValueError: the answer '' is not mathematics"):
        one.check([start(answer="")])
    one.close()


def test_the_worker_has_its_memory_limited(tmp_path):
    file = tmp_path / "limits.py"
    file.write_text(
        "import resource, json\n"
        "def limits(completions, log_extra):\n"
        "    kinds = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)\n"
        "    log_extra('limits', [[resource.getrlimit(kind)[0] for kind in kinds]])\n"
        "    return [1.0]\n"
        "def greedy(completions):\n"
        "    return [float(len(bytearray(1 << 31)))]\n"
    )
    from covey.llm.rewards.runner import RewardPool
    from covey.runtime.worker.process import CallError

    arguments = {"completions": [""]}
    one = RewardPool(f"{file}:limits", memory_mib=1024)
    assert json.loads(json.dumps(one.call(arguments, 0, 60).extras["limits"])) == [[1 << 30, 0, 0]]
    one.close()
    two = RewardPool(f"{file}:greedy", memory_mib=1024)
    with pytest.raises(CallError, match="MemoryError"):
        two.call(arguments, 0, 60)
    two.close()
    assert BUILT_IN_REWARDS["math"].memory_mib > 0


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    config = RunConfig(task=ArithmeticConfig(), rewards=(RewardConfig(name="math"),))
    with pytest.raises(ConfigError, match=r'number 1: the math reward needs a package.*pip install "covey\[math\]"'):
        validate(config)
