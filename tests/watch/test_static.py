"""The files of the page: vendored ones are unchanged, nothing comes from elsewhere, no script or style is inline."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.pages import ROOT

STATIC = ROOT / "src" / "covey" / "watch" / "static"
OWN = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))
MAX_LINES = 800


@pytest.mark.parametrize("folder", [STATIC / "vendor", ROOT / "tests" / "watch" / "vendor"], ids=["page", "tests"])
def test_vendored_files_have_their_licence_and_are_unchanged(folder: Path) -> None:
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {path.name for path in folder.iterdir()} - {"SHA256SUMS", "README.md"}
    assert files == sums.keys()
    assert any(name.endswith(".LICENSE") for name in files)
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_is_small_and_loads_nothing_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.name)
def test_no_module_parses_markup_or_code(path: Path) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    assert not re.findall(rf"{markup}|\beval\(|\bFunction\(", path.read_text())


def test_the_map_in_main_names_every_module() -> None:
    main = (STATIC / "main.js").read_text()
    described = main[: main.index("import ")]
    modules = {path.stem for path in OWN if path.suffix == ".js"}
    assert {name for name in modules if not re.search(rf"\b{name}\b", described)} == set()


def test_the_page_has_no_inline_script_or_style() -> None:
    class Tags(HTMLParser):
        seen: list[tuple[str, dict[str, str | None]]] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen.append((tag, dict(attrs)))

    Tags().feed((STATIC / "index.html").read_text())
    for tag, attributes in Tags.seen:
        assert tag != "style"
        assert not any(name == "style" or name.startswith("on") for name in attributes), tag
        assert tag != "script" or attributes.get("src", "").startswith("/static/")  # type: ignore[union-attr]
