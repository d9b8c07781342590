"""HTML elements. Every text is escaped: only a `Html` is markup, and only `element` and the charts make one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from covey.config.fields import printable

VOID = {"meta", "br"}  # elements without an end


class Html(str):
    """Markup."""

    __slots__ = ()


Child = str | Html | None


def text_of(content: str) -> Html:
    """A text as markup: escaped, without control characters."""
    return Html(escape(printable(content)))


def element(name: str, /, *children: Child | Iterable[Child], **attributes: str | None) -> Html:
    """An element. Children that are no `Html` are texts; None is left out, as are attributes of None.

    An underscore at the end of an attribute's name is removed, and the others become hyphens: `class_`, `http_equiv`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[Child | Iterable[Child]]) -> Html:
    """Children one after another."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else text_of(child))
        elif child is not None:
            parts.append(joined(child))
    return Html("".join(parts))


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], *, numbers: Sequence[int] = ()) -> Html:
    """A table that scrolls by itself where it is too wide.

    Args:
        numbers: places of the columns with numbers.
    """
    kinds = ["number" if place in numbers else None for place in range(len(head))]
    top = element(
        "tr", *(element("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True))
    )
    body = [element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
            for row in rows]  # fmt: skip
    inner = element("table", element("thead", top), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex="0")


def heading(level: int, title: str) -> Html:
    """A heading, h1 to h6."""
    return element(f"h{level}", title)


def section(title: str, *children: Child | Iterable[Child], level: int = 2, id_: str | None = None) -> Html:
    """A section with its heading."""
    return element("section", heading(level, title), *children, id_=id_)


def pre(content: str, limit: int | None = None) -> Html:
    """A text as it is, with its line ends; of a long one the beginning and a note."""
    shown = content if limit is None else content[:limit]
    rest = len(content) - len(shown)
    body = shown if shown.strip() else "(nothing)"
    kind = "text" if shown.strip() else "text nothing"
    note = element("span", f" ... {rest:,} more characters", class_="muted") if rest else None
    return element("pre", body, note, class_=kind)
