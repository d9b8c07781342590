"""Calls for single completions in a pool of processes: faults of one completion and of whole processes."""

import os

import pytest

from covey.llm.rewards.runner import OneByOne, RewardPool
from covey.runtime.worker.child import InvalidResult
from covey.runtime.worker.process import CallError

FUNCTIONS = """
import os, signal, threading, time

def mixed(completions, factor, answer, **columns):
    assert len(completions) == len(answer) == 1
    assert set(columns) <= {"trainer_state", "log_metric", "log_extra"}, columns
    (text,) = completions
    if text == "hang":
        time.sleep(3600)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "die":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "none":
        return [None]
    if text == "wrong":
        return ["a text"]
    return [factor * float(text) + answer[0]]

def process(completions, **columns):
    time.sleep(0.05)
    return [float(os.getpid())]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def one_by_one(function, workers, shortcut=None):
    return OneByOne(RewardPool(function, workers, repeat=False), ("factor",), shortcut)


def call(pool, texts, *, seconds=60.0, answer=0):
    count = len(texts)
    arguments = {
        "prompts": ["p"] * count, "completions": texts, "completion_ids": [[1]] * count,
        "answer": [answer] * count, "factor": 10,
    }  # fmt: skip
    return pool.call(arguments, 0, seconds)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_completion_gets_its_own_result_in_order(file, workers):
    pool = one_by_one(f"{file}:mixed", workers)
    try:
        results = call(pool, [str(i) for i in range(12)], answer=1)
        assert results.values == [10 * i + 1 for i in range(12)]
        assert results.errors == {}
        assert call(pool, ["none", "7"]).values == [None, 70]
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("hang", "took longer than 3 s"),
        ("raise", "KeyError: 'no such thing' (functions.py line"),
        ("die", "its process ended by itself with exit code 3"),
        ("kill", "its process was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_fault_costs_one_completion(file, fault, why, workers):
    pool = one_by_one(f"{file}:mixed", workers)
    try:
        for _ in range(2):
            results = call(pool, ["1", fault, "2", "3", "4", "5"], seconds=3.0)
            assert results.values == [10, None, 20, 30, 40, 50]
            assert list(results.errors) == [1]
            assert results.errors[1].startswith(why)
    finally:
        pool.close()


def test_after_too_many_faults_the_rest_is_not_tried(file):
    pool = one_by_one(f"{file}:mixed", 1)
    results = call(pool, ["raise"] * 10)
    assert sorted(results.errors) == list(range(10))
    tried = [error for error in results.errors.values() if error.startswith("KeyError")]
    assert len(tried) == 3, "two of ten are allowed to fail"
    assert results.errors[9].startswith("was not graded, because more than 20 % failed: KeyError")
    pool.close()


def test_an_invalid_result_and_a_missing_function_are_errors(file):
    pool = one_by_one(f"{file}:mixed", 2)
    with pytest.raises(InvalidResult, match="returned str 'a text' where a number"):
        call(pool, ["1", "wrong"])
    pool.close()
    absent = one_by_one(f"{file}:absent", 2)
    results = call(absent, ["1"])
    assert "has no function 'absent'" in results.errors[0]
    absent.close()


@pytest.mark.slow
def test_the_processes_work_side_by_side_and_end_with_the_pool(file):
    pool = one_by_one(f"{file}:process", 3)
    processes = {int(value) for value in call(pool, ["x"] * 60).values}
    assert len(processes) == 3
    pool.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert {int(value) for value in call(pool, ["x"] * 3).values}.isdisjoint(processes)
    pool.close()


def test_the_shortcut_comes_first(file):
    def known(completions, answer, **columns):
        return [5.0 if text == "known" else None for text in completions]

    pool = one_by_one(f"{file}:mixed", 2, known)
    assert call(pool, ["known", "2", "known"]).values == [5, 20, 5]
    pool.close()

    def fails(completions, **columns):
        raise ValueError("no column")

    with pytest.raises(CallError, match="ValueError: no column"):
        call(one_by_one(f"{file}:mixed", 2, fails), ["1"])
