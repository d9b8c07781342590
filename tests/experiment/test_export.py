"""`covey export`: what transformers loads from the folder are the weights of the run."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import ArithmeticConfig, EvaluationConfig, RewardConfig, RunConfig, SamplingConfig, UpdateConfig, run
from covey.cli.main import main
from covey.config import CheckpointConfig
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.wording import ACCURACY
from helpers.tiny_models import tiny_folder, tiny_gguf


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps in bf16, with the checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("export")
    run(
        RunConfig(
            model=str(tiny_folder(folder / "model")),
            steps=3,
            threads=1,
            precision="bf16",
            task=ArithmeticConfig(digits=(1,)),
            sampling=SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=6),
            evaluation=EvaluationConfig(problems=2),
            checkpoint=CheckpointConfig(every=1),
            run_dir=str(folder / "run"),
        )
    )
    return folder / "run"


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_becomes_a_transformers_folder(trained: Path, tmp_path: Path, step: int) -> None:
    assert main(["export", f"{trained}@{step}", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    masters = CheckpointFolder(trained / "checkpoints").tensors(step, "optimizer/masters")
    found = dict(model.named_parameters())
    assert found.keys() == masters.keys()
    for name, master in masters.items():
        assert torch.equal(found[name], master.to(torch.bfloat16)), name


def test_a_finished_run_becomes_its_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is filled
    assert main(["export", str(trained), str(tmp_path / "out")]) == 0
    assert "in bfloat16" in capsys.readouterr().out
    found, saved = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "out", trained / "model")
    )
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    prompt = [{"role": "user", "content": "1+2"}]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(prompt, tokenize=False) == "1+2"
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}
    assert "README.md" in {path.name for path in (tmp_path / "out").iterdir()}
    assert main(["sample", str(tmp_path / "out"), "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("model", "folder", "message"),
    [
        ("RUN@9", "new", "has no checkpoint step-00000009: it has step-00000002, step-00000003"),
        ("nothing@3", "new", "'nothing@3' is not an embedded model, folder, .gguf file or hub name"),
        ("RUN", "full", "full is there already, and is not replaced: name a new folder"),
        ("RUN", "file", "file is there already, and is not replaced: name a new folder"),
        ("RUN", "link", "link is there already, and is not replaced: name a new folder"),
        ("RUN", "no/new", "there is no folder no: create it, or name another"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    folder: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full", "config.json").write_text("{}")
    Path("file").write_text("")
    Path("link").symlink_to("missing")
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", model.replace("RUN", str(trained)), folder]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_the_model_card_of_a_run(trained: Path, tmp_path: Path) -> None:
    (trained.parent / "model" / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nA model. license: none")
    assert main(["export", f"{trained}@2", str(tmp_path / "mine")]) == 0
    card = (tmp_path / "mine" / "README.md").read_text()
    front, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert front.splitlines() == [
        "license: mit",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [covey, grpo, reinforcement-learning]",
    ]
    for part in (
        "# mine\n",
        "| base model | model (licence: mit) |",
        "| algorithm | grpo |",
        "| recipe | run |",
        "| step | 2 of 3 |",
        "Held-out accuracy of greedy answers to 2 problems, with the 95 % interval.",
        "| most tokens | before training | after step 2 |",
        "import covey; covey.run(covey.RunConfig(steps=3, threads=1",
        'algorithm = "grpo"',
    ):
        assert part in text, part
    (row,) = [line for line in text.splitlines() if line.startswith("| 6 |")]
    assert row == "| 6 | 0.0% (0.0 to 65.8) | not measured |"  # there was no evaluation after step 2
    assert 'run_dir = ""' in text
    assert str(trained) not in text


def test_the_model_card_names_a_licence_only_if_it_is_known(trained: Path, tmp_path: Path) -> None:
    (trained.parent / "model" / "README.md").write_text("The license: is written elsewhere.\n")
    assert main(["export", str(trained), str(tmp_path / "mine")]) == 0
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "licen" not in card
    assert "| step | 3 of 3 |" in card
    (row,) = [line for line in card.splitlines() if line.startswith("| 6 |")]
    summary = json.loads((trained / "summary.json").read_text())["evaluations"][0]
    assert row == f"| 6 | {' | '.join(ACCURACY.write_interval(summary[when]) for when in ('before', 'after'))} |"


@pytest.mark.slow
def test_the_model_of_a_run_becomes_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on a GGUF file: what is exported is read by transformers and by covey, and is the trained model."""
    settings = RunConfig(
        model=str(tiny_gguf(tmp_path / "base.gguf")),
        steps=2,
        threads=1,
        precision="bf16",
        task=ArithmeticConfig(digits=(1,)),
        rewards=(RewardConfig(name="digits"),),
        update=UpdateConfig(learning_rate=1e-2),
        sampling=SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=6),
        evaluation=EvaluationConfig(problems=2),
        run_dir=str(tmp_path / "run"),
    )
    run(settings)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--gguf", "bf16"]) == 0
    assert "out/out-BF16.gguf has the same model as GGUF" in capsys.readouterr().out
    trained, base = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32, **options)
        for folder, options in (("out", {}), (".", {"gguf_file": "base.gguf"}))
    )
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="out-BF16.gguf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("What is 12 + 3?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected, again, before = (model(ids).logits.log_softmax(-1) for model in (trained, found, base))
    assert torch.equal(again, expected)
    assert not torch.allclose(before, expected, atol=1e-3)
    assert main(["sample", str(tmp_path / "out" / "out-BF16.gguf"), "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0
    assert "base model | base.gguf |" in (tmp_path / "out" / "README.md").read_text()


def test_a_file_whose_name_has_an_at_sign_is_no_step(trained: Path, tmp_path: Path) -> None:
    """A path that exists counts before RUN@STEP."""
    copy = tmp_path / "model@3"
    copy.symlink_to(trained / "model")
    assert main(["export", str(copy), str(tmp_path / "out")]) == 0
