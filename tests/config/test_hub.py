"""Data sets that are read from the hub, and models that are written to it, at a small hub on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet

from covey.cli.main import main
from covey.config import ConfigError, DatasetConfig, RunConfig, hub
from covey.config.inputs import input_checksums, keep_hub_data
from covey.config.rules import refuse
from covey.config.sft import SFTConfig
from covey.llm.data.reward_examples import read_examples
from covey.llm.data.rows import read_data, read_records
from helpers.fake_hub import FakeHub, fake_hub, version_of
from helpers.tiny_models import tiny_folder

SUMS = DatasetConfig(path="hub:someone/sums", columns=("answer = solution",))
TOKEN = "hf_aSecretToken"


def write(folder: Path, files: dict[str, int]) -> Path:
    """Parquet files of so many rows; the rows of a data set are numbered through."""
    number = 0
    for name, rows in files.items():
        columns = {"question": [], "solution": []}
        for _ in range(rows):
            number += 1
            columns["question"].append(f"{name.partition('-')[0]} {number}?")
            columns["solution"].append(str(number))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), folder / name)
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    converted = write(
        tmp_path / "converted",
        {
            "default/train/0000.parquet": 3, "default/train/0001.parquet": 2, "default/test/0000.parquet": 2,
            "hard/train/0000.parquet": 1,
        },
    )  # fmt: skip
    own = write(tmp_path / "own", {"main/train-00000-of-00002.parquet": 2, "main/train-00001-of-00002.parquet": 2})
    folders = write(tmp_path / "folders", {"train/0000.parquet": 2, "train/0001.parquet": 2, "data/hard/0.parquet": 1})
    repositories = {
        "datasets/someone/folders": {"main": folders},
        "datasets/someone/sums": {"main": tmp_path / "none", hub.CONVERTED: converted},
        "datasets/someone/own": {"main": own},
        "datasets/someone/text": {"main": tmp_path / "none"},
    }
    hub.newest_files.cache_clear()
    with fake_hub(repositories, tmp_path / "cache", monkeypatch) as made:
        yield made
    hub.newest_files.cache_clear()


def questions(config: DatasetConfig) -> tuple[list[str], list[str]]:
    split = read_data(config)
    return tuple([row.prompt[0]["content"] for row in rows] for rows in (split.training, split.held_out))  # type: ignore[return-value]


def test_a_split_is_downloaded_once_with_all_its_files_and_no_others(server: type[FakeHub], tmp_path: Path) -> None:
    training, held_out = questions(replace(SUMS, held_out_split="test"))
    assert training == [f"default/train/000{number > 3:d}.parquet {number}?" for number in range(1, 6)]
    assert [one.rpartition(" ")[2] for one in held_out] == ["6?", "7?"]
    assert read_data(replace(SUMS, held_out_split="test")).training[4].columns == {"answer": "5"}
    assert not list((tmp_path / "cache").rglob("hard"))
    hub.newest_files.cache_clear()
    server.asked.clear()
    questions(replace(SUMS, held_out_split="test"))
    assert not [path for path in server.asked if "/resolve/" in path]
    checksums = input_checksums(RunConfig(task=SUMS), own_task=False, own_rewards=False)
    assert list(checksums) == ["hub:someone/sums::train 0000.parquet", "hub:someone/sums::train 0001.parquet"]


def test_a_subset_and_a_repository_s_own_files(server: type[FakeHub]) -> None:
    (data,) = hub.hub_files(hub.HubData("someone/sums", "hard", "train"))
    assert data.as_posix().endswith("hard/train/0000.parquet")
    training, held_out = questions(replace(SUMS, path="hub:someone/own", held_out_fraction=0.25))
    assert len(training + held_out) == 4
    for split, files in (("train", 2), ("hard", 1)):
        assert len(hub.hub_files(hub.HubData("someone/folders", "", split))) == files


def test_a_resumed_run_reads_the_version_that_it_began_with(
    server: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, began = RunConfig(task=SUMS), questions(SUMS)
    checksums = input_checksums(config, own_task=False, own_rewards=False)
    write(tmp_path / "converted", {"default/train/0000.parquet": 4})
    monkeypatch.setattr("helpers.fake_hub.version_of", lambda branch: version_of(branch)[::-1])
    hub.newest_files.cache_clear()
    assert questions(SUMS) != began
    keep_hub_data(config, checksums)
    assert questions(SUMS) == began
    assert input_checksums(config, own_task=False, own_rewards=False) == checksums
    keep_hub_data(config, checksums | {f"{SUMS.sources[0]} 0002.parquet": "0"})
    assert questions(SUMS) != began, "a part of a version is none"


@pytest.mark.parametrize("why", ["HF_HUB_OFFLINE is set", "it did not answer within 0.5 s"])
def test_without_the_hub_what_was_downloaded_serves_and_the_rest_is_one_line(
    server: type[FakeHub], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    questions(SUMS)
    hub.newest_files.cache_clear()
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    server.silent = True
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", why.startswith("HF"))
    assert sum(map(len, questions(SUMS))) == 5
    with pytest.raises(ConfigError) as caught:
        questions(replace(SUMS, split="test"))
    assert str(caught.value).startswith(
        f"data set 'someone/sums' (default, test) is not on this machine, and the hub cannot be asked ({why}): "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            replace(SUMS, path="hub:someone/none"),
            "'someone/none' is not a data set of the hub .*: check its name, or hf auth login",
        ),
        (
            replace(SUMS, path="hub:someone/text"),
            "'someone/text' has no Parquet files, .*: hf download someone/text --repo-type dataset",
        ),
        (replace(SUMS, split="validation"), "has no split 'validation': it has test, train"),
        (replace(SUMS, subset="easy"), "has no subset 'easy': set task.subset to one of default, hard"),
        (
            replace(SUMS, columns=("answer = result",)),
            r"row 1: task.columns names the column 'result', .* \(columns: 'question', 'sol",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(server: type[FakeHub], config: DatasetConfig, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_data(config)


def test_examples_of_the_hub_are_refused_with_what_to_do() -> None:
    for read in (read_examples, lambda name: SFTConfig(data=name).check() or read_records(name, "examples")):
        with pytest.raises(
            ConfigError, match=r"hub:a/b: only \[task\] reads data sets of the hub: hf download a/b --repo"
        ):
            read("hub:a/b")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (DatasetConfig("data.jsonl", split="test"), "task.split is for a data set of the hub"),
        (DatasetConfig("hub:a/b:c"), "write 'hub:a/b:c' as hub:NAME"),
        (DatasetConfig("hub:a/b", held_out_split="test", held_out_path="x"), "are both set"),
        (DatasetConfig("hub:a/b", split="train[:10%]"), r"task.split is 'train\[:10%\]': only a whole split is read"),
        (DatasetConfig("hub:a/b", held_out_split="test+dev"), "held_out_split is 'test[+]dev': only a whole split"),
        (DatasetConfig("hub:a/../b"), "'a/../b' is not a name of the hub"),
        (DatasetConfig("hub:a/b", columns=("prompt",)), "each is NEW = OLD"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_before_the_hub_is_asked(config: DatasetConfig, why: str) -> None:
    def check() -> None:
        refuse(config.faults())
        config.check()

    with pytest.raises(ConfigError, match=why):
        check()


def test_an_export_is_pushed_to_a_private_model_with_the_token(
    server: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    model = str(tiny_folder(tmp_path / "model"))
    words = ["export", model, str(tmp_path / "out"), "--push", "me/tiny"]
    assert main(words) == 2
    assert "--push needs an access token of the hub: hf auth login, or set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([*words[:4], "tiny"]) == 2
    assert "--push 'tiny' is not a name of the hub: write it as USER/MODEL" in capsys.readouterr().err
    assert main([*words[:4], "other/tiny"]) == 2
    refused = capsys.readouterr().err
    assert "cannot be written (HTTP status 403): the access token may not write there" in refused
    server.public.add("me/tiny")
    assert main(words) == 2
    assert "me/tiny is public: add --public" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was exported in vain"
    server.public.clear()
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "/me/tiny has the folder" in out
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert server.pushed == written
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= written.keys()
    assert server.created[-1]["visibility"] == "private"
    assert server.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in refused + out + err
    assert main([*words[:2], str(tmp_path / "again"), *words[3:], "--public"]) == 0
    assert server.created[-1]["visibility"] == "public"
