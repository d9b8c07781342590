"""Every place that a model can come from, in every command and from Python."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from covey import GRPOTrainer, PPOTrainer
from covey.cli.main import main
from covey.config import ConfigError, hub
from covey.config.model_sources import ModelKind, locate_model
from covey.config.recipe import config_from_dict, read_tables
from covey.experiment import evaluation
from covey.llm.model.loading import load_model
from covey.runtime.device import Machine
from helpers.fake_hub import FakeHub, fake_hub
from helpers.tiny_models import tiny_folder, tiny_gguf

CPU = torch.device("cpu")
SOURCES = (
    "embedded", "folder", "hub", "gguf", "run", "model of a run", "stopped run", "checkpoint", "stopped embedded",
    "checkpoint of embedded", "chain",
)  # fmt: skip
RECIPE = """
model = {model}
steps = {steps}
threads = 1
precision = "fp32"
show_rollouts_every = 0
[task]
name = "arithmetic"
digits = [1]
[[rewards]]
function = {reward}
[sampling]
prompts_per_step = 2
group_size = 2
max_new_tokens = 3
[evaluation]
problems = 2
[checkpoint]
every = 1
"""


def write_recipe(folder: Path, model: str, steps: int = 1) -> str:
    reward = folder / "rewards.py"
    reward.write_text(
        "def letters(completions, **columns):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    file = folder / "tiny.toml"
    file.write_text(RECIPE.format(model=json.dumps(model), steps=steps, reward=json.dumps(f"{reward}:letters")))
    return str(file)


def stopped_run(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps that was killed when the second had its checkpoint."""
    from covey.train import loop

    class Killed(BaseException): ...

    whole = loop.train_step
    taken: list[int] = []

    def counted(*arguments):
        taken.append(1)
        if len(taken) == 3:
            raise Killed
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", counted)
        with pytest.raises(Killed):
            main(["train", write_recipe(folder.parent, model, steps=3), "--run-dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A name for every source. The embedded model's file is a tiny one here."""
    patched = pytest.MonkeyPatch()
    top = tmp_path_factory.mktemp("sources")
    for name in ("cache", "gguf", "runs"):
        (top / name).mkdir()
    gguf = tiny_gguf(top / "gguf" / "embedded.gguf")
    patched.setenv("COVEY_CACHE", str(top / "cache"))
    patched.setattr("covey.llm.model.loading.embedded_file", lambda: gguf)
    folder = str(tiny_folder(top / "base"))
    repository = top / "hub" / "models--someone--tiny"
    shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    patched.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(top / "hub"))
    patched.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["train", write_recipe(top, folder), "--run-dir", str(top / "runs" / "finished")]) == 0
    stopped = stopped_run(top / "runs" / "stopped", folder, patched)
    embedded = stopped_run(top / "runs" / "embedded", "smollm2-135m", patched)
    chain = stopped_run(top / "runs" / "second", str(stopped), patched)
    chain = stopped_run(top / "runs" / "third", str(chain / "checkpoints" / "step-00000001"), patched)
    yield {
        "embedded": "smollm2-135m",
        "folder": folder,
        "hub": "someone/tiny",
        "gguf": str(tiny_gguf(top / "gguf" / "another.gguf", seed=1)),
        "run": str(top / "runs" / "finished"),
        "model of a run": str(top / "runs" / "finished" / "model"),
        "stopped run": str(stopped),
        "checkpoint": str(stopped / "checkpoints" / "step-00000001"),
        "stopped embedded": str(embedded),
        "checkpoint of embedded": str(embedded / "checkpoints" / "step-00000002"),
        "chain": str(chain),
    }
    patched.undo()


def nothing(completions, **_):
    return [0.0] * len(completions)


def weights(model: str) -> dict[str, torch.Tensor]:
    return dict(load_model(model, dtype=torch.float32, device=CPU).module.named_parameters())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


COMMANDS = ["check", "plan", "eval", "sample", "train", "resume"]


