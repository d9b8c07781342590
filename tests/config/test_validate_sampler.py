"""Every wrong [sampler] table is refused with one line that names the fix, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    IterationConfig,
    RewardConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
)
from covey.config.rules import validate

HERE = "http://127.0.0.1:8801"
THERE = "http://10.0.0.7:8801"


def checked(sampler: dict[str, Any], **fields: Any) -> None:
    validate(RunConfig(task=ArithmeticConfig(), sampler=SamplerConfig(**sampler), **fields))


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("abc\n")
    return str(path)


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        ({"servers": (HERE,)}, "sampler.servers is set, but has no effect while sampler.kind is 'local'"),
        ({"start": 2}, "sampler.start is set"),
        ({"timeout": 5.0}, "sampler.timeout is set"),
        ({"kind": "other"}, "sampler.kind must be local, covey or vllm"),
        ({"kind": "covey"}, "names no server: start covey serve, or set sampler.start"),
        ({"kind": "vllm"}, "names no server: start covey serve --vllm"),
        ({"kind": "vllm", "start": 1}, "sampler.start starts covey serve"),
        ({"kind": "covey", "servers": (HERE,), "start": 1}, "both servers and start"),
        ({"kind": "covey", "servers": (HERE, HERE + "/")}, "an address twice"),
        ({"kind": "covey", "servers": ("127.0.0.1:8801",)}, "must be addresses such as"),
        ({"kind": "covey", "servers": ("ftp://127.0.0.1",)}, "must be addresses such as"),
        ({"kind": "covey", "servers": (HERE + "/v1",)}, "without a path"),
        ({"kind": "covey", "servers": (HERE + "?a=b",)}, "without a path"),
        ({"kind": "covey", "servers": ("http://127.0.0.1:99999",)}, "is not an address"),
        ({"kind": "covey", "servers": ("http://127.0.0.1:0",)}, "is not an address (the port is 0)"),
        ({"kind": "covey", "servers": ("http://me:secret@127.0.0.1:1",)}, "with a user name"),
        ({"kind": "covey", "servers": (THERE,)}, "10.0.0.7 is another machine, so sampler.token_file"),
        ({"kind": "vllm", "servers": ("http://node7:8801",)}, "node7 is another machine, so sampler.token_file"),
        ({"kind": "covey", "servers": (THERE,), "token_file": "TOKEN"}, "so sampler.folder must name a folder"),
        ({"kind": "covey", "servers": (HERE,), "token_file": "TOKEN", "folder": "/missing"}, "no folder /missing"),
        (
            {"kind": "covey", "servers": (HERE,), "token_file": "TOKEN", "transport": "group", "folder": "/tmp"},
            "remove one of them",
        ),
        ({"kind": "covey", "servers": (HERE,), "token_file": "/missing"}, "there is no file /missing"),
        ({"kind": "covey", "servers": (HERE,)}, "covey serve smollm2-135m creates the access token, start it first"),
        ({"kind": "covey", "start": 1, "max_mismatch": 1.0}, "sampler.max_mismatch must be above 1"),
        ({"kind": "covey", "start": 1, "attempts": 0}, "sampler.attempts must be at least 1"),
        ({"kind": "covey", "start": 1, "timeout": 0.0}, "sampler.timeout must be above 0"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(
    sampler: dict[str, Any], named: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    given = {name: token if value == "TOKEN" else value for name, value in sampler.items()}
    with pytest.raises(ConfigError) as caught:
        checked(given)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_may_read_is_refused(token: str, mode: int) -> None:
    Path(token).chmod(mode)
    with pytest.raises(ConfigError, match="run chmod 600"):
        checked({"kind": "covey", "servers": (HERE,), "token_file": token})


def test_right_tables_are_accepted(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    checked({})
    checked({"kind": "covey", "start": 2})
    checked({"kind": "covey", "servers": (HERE, "http://localhost:8802", "http://[::1]:8803"), "token_file": token})
    checked({"kind": "vllm", "servers": (THERE,), "token_file": token, "transport": "group"})
    checked({"kind": "covey", "servers": (THERE,), "token_file": token, "folder": str(tmp_path)})
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey" / "token").symlink_to(token)
    checked({"kind": "covey", "servers": (HERE,)})


def test_a_minimum_length_needs_log_probabilities_of_the_distribution_that_is_sampled(token: str) -> None:
    least = SamplingConfig(min_new_tokens=3)
    checked({"kind": "covey", "servers": (HERE,), "token_file": token}, sampling=least)
    with pytest.raises(ConfigError, match=r"sampling\.min_new_tokens is for covey's own samplers"):
        checked({"kind": "vllm", "servers": (HERE,), "token_file": token}, sampling=least)


@pytest.mark.parametrize(
    ("shortest", "message"),
    [(-1, "min_new_tokens must be at least 0"), (9, "no completion could end")],
)
def test_a_minimum_length_is_below_the_limit(shortest: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked({}, sampling=SamplingConfig(min_new_tokens=shortest, max_new_tokens=9))


def test_an_iterative_run_samples_in_its_own_process() -> None:
    with pytest.raises(ConfigError, match=r"remove sampler\.kind, or iteration\.steps"):
        checked(
            {"kind": "covey", "start": 1},
            iteration=IterationConfig(steps=2),
            rewards=(RewardConfig(name="exact"),),
        )
