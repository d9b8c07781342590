"""The code reward: what is taken from a completion, how tests are read, what counts as equal, what is masked."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.config import ConfigError, RewardConfig
from covey.config.rewards import check_reward
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import GradingError, RewardGrader
from covey.llm.rewards import code as code_module
from covey.llm.rewards.code import (
    CallCase,
    CallTests,
    CheckTests,
    CodeRunner,
    Judge,
    StdinCase,
    StdinTests,
    Tests,
    Verdict,
    code,
    extract_program,
    matches,
    read_tests,
    same_output,
)
from covey.llm.rewards.sandbox import backends
from covey.llm.rewards.sandbox.backends import check_isolation, no_sandbox
from covey.llm.rewards.sandbox.harness import DEEPEST, NotPlain, decode, encode
from covey.llm.rewards.sandbox.session import Limits, Sandbox, SandboxFailure, Session
from covey.llm.rewards.weighted_reward import WeightedReward
from helpers.sandboxes import BACKENDS, any_backend, backend, descendants, is_running, processes_left, workers

LIMITS = Limits(seconds=20.0, cpu_seconds=20)
DOUBLE = CallTests("solve", [CallCase([n], 2 * n) for n in (3, -1, 0)])


# ---- the program in a completion ----


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nfirst\n```\nand\n```py\nsecond\n```", "second\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("```python\nx = '''\n``\n'''\n", "x = '''\n``\n'''\n"),
        ("a\n```python\ncut off", "cut off"),
        ("```python\n```", ""),
        ("~~~\ntilde\n```\n~~~", "tilde\n```\n"),
        ("````\n```\ninner\n```\n````", "```\ninner\n```\n"),
        ("inline ```x``` only", "inline ```x``` only"),
        ("", ""),
    ],
)
def test_the_last_fenced_block_is_the_program(text: str, program: str) -> None:
    assert extract_program(text) == program


def test_a_line_of_fence_characters_is_searched_in_linear_time() -> None:
    began = time.process_time()
    for character in "~`":
        line = character * 200_000 + ("`" if character == "~" else " `")
        assert extract_program(line) == line
    assert time.process_time() - began < 5


# ---- the forms of tests ----


def test_each_form_of_tests_is_read() -> None:
    stdin = StdinTests([StdinCase("1\n", "2\n")])
    assert read_tests([{"input": "1\n", "output": "2\n"}]) == stdin
    assert read_tests({"inputs": ["1\n"], "outputs": ["2\n"]}) == stdin
    assert read_tests(json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})) == stdin
    calls = CallTests("f", [CallCase([1, "a"], [2])])
    assert read_tests([{"args": [1, "a"], "expected": [2]}], "f") == calls
    assert read_tests({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[2]]}) == calls
    keyword = read_tests([{"args": [], "kwargs": {"x": 1}, "expected": None}], "f")
    assert keyword == CallTests("f", [CallCase([], None, {"x": 1})])
    program = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert read_tests(program, "f") == CheckTests(program, "f", ("f",))
    asserts = ["assert f(len([1])) == g(2)", "assert isinstance(f(1), int)"]
    assert read_tests(asserts) == CheckTests("\n".join(asserts), "", ("f", "g"))


@pytest.mark.parametrize(
    ("value", "entry_point", "named"),
    [
        ([], "f", "give a list"),
        (None, "f", "give a list"),
        (3, "f", "give a list"),
        ([1], "f", "hold"),
        ("x = 1", "f", "no function check"),
        ("def check(:", "f", "neither Python nor JSON"),
        ("def check(candidate): pass", None, "entry_point"),
        ([{"args": [1], "expected": 2}], None, "entry_point"),
        ([{"args": "abc", "expected": 2}], "f", "args"),
        ([{"args": [1]}], "f", "expected"),
        ([{"input": "1"}], None, "output"),
        ({"inputs": ["1"], "outputs": []}, None, "same length"),
        (["assert len([1]) == 1"], None, "no function of the program"),
    ],
)
def test_unusable_tests_are_named_in_one_line(value: object, entry_point: str | None, named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        read_tests(value, entry_point)
    assert "\n" not in str(error.value)


# ---- values ----

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)


@pytest.mark.slow
@given(PLAIN)
@example({1, 2})
@example(10**400)
@example(1 + 2j)
@example(frozenset({"a"}))
def test_a_value_crosses_as_itself(value: object) -> None:
    item = json.loads(json.dumps(encode(value)))
    back = decode(item)
    assert back == value
    assert type(back) is type(value)
    assert matches(value, item)


@pytest.mark.parametrize(
    ("expected", "result", "same"),
    [
        (1, 1, True), (1, 2, False), (1, True, False), (True, 1, False), (True, True, True), (0, False, False),
        (1, 1.0, True), (0.1 + 0.2, 0.3, True), (0.3, 0.3001, False), (1.0, "1.0", False), ("1", 1, False),
        (None, 0, False), (None, None, True), (math.nan, math.nan, True), (1.0, math.nan, False),
        (math.nan, 1.0, False), (math.inf, math.inf, True), (1.0, math.inf, False), (math.inf, -math.inf, False),
        ([1, 2], (1, 2), True), ((1, 2), [1, 2], True), ([1, 2], [2, 1], False), ([1], [1, 2], False),
        ([], {}, False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"a": 2}, False), ({"a": 1}, {"b": 1}, False),
        ({"1": 2}, {1: 2}, True), ({"a": 1}, {"a": 1, "b": 1}, False), ({1}, {1}, True), ({1}, {2}, False),
        ({1, 2}, [1, 2], False), (b"a", b"a", True), (b"a", "a", False), (10**30, 10**30, True),
        (10**30, 10**30 + 1, False), (0, 1e-10, False), (7, 7 + 1e-9, False), (10**16 + 1, 1e16, False),
        (0, 1e-10j, False), (0.0, 1e-10, True), ({"a": [3]}, {"a": [3 + 1e-9]}, False), ({1}, {1.0}, True),
        ({0.5}, {0.5}, True), ({1}, {True}, False), ({0: 1}, {0.0: 1}, True), ({0: 1}, {1e-10: 1}, False),
        ({"1": 2, 1: 3}, {1: 3, "1": 2}, True), ({(1, 2): 3}, {(1, 2): 3}, True), ({(1, 2): 3}, {(2, 1): 3}, False),
        ({("a", "b"): 3}, {("a,'b'",): 3}, False), ({frozenset({1, 2})}, {frozenset({2, 1})}, True),
        ({frozenset({1, 2})}, {frozenset({2, 3})}, False), ({1 + 2j}, {1 + 2j}, True), ({1 + 2j}, {1 - 2j}, False),
        ({b"a"}, {"a"}, False), ({"a", None}, {None, "a"}, True), ({"None"}, {None}, False), ({-1}, {-1.0}, True),
        ({10**30: 1}, {10**30: 1}, True), ("a", "a", True), ("a", "A", False), ([[1.0]], [[1]], True),
    ],
)  # fmt: skip
def test_what_counts_as_the_expected_value(expected: object, result: object, same: bool) -> None:
    assert matches(expected, json.loads(json.dumps(encode(result)))) is same


@pytest.mark.parametrize(
    "item",
    [{"a": 1}, [], ["int", "x"], ["int"], ["float", "xyz"], ["list", ["evil"]], ["dict", [1]], ["dict", [["list"], 1]],
     ["complex", "1"], ["int", 5], ["set", ["list"]], 1.5, [["list"]], ["bytes", "zz"]],
)  # fmt: skip
def test_what_encode_never_writes_equals_nothing(item: object) -> None:
    for expected in (1, 1.5, "a", [1], {"a": 1}, {1}, None, True, b"", 1j):
        assert not matches(expected, item)
    with pytest.raises(NotPlain):
        decode(item)


def test_a_value_nested_too_deeply_is_refused() -> None:
    nested: list[object] = []
    for _ in range(DEEPEST + 2):
        nested = [nested]
    with pytest.raises(NotPlain):
        encode(nested)
    with pytest.raises(NotPlain):
        encode(object())


def test_a_result_with_colliding_keys_is_not_built_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_number(item: Any) -> Any:
        assert isinstance(item, int) or item[0] in ("int", "float", "complex")
        return decode(item)

    monkeypatch.setattr(code_module, "decode", decode_number)
    keys = [["int", hex(number * (2**61 - 1))] for number in range(2_000)]
    assert not matches({"a": 1}, ["dict", *([key, 1] for key in keys)])
    assert not matches({1}, ["set", *keys])
    assert not matches({frozenset({1}): 1}, ["dict", [["frozenset", *keys], 1]])
    assert not matches({frozenset({1})}, ["set", ["frozenset", *keys]])
    assert not matches({(1,): 1}, ["dict", [["tuple", ["dict", *([key, 1] for key in keys)]], 1]])
    assert not matches(dict.fromkeys(range(2_000)), ["dict", *([key, None] for key in keys)])
    assert not matches(set(range(2_000)), ["set", *keys])


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [("a\nb", b"a  \nb\n\n", True), ("a", b"a\r\n", True), ("a b", b"a  b", False), ("", b"\n", True),
     ("a", b"b", False), ("a", b"\xff", False), (" a", b"a", False), ("é", "é".encode(), True)],
)  # fmt: skip
def test_printed_lines_are_compared_without_white_space_at_their_ends(
    expected: str, printed: bytes, same: bool
) -> None:
    assert same_output(expected, printed) is same


# ---- verdicts ----


def test_the_share_of_cases_counts_those_after_a_failure() -> None:
    sandbox = any_backend()
    program = "def solve(x):\n    if x == 3: raise ValueError('three')\n    return 2 * x"
    verdict = Judge(sandbox, LIMITS).judge(program, DOUBLE)
    assert (verdict.passed, verdict.total, verdict.share) == (2, 3, 2 / 3)
    assert verdict.text == "case 1: ValueError: three"
    assert Judge(sandbox, LIMITS, every_case=False).judge(program, DOUBLE).passed == 0


def test_a_process_that_ended_is_started_again_for_the_next_case() -> None:
    program = "import os\ndef solve(x):\n    if x == 3: os._exit(1)\n    return 2 * x"
    assert Judge(any_backend(), LIMITS).judge(program, DOUBLE).passed == 2


@pytest.mark.slow
def test_no_case_is_run_after_one_that_took_too_long() -> None:
    program = "import time\ndef solve(x):\n    if x == -1: time.sleep(100)\n    return 2 * x"
    verdict = Judge(any_backend(), replace(LIMITS, seconds=2.0)).judge(program, DOUBLE)
    assert (verdict.passed, verdict.total, verdict.text) == (1, 3, "case 2: took longer than 2 s")


@pytest.mark.parametrize("form", ["calls", "stdin"])
def test_all_cases_together_have_the_time_of_ten(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case may take the limit, so a program that sleeps in each would take cases x limit."""
    monkeypatch.setattr(code_module, "MOST_CASES", 0.05)
    sleep = "import time\ndef solve(x):\n    time.sleep(0.2)\n    return x\n"
    tests: Tests = CallTests("solve", [CallCase([n], n) for n in range(10)])
    if form == "stdin":
        sleep, tests = f"{sleep}print(solve(input()))", StdinTests([StdinCase(str(n), str(n)) for n in range(10)])
    verdict = Judge(any_backend(), LIMITS).judge(sleep, tests)
    assert verdict.passed < 10
    assert verdict.text.endswith(": all cases took longer than 1 s")


