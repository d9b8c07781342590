"""Other libraries' option names with covey's own, for the error message of an unknown field."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple


class ForeignName(NamedTuple):
    """covey's counterpart of another library's name.

    Attributes:
        libraries: the libraries that have the name.
        fields: dotted names of covey's fields for it.
        note: the difference from covey's field, or the reason why there is none.
    """

    libraries: str
    fields: tuple[str, ...]
    note: str


@cache
def foreign_names() -> dict[str, ForeignName]:
    """The table in `foreign_names.toml`."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: ForeignName(libraries, tuple(fields.split()), "".join(note))
        for name, (libraries, fields, *note) in table.items()
    }


def answer(name: str, known: Collection[str], elsewhere: str) -> str:
    """covey's name for `name`, or the reason why there is none, in one line; '' if no other library has the name.

    Args:
        name: the unknown name, with dots and either - or _, such as "actor_rollout_ref.rollout.n".
        known: dotted names of the fields that this kind of recipe has.
        elsewhere: in words, the kind of recipe that has the field if this kind does not.
    """
    last = name.replace("-", "_").lower().rpartition(".")[2]
    found = foreign_names().get(last)
    if found is None:
        return ""
    whose = f"{found.libraries}: {last}"
    if not found.fields:
        return f"{whose} has no counterpart; {found.note}"
    here = [field for field in found.fields if field in known]
    fields = " and ".join(here or found.fields)
    where = "" if here else f", in recipes for {elsewhere}"
    return f"{whose} is covey's {fields}{where}" + (f"; {found.note}" if found.note else "")
