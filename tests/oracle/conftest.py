"""Comparison with other people's code, in an environment of its own: `make oracle`. docs/oracle.md tells the results.

Where TRL is not installed, as in covey's own environment, pytest collects nothing here.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` may change, and TRL is pinned
if find_spec("trl") is None or find_spec("stable_baselines3") is None:
    collect_ignore_glob = ["test_*.py"]

TOLERANCE = 1e-10  # of the largest number that the peer gives ...
SMALLEST = 1e-4  # ... or of this, where terms of a loss cancelled out and left rounding
_largest: dict[str, tuple[float, int]] = {}  # what was compared -> largest deviation, comparisons


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Numbers without a type of their own are float64, on both sides."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def agree() -> Callable[..., None]:
    """agree(what, ours, theirs): they differ by less than the tolerance, as a share of the peer's largest number."""

    def check(what: str, ours: Tensor, theirs: Tensor, *, tolerance: float = TOLERANCE) -> None:
        ours, theirs = torch.as_tensor(ours).detach().double(), torch.as_tensor(theirs).detach().double()
        assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        size = max(float(theirs.abs().max()), SMALLEST)
        deviation = float((ours - theirs).abs().max()) / size
        before, times = _largest.get(what, (0.0, 0))
        _largest[what] = (max(before, deviation), times + 1)
        assert deviation <= tolerance, f"{what}: differs by {deviation:.2e} of the largest number, {size:.3g}"

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest deviation of every comparison, as a share of the peer's largest number."""
    if _largest:
        terminalreporter.section("largest deviation from the peer, relative; comparisons")
        for what, (deviation, times) in _largest.items():
            terminalreporter.write_line(f"{deviation:8.1e}  {times:4d}  {what}")