def test_stdin_cases_run_the_whole_program_each_time() -> None:
    tests = StdinTests([StdinCase("1 2\n", "3"), StdinCase("4 5\n", "9\n"), StdinCase("0 0\n", "1")])
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
    verdict = Judge(any_backend(), LIMITS).judge(program, tests)
    assert (verdict.passed, verdict.text) == (2, "case 3: wrong output")


def test_an_input_larger_than_a_pipe_arrives_whole() -> None:
    text = "x" * 1_000_000
    tests = StdinTests([StdinCase(text, str(len(text)))])
    assert Judge(any_backend(), LIMITS).judge("print(len(input()))", tests).is_right


def test_what_a_function_prints_is_no_part_of_its_result() -> None:
    program = "import sys\ndef solve(x):\n    print('x' * 200_000)\n    print(sys.stdin.read())\n    return 2 * x"
    assert Judge(any_backend(), LIMITS).judge(program, DOUBLE).is_right


def test_a_method_of_a_class_solution_is_found() -> None:
    program = "class Solution:\n    def solve(self, x):\n        return 2 * x"
    assert Judge(any_backend(), LIMITS).judge(program, DOUBLE).is_right


def test_a_test_program_runs_apart_from_the_program_under_test() -> None:
    prefix = "import math\n\ndef helper(x):\n    return x + 1\n\ndef solve(x):\n"
    source = (
        "def check(candidate):\n    assert candidate((1, 2)) == {'sum': 3}\n    assert helper(1) == 2\n"
        "    try:\n        candidate(0)\n    except ValueError as error:\n        assert 'zero' in str(error)\n"
        "    else:\n        assert False\n"
    )
    tests = CheckTests(source, "solve", ("solve",))
    judge = Judge(any_backend(), LIMITS)
    body = "    if x == 0: raise ValueError('zero')\n    return {'sum': sum(x)}"
    assert judge.judge(body, tests, prefix).is_right
    assert judge.judge(f"def solve(x):\n{body}", tests, prefix).is_right
    assert not judge.judge("    return {'sum': 3}", tests, prefix).is_right
    spoiled = "    return {'sum': 3}\nimport builtins\nbuiltins.sum = builtins.str = None"
    assert not judge.judge(spoiled, tests, prefix).is_right


