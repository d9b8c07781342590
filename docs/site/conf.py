"""The site that `make docs` builds: README, docs/ and the docstrings, by Sphinx.

The pages are read as they are. Their order is that of the links of docs/README.md; other pages follow by folder.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import sys
import tomllib
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from pygments.lexers import JsonLexer
from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from docstrings import to_rst  # noqa: E402

from covey.config.recipe import _describe  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MATHJAX = (
    Path(str(importlib.import_module("sphinx-mathjax-offline").__file__)).parent / "static/mathjax/tex-svg-full.js"
)

project, author, version = "covey", "The covey authors", PROJECT["version"]
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "src", "tests", "extras", "runs", "site", "benchmarks", ".github"]

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False
myst_heading_anchors = 4  # as GitHub makes them
smartquotes_action = "qe"  # --option keeps its dashes
suppress_warnings = ["myst.header"]  # README begins with levels of its own

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

html_theme, html_title = "furo", f"covey {version}"
html_static_path = ["site.css", str(MATHJAX)]
html_css_files = ["site.css"]
mathjax_path = MATHJAX.name
html_copy_source = html_show_sourcelink = False
highlight_language = "none"  # of blocks that name none: commands, formulas

API = {
    "covey": "Training from Python, and the classes of articles",
    "covey.config": "Settings: the tables and fields of a recipe",
    "covey.algorithms": "Algorithms, composed of advantage, surrogate, KL and averaging",
    "covey.core": "The mathematics: pure functions of tensors",
}


class EnglishAndChinese(SearchEnglish):
    """Words as in English; Chinese text, which has no spaces, in pairs of characters, in the index and in a query."""

    lang = "en-zh"
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/\p{sc=Han}+|(?:(?!\p{sc=Han})[\p{L}\p{N}_])+/gu) || []).flatMap((word) =>
    /\p{sc=Han}/u.test(word) && word.length > 2 ? [...word].slice(1).map((_, at) => word.slice(at, at + 2)) : [word]);
"""

    def split(self, text: str) -> list[str]:  # type: ignore[override]
        words = re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text)
        return [
            part
            for word in words
            for part in ([word[at : at + 2] for at in range(max(1, len(word) - 1))] if word > "\u4e00" else [word])
        ]


languages[EnglishAndChinese.lang] = EnglishAndChinese  # type: ignore[assignment]
html_search_language = EnglishAndChinese.lang


def write_reference() -> None:
    """A page for each package in `API`, in docs/api, which git does not know."""
    folder = ROOT / "docs/api"
    folder.mkdir(exist_ok=True)
    in_config = set(importlib.import_module("covey.config").__all__)
    for package, title in API.items():
        module = importlib.import_module(package)
        exported = [name for name in getattr(module, "__all__", ()) if package != "covey" or name not in in_config]
        if exported:
            body = "\n".join(directive(f"{package}.{name}", getattr(module, name)) for name in exported)
        else:
            parts = sorted(f"{package}.{part.name}" for part in pkgutil.iter_modules(module.__path__))
            body = "\n\n".join(f"{part}\n{'-' * len(part)}\n\n.. automodule:: {part}\n   :members:" for part in parts)
        text = f"# {package}\n\n{title}.\n\n```{{eval-rst}}\n.. currentmodule:: {package}\n\n{body}\n```\n"
        (folder / f"{package}.md").write_text(text, encoding="utf-8")


def directive(name: str, found: Any) -> str:
    """Of a class or a function; the docstring of a constant is that of its type."""
    if isinstance(found, type):
        return f".. autoclass:: {name}\n   :members:\n"
    return f".. autofunction:: {name}\n" if hasattr(found, "__name__") else f".. data:: {name.rpartition('.')[2]}\n"


