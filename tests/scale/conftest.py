"""covey with a real vLLM as the sampler: `make scale`, which creates the environment for it. docs/samplers.md has the
results.
"""

from pathlib import Path
from typing import Any

import pytest

from helpers.vllm_servers import FIGURES

HERE = Path(__file__).parent
LIMIT_SECONDS = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.scale)
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.write_sep("=", "measured")
        terminalreporter.write_line("| # | what | criterion | measured |\n|---|---|---|---|")
        for row in FIGURES:
            terminalreporter.write_line("| " + " | ".join(row) + " |")
