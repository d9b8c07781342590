"""The site that `make docs` has built, as a reader has it: in a browser, without a network."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from helpers.browser import Browser, browser

pytestmark = pytest.mark.site
ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
LOOKED_AT = ["README", "docs/tutorial", "docs/mathematics", "docs/api/covey.core", "docs/api/covey.config", "search"]
GIVEN_BY_SPHINX = {"genindex", "search", "py-modindex", "index"}


class Links(HTMLParser):
    """The addresses of a page: where its links lead, what it loads, and the places in it that have a name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        self.names |= {attributes[name] for name in ("id", "name") if name in attributes}
        if "href" in attributes and not (tag == "link" and attributes.get("rel") == "canonical"):
            (self.links if tag == "a" else self.loaded).append(attributes["href"])
        if "src" in attributes:
            self.loaded.append(attributes["src"])


links_of = cache(Links)


def pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert len(found) > 40, "run `make docs` first"
    return found


def test_every_link_leads_to_a_place_of_the_site_or_is_a_web_address() -> None:
    broken = []
    for page in pages():
        for link in [*links_of(page).links, *links_of(page).loaded]:
            where = urlsplit(link)
            if where.scheme or not (where.path or where.fragment):
                continue
            target = (page.parent / unquote(where.path)).resolve() if where.path else page
            known = target.is_file() and (
                not where.fragment or target.suffix != ".html" or unquote(where.fragment) in links_of(target).names
            )
            if not known:
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere() -> None:
    foreign = {address for page in pages() for address in links_of(page).loaded if urlsplit(address).netloc}
    assert foreign == set()


def test_options_keep_their_dashes_and_a_link_has_the_title_of_its_page() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    assert [page for page, text in texts.items() if re.search(r"\W–[a-z]", text)] == []
    assert re.search(r">[\w/.]+\.md<", texts[SITE / "docs/README.html"]) is None


def test_every_page_is_in_the_navigation() -> None:
    front = SITE / "README.html"
    reachable = {(SITE / unquote(urlsplit(link).path)).resolve() for link in links_of(front).links}
    missing = [str(page.relative_to(SITE)) for page in pages() if page not in reachable and page != front]
    assert set(missing) <= {f"{name}.html" for name in GIVEN_BY_SPHINX}


@pytest.mark.parametrize("package", ["covey", "covey.config", "covey.algorithms"])
def test_the_reference_has_every_exported_name(package: str) -> None:
    names = {name for page in SITE.glob("docs/api/*.html") for name in links_of(page).names}
    exported = importlib.import_module(package).__all__
    settings = set(importlib.import_module("covey.config").__all__)
    wanted = {f"{'covey.config' if package == 'covey' and name in settings else package}.{name}" for name in exported}
    assert wanted - names == set()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_page_is_accessible_fits_and_asks_no_other_host(
    name: str, width: int, scheme: str, chromium: Browser
) -> None:
    page = chromium.open((SITE / f"{name}.html").as_uri(), width=width, scheme=scheme)
    try:
        page.wait("document.readyState == 'complete'")
        if name == "docs/mathematics":
            page.wait("document.querySelectorAll('mjx-container svg').length > 100")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
        assert page.problems == []
        assert page.barriers() == []
    finally:
        page.close()


@pytest.mark.parametrize(("query", "title"), [("group_zscore", "covey.core"), ("learning rate", "")])
def test_the_search_finds(query: str, title: str, chromium: Browser) -> None:
    page = chromium.open(f"{(SITE / 'search.html').as_uri()}?q={query.replace(' ', '+')}")
    try:
        page.wait("document.querySelectorAll('#search-results li').length > 0")
        page.wait(f"document.querySelector('#search-results').textContent.includes({title!r})")
    finally:
        page.close()


@pytest.mark.skipif(not [*ROOT.glob("docs/zh/*.md")], reason="there are no Chinese pages")
@pytest.mark.parametrize("query", ["强化学习", "优势"])
def test_the_search_finds_chinese_words(query: str, chromium: Browser) -> None:
    page = chromium.open(f"{(SITE / 'search.html').as_uri()}?q={query}")
    try:
        page.wait("[...document.querySelectorAll('#search-results a')].some((a) => a.href.includes('/zh/'))")
    finally:
        page.close()
