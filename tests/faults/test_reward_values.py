"""What a reward function may return, log, raise and leave behind, in a worker process and in the run's own process."""

import json
import locale
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from covey.config import ConfigError, RewardConfig
from covey.data import Group
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.runner import LOAD_LEAST_SECONDS, RewardPool
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.runtime.worker.child import load_function
from covey.tracking.metrics import find
from covey.tracking.run_store import rollout_record
from covey.train.collect import _joined
from covey.train.metrics import describe
from helpers.graded import asked as group
from helpers.graded import rewards_of
from helpers.run_helpers import is_running
from helpers.step_records import UNKNOWN

HEAD = """
    import itertools, os, resource, sys, time
    class Value:
        def __init__(self, how): self.how = how
        def __float__(self): return self.how()
        def __repr__(self): raise ValueError
    class Liar(list):
        def __len__(self): return 2
    class Refusing:
        def __iter__(self): raise KeyError("no")
        def __repr__(self): raise KeyboardInterrupt
    class Odd(Exception):
        def __str__(self): return 5
    class Late(Exception):
        def __str__(self): time.sleep(1000)
    class Gone(Exception):
        def __str__(self): sys.exit(0)
    class Coloured(Exception):
        def __str__(self): return "\\x1b[31mred\\n\\x07bell\\u202e"
    def fail(error): raise error
    def hidden(call):
        try: call()
        except Exception: pass
    def reward(completions, log_metric, log_extra, **columns):
        n = len(completions)
        return EXPRESSION
"""


