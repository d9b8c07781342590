"""`covey serve --vllm`: what vLLM is started with, what is refused before it starts, and how it ends.

vLLM itself is started by the tests of `make scale`. Here a script is the interpreter of its environment.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.cli.main import main
from covey.config import ConfigError, RunError
from covey_vllm import launcher
from covey_vllm.launcher import VllmProcess, VllmSettings
from helpers.run_helpers import is_running, wait_for_end
from helpers.tiny_models import tiny_folder

SECRET = "not-to-be-seen"


@pytest.fixture
def settings(tmp_path) -> VllmSettings:
    token = tmp_path / "token"
    token.write_text(SECRET)
    token.chmod(0o600)
    return VllmSettings(interpreter(tmp_path, "exit 0"), tmp_path, "127.0.0.1", 8801, token, [tmp_path], "bf16")


def interpreter(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def value_of(settings: VllmSettings, option: str) -> str:
    arguments = settings.arguments
    assert arguments.count(option) == 1
    return arguments[arguments.index(option) + 1]


def test_vllm_is_started_with_what_a_run_needs(settings):
    assert settings.arguments[:3] == [str(settings.python), "-m", "covey_vllm"]
    assert {"--enable-scale-out", "--no-enable-chunked-prefill"} <= set(settings.arguments)
    assert "--enforce-eager" not in settings.arguments
    assert "--enforce-eager" in replace(settings, eager=True).arguments
    assert value_of(settings, "--logprobs-mode") == "processed_logprobs"
    assert value_of(settings, "--generation-config") == "vllm"
    assert value_of(settings, "--middleware") == "covey_vllm.Guard"
    assert value_of(settings, "--weight-transfer-config") == '{"backend": "covey"}'
    assert value_of(settings, "--dtype") == "bfloat16"
    assert value_of(replace(settings, precision="fp32"), "--dtype") == "float32"
    assert not {"--gpu-memory-utilization", "--enable-sleep-mode"} & set(settings.arguments)
    beside = replace(settings, gpu_memory=0.35, sleep=True)
    assert value_of(beside, "--gpu-memory-utilization") == "0.35"
    assert "--enable-sleep-mode" in beside.arguments
    environment = settings.environment
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["COVEY_TOKEN_FILE"] == str(settings.token_file)
    assert SECRET not in " ".join([*settings.arguments, *environment.values()])


def test_a_batch_has_room_for_the_longest_sequence(settings):
    """A prompt that does not fit is cut, and a seeded request with a cut prompt ends vLLM on CPUs."""
    assert int(value_of(settings, "--max-num-batched-tokens")) >= settings.max_model_len
    assert value_of(replace(settings, max_model_len=5000), "--max-num-batched-tokens") == "5000"
    assert value_of(replace(settings, batched_tokens=3000), "--max-num-batched-tokens") == "3000"
    replace(settings, batched_tokens=2048).check()
    with pytest.raises(ConfigError, match="--batched-tokens 2047 is below --max-model-len 2048"):
        replace(settings, batched_tokens=2047).check()
    with pytest.raises(ConfigError, match="--max-model-len must be at most"):
        replace(settings, max_model_len=1 << 20).check()


def test_libraries_of_covey_are_not_seen(settings, monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/somewhere")
        assert name not in settings.environment


def test_a_server_that_ends_is_one_line(settings, tmp_path):
    interpreter(tmp_path, "echo starting; echo 'ValueError: no such model' >&2; exit 3")
    with VllmProcess(settings, tmp_path / "log") as process:
        with pytest.raises(RunError, match=r"vLLM did not start: status 3 \(ValueError: no such model\)") as found:
            process.wait_until(lambda: False, print)
        assert str(tmp_path / "log") in str(found.value)
        with pytest.raises(RunError, match="vLLM has ended"):
            process.wait()


def test_without_the_package_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setattr("covey.config.servers.entry_points_of", lambda group: {})
    for words in (["serve", "smollm2-135m", "--vllm"], ["train", "arithmetic_grpo", "--sampler", "vllm"]):
        assert main(words) == 2
        assert 'needs the package covey-vllm here, beside covey: pip install "covey[vllm]"' in capsys.readouterr().err


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_precision_is_that_of_the_gpu_of_vllm(has_bf16, dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    python = interpreter(tmp_path, f'echo "$@" > {tmp_path}/words; exit 3')
    words = ["--gpu-memory", "0.3", "--sleep", "--max-model-len", "100", "--threads", "1"]
    assert main(["serve", str(tiny_folder(tmp_path / "model")), "--vllm", "--vllm-python", str(python), *words]) == 1
    assert "vLLM did not start: status 3" in capsys.readouterr().err
    given = (tmp_path / "words").read_text()
    assert f"--dtype {dtype} " in given
    assert "--gpu-memory-utilization 0.3 " in given
    assert "--enable-sleep-mode" in given


def test_the_server_and_its_workers_are_ended(settings, tmp_path, monkeypatch):
    """Also if they ignore SIGTERM."""
    monkeypatch.setattr(launcher, "STOP_SECONDS", 0.2)
    interpreter(tmp_path, f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/worker; echo up; wait")
    with VllmProcess(settings, tmp_path / "log") as process:
        process.wait_until(lambda: "up" in process.log.read_text(), print)
        worker = int((tmp_path / "worker").read_text())
        assert is_running(worker)
    assert process.process.returncode == -signal.SIGKILL
    wait_for_end(worker)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "3"], "--slots is for vLLM: add --vllm"),
        (["--eager"], "--eager is for vLLM: add --vllm"),
        (["--vllm", "--rows", "3"], "--rows and --device are for covey's own decoder"),
        (["--vllm", "--vllm-python", "nowhere/python"], "`make scale` in covey's repository creates .scale-venv"),
        (["--vllm", "--host", "0.0.0.0"], "is reachable from other machines: name a --token-file"),
        (["--vllm", "--vllm-python", "PYTHON", "--batched-tokens", "100"], "is below --max-model-len 2048"),
        (["--vllm", "--vllm-python", "PYTHON", "--folder", "nowhere"], "--folder: there is no folder nowhere"),
        (["--vllm", "--vllm-python", "PYTHON"], "exceeds the model's 256 positions"),
    ],
)
def test_mistakes_are_refused_before_vllm_starts(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    python = interpreter(tmp_path, f"touch {tmp_path}/started")
    model = tiny_folder(tmp_path / "model")
    capsys.readouterr()  # the progress of writing it
    status = main(["serve", str(model), *(str(python) if word == "PYTHON" else word for word in words)])
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not os.path.exists(tmp_path / "started")