def test_a_program_after_its_prefix_may_begin_with_an_import_from_the_future() -> None:
    program = "from __future__ import annotations\n\ndef solve(x: Any) -> Any:\n    return factor * x"
    judge, prefix = Judge(any_backend(), LIMITS), "from typing import Any\nfactor = 2"
    assert judge.judge(program, DOUBLE, prefix).is_right
    assert judge.judge(program, DOUBLE, f"{prefix}\n\ndef solve(x):\n").is_right


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "Exception"])
def test_an_exception_of_the_program_ends_no_loop_of_the_tests(kind: str) -> None:
    source = "def check(candidate):\n    assert all(map(lambda n: candidate(n) == 2 * n, [1, 2]))"
    verdict = Judge(any_backend(), LIMITS).judge(f"def f(x): raise {kind}", CheckTests(source, "f", ("f",)))
    assert (verdict.is_right, verdict.text) == (False, f"{kind}: ")


def test_assert_statements_call_the_program() -> None:
    tests = read_tests(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"])
    judge = Judge(any_backend(), LIMITS)
    assert judge.judge("def add(a, b): return a + b", tests).is_right
    assert not judge.judge("def add(a, b): return 3", tests).is_right
    assert not judge.judge("def sub(a, b): return a", tests).is_right


ENCODE = "def encode(x): return x[::-1]\n"
DECODE = "def decode(x): return x[::-1]"
# Tests of `decode`, whose prefix or program has `encode`.
AT_MODULE_LEVEL = {
    "assert": "assert decode('ba') == 'ab'\ndef check(candidate): pass",
    "call": "found = decode('ba')\ndef check(candidate): assert found == 'ab'",
    "check": "def check(candidate): assert candidate('ba') == 'ab'\ncheck(decode)",
    "passed back": "assert decode(encode('ab')) == 'ab'\ndef check(candidate): assert candidate(encode('x')) == 'x'",
    "loop": "for text in ('a', 'ab'):\n    assert decode(encode(text)) == text\ndef check(candidate): pass",
    "not called by name": "def check(candidate): assert list(map(candidate, map(encode, ['ab']))) == ['ab']",
}


@pytest.mark.parametrize("source", AT_MODULE_LEVEL.values(), ids=AT_MODULE_LEVEL)
def test_tests_at_module_level_are_judged(source: str) -> None:
    judge = Judge(any_backend(), LIMITS)
    tests = read_tests(source, "decode")
    assert judge.judge(DECODE, tests, ENCODE).is_right
    assert judge.judge(ENCODE + DECODE, tests).is_right
    for wrong in ("def decode(x): return None", "def decode(x): return iter(x)"):
        assert not judge.judge(wrong, tests, ENCODE).is_right


def test_tests_that_ask_forever_end_at_the_limit() -> None:
    tests = read_tests("def check(candidate):\n    while candidate(1) != 2: pass", "f")
    verdict = Judge(any_backend(), replace(LIMITS, seconds=1.0)).judge("def f(x): return x", tests)
    assert (verdict.is_right, verdict.text) == (False, "took longer than 1 s")


def test_assert_statements_pass_a_result_back() -> None:
    judge = Judge(any_backend(), LIMITS)
    for entry_point in (None, "decode"):
        tests = read_tests(["assert decode(encode('ab')) == 'ab'"], entry_point)
        assert judge.judge(ENCODE + DECODE, tests).is_right
        assert not judge.judge(f"{ENCODE}def decode(x): return x", tests).is_right


def test_a_function_of_the_prefix_that_tests_use_is_not_the_programs() -> None:
    tests = read_tests("def check(candidate): assert encode(candidate('ba')) == 'ba'", "decode")
    forged = "def encode(x): return 'ba'\ndef decode(x): return ''"
    assert not Judge(any_backend(), LIMITS).judge(forged, tests, ENCODE).is_right


@pytest.mark.parametrize(
    "source",
    ["def check(candidate:\n    pass", "import no_such_module\ndef check(candidate): pass",
     "def check(candidate):\n    candidate(lambda: 1)"],
)  # fmt: skip
def test_tests_that_cannot_run_are_a_failed_grading(source: str) -> None:
    with pytest.raises(SandboxFailure, match="tests"):
        Judge(any_backend(), LIMITS).judge("def f(x): return x", CheckTests(source, "f", ("f",)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["none", *BACKENDS])
def test_a_program_has_the_memory_of_its_limit(name: str) -> None:
    """The harness sets the limit for bubblewrap, which is not on every machine, and for programs without a sandbox."""
    sandbox = no_sandbox() if name == "none" else backend(name)
    program = "try:\n    x = bytearray(400 << 20)\n    print('had it')\nexcept MemoryError:\n    print('had not')"
    tests = StdinTests([StdinCase("", "had it")])
    assert Judge(sandbox, replace(LIMITS, memory_mb=600)).judge(program, tests).is_right
    assert not Judge(sandbox, replace(LIMITS, memory_mb=200)).judge(program, tests).is_right


def test_output_is_cut_while_it_is_read() -> None:
    program = "import os\nos.write(1, b'1' * 1000)\nwhile True: os.write(1, b' ' * 65536)"
    verdict = Judge(any_backend(), replace(LIMITS, output_bytes=1 << 16, seconds=5.0)).judge(
        program, StdinTests([StdinCase("", "1")])
    )
    assert verdict.text == "case 1: printed more than 64 KiB"


def test_a_program_that_fails_after_its_output_is_wrong() -> None:
    verdict = Judge(any_backend(), LIMITS).judge(
        "print(1, flush=True)\nraise KeyError", StdinTests([StdinCase("", "1")])
    )
    assert (verdict.passed, verdict.text) == (0, "case 1: KeyError")


# ---- the reward ----


def groups(texts: list[str], **columns: object) -> list[Group]:
    start = Start(0, "write", columns)
    rollouts = [
        Rollout(context=(), actions=(0,), behavior_logprobs=(0.0,), end=EndReason.STOP, text=text) for text in texts
    ]
    return [Group(start, rollouts)]


def grader(**fields: object) -> RewardGrader:
    any_backend()
    return RewardGrader([WeightedReward.from_config(RewardConfig(name="code", workers=2, **fields))])  # type: ignore[arg-type]


RIGHT, HALF, WRONG = "def f(x): return 2 * x", "```python\ndef f(x): return x ** 2\n```", "I do not know."
TESTS = [{"args": [2], "expected": 4}, {"args": [3], "expected": 6}]


def test_the_reward_is_all_or_nothing_or_the_share() -> None:
    for partial, expected in ((False, [1.0, 0.0, 0.0]), (True, [1.0, 0.5, 0.0])):
        judge = grader(partial=partial)
        (group,) = judge.grade(groups([RIGHT, HALF, WRONG], tests=TESTS, entry_point="f"))
        judge.close()
        assert [rollout.reward for rollout in group.rollouts] == expected
        assert judge.score_kind == ("score" if partial else "accuracy")
        assert group.rollouts[1].extras["code"]["verdict"] == "case 2: wrong result"


def test_a_failure_of_the_sandbox_is_masked_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = grader()
    settings = Sandbox.settings

    def fails(self: Sandbox, limits: Limits) -> object:
        raise SandboxFailure("no namespace left")

    monkeypatch.setattr(Sandbox, "settings", fails)
    (group,) = groups([RIGHT], tests=TESTS, entry_point="f")
    with pytest.raises(GradingError, match="no namespace left"):
        judge.grade([group])
    assert group.rollouts[0].reward is None
    monkeypatch.setattr(Sandbox, "settings", settings)
    mixed = [*groups([RIGHT] * 9, tests=TESTS, entry_point="f"), *groups([RIGHT], tests="broken", entry_point="f")]
    graded = judge.grade(mixed)
    judge.close()
    assert [rollout.reward for group in graded for rollout in group.rollouts] == [1.0] * 9 + [None]


def test_a_masked_program_is_masked_beside_other_rewards() -> None:
    any_backend()
    other = WeightedReward.from_function(lambda completions, **columns: [1.0] * len(completions))
    both = RewardGrader([WeightedReward.from_config(RewardConfig(name="code")), other])
    mixed = [*groups([RIGHT] * 9, tests=TESTS, entry_point="f"), *groups([RIGHT], tests="broken", entry_point="f")]
    graded = both.grade(mixed)
    both.close()
    assert [rollout.reward for group in graded for rollout in group.rollouts] == [2.0] * 9 + [None]


def test_a_program_of_several_completions_is_run_once_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    judge = Judge.judge

    def counting(self: Judge, program: str, tests: Tests, prefix: str = "") -> Verdict:
        judged.append(program)
        return judge(self, program, tests, prefix)

    monkeypatch.setattr(Judge, "judge", counting)
    squares = [{"args": [n], "expected": n * n} for n in (2, 3)]
    fenced = f"Here it is:\n```python\n{RIGHT}\n```"
    texts = [RIGHT, HALF, WRONG, RIGHT, HALF, fenced, RIGHT]
    mixed = [*groups(texts, tests=TESTS, entry_point="f"), *groups(texts, tests=squares, entry_point="f")]
    grading = grader()
    graded = grading.grade(mixed)
    grading.close()
    rewards = [[rollout.reward for rollout in group.rollouts] for group in graded]
    assert rewards == [[1, 0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0, 0]]
    assert [graded[0].rollouts[row].extras["code"]["verdict"] for row in (1, 4)] == ["case 2: wrong result"] * 2
    # The fenced program ends with a line break, so it is another text.
    assert sorted(judged) == sorted(2 * [RIGHT, extract_program(HALF), WRONG, f"{RIGHT}\n"])


def test_the_same_program_after_another_prefix_or_for_another_function_is_another() -> None:
    any_backend()
    runner = CodeRunner(RewardConfig(name="code", workers=2))
    program = "def f(x): return number * x\ndef g(x): return 0"
    columns = {
        "completions": [program] * 4,
        "tests": [TESTS] * 4,
        "entry_point": ["f", "f", "g", "f"],
        "code_prefix": ["number = 2", "number = 3", "number = 2", "number = 2"],
    }
    values = runner.call(columns, 0, 0.0).values
    runner.close()
    assert values == [1.0, 0.0, 0.0, 1.0]


def test_data_without_tests_is_named_before_training() -> None:
    judge = grader()
    with pytest.raises(ConfigError, match="no column 'tests'"):
        judge.check([Start(0, "write", {"answer": RIGHT})])
    judge.close()


def test_the_function_has_the_signature_of_trl() -> None:
    any_backend()
    chat = [{"role": "assistant", "content": RIGHT}]
    assert code([chat, WRONG], tests=[TESTS, TESTS], entry_point=["f", "f"], prompts=["", ""]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"name": "numeric", "workers": 2}, "workers"), ({"name": "exact", "partial": True}, "partial"),
     ({"function": "f.py:g", "unsafe_without_sandbox": True}, "unsafe_without_sandbox")],
)  # fmt: skip
def test_fields_of_the_reward_are_refused_for_others(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} is set, but not used with .*code"):
        check_reward(RewardConfig(**fields), "[[rewards]] number 1")  # type: ignore[arg-type]