@pytest.fixture(params=["worker", "in_process"])
def graded(request, tmp_path, monkeypatch):
    """Grades groups with a reward that returns an expression of its `completions` and their number n."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a function adds its folder
    graders = []

    def grade(expression, *groups, seconds=30.0):
        path = tmp_path / f"values{len(graders)}.py"
        path.write_text(textwrap.dedent(HEAD).replace("EXPRESSION", expression))
        name = f"{path}:reward"
        if request.param == "worker":
            reward = RewardConfig(function=name, timeout_seconds=seconds)
        else:
            reward = WeightedReward.from_function(load_function(name), timeout_seconds=seconds)
        graders.append(build_grader([reward], ()))
        return graders[-1].grade(list(groups) or [group("a", "bc")])

    yield grade
    for grader in graders:
        grader.close()


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "expression",
    [
        "(float(len(text)) for text in completions)",
        "(1, 2)",
        "range(1, 3)",
        "{'x': 1, 'y': 2}.values()",
        "__import__('array').array('d', [1, 2])",
        "__import__('collections').deque([1, 2])",
        "[__import__('decimal').Decimal(1), __import__('fractions').Fraction(2)]",
        "__import__('numpy').array([1.0, 2.0], dtype='float32')",
        "list(__import__('numpy').array([1, 2], dtype='int8'))",
        "[Value(lambda: 1.0), Value(lambda: 2.0)]",
    ],
)
def test_whatever_has_an_order_and_holds_numbers_is_a_list_of_numbers(expression, graded):
    assert rewards_of(graded(expression)) == [[1.0, 2.0]]


@pytest.mark.parametrize("expression", ["torch.tensor([1.0, 2.0])", "[torch.tensor(1), torch.tensor([2.0])]"])
def test_tensors_are_numbers(expression, tmp_path):
    """In this process, where torch is loaded already."""
    values = eval(expression)
    one = build_grader([WeightedReward.from_function(lambda completions: values)], ())
    assert rewards_of(one.grade([group("a", "b")])) == [[1.0, 2.0]]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(GradingError, match=r"returned Tensor tensor\(\[1., 2.\]\) where a number or None is needed"):
        one.grade([group("a", "b")])


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("{1.0, 2.0}", r"returned set \{1.0, 2.0\} instead of a list of 2 numbers"),
        ("{'a': 1.0, 'b': 2.0}", "returned dict .* instead of a list of 2 numbers"),
        ("b'ab'", "returned bytes b'ab' instead of a list of 2 numbers"),
        ("None", "returned None instead of a list of 2 numbers"),
        ("1.0", "returned float 1.0 instead of a list of 2 numbers"),
        ("'1' * n", "returned str '11' instead of a list of 2 numbers"),
        ("[[1.0, 2.0]] * n", r"returned list \[1.0, 2.0\] where a number or None is needed"),
        ("object", "returned type <class 'object'> instead of a list of 2 numbers"),
        ("__import__('numpy').array(1.0)", r"returned ndarray array.1\.. instead of a list of 2 numbers"),
        ("itertools.count()", "returned 3 or more results for 2 completions"),
        ("[1.0] * 7", "returned 7 results for 2 completions"),
        ("Liar([1.0])", "returned 1 results for 2 completions"),
        ("[]", "returned 0 results for 2 completions"),
        ("[1j, 2j]", "returned complex 1j where a number or None is needed"),
        ("[10 ** 400, 1]", "returned int 1000.* where a number or None is needed"),
        ("[Value(lambda: 'x')] * n", r"returned Value <Value instance at \w+> where a number or None is needed"),
        ("[Value(lambda: fail(ValueError()))] * n", r"returned Value <Value instance at \w+> where a number"),
        ("[Refusing()] * n", r"returned Refusing \(its repr raises\) where a number or None is needed"),
        ("['\\x1b[31m' * 99] * n", r"returned str '\\x1b\[31m"),
        ("[[[]] * 10 ** 6] * n", r"returned list \[\[\], \[\], "),
        # The call failed: too many rollouts without a reward.
        ("Refusing()", r"KeyError: 'no' \(values0.py line \d+\)"),
        ("[Value(lambda: fail(KeyError('x')))] * n", r"KeyError: 'x' \(values0.py line \d+\)"),
        ("[1e300, float('nan')]", r"returned 1e\+300"),
        ("fail(Odd())", r"Odd: \(its text cannot be shown: str\(\) raised TypeError\) \(values0.py line \d+\)"),
        ("fail(Gone())", r"Gone: \(its text cannot be shown: str\(\) raised SystemExit\)"),
        ("fail(Coloured())", r"Coloured: \\x1b\[31mred \\x07bell\\u202e \(values0.py line \d+\)"),
        ("fail(Exception('x' * 10 ** 7))", r"Exception: x{289}\.\.\. \(values0.py line \d+\)"),
        ("fail(type('a\\nb' * 999, (Exception,), {})())", r"a ba ba b"),
    ],
)
def test_anything_else_is_one_line(expression, why, graded):
    with pytest.raises(GradingError, match=why) as caught:
        graded(expression)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "expression", ["[Value(lambda: time.sleep(1000))] * n", "fail(Late())", "iter(lambda: time.sleep(1000), 1)"]
)
def test_values_and_messages_that_take_forever_meet_the_deadline(expression, graded):
    with pytest.raises(GradingError, match=r"took longer than 0\.3 s"):
        graded(expression, seconds=0.3)


# ---- what a call changes ----


def test_a_function_that_changes_its_arguments_changes_no_later_call(graded):
    data = {"answer": ["1", {"deep": ["2"]}]}
    expression = (
        "(prompts := columns['prompts'], answers := columns['answer'], "
        "rewards := [len(p) + len(a[1]['deep']) for p, a in zip(prompts, answers)], "
        "[p.append(p[0]) or a[1]['deep'].clear() for p, a in zip(prompts, answers)], completions.clear())[2]"
    )
    prompt = [{"role": "user", "content": "hi"}]
    groups = [group("a", "b", prompt=prompt, **data), group("c", "d", prompt=prompt, **data)]
    assert rewards_of(graded(expression, *groups)) == [[2.0, 2.0]] * 2
    assert data == {"answer": ["1", {"deep": ["2"]}]}
    assert len(prompt) == 1


def test_the_state_of_this_process_is_put_back(tmp_path):
    def state():
        import resource

        mask = os.umask(0)
        os.umask(mask)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        named = locale.setlocale(locale.LC_ALL)
        return os.getcwd(), mask, files, named, sys.getrecursionlimit(), torch.get_default_dtype()

    def rude(completions, **_):
        import resource

        os.chdir(tmp_path)
        os.umask(0o777)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")
        sys.setrecursionlimit(200)
        torch.set_default_dtype(torch.float64)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        raise ValueError

    before = state()
    with pytest.raises(GradingError, match="ValueError"):
        build_grader([rude], ()).grade([group("a")])
    assert state() == before
    time.sleep(0.3)  # the alarm would end this process


def test_a_child_that_a_function_forks_in_this_process_does_not_become_a_second_run(tmp_path):
    def forking(completions, **_):
        child = os.fork()
        with open(tmp_path / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")
        if child:
            os.waitpid(child, 0)
        return [1.0] * len(completions)

    assert rewards_of(build_grader([forking], ()).grade([group("a")])) == [[1.0]]
    parent, child = sorted((tmp_path / "pids").read_text().split(), key=lambda pid: pid != str(os.getpid()))
    assert parent != child
    assert not os.path.exists(f"/proc/{child}")


def test_a_module_may_set_up_its_process_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    path = tmp_path / "setting.py"
    path.write_text(
        f"import os, sys\nos.chdir({str(tmp_path / 'there')!r})\nsys.setrecursionlimit(5000)\n"
        "def f(completions): return [os.getcwd().endswith('there') + sys.getrecursionlimit()] * len(completions)\n"
    )
    one = build_grader([RewardConfig(function=f"{path}:f")], ())
    for _ in range(2):
        assert rewards_of(one.grade([group("a")])) == [[5001.0]]
    one.close()


# ---- importing, ending ----


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "statement", ["time.sleep(1000)", "while True: pass", "__import__('re').match('(a+)+b', 'a' * 60)"]
)
def test_an_import_that_never_ends_is_bounded_by_its_own_time_limit(statement, tmp_path, monkeypatch):
    monkeypatch.setattr("covey.llm.rewards.runner.LOAD_LEAST_SECONDS", 0.5)
    path = tmp_path / "endless.py"
    path.write_text(f"import time\n{statement}\ndef f(completions): return [1.0]\n")
    one = build_grader([RewardConfig(function=f"{path}:f", timeout_seconds=0.5)], ())
    with pytest.raises(
        ConfigError, match=r"'f'.*cannot be loaded: importing its file took longer than 0\.5 s"
    ) as caught:
        one.check([group(answer="1").start])
    assert str(caught.value).isprintable()


def test_an_import_may_take_as_long_as_a_call_and_a_minute_in_any_case():
    assert RewardPool("m:f", load_seconds=90.0).load_seconds == 90.0
    assert RewardPool("m:f", load_seconds=1.0).load_seconds == LOAD_LEAST_SECONDS == 60.0


# The process outlives the parent that it kills by a moment, in which it could answer.
KILL_PARENT = "os.kill(os.getppid(), 9); os.read(os.pipe()[0], 1)"


@pytest.mark.parametrize(
    "statement", ["os.fork()", "os._exit(0)", "raise SystemExit", KILL_PARENT, "os.closerange(0, 256)"]
)
def test_a_file_that_misbehaves_while_it_is_imported_is_one_line_or_no_harm(statement, tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(f"import os\n{statement}\ndef f(completions): return [float(len(t)) for t in completions]\n")
    one = build_grader([RewardConfig(function=f"{path}:f")], ())
    if statement == "os.fork()":
        assert rewards_of(one.grade([group("a", "bc")])) == [[1.0, 2.0]]
    else:
        with pytest.raises(GradingError, match=r"its process|cannot be loaded: SystemExit") as caught:
            one.grade([group("a", "bc")])
        assert str(caught.value).isprintable()
    one.close()


@pytest.mark.parametrize("environment", ["None", "{}"])
def test_what_a_reward_started_ends_with_a_run_that_is_killed(environment, tmp_path):
    path = tmp_path / "starting.py"
    path.write_text(
        "import os, subprocess\ndef f(completions):\n"
        f"  child = subprocess.Popen(['sleep', '1000'], start_new_session=True, env={environment})\n"
        "  return [float(child.pid), float(os.getpid())]\n"
    )
    parent = (
        "import time; from covey.llm.rewards.runner import RewardPool\n"
        f"print(RewardPool({str(path) + ':f'!r}).call({{'completions': ['a', 'b']}}, 0, 20.0).values, flush=True)\n"
        "time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    started = [int(float(number)) for number in json.loads(line)]
    deadline = time.monotonic() + 20
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, started))


def test_output_without_end_is_cut_and_has_no_control_characters(tmp_path, capfd):
    path = tmp_path / "loud.py"
    path.write_text(
        "import sys\ndef f(completions):\n  print('\\x1b[31mred\\x07')\n"
        "  for _ in range(3000): sys.stderr.write('noise ' * 200)\n  return [1.0] * len(completions)\n"
    )
    one = build_grader([RewardConfig(function=f"{path}:f", timeout_seconds=60)], ())
    for _ in range(2):
        assert rewards_of(one.grade([group("a")])) == [[1.0]]
    one.close()
    shown = capfd.readouterr().err
    assert shown.count("\\x1b[31mred\\x07") == 2
    assert shown.count("(further output of the function is left out)") == 2
    assert 1 << 18 < len(shown) < 1 << 20


# ---- log_metric and log_extra ----

LOGS = (
    "[log_metric('length', sum(map(len, completions)) / n), "
    "log_extra('upper', [text.upper() for text in completions]), [1.0] * n][2]"
)


def test_logged_numbers_are_means_over_calls_and_columns_stand_beside_the_rollouts(graded):
    groups = graded(LOGS, group("a", "bcd"), group("ef", "gh", index=1))
    metrics = describe(groups)
    assert metrics["reward/reward/length"] == 2.0
    assert find("reward/reward/length").name == "reward/<reward>/<name>"
    records = [rollout_record(1, each, rollout, UNKNOWN) for each in groups for rollout in each.rollouts]
    assert [record["extra"] for record in records] == [{"reward": {"upper": t}} for t in ("A", "BCD", "EF", "GH")]


def test_values_that_are_not_finite_are_left_out_of_the_mean(graded):
    groups = graded("[log_metric('x', float(v)) for v in ('nan', 'inf', '1e308', '3')] and [1.0] * n")
    assert describe(groups)["reward/reward/x"] == 3.0
    assert "reward/reward/y" not in describe(graded("[log_metric('y', float('nan'))] and [1.0] * n"))


def test_groups_of_two_rounds_keep_what_was_logged(graded):
    first, second = (graded(f"[log_metric('x', {value})] and [1.0] * n")[0] for value in (1, 4))
    joined = _joined(first, second)
    assert describe([joined])["reward/reward/x"] == 2.5
    assert len(joined.rollouts) == 4
    assert describe([_joined(first, Group(first.start, []))])["reward/reward/x"] == 1.0


def test_numbers_of_numpy_are_columns_like_any_other(graded):
    (one,) = graded("[log_extra('x', __import__('numpy').array([1.5, 2.5])), [1.0] * n][1]")
    assert [rollout.extras for rollout in one.rollouts] == [{"reward": {"x": 1.5}}, {"reward": {"x": 2.5}}]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("log_metric('x', 'high')", r"called log_metric('x', ...) with str 'high': a number is needed"),
        ("log_metric('x', None)", r"called log_metric('x', ...) with None: a number is needed"),
        ("log_metric('x', [1, 2])", r"called log_metric('x', ...) with list [1, 2]: a number is needed"),
        ("log_metric(3, 1)", r"called log_metric with the name int 3: a short text is needed"),
        ("log_metric('', 1)", r"called log_metric with the name str '': a short text is needed"),
        ("log_metric('x\\ny', 1)", r"called log_metric with the name str 'x\ny': a short text is needed"),
        ("log_extra('c', [1])", r"called log_extra('c', ...) with 1 values for 2 completions"),
        ("log_extra('c', itertools.count())", r"called log_extra('c', ...) with 3 or more values for 2 completions"),
        ("log_extra('c', 'ab')", r"called log_extra('c', ...) with str 'ab': a list of 2 values is needed"),
        ("log_extra('c', 5)", r"called log_extra('c', ...) with int 5: a list of 2 values is needed"),
        ("log_extra('c', [object, 1])", r"called log_extra('c', ...) with type <class 'object'>, which cannot be"),
    ],
)
def test_a_wrong_log_is_one_line_even_if_the_function_hides_it(call, why, graded):
    for expression in (f"({call}, [1.0] * n)[1]", f"hidden(lambda: {call}) or [1.0] * n"):
        with pytest.raises(GradingError, match=re.escape(why)) as caught:
            graded(expression)
        assert str(caught.value).isprintable()


@pytest.mark.slow
def test_a_reply_larger_than_any_should_be_is_one_line(tmp_path):
    path = tmp_path / "large.py"
    path.write_text("def f(completions, log_extra):\n  log_extra('x', ['y' * (1 << 26)])\n  return [1.0]\n")
    one = build_grader([RewardConfig(function=f"{path}:f", timeout_seconds=60)], ())
    with pytest.raises(GradingError, match="'f' logged more than fits into a reply of 64 MiB"):
        one.grade([group("a")])
    one.close()


def test_a_function_gets_the_logs_only_if_it_accepts_them(tmp_path):
    seen = []
    one = build_grader([lambda completions: seen.append("bare") or [1.0]], ())
    assert rewards_of(one.grade([group("a")])) == [[1.0]]

    def all_of_them(completions, **given):
        given["log_metric"]("x", 1)
        return [float(given["trainer_state"].global_step)]

    assert describe(build_grader([all_of_them], ()).grade([group("a")]))["reward/all_of_them/x"] == 1.0
