"""Runs whose completions come from `covey serve` end with the bits of runs that sample by themselves."""

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.runtime.interrupts import EXIT_CODE
from helpers import fake_vllm, guessing
from helpers.rank_cases import start_ranks
from helpers.rank_runs import finish
from helpers.run_helpers import LIMIT_SECONDS, Moment, covey, is_running, start, wait_for_end
from helpers.sampled_runs import files_of, sampler_table, write_recipe
from helpers.samplers import Proxy, Serving, begin, is_generation, serving, token_file, wait_for
from helpers.tiny_models import calling_folder, tiny_folder

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samplers")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_folder(folder / "tiny")


@pytest.fixture(scope="module")
def servers(model: Path, folder: Path) -> Iterator[list[Serving]]:
    with serving(model, folder, 2) as found:
        yield found


@pytest.fixture(scope="module")
def alone(model: Path, folder: Path) -> Path:
    """A run that samples by itself."""
    code, said = covey("train", write_recipe(folder, "alone", model), "--run-dir", folder / "alone", cwd=folder)
    assert code == 0, said
    return folder / "alone"


def metrics(run: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["file", "group"])
def test_a_run_on_two_servers_has_the_bits_of_one_alone(
    servers: list[Serving], model: Path, folder: Path, alone: Path, transport: str
) -> None:
    table = sampler_table([one.address for one in servers], token_file(folder), transport=transport)
    run = folder / f"run_{transport}"
    code, said = covey("train", write_recipe(folder, transport, model, sampler=table), "--run-dir", run, cwd=folder)
    assert code == 0, said
    assert f"weights by {transport}" in said
    assert files_of(run) == files_of(alone)
    assert metrics(run, "sampler/servers") == [2.0] * 3
    assert metrics(run, "sampler/rerouted") == [0.0] * 3
    assert "a-token-of-the-tests" not in said + (run / "config.toml").read_text()