@pytest.mark.slow
@pytest.mark.sampled(39)
@pytest.mark.parametrize(("source", "command"), list(itertools.product(SOURCES, COMMANDS)))
def test_every_source_in_every_command(command, source, places, tmp_path, capsys, monkeypatch):
    model, run_dir = places[source], str(tmp_path / "run")
    recipe = write_recipe(tmp_path, model)
    words = {
        "check": ["check", recipe],
        "plan": ["plan", model],
        "eval": ["eval", model, "--task", "arithmetic", "--problems", "2", "--max-new-tokens", "2"],
        "sample": ["sample", model, "1+2=", "--max-new-tokens", "2"],
        "train": ["train", recipe, "--run-dir", run_dir],
        "resume": ["train", "--resume", run_dir],
    }  # fmt: skip
    if command == "resume":
        stopped_run(Path(run_dir), model, monkeypatch)
    code = main(words[command])
    told = capsys.readouterr()
    assert code == 0, told.err
    if command in ("train", "resume"):
        written = config_from_dict(read_tables(Path(run_dir) / "config.toml")).model
        assert written in (model, locate_model(written).name), "found again from any working directory"
        assert (Path(run_dir) / "model" / "model.safetensors").is_file()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_in_both_trainers(source, places):
    options = {"max_new_tokens": 2, "device": "cpu", "precision": "fp32", "reward_function": nothing}
    for trainer in (GRPOTrainer, PPOTrainer):
        assert same(dict(trainer(places[source], **options).model.named_parameters()), weights(places[source]))


@pytest.mark.slow
def test_compare_takes_the_checkpoint_of_a_run(places, tmp_path):
    recipe = write_recipe(tmp_path, places["chain"])
    assert main(["compare", recipe, "--seeds", "1", "--jobs", "1", "--output", str(tmp_path / "compared")]) == 0


def test_a_run_and_its_newest_checkpoint_are_the_same_weights(places):
    assert same(weights(places["stopped embedded"]), weights(places["checkpoint of embedded"]))
    assert same(weights(places["run"]), weights(places["model of a run"]))
    assert not same(weights(places["embedded"]), weights(places["checkpoint of embedded"]))
    assert not same(weights(places["stopped run"]), weights(places["checkpoint"]))


@pytest.mark.parametrize("source", ["folder", "gguf", "run", "model of a run", "stopped run", "checkpoint"])
def test_a_place_is_the_same_however_it_is_written(source, places, tmp_path, monkeypatch):
    place = Path(places[source])
    expected = locate_model(str(place))
    monkeypatch.chdir(place.parent)
    monkeypatch.setenv("HOME", str(place.parent))
    ways = [place.name, f"./{place.name}", f"../{place.parent.name}/{place.name}", f"~/{place.name}"]
    ways += [] if place.is_file() else [f"{place}/", f"{place.name}/", f"{place}/."]
    link = tmp_path / f"link{place.suffix}"
    link.symlink_to(place)
    for way in [*ways, str(link)]:
        assert locate_model(way) == expected, way


@pytest.mark.slow
def test_a_run_begun_from_a_relative_path_is_known_from_anywhere(places, tmp_path, monkeypatch):
    shutil.copytree(places["folder"], tmp_path / "mine" / "base")
    monkeypatch.chdir(tmp_path / "mine")
    run_dir = stopped_run(tmp_path / "mine" / "run", "base", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["sample", str(run_dir), "1", "--max-new-tokens", "1"]) == 0
    assert main(["train", "--resume", str(run_dir)]) == 0


@pytest.mark.slow
def test_runs_that_moved_together_and_lost_their_base_can_be_begun_from(places, tmp_path, monkeypatch):
    shutil.copytree(places["folder"], tmp_path / "mine" / "base")
    first = stopped_run(tmp_path / "mine" / "first", str(tmp_path / "mine" / "base"), monkeypatch)
    second = stopped_run(tmp_path / "mine" / "second", str(first), monkeypatch)
    expected = weights(str(second))
    (tmp_path / "mine").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "base")
    shutil.rmtree(tmp_path / "moved" / "first")
    moved = str(tmp_path / "moved" / "second")
    assert same(weights(moved), expected)
    assert main(["train", write_recipe(tmp_path, moved), "--run-dir", str(tmp_path / "third")]) == 0


