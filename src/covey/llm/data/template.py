"""Texts with places such as {answer}, which the columns of a row fill."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def places(template: str) -> list[str]:
    """The names of the columns that a template has places for."""
    return _PLACE.findall(template)


def filled(template: str, columns: Mapping[str, Any]) -> str:
    """The template with the columns in their places. What is filled in is not searched for places again."""
    return _PLACE.sub(lambda match: as_text(columns[match[1]]), template)


def as_text(value: Any) -> str:
    """A value as text: chat messages by their contents, with the roles if there are several."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n\n".join(f"{message.get('role', '')}: {message['content']}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)
