"""The argparse type of a number."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from covey.config.fields import TYPE_NAMES
from covey.config.files import shortened


def number(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """argparse type of a number: an int or a float from `least` to `most`."""

    def parse_number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {TYPE_NAMES[kind]} (is {shortened(text)})") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number (is {value})")
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:.12g} (is {value})")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:.12g} (is {value})")
        return value

    return parse_number