@pytest.mark.slow
def test_an_evaluation_of_a_checkpoint_brings_the_task_of_its_run(places, capsys):
    for source in ("run", "model of a run", "stopped run", "checkpoint"):
        assert main(["eval", places[source], "--problems", "2"]) == 0, source
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("runs/no-such-run", "there is no folder runs/no-such-run"),
        ("runs/finishd", "there is no folder runs/finishd (did you mean 'runs/finished'?)"),
        ("runs/stopped/checkpoints/step-00000009", "has no checkpoint step-00000009: it has step-0"),
        ("runs/stopped/checkpoints", "is the folder of a run's checkpoints: name one of them (step-0"),
        ("runs/stopped/checkpoints/step-00000001/tensors.safetensors", "is a file; give the model's folder"),
        ("runs/finished/critic", "is the critic of a run, no language model: name the run"),
        ("runs", "the folder runs has no config.json, so it is not a Hugging Face model"),
        ("base/config.json", "is a file; give the model's folder"),
        ("base/model.safetensors", "is a file; give the model's folder"),
        ("gguf", "name the GGUF file itself"),
        ("gguf/none.gguf", "there is no file gguf/none.gguf"),
        ("adapter", "is an adapter"),
        ("~nobody-here/model", "the home folder of that user is not known"),
        ("a\0b", "holds characters that no path can have"),
        ("x" * 5000, "cannot be used as a path: File name too long"),
        ("a b/c", "is not an embedded model, folder, .gguf file or hub name"),
        ("-/-", "is not an embedded model, folder, .gguf file or hub name"),
        ("org/na--me", "is not an embedded model, folder, .gguf file or hub name"),
        ("", "is no"),
        ("smollm2", "did you mean 'smollm2-135m'"),
        ("org/name/file", "there is no folder org/name/file"),
        ("someone/other", "is not on this machine, and the hub cannot be asked (HF_HUB_OFFLINE is set)"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_one_line_in_every_command(model, message, places, tmp_path, monkeypatch, capsys):
    top = Path(places["folder"]).parent
    monkeypatch.chdir(top)
    (top / "adapter").mkdir(exist_ok=True)
    (top / "adapter" / "adapter_config.json").write_text("{}")
    (top / "runs" / "finished" / "critic").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_model(model, dtype=torch.float32, device=CPU)
    assert "\n" not in str(refused.value)
    assert main(["sample", model, "1"]) == 2
    assert main(["eval", model, "--task", "arithmetic"]) == 2
    if "hub" not in message or "hub name" in message:  # what is not yet downloaded passes
        assert main(["check", write_recipe(tmp_path, model.replace("\0", "\u0000"))]) == 2
        assert main(["plan", model]) == 2 or model.endswith(".json")
    assert all(len(line.split("error: ")) == 2 for line in capsys.readouterr().err.splitlines() if "error: " in line)


@pytest.fixture
def server(places, tmp_path, monkeypatch) -> Iterator[type[FakeHub]]:
    shutil.copytree(places["folder"], tmp_path / "repository")
    (tmp_path / "repository" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    repositories = {"models/someone/tiny": {"main": tmp_path / "repository"}}
    with fake_hub(repositories, tmp_path / "hub", monkeypatch) as hub_server:
        yield hub_server


@pytest.mark.slow
def test_a_hub_name_is_downloaded_without_pickles_and_then_is_a_folder(server, places, tmp_path, monkeypatch):
    assert same(weights("someone/tiny"), weights(places["folder"]))
    assert not list((tmp_path / "hub").rglob("*.bin"))
    server.asked.clear()
    assert same(weights("someone/tiny"), weights(places["folder"]))
    assert not [path for path in server.asked if "/resolve/" in path], "what is there is not downloaded again"
    server.silent = True
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    assert same(weights("someone/tiny"), weights(places["folder"])), "the version downloaded before serves"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert same(weights("someone/tiny"), weights(places["folder"]))
    assert server.asked == []


def test_a_model_that_the_hub_does_not_have_is_one_line(server):
    with pytest.raises(ConfigError, match="'someone/else' is neither a folder nor a model of the hub"):
        load_model("someone/else", dtype=torch.float32, device=CPU)


def test_a_hub_that_never_answers_is_left_after_seconds(server, monkeypatch):
    server.silent = True
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"someone/tiny.* the hub cannot be asked \(it did not answer within 0.5 s\)"):
        load_model("someone/tiny", dtype=torch.float32, device=CPU)


@pytest.mark.slow
def test_only_a_name_of_the_hub_is_asked_for_there(server, places):
    for source in SOURCES:
        if source != "hub":
            main(["plan", places[source]])
            main(["sample", places[source], "1", "--max-new-tokens", "1"])
            main(["check", write_recipe(Path(os.environ["COVEY_CACHE"]).parent, places[source])])
    main(["plan", "someone/tiny"])
    assert server.asked == []
    assert locate_model("someone/tiny").kind is ModelKind.HUB


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("source", "options", "precision"),
    [
        ("run", [], "fp32"),
        ("stopped run", [], "fp32"),
        ("checkpoint", [], "fp32"),
        ("folder", [], "auto"),
        ("run", ["--precision", "bf16"], "bf16"),
    ],
)
def test_a_run_is_measured_in_its_own_precision(source, options, precision, places, monkeypatch):
    asked = []

    def build_machine(*given):
        asked.append(given[1])
        return Machine(CPU, torch.float32)

    monkeypatch.setattr(evaluation, "build_machine", build_machine)
    task = ["--task", "arithmetic", "--digits", "1"] if source == "folder" else []
    assert main(["eval", places[source], "--problems", "2", "--max-new-tokens", "2", *task, *options]) == 0
    if not options:
        assert main(["sample", places[source], "1 + 1 =", "--n", "1", "--max-new-tokens", "2"]) == 0
    assert set(asked) == {precision}