@pytest.mark.slow
def test_a_lost_server_changes_no_bit_and_without_any_the_run_is_resumed_later(
    servers: list[Serving], model: Path, folder: Path, alone: Path
) -> None:
    """One of two servers is killed in the second step, the other one in the third."""
    others = [begin(model, folder) for _ in range(2)]
    wait_for(*others)
    trained = 0

    def kill(request: bytes, answer: bytes) -> bytes:
        nonlocal trained
        if b'"step": 2' in request and others[0].process.poll() is None:
            others[0].kill()
            return b""
        if b'"step": 3' in request and others[1].process.poll() is None:
            others[1].kill()
            return b""
        trained += is_generation(request)
        return answer

    with Proxy(others[0].address, kill) as first, Proxy(others[1].address, kill) as second:
        table = sampler_table([first.address, second.address], token_file(folder), timeout=2.0)
        run = folder / "lost"
        recipe = write_recipe(folder, "lost", model, sampler=table)
        code, said = covey("train", recipe, "--run-dir", run, cwd=folder)
        assert code == 1, said
        (line,) = [line for line in said.splitlines() if line.startswith("error:")]
        assert "no sampler is left" in line
        assert f"Go on with: covey train --resume {run}" in line
        assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["step-00000002"]
        assert metrics(run, "sampler/rerouted")[1] > 0
        # Servers of another process with other weights and versions take the place of those that were killed.
        first.target, second.target = (int(one.address.rpartition(":")[2]) for one in servers)
        first.bend = second.bend = lambda request, answer: answer
        code, said = covey("train", "--resume", run, cwd=folder)
        assert code == 0, said
        found, expected = files_of(run), files_of(alone)
        for name in expected:
            assert found[name] == expected[name], name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_with_sharded_weights_and_servers_have_the_bits_of_one_process(
    model: Path, tmp_path: Path, precision: str
) -> None:
    """The second rank has none of the six held-out problems."""
    shards = "\n[cluster]\nshards = 4\n"
    recipe = write_recipe(tmp_path, "one", model, sampler=shards, precision=precision)
    code, said = covey("train", recipe, "--run-dir", tmp_path / "one", cwd=tmp_path)
    assert code == 0, said
    with serving(model, tmp_path, 2, ("--precision", precision)) as found:
        table = sampler_table([one.address for one in found], token_file(tmp_path)) + shards + 'weights = "fsdp"\n'
        recipe = write_recipe(tmp_path, "two", model, sampler=table, precision=precision)
        ranks = start_ranks(["-m", "covey", "train", str(recipe), "--run-dir", str(tmp_path / "two")], 2, tmp_path)
        ended = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), ended
    one, two = (
        {name: value for name, value in files_of(tmp_path / name).items() if not name.startswith("checkpoints/")}
        for name in ("one", "two")
    )
    assert two == one


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "weights"), [("fp32", "fsdp"), ("bf16", "fsdp"), ("fp32", "replicate")])
def test_ranks_with_an_adapter_share_servers_and_have_the_bits_of_one(
    model: Path, tmp_path: Path, precision: str, weights: str
) -> None:
    with serving(model, tmp_path, 2, ("--precision", precision)) as found:
        table = sampler_table([one.address for one in found], token_file(tmp_path))
        table += "\n[lora]\nrank = 2\nalpha = 400\n[cluster]\nshards = 4\n"
        for name, size, divided in (("one", 1, "replicate"), ("two", 2, weights)):
            more = f'{table}weights = "{divided}"\n'
            recipe = write_recipe(tmp_path, name, model, sampler=more, precision=precision)
            words = ["-m", "covey", "train", str(recipe), "--run-dir", str(tmp_path / name)]
            finish(start_ranks(words, size, tmp_path))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_servers_have_the_weights_merged_with_an_adapter(model: Path, tmp_path: Path, precision: str) -> None:
    """If they had the weights without the adapter, their KL to the trainer would be that of the reference."""
    lora = '\n[lora]\nrank = 2\nalpha = 400\ntargets = ["q_proj", "v_proj", "down_proj"]\n'
    with serving(model, tmp_path, 1, ("--precision", precision)) as found:
        table = lora + sampler_table([one.address for one in found], token_file(tmp_path))
        recipe = write_recipe(tmp_path, "run", model, sampler=table, precision=precision)
        code, said = covey("train", recipe, "--run-dir", tmp_path / "run", cwd=tmp_path)
        assert code == 0, said
    mismatch, distance = (metrics(tmp_path / "run", name)[-1] for name in ("mismatch/kl", "kl"))
    assert distance > 1e-3
    assert mismatch < distance * (1e-4 if precision == "fp32" else 0.1)


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {int(word) for word in task.read_text().split()}
    return found


def serving_children(pid: int) -> set[int]:
    """The `covey serve` processes that a run has started."""
    return {child for child in children_of(pid) if b"serve" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")}


@pytest.mark.slow
def test_a_run_starts_its_servers_and_they_end_with_it(model: Path, folder: Path, alone: Path) -> None:
    """One is killed and started again; then the run is killed, and they end by themselves."""
    table = f'[sampler]\nkind = "covey"\nstart = 2\ntoken_file = "{token_file(folder)}"\n'
    run = folder / "started"
    recipe = write_recipe(folder, "started", model, sampler=table)
    running = start("train", recipe, "--run-dir", run, cwd=folder, moment=Moment(2))
    assert running.pid is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    seen: set[int] = set()
    while running.poll() is None and time.monotonic() < deadline:
        seen |= serving_children(running.pid)
        time.sleep(0.01)
    assert running.poll() == -signal.SIGKILL
    assert len(seen) == 2
    while any(map(is_running, seen)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, seen))
    recorded = (run / "metrics.jsonl").stat().st_mtime_ns
    running = start("train", "--resume", run, cwd=folder)
    assert running.pid is not None
    while running.poll() is None and (run / "metrics.jsonl").stat().st_mtime_ns == recorded:
        time.sleep(0.002)
    if seen := serving_children(running.pid):
        os.kill(min(seen), signal.SIGKILL)
    code, said = running.ended()
    assert code == 0, said
    found = files_of(run)
    expected = {name: value for name, value in files_of(alone).items() if not name.startswith("checkpoints")}
    for name in expected:
        assert found[name] == expected[name], name
    assert not re.search("Traceback|RuntimeWarning", said)


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Path:
    """An interpreter for vLLM that runs `fake_vllm`, which writes into the file `events` beside it."""
    path, python = folder / "vllm-python", [sys.executable, fake_vllm.__file__, str(folder / "events")]
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{os.pathsep.join(sys.path)}" exec {shlex.join(python)} "$@"\n')
    path.chmod(0o755)
    return path


