"""Recipes by their path, or by the name of one that comes with covey."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from covey.config import ConfigError
from covey.config.fields import did_you_mean, did_you_mean_file
from covey.config.files import unusual_kind, user_path

PACKAGED_RECIPES = Path(__file__).parents[1] / "recipes"


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe given as a path or as the name of a packaged one (also `recipes/NAME.toml`).

    Raises:
        ConfigError: if there is neither; lists the packaged recipes.
    """
    path = user_path(recipe)
    name = path.stem if path.parent == Path("recipes") and path.suffix == ".toml" else str(recipe)
    packaged = PACKAGED_RECIPES / f"{name}.toml"
    if path.is_file():
        return path
    if name == Path(name).name and packaged.is_file():
        return packaged
    if path.is_dir():
        raise ConfigError(f"{recipe} is a folder; name a recipe file, or continue a run with: covey train --resume")
    if unusual_kind(path):
        raise ConfigError(f"{recipe} is {unusual_kind(path)}; name a recipe file")
    near = did_you_mean(name, packaged_recipes()) or did_you_mean_file(path)
    raise ConfigError(f"there is no recipe {recipe}{near}; covey recipes lists the packaged ones")


def packaged_recipes() -> list[str]:
    """The names of the recipes that come with covey, sorted."""
    return sorted(file.stem for file in PACKAGED_RECIPES.glob("*.toml"))


def describe_recipe(name: str) -> str:
    """The first clause of the comment that a packaged recipe begins with."""
    lines = (PACKAGED_RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"; |\. |\.$", comment)[0]
