"""`covey plan --ranks` and `--cluster`: reports, options and mistakes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.cli.main import main
from covey.config import ConfigError, RunConfig, SamplerConfig
from covey.experiment import plan
from covey_cluster.report import memory_size

MODEL = "smollm2-135m"
GPU = ["--device-memory", "80GiB"]
SIMULATED = [*GPU, "--cluster", "--mean-tokens", "30", "--simulated-steps", "2"]
SEVEN = "benchmarks/models/7b.json"
ROOT = Path(__file__).parents[2]


def report(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def cells(text: str, name: str) -> list[str]:
    """The columns of the line with this name."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{name}  "))
    return line.split(name, 1)[1].split()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "rollouts").mkdir(parents=True)
    lines = [{"step": 1, "group": 0, "decisions": tokens} for tokens in (5, 9, 40)]
    (folder / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_ranks_of_a_small_model_have_whole_weights(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, MODEL, "--ranks", "4", *GPU)
    assert "one of 4 ranks" in text
    assert "in bf16 on cuda" in text
    assert cells(text, "fits in 80.0 GiB") == ["yes", "yes", "yes"]
    assert cells(text, "fewest ranks that fit") == ["1", "1", "1"]
    assert cells(text, "fp32 master weights") == ["0.50", "0.13", "0.13"]
    assert 'cluster.weights = "auto" chooses replicated' in text
    assert "weights to the samplers" not in text.replace("--weights-link", "").split("host memory")[0]


def test_a_large_model_must_be_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ROOT / SEVEN), "--ranks", "8", "--prompts-per-step", "64", "--external-sampler"]
    text = report(capsys, *words, *GPU)
    assert cells(text, "fits in 80.0 GiB")[0] == "no"
    assert cells(text, "fewest ranks that fit")[0] == "none"
    assert int(cells(text, "fewest ranks that fit")[2]) <= 8
    assert 'cluster.weights = "auto" chooses FSDP2, exact' in text
    assert cells(text, "weights to the samplers") == ["1.85"] * 3
    assert "while sampling" not in text
    recomputed = report(capsys, *words, *GPU, "--recompute", "true")
    assert float(cells(recomputed, "activations")[0]) < float(cells(text, "activations")[0]) / 3


def test_ranks_on_cpus_share_the_machine_s_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.experiment.plan.total_memory_bytes", lambda device: 24 << 30)
    text = report(capsys, MODEL, "--ranks", "4", "--device", "cpu")
    assert "fits in 6.0 GiB" in text
    assert "computing" not in text


def test_apple_s_gpu_has_its_name_and_no_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "in fp32 on mps, in GiB" in report(capsys, MODEL, "--device", "mps")
    assert main(["plan", MODEL, "--ranks", "4", "--device", "mps", "--device-memory", "16GB"]) == 2
    assert "device is mps, which several ranks cannot use: plan with" in capsys.readouterr().err


def test_links_scale_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (
        float(
            cells(
                report(capsys, str(ROOT / SEVEN), "--ranks", "8", *GPU, "--node-link", link), "reduction of gradients"
            )[0]
        )
        for link in ("50", "100")
    )
    assert slow == pytest.approx(2 * fast, abs=0.011)
    between = cells(
        report(capsys, str(ROOT / SEVEN), "--ranks", "8", *GPU, "--devices-per-node", "4"), "reduction of gradients"
    )
    assert float(between[0]) == pytest.approx(2 * 7.6156 * 4 * 7 / 8 / 40, abs=0.01)


@pytest.mark.slow
def test_a_simulated_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = [MODEL, "--ranks", "2", *SIMULATED, "--sampler-devices", "1,2", "--staleness", "1,3"]
    text = report(capsys, *words)
    assert text == report(capsys, *words), "the same command has the same figures"
    rows = [line[:30].split() for line in text.splitlines() if line[10:30].strip() == "synchronous"]
    assert rows == [["the", "ranks", "synchronous"], ["1", "synchronous"], ["2", "synchronous"]]
    assert sum("S = 3" in line for line in text.splitlines()) == 2
    assert "a prediction of a model, not a measurement" in text
    assert "lognormal lengths, mean 30, sigma 0.9, at most 64 tokens" in text
    assert report(capsys, *words, "--seed", "7") != text


