"""covey with a real vLLM as the sampler: `make scale`, which creates the environment for it. docs/samplers.md has the
results.
"""

from typing import Any

from helpers.vllm_servers import FIGURES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.write_sep("=", "measured")
        terminalreporter.write_line("| # | what | criterion | measured |\n|---|---|---|---|")
        for row in FIGURES:
            terminalreporter.write_line("| " + " | ".join(row) + " |")
