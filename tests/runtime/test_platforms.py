"""Nothing that only Linux or glibc has is assumed; each test takes one such thing away."""

import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from covey import __main__ as command
from covey.config import ConfigError, EnvironmentConfig, RewardConfig, machine
from covey.control.envs.isolated import IsolatedVectorEnv
from covey.control.envs.manual_reset import ManualResetVectorEnv
from covey.control.envs.vector_env import make_environments
from covey.llm.native import build
from covey.llm.rewards.code import CodeRunner
from covey.runtime.device import environment
from covey.runtime.worker import child
from covey.runtime.worker.sessions import Sessions
from helpers import toy_envs

SERVICE = """
def begin(request):
    return {}, lambda seed: lambda request: {"length": len(seed) + request["more"]}
"""


@pytest.fixture
def service(tmp_path: Path) -> ModuleType:
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    spec = importlib.util.spec_from_file_location("service", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@pytest.mark.parametrize(
    ("given", "torch_loaded", "kept"),
    [
        ({}, False, machine.WAITING),
        ({}, True, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, False, {"GOMP_SPINCOUNT": "7"}),
        ({"KMP_BLOCKTIME": "200"}, False, {"KMP_BLOCKTIME": "200"}),
    ],
)
def test_how_threads_wait_is_chosen_before_torch_reads_it_and_by_the_user_first(
    given: dict[str, str], torch_loaded: bool, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("OMP_WAIT_POLICY", *machine.WAITING):
            patch.delenv(name, raising=False)
            patch.setenv(name, given.get(name, ""))
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        if not torch_loaded:
            patch.delitem(sys.modules, "torch")
        machine.wait_briefly()
        assert machine.waiting() == kept
        said = environment(torch.device("cpu"), torch.float32)["waiting threads"]
        assert said == (" ".join(f"{name}={value}" for name, value in kept.items()) or "the library's choice")


def test_covey_chooses_it_before_it_imports_torch() -> None:
    """Also as a library, and for the processes that it starts."""
    read = "import os, sys, covey; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    environment = {name: value for name, value in os.environ.items() if name not in machine.waiting()}
    done = subprocess.run([sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == machine.WAITING["GOMP_SPINCOUNT"]


@pytest.mark.parametrize(("platform", "limited"), [("linux", True), ("darwin", False), ("freebsd14", False)])
def test_address_space_is_limited_on_linux_alone(platform: str, limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward `math` asks for it; macOS refuses a limit below what every process has reserved."""
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (0, resource.RLIM_INFINITY))
    child.limit_resources(RLIMIT_AS=2 << 30, RLIMIT_CORE=0)
    assert limits == {resource.RLIMIT_CORE: (0, 0)} | ({resource.RLIMIT_AS: (2 << 30,) * 2} if limited else {})


@pytest.mark.parametrize("has_waitid", [True, False])
def test_what_an_ended_session_has_started_is_ended_without_waitid_too(
    has_waitid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS before Python 3.13."""
    if not has_waitid:
        monkeypatch.delattr(os, "waitid")
    read, write = os.pipe()
    session = os.fork()
    if not session:
        os.setpgid(0, 0)
        if os.fork():
            os._exit(0)
        os.close(read)
        signal.pause()
        os._exit(0)
    os.close(write)
    processes, ended = {7: session}, time.monotonic() + 60
    while processes and time.monotonic() < ended:
        child._reap(processes)
    assert processes == {}
    assert os.read(read, 1) == b"", "the process that the session has started has ended"
    os.close(read)


def test_a_session_begins_with_more_than_a_socket_holds(service: ModuleType) -> None:
    """A socket pair holds 8 KB on macOS, and 200 KB on Linux."""
    sessions = Sessions(service, dict, 60.0, 60.0)
    try:
        sessions.start()
        connection = sessions._worker.child.connection.socket  # type: ignore[union-attr]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        begun = [sessions.open("x" * length) for length in (1, 1_000_000, 3)]
        replies = [session.ask({"more": 1}).result(60.0)["length"] for session in begun]
        assert replies == [2, 1_000_001, 4]
    finally:
        sessions.close()


@pytest.mark.parametrize(("platform", "ended"), [("linux", False), ("darwin", True)])
def test_without_orphans_of_its_own_a_worker_is_ended_with_its_group(
    platform: str, ended: bool, service: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS, where a group of processes that have ended is no longer one's own."""
    sessions, groups = Sessions(service, dict, 60.0, 60.0), list[int]()

    def killpg(group: int, number: int) -> None:
        groups.append(group)
        raise PermissionError

    sessions.start()
    supervisor = sessions._worker.child.supervisor  # type: ignore[union-attr]
    supervisor.kill()
    supervisor.wait()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        patch.setattr(os, "killpg", killpg)
        sessions.close()
    assert groups == [supervisor.pid] * ended


def test_a_command_past_its_time_limit_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def killpg(group: int, number: int) -> None:
        os.kill(group, number)
        raise PermissionError

    monkeypatch.setattr(os, "killpg", killpg)
    with pytest.raises(subprocess.TimeoutExpired):
        build._output_of(["sleep", "600"], 0.01)


@pytest.mark.parametrize(("platform", "kind"), [("linux", IsolatedVectorEnv), ("darwin", ManualResetVectorEnv)])
def test_an_environment_of_ones_own_is_not_forked_from_torch_on_macos(
    platform: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_envs.register()
    config = EnvironmentConfig(id=toy_envs.TARGET)
    monkeypatch.setattr(sys, "platform", platform)
    environments = make_environments(config, 2)
    try:
        assert type(environments._vector) is kind
    finally:
        environments.close()


@pytest.mark.parametrize("unsafe", [True, False])
def test_programs_of_a_model_run_on_linux_alone(unsafe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"^the reward code runs .* on Linux alone: use a Linux machine"):
        CodeRunner(RewardConfig(name="code", unsafe_without_sandbox=unsafe))


def test_windows_is_told_of_wsl_before_a_module_of_unix_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        with pytest.raises(SystemExit, match=r"^error: covey runs on Linux and macOS: on Windows, install it in WSL"):
            command.main()
    absent = "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource', 'pwd', 'termios')); import covey.__main__"
    assert subprocess.run([sys.executable, "-c", absent], check=False).returncode == 0
