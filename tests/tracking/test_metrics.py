"""The glossary: complete, current, and clear about what is healthy."""

import re
from pathlib import Path

import pytest

from covey.tracking import metrics

ROOT = Path(__file__).parents[2]


def test_every_metric_that_the_loop_names_is_defined() -> None:
    def names_in(package: str) -> set[str]:
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "covey" / package).glob("*.py")]
        return {name for text in texts for name in re.findall(r'"((?:[a-z_]+/[a-z_]+)|decisions_per_second)"', text)}

    sections = {name.partition("/")[0] for name in metrics.METRICS}
    named = names_in("train") | {name for name in names_in("control") if name.partition("/")[0] in sections}
    assert {
        "groups/zero_advantage_fraction",
        "time/step",
        "reward/mean",
        "mismatch/mean",
    } <= named  # the search still finds them
    for name in named:
        metrics.find(name)


def test_find_knows_patterns_and_refuses_strangers() -> None:
    assert metrics.find("reward/format") is metrics.METRICS["reward/<name>"]
    assert metrics.find("reward/mean") is metrics.METRICS["reward/mean"]
    assert metrics.find("reward_model/held_out_auc") is metrics.METRICS["reward_model/held_out_<measure>"]
    for stranger in ("rewards/mean", "reward/", "time/lunch", "speed"):
        with pytest.raises(KeyError):
            metrics.find(stranger)


def test_what_depends_on_the_clock_is_marked() -> None:
    clock = {name for name in metrics.METRICS if not metrics.is_reproducible(name)}
    expected = {name for name in metrics.METRICS if name.startswith(("time/", "memory/", "sampler/"))} | {
        "decisions_per_second"
    }
    assert clock == expected
    assert metrics.is_reproducible("reward/my_function")


def test_what_looks_dead_on_policy_is_called_healthy() -> None:
    for name in ("loss", "ratio/max", "clip/low", "clip/high"):
        assert "not a fault" in metrics.METRICS[name].healthy
