"""docs/mathematics.md names functions and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mathematics.md").read_text()


def test_every_test_and_file_named_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(names) > 20
    assert [name for name in sorted(names) if f"def {name}(" not in tests] == []
    files = re.findall(r"`((?:tests|src)/[\w/.]+)`", PAGE)
    assert [name for name in files if not (ROOT / name).exists()] == []