def test_lengths_of_a_run(capsys: pytest.CaptureFixture[str], run_folder: Path) -> None:
    words = [MODEL, "--ranks", "1", *GPU, "--cluster", "--simulated-steps", "1", "--lengths", str(run_folder)]
    assert f"lengths of the 3 completions of {run_folder}, mean 18, at most 40 tokens" in report(capsys, *words)


def test_given_speeds_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    words = [MODEL, "--ranks", "1", *SIMULATED, "--slots", "5", "--tokens-alone", "7", "--tokens-full", "21"]
    assert "server: 1 device, 5 slots, 7 tokens/s for one completion, 21 if full" in report(capsys, *words)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--ranks N", "--device-memory VALUE", "--cluster", "--sampler-devices VALUE", "--lengths VALUE"):
        assert option in text
    assert "memory of a device, such as 80GiB or 80GB" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80 GB", 80 * 10**9), ("80gb", 80 * 10**9), ("1.5 TiB", 3 << 39), ("512MiB", 1 << 29)],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize(
    "text", ["80", "GiB", "80 giga", "-80GiB", "eighty", "80GiB of", "1e9GB", "", "8 0GiB", "80 GiBs"]
)
def test_other_texts_are_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number and a unit, such as 80GiB"):
        memory_size(text)


@pytest.mark.parametrize("text", ["0GiB", "1KB", "5000TiB"])
def test_sizes_that_no_device_has(text: str) -> None:
    with pytest.raises(ConfigError, match="from 1MiB to 1PiB"):
        memory_size(text)


@pytest.mark.parametrize("line", ["{", "[]", '{"decisions": 0}', '{"decisions": "5"}', "{}"])
def test_files_that_are_no_rollouts(line: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "rollouts" / "step_000002.jsonl").write_text(line + "\n")
    assert main(["plan", MODEL, "--ranks", "2", *GPU, "--cluster", "--lengths", str(run_folder)]) == 2
    assert "line 1 of" in capsys.readouterr().err


def test_ranks_are_planned_by_a_package_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.cli.plan.entry_points_of", lambda group: {})
    assert main(["plan", "smollm2-135m", "--ranks", "2"]) == 2
    assert '--ranks needs the package covey-cluster: pip install "covey[cluster]"' in capsys.readouterr().err


@pytest.mark.parametrize(("gib", "usable"), [(24, 24), (80, 60), (4, 4)])
def test_vllm_beside_a_run_gets_what_the_run_leaves(gib, usable, monkeypatch):
    place = plan.Place("cuda", torch.bfloat16, usable << 30)
    monkeypatch.setattr(plan.Place, "of", lambda config: place)
    monkeypatch.setattr(plan, "gpu_memory", lambda device: (gib << 30, usable << 30))
    gpu, config = torch.device("cuda"), RunConfig(model=MODEL, sampler=SamplerConfig(kind="vllm"))
    if usable < 5:
        with pytest.raises(
            ConfigError, match=r"vLLM beside the run needs at least 3.3 GiB, and the run leaves 1\.\d of"
        ):
            plan.with_vllm_memory(config, gpu)
    else:
        share = plan.with_vllm_memory(config, gpu).sampler.vllm_memory
        staying = plan.plan_of(plan.find_dimensions(MODEL), config, place).staying
        assert share * (gib << 30) + staying == pytest.approx(0.9 * (usable << 30), rel=2e-3)
    for sampler in (
        SamplerConfig(),
        SamplerConfig(kind="covey", start=1),
        SamplerConfig(kind="vllm", servers=("http://127.0.0.1:1",)),
        SamplerConfig(kind="vllm", vllm_memory=0.25),
    ):
        given = replace(config, sampler=sampler)
        assert plan.with_vllm_memory(given, gpu) is given
    assert plan.with_vllm_memory(config, torch.device("cpu")) is config
