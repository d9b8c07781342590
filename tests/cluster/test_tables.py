"""The tables of docs/planning.md are what `covey plan` prints."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cluster_tables

    yield cluster_tables
    sys.modules.pop("cluster_tables")


def in_docs(tables: object, name: str) -> list[str]:
    found = tables.block(name).search(TEXT)  # type: ignore[attr-defined]
    assert found is not None, f"docs/planning.md has no table {name}"
    return found[0].splitlines()


@pytest.mark.slow
def test_the_memory_table(tables: object) -> None:
    assert in_docs(tables, "memory") == tables.memory_table()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_row_of_the_simulated_table(tables: object) -> None:
    written = in_docs(tables, "simulated")
    assert tables.simulated_table(["0"]) == written[:3]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulated", "crashes"])
def test_the_simulated_tables(tables: object, name: str) -> None:
    assert in_docs(tables, name) == tables.TABLES[name]()  # type: ignore[attr-defined]
