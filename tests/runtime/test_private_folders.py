"""Folders of covey's caches and settings, with a umask that forbids nothing, as many containers have it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config.files import make_folder
from covey.config.servers import own_token


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_new_folders_are_the_users_alone(tmp_path: Path) -> None:
    own_token(tmp_path / "config" / "covey" / "token")
    make_folder(tmp_path / "cache" / "covey" / "watch")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 5
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("umask", "then"), [(0o000, 0o022), (0o020, 0o022), (0o002, 0o002), (0o077, 0o077)])
def test_what_a_command_creates_is_not_for_everybody_to_write(umask: int, then: int) -> None:
    """Also what other libraries create; a group may share its runs."""
    os.umask(umask)
    assert main(["recipes", "cartpole_grpo"]) == 0
    assert os.umask(0) == then