def read_page(app: Sphinx, name: str, text: list[str]) -> None:
    """Links to code lead to the repository; pages get their place in the navigation; a graph becomes a table."""
    folder = Path(name).parent
    tag = f"{PROJECT['urls']['Repository']}/blob/v{version}"

    def elsewhere(found: re.Match[str]) -> str:
        path = (ROOT / folder / found[1]).resolve()
        if path.suffix in (".md", ".png", ".gif", ".svg") or not path.is_relative_to(ROOT):
            return found[0]
        return f"]({tag}/{path.relative_to(ROOT)}{found[2]})"

    # The text of a link is the title of the page or the section, instead of a file's name.
    text[0] = re.sub(r"\[[\w/.]+\.md\](?=\([\w/.]+\.md(#[^)]*)?\))", "[]", text[0])
    text[0] = re.sub(r"\]\(((?!\w+:|#)[^)\s#]+)([^)\s]*)\)", elsewhere, text[0])
    text[0] = re.sub(r"^```mermaid\ngraph TD\n(.*?)^```", table_of_graph, text[0], flags=re.M | re.S)
    if name == root_doc:
        text[0] += navigation()


def table_of_graph(found: re.Match[str]) -> str:
    edges: dict[str, list[str]] = {}
    for one, other in re.findall(r"(\w+) --> (\w+)", found[1]):
        edges.setdefault(one, []).append(f"`{other}`")
    return "| package | imports |\n|---|---|\n" + "".join(
        f"| `{one}` | {', '.join(to)} |\n" for one, to in edges.items()
    )


def navigation() -> str:
    """Toctrees: a caption for each section of docs/README.md with the pages that it links to, then all others."""
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    groups = {"Documentation": ["docs/README"]}
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        pages = re.findall(r"\]\(([\w/.-]+)\.md[)#]", section)
        paths = [str((ROOT / "docs" / page).resolve().relative_to(ROOT)) for page in pages]
        groups[section.partition("\n")[0]] = [path for path in paths if not path.startswith("docs/zh/")]
    groups["Python"] = [f"docs/api/{package}" for package in API]
    every = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("docs/**/*.md"))
    groups["中文"] = [page for page in every if page.startswith("docs/zh/")]
    known = {page for group in groups.values() for page in group}
    others = [*every, "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT"]
    groups["More"] = [page for page in others if page not in known]
    urls = PROJECT["urls"]
    groups["More"] += [f"Repository <{urls['Repository']}>", f"Versions <{urls['Documentation']}/versions.html>"]
    seen = {root_doc}
    toctrees = ""
    for caption, pages in groups.items():
        new = [page for page in dict.fromkeys(pages) if page not in seen]
        seen.update(new)
        if new:
            toctrees += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(new) + "\n```\n"
    return "\n" + toctrees


def read_docstring(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)
    if is_dataclass(found) and any("help" in field.metadata for field in fields(found)):
        lines += ["", ".. raw:: html", "", f"   {table_of_fields(found)}", ""]


def table_of_fields(config: Any) -> str:
    """HTML, in one line: the fields as `--help` describes them, then those that are tables."""
    described = {row.name: (row.type, row.default, row.text) for row in _describe(config, "")}
    tables = {
        field.name: (type(field.default).__name__ if field.default else "", "", field.metadata["help"])
        for field in fields(config)
        if field.name not in described
    }
    rows = "".join(
        f"<tr><td><code>{name}</code></td><td>{escape(kind)}</td><td><code>{escape(default)}</code></td>"
        f"<td>{escape(text)}</td></tr>"
        for name, (kind, default, text) in (described | tables).items()
    )
    head = "<thead><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr></thead>"
    return f"<table class='fields' tabindex='0'>{head}<tbody>{rows}</tbody></table>"


def shorten_signature(app: Sphinx, what: str, name: str, found: Any, *_: Any) -> tuple[str, None] | None:
    """A config's signature is the table of its fields."""
    return ("", None) if is_dataclass(found) and any("help" in field.metadata for field in fields(found)) else None


SIGNATURE = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*</dd>\n)+)</dl>')


def make_accessible(app: Sphinx, name: str, template: str, context: dict[str, Any], *_: Any) -> None:
    """What axe-core finds in pages by Sphinx and Furo: lists without terms, headings without a level, and parts that
    scroll but cannot be reached with the keyboard."""
    body = SIGNATURE.sub(one_for_each_line, context.get("body", ""))
    context["body"] = re.sub(r'<(pre|div class="(?:table-wrapper|math)[^"]*")', r'<\1 tabindex="0"', body)
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def one_for_each_line(found: re.Match[str]) -> str:
    return found[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")


def write_front_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    write_reference()
    app.add_lexer("jsonl", JsonLexer)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("html-page-context", make_accessible, priority=900)  # after Furo
    app.connect("build-finished", write_front_page)