def events_of(folder: Path) -> tuple[list[int], list[str]]:
    """The processes of the fake vLLM, and the routes that they were asked for, equal ones in a row once."""
    lines = (folder / "events").read_text().splitlines() if (folder / "events").exists() else []
    routes = [line for line in lines if line.startswith("/")]
    kept = [route for before, route in zip(["", *routes], routes, strict=False) if route != before]
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")], kept


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "SIGKILL", "SIGINT", "SIGTERM"])
def test_a_run_starts_vllm_beside_itself_which_sleeps_between_samplings_and_ends_with_it(
    end: str, vllm: Path, model: Path, tmp_path: Path, folder: Path
) -> None:
    """If the run is not ended, vLLM is, and is started again."""
    (folder / "events").unlink(missing_ok=True)
    fields = f'vllm_python = "{vllm}"\nsleep = true\nvllm_memory = 0.4\ntoken_file = "{token_file(folder)}"\n'
    recipe, run = write_recipe(tmp_path, "beside", model, sampler=f"[sampler]\n{fields}"), tmp_path / "run"
    moment = Moment(2, signal=getattr(signal, end)) if end else None
    words = ["train", recipe, "--sampler", "vllm", "--run-dir", run]
    running = start(*words, cwd=tmp_path, moment=moment)
    if not end:
        deadline = time.monotonic() + LIMIT_SECONDS
        while "/wake_up" not in events_of(folder)[1] and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(events_of(folder)[0][0], signal.SIGKILL)
    code, said = running.ended()
    assert code == {"": 0, "SIGKILL": -signal.SIGKILL}.get(end, EXIT_CODE), said
    processes, routes = events_of(folder)
    assert len(processes) == (1 if end else 2)
    for process in processes:
        wait_for_end(process)
    assert '"--gpu-memory-utilization", "0.4"' in (folder / "events").read_text()
    update = ["/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights",
              "/finish_weight_update", "/reset_prefix_cache", "/resume", "/weight_info"]  # fmt: skip
    sampled = ["/inference/v1/generate", "/sleep", "/wake_up"]
    if end:
        assert routes[:22] == [*update, *sampled, *sampled, *update]
    else:
        assert metrics(run, "sampler/servers") == [1.0] * 3
        assert routes[-2:] == sampled[:2]


def test_check_names_the_sampler_and_starts_none(model: Path, folder: Path) -> None:
    table = f'[sampler]\nkind = "covey"\nstart = 2\ntoken_file = "{token_file(folder)}"\n'
    code, said = covey("check", write_recipe(folder, "checked", model, sampler=table), cwd=folder)
    assert code == 0, said
    assert "start = 2" in said