# ---- the choice of a sandbox ----


def test_without_a_sandbox_the_reward_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise SandboxFailure("is not installed")

    monkeypatch.setattr(backends, "CANDIDATES", {name: lambda: {"it": absent} for name in ("bubblewrap", "sandlock")})
    backends.find_sandbox.cache_clear()
    with pytest.raises(ConfigError) as error:
        CodeRunner(RewardConfig(name="code"))
    backends.find_sandbox.cache_clear()
    assert "apt install bubblewrap" in str(error.value)
    assert "covey[sandbox]" in str(error.value)
    assert "\n" not in str(error.value)
    runner = CodeRunner(RewardConfig(name="code", unsafe_without_sandbox=True))
    values = runner.call({"completions": [RIGHT], "tests": [TESTS], "entry_point": ["f"]}, 0, 0.0).values
    runner.close()
    assert values == [1.0]


def test_a_sandbox_that_leaks_is_not_used() -> None:
    """A process without isolation fails the probe, so the probe can fail."""
    with pytest.raises(SandboxFailure, match=r"read a file of the host.*opened a connection"):
        check_isolation(no_sandbox())


# The four leaks of a naive command line: environment, processes of root, user namespaces, ptrace.
@pytest.mark.parametrize(
    ("removed", "leak"),
    [("--unshare-net", "opened a connection"), (None, "traced a process|made a user namespace")],
)
def test_the_probe_notices_what_is_missing(removed: str | None, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = backend("bubblewrap").command[0]
    monkeypatch.setattr(backends, "bpf_filter", lambda: b"")
    sandbox = backends.bubblewrap(program, disable_userns=False)
    sandbox.command = [word for word in sandbox.command if word != removed]
    with pytest.raises(SandboxFailure, match=leak):
        check_isolation(sandbox)
    sandbox.sessions.close()


def test_neither_bwrap_nor_its_supervisor_has_an_environment_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    found = backend("bubblewrap")
    monkeypatch.setenv("COVEY_TEST_TOKEN", "secret of the run")
    sandbox = replace(found)  # with a worker that is started now
    with Session(sandbox, LIMITS):
        family = [process for worker in workers() for process in (worker, *descendants(worker))]
        assert len(family) >= 5  # the worker, its fork, bwrap, the first process inside, the program
        for member in family:
            assert b"secret" not in Path(f"/proc/{member}/environ").read_bytes()
    sandbox.sessions.close()


# ---- nothing stays ----


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.04, 0.08, 0.3])
@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_runs_on_when_covey_is_killed(name: str, seconds: float) -> None:
    """SIGKILL while programs are being started, and while they run; they hide their command lines."""
    backend(name)
    program = f"""
        import sys
        from covey.config import RewardConfig
        from covey.llm.rewards.code import CodeRunner
        from covey.llm.rewards.sandbox import backends
        backends.CANDIDATES = {{{name!r}: backends.CANDIDATES[{name!r}]}}
        runner = CodeRunner(RewardConfig(name="code", workers=2, time_limit_seconds=3000))
        print("ready", flush=True)
        hang = "import os, sys\\nif not os.fork():\\n    os.setsid()\\n"
        hang += "os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time\\\\nwhile True: time.sleep(1)'])"
        runner.call({{"completions": [hang] * 4, "tests": [[{{"input": "", "output": "x"}}]] * 4}}, 0, 0.0)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "src"}
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"ready\n"
    time.sleep(seconds)
    os.kill(run.pid, signal.SIGSTOP)  # so that it starts nothing while its processes are listed
    started: set[int] = set()
    while len(started) < len(started := started | set(descendants(run.pid))):  # a supervisor may start some yet
        pass
    assert len(started) >= 2  # a supervisor and its worker
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process for process in started if is_running(process)] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BACKENDS)
def test_many_programs_leave_no_process_and_no_descriptor(name: str) -> None:
    runner = CodeRunner(RewardConfig(name="code", workers=8))
    runner._judge.sandbox = backend(name)
    programs = [
        RIGHT,
        "def f(x: 1",
        "import os\nos._exit(0)",
        "import os, time\nos.fork() or time.sleep(100)\n" + RIGHT,
    ]

    def values(count: int) -> list[float | None]:
        texts = [f"{programs[number % 4]}\n# {number}" for number in range(count)]
        columns = {"completions": texts, "tests": [TESTS] * count, "entry_point": ["f"] * count}
        return runner.call(columns, 0, 0.0).values

    values(4)
    before = len(os.listdir("/proc/self/fd"))  # with the sockets of these programs, if they are still open
    assert values(40) == [1.0, 0.0, 0.0, 1.0] * 10
    deadline = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the sockets of programs are closed in the background
    assert len(os.listdir("/proc/self/fd")) <= before
    runner.close()
    assert processes_left() == []


def test_a_worker_that_was_killed_is_started_again_and_its_programs_are_not_judged() -> None:
    sandbox, before = replace(any_backend()), set(workers())
    running = Session(sandbox, LIMITS)
    (worker,) = set(workers()) - before
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(SandboxFailure):
        running.run_script("import time\ntime.sleep(1000)", b"", 100)
    running.close()
    supervisor = sandbox.sessions._worker.child.supervisor  # type: ignore[union-attr]
    assert supervisor.wait(60) is not None
    with Session(sandbox, LIMITS) as another:
        assert another.run_script("print(2)", b"", 100) == b"2\n"
    assert processes_left() == []
    sandbox.sessions.close()


def test_ctrl_c_while_a_sandbox_starts_leaves_no_process() -> None:
    sandbox = replace(no_sandbox(), command=[sys.executable, "-c", "import time; time.sleep(1000)  # never ready"])
    started: set[int] = set()

    def interrupt() -> None:
        while not any("never ready" in words for words in processes_left(0.0)):
            time.sleep(0.01)
        started.update(process for worker in set(workers()) - before for process in descendants(worker))
        os.kill(os.getpid(), signal.SIGINT)

    before, thread = set(workers()), threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Session(sandbox, LIMITS)
    thread.join()
    assert started
    sandbox.sessions.close()
    assert not any(map(is_running, started))


@pytest.mark.slow
def test_a_normal_end_leaves_no_process_and_no_warning() -> None:
    any_backend()
    program = """
        from covey.config import RewardConfig
        from covey.llm.rewards.code import CodeRunner
        from helpers.sandboxes import workers
        runner = CodeRunner(RewardConfig(name="code", workers=1))
        print(runner.call({"completions": ["print(1)"], "tests": [[{"input": "", "output": "1"}]]}, 0, 0.0).values)
        runner.close()
        print(*workers())
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "src:tests"})
    values, *left = done.stdout.split()
    assert (values, done.stderr) == ("[1.0]", "")
    assert len(left) == 1
    assert not any(is_running(int(process)) for process in left)


def test_programs_run_side_by_side() -> None:
    any_backend()
    runner = CodeRunner(RewardConfig(name="code", workers=3))
    # Each program ends when all three have started: the file descriptors of one are not those of another, so they meet
    # in time, not in files.
    program = "import time\nbegan = time.time()\ntime.sleep(1.5)\nprint(began, time.time())"
    printed: list[tuple[float, float]] = []

    def spans(expected: str, output: bytes) -> bool:
        first, last = map(float, output.split())
        printed.append((first, last))
        return True

    original = code_module.Judge.judge.__globals__["same_output"]
    code_module.Judge.judge.__globals__["same_output"] = spans
    try:
        runner.call({"completions": [program] * 3, "tests": [[{"input": "", "output": ""}]] * 3}, 0, 0.0)
    finally:
        code_module.Judge.judge.__globals__["same_output"] = original
        runner.close()
    assert max(first for first, _ in printed) < min(last for _, last in printed)
    assert processes_left() == []
