"""Environments in processes: replies under deadlines, and faults that stay in their own conversation."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.llm.conversation.environment import HostedEnvironment
from covey.llm.conversation.processes import EnvironmentProcesses, copied_environment
from covey.runtime.worker import child
from covey.runtime.worker.process import CallError
from helpers import guessing
from helpers.run_helpers import is_running, wait_for_end

FILE = str(Path(guessing.__file__))
FAULTS = {
    "raise too bad": r"^RuntimeError: too bad \(guessing.py line \d+\)$",
    "hang": "took longer than 1.5 s for one call",
    "die 7": "its process ended before it answered",
    "kill": "its process ended before it answered",
    "exit": "SystemExit: 3",
    "number": "step returned int 42 instead of a text",
    "reward nan": "returned the reward float nan: a finite number is needed",
    "reward text": "returned the reward str 'high'",
    "two": "instead of a reply, a reward and whether it is over",
    "done": "str 'no' as the third value: True or False",
}


@pytest.fixture(scope="module")
def processes():
    found = EnvironmentProcesses(f"{FILE}:Faulty", 1.5, 1000)
    yield found
    found.close()


@pytest.fixture(scope="module")
def copies():
    """Of a class that only this program has."""
    found = EnvironmentProcesses("Own", 1.5, 1000, copied=copied_environment(own_class(), "Own"))
    yield found
    found.close()


def own_class():
    class Own(guessing.Faulty):
        pass

    return Own


@pytest.fixture(params=["file", "Python"])
def environments(request):
    return request.getfixturevalue("processes" if request.param == "file" else "copies")


def say(session, message):
    return session.ask({"do": "step", "message": message}).result(60)


def test_a_conversation(environments):
    session = environments.open(0)
    assert session.ask({"do": "describe"}).result(60)["style"] == "step"
    assert session.ask({"do": "reset", "columns": {"other": 1}}).result(60)["text"] is None
    reply = say(session, "hello")
    assert (reply["text"], reply["reward"], reply["done"]) == ("got hello", 0.5, False)
    reply = say(session, "reward none")
    assert (reply["text"], reply["reward"], reply["done"]) == ("", 0.0, False)
    end = session.ask({"do": "end"}).result(60)
    assert end["attributes"] == {"log": ["hello", "reward none"]}, "public attributes that JSON has"
    assert end["reward"] is None
    session.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_own_conversation_alone(environments, fault):
    sessions = [environments.open(0) for _ in range(3)]
    answers = [
        session.ask({"do": "step", "message": message})
        for session, message in zip(sessions, ("a", fault, "b"), strict=True)
    ]
    with pytest.raises(CallError, match=FAULTS[fault]) as failed:
        answers[1].result(60)
    assert "\n" not in str(failed.value)
    assert [answers[place].result(60)["text"] for place in (0, 2)] == ["got a", "got b"]
    assert say(sessions[0], "again")["text"] == "got again"
    if "process" in FAULTS[fault] or fault == "hang":
        with pytest.raises(CallError, match=FAULTS[fault]):
            say(sessions[1], "hello")
    for session in sessions:
        session.close()


def test_a_fault_in_reset(environments):
    session = environments.open(0)
    with pytest.raises(CallError, match="RuntimeError: at once"):
        session.ask({"do": "reset", "columns": {"fault": "raise at once"}}).result(60)


def test_replies_have_a_largest_size(environments):
    session = environments.open(0)
    assert say(session, "huge 1000")["text"] == "x" * 1000
    assert say(session, "huge 3000000")["text"] == "x" * 1000 + " ... (2,999,000 more characters)"
    assert say(session, "surrogate")["text"] == "a?b"


def test_a_forked_child_of_an_environment_does_not_reply(processes):
    session = processes.open(0)
    assert say(session, "fork")["text"] == "of the parent"
    assert say(session, "hello")["text"] == "got hello"


def test_conversations_share_nothing_and_have_the_same_random_numbers(environments):
    first, second, other = environments.open(3), environments.open(3), environments.open(4)
    assert say(first, "shared")["text"] == say(second, "shared")["text"] == "1"
    numbers = [say(session, "random")["text"] for session in (first, second, other)]
    assert numbers[0] == numbers[1] != numbers[2]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processes_of_an_environment_end_with_it(processes):
    closed, hanging = processes.open(0), processes.open(0)
    started = [int(say(session, "child")["text"]) for session in (closed, hanging)]
    assert all(map(is_running, started))
    closed.close()
    with pytest.raises(CallError):
        say(hanging, "hang")
    for process in started:
        wait_for_end(process)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_worker_is_started_again():
    processes = EnvironmentProcesses(f"{FILE}:Faulty", 60.0, 1000)
    session = processes.open(0)
    started = int(say(session, "child")["text"])
    supervisor = processes._sessions._worker.child.supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(CallError, match="its process ended"):
        say(session, "hang")
    supervisor.wait()
    assert say(processes.open(0), "hello")["text"] == "got hello"
    processes.close()
    wait_for_end(started)


def test_output_goes_to_stderr(processes, capfd):
    session = processes.open(0)
    assert say(session, "print covey \x1b[31mred")["text"] == "printed"
    processes.close()
    assert "covey \\x1b[31mred" in capfd.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{FILE}:Nothing", "Nothing is not an environment: it needs a method step"),
        (f"{FILE}:Absent", "has no function 'Absent'"),
        ("no_such_module:Guess", "ModuleNotFoundError"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name, message):
    processes = EnvironmentProcesses(name, 5.0, 1000)
    with pytest.raises(ConfigError, match=message) as refused:
        processes.start()
    assert "\n" not in str(refused.value)


def test_a_column_without_json_fails_the_conversation(processes):
    with pytest.raises(CallError, match="cannot be sent"):
        processes.open(0).ask({"do": "reset", "columns": {"columns": object()}}).result(60)


STEP = "\n    def step(self, m): return 'x', 0.0, False"
MISTAKES = {
    "class E:\n    def __init__(self, size): ..." + STEP:
        "missing a required argument: 'size'; its options are size: give each a default value, set options = "
        '["NAME = VALUE"], or in Python use functools.partial',
    "class E:\n    async def reset(self): return 'x'" + STEP:
        "E.reset is an async function or a generator: make it an ordinary method",
    "class E:\n    async def step(self, m): return 'x', 0.0, False":
        "E.step is an async function or a generator: make it an ordinary method",
    "class E:\n    def step(self, m): yield 'x', 0.0, False":
        "E.step is an async function or a generator: make it an ordinary method",
    "class E:\n    def step(self): return 'x', 0.0, False":
        "E.step does not take one argument, the text of a turn: write def step(self, message)",
    "class E:\n    def step(self, a, b): return 'x', 0.0, False":
        "E.step does not take one argument, the text of a turn: write def step(self, message)",
    "class E:\n    def reset(self, answer, /): return 'x'" + STEP:
        "reset takes 'answer' by position, but gets columns by name: take out the /",
    "class E:\n    def reset(self, secret): return 'x'" + STEP:
        "reset asks for 'secret', but the data has only answer",
    "import no_such_package\nclass E:" + STEP:
        "ModuleNotFoundError: No module named 'no_such_package' (mistaken.py line 1)",
    "import sys\nsys.exit(2)\nclass E: ...": "SystemExit: 2 (mistaken.py line 2)",
    "class E:" + STEP + "\nE = E()": "is an object: name a function or a class",
}  # fmt: skip


def describe_and_reset(processes):
    session = processes.open(0)
    session.ask({"do": "describe"}).result(60)
    session.ask({"do": "reset", "columns": {"answer": 1}}).result(60)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_in_a_class_is_one_line_that_names_the_fix(source, tmp_path):
    file = tmp_path / "mistaken.py"
    file.write_text(source)
    processes = EnvironmentProcesses(f"{file}:E", 60.0, 1000)
    try:
        with pytest.raises((ConfigError, CallError)) as refused:
            describe_and_reset(processes)
    finally:
        processes.close()
    assert MISTAKES[source] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "ConfigError" not in str(refused.value)


def test_a_reply_after_the_deadline_is_dropped():
    run, environment = socket.socketpair()
    run.sendall(json.dumps({"id": 1}).encode() + b"\n")
    run.close()

    class Slow:
        calls = 0

        def answer(self, request):
            self.calls += 1
            return {"reply": "late"}

    slow = Slow()
    with environment:
        child._Worker(environment).converse(slow.answer)
    assert slow.calls == 1


class Unreadable:
    def add(self, a: bytearray) -> int:
        """Add.

        Args:
            a: a number
        """
        return len(a)


@pytest.mark.slow
def test_a_tool_that_cannot_be_described_is_one_line_that_names_the_fix():
    message = HostedEnvironment(Unreadable, 1000).answer({"do": "describe"})["failed"]
    assert message.startswith("the tool Unreadable.add cannot be described to a model (bytearray is not a type")
    assert message.endswith("or begin the name with an underscore if it is not a tool")