@pytest.mark.slow
def test_two_ranks_share_two_servers_and_end_alike_if_both_are_lost(
    servers: list[Serving], model: Path, folder: Path
) -> None:
    shards = "[cluster]\nshards = 2\n"
    code, said = covey(
        "train", write_recipe(folder, "shards", model, sampler=shards), "--run-dir", folder / "shards", cwd=folder
    )
    assert code == 0, said

    def close(request: bytes, answer: bytes) -> bytes:
        return b"" if b'"step": 3' in request else answer

    with Proxy(servers[0].address, close) as first, Proxy(servers[1].address, close) as second:
        table = sampler_table([first.address, second.address], token_file(folder), timeout=3.0, attempts=9)
        recipe = write_recipe(folder, "ranks", model, sampler=shards + table)
        ranks = start_ranks(["-m", "covey", "train", str(recipe), "--run-dir", str(folder / "ranks")], 2, folder)
        lines = [rank.communicate(timeout=LIMIT_SECONDS)[1].strip().splitlines()[-1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1]
        assert all(f"error: rank {rank}: " in line for rank, line in enumerate(lines)), lines
        assert (folder / "ranks" / "checkpoints" / "step-00000002").is_dir()
        first.bend = second.bend = lambda request, answer: answer
        code, said = covey("train", "--resume", folder / "ranks", cwd=folder)
        assert code == 0, said
    found, expected = files_of(folder / "ranks"), files_of(folder / "shards")
    for name in expected:
        assert found[name] == expected[name], name


@pytest.mark.slow
def test_the_embedded_model_on_two_servers_has_the_bits_of_one_alone(folder: Path) -> None:
    with serving(Path("smollm2-135m"), folder, 2, ["--precision", "bf16"]) as servers:
        table = sampler_table([one.address for one in servers], token_file(folder))
        for name, sampler in (("embedded_alone", ""), ("embedded", table)):
            recipe = write_recipe(folder, name, Path("smollm2-135m"), sampler=sampler, precision="bf16")
            code, said = covey("train", recipe, "--run-dir", folder / name, cwd=folder)
            assert code == 0, said
    assert files_of(folder / "embedded") == files_of(folder / "embedded_alone")


CONVERSATION = f"""
[conversation]
environment = "{guessing.__file__}:Adder"
turns = 3
total_tokens = 60

[[rewards]]
name = "environment"
"""


def served_conversations(folder: Path, more: str, precision: str, ranks: int = 1) -> tuple[Path, Path]:
    """A run of conversations that samples by itself, and one with two servers."""
    model = calling_folder(folder / "calling")
    alone, run = folder / "alone", folder / "served"
    recipe = write_recipe(folder, "alone", model, sampler=CONVERSATION + more, precision=precision)
    code, said = covey("train", recipe, "--run-dir", alone, cwd=folder)
    assert code == 0, said
    with serving(model, folder, 2, ("--precision", precision)) as found:
        table = CONVERSATION + more + sampler_table([one.address for one in found], token_file(folder))
        recipe = write_recipe(folder, "served", model, sampler=table, precision=precision)
        started = start_ranks(["-m", "covey", "train", str(recipe), "--run-dir", str(run)], ranks, folder)
        ended = [rank.communicate(timeout=LIMIT_SECONDS) for rank in started]
    assert not any(rank.returncode for rank in started), ended
    assert all(calls > 0 for calls in metrics(run, "conversation/tool_calls"))
    assert all(0.5 < fraction < 1 for fraction in metrics(run, "sampler/cached_fraction"))
    return alone, run


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 1), ("fp32", 2)])
def test_conversations_on_servers_have_the_bits_of_a_run_alone(tmp_path: Path, precision: str, ranks: int) -> None:
    alone, run = served_conversations(tmp_path, f"\n[cluster]\nshards = {ranks}\n", precision, ranks)
    assert files_of(run) == files_of(alone)


@pytest.mark.slow
def test_servers_of_conversations_have_the_weights_merged_with_an_adapter(tmp_path: Path) -> None:
    """A run alone computes the prompts with weights that are not merged, so that the last bits differ."""
    alone, run = served_conversations(tmp_path, "\n[lora]\nrank = 2\nalpha = 400\n", "fp32")
    assert metrics(run, "kl")[-1] > 1e-3
    assert all(gap < 1e-4 for gap in metrics(run, "mismatch/mean"))
    for step in (1, 2, 3):
        one, two = (
            [json.loads(line)["messages"] for line in path.read_text().splitlines()]
            for path in (folder / "rollouts" / f"step_{step:06d}.jsonl" for folder in (alone, run))
        )
        assert two == one
