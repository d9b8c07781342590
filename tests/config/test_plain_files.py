"""Files below a folder: no links, no special files, bounded sizes."""

import os
from pathlib import Path

import pytest

from covey.config.files import Refused, TooLarge, files_below, open_below, read_below, status_below


def test_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"content")
    assert read_below(tmp_path, "a", "b", "file") == b"content"
    assert [name for name, _ in files_below(tmp_path, "a", "b")] == ["file"]
    assert files_below(tmp_path, "a") == []  # folders are none
    assert files_below(tmp_path, "missing") == []
    status = status_below(tmp_path, "a", "b", "file")
    assert status is not None
    assert status.st_size == 7


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    assert read_below(tmp_path / "link", "file") == b"content"


@pytest.mark.parametrize("target", ["inside", "../outside", "/etc/passwd", "missing"])
def test_links_are_refused_in_every_place(tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    (run / "inside").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for folder in (run / "inside", tmp_path / "outside"):
        (folder / "file").write_text("secret")
    (run / "folder").symlink_to(target)
    (run / "file").symlink_to(f"{target}/file")
    for parts in (("file",), ("folder",), ("folder", "file")):
        with pytest.raises(Refused):
            read_below(run, *parts)
        assert status_below(run, *parts) is None
    with pytest.raises(Refused):
        files_below(run, "folder")
    assert files_below(run) == []


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/etc", "a\0b", "../x"])
def test_parts_are_names(tmp_path: Path, part: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    for parts in ((part,), (part, "b"), ("a", part)):
        with pytest.raises(Refused):
            read_below(tmp_path, *parts)


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(Refused, match=name):
            read_below(tmp_path, name)
    with pytest.raises(Refused), open_below(Path("/dev"), "null"):
        pass


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge, match="large has more than 256 MiB"):
        read_below(tmp_path, "large")
    (tmp_path / "small").write_bytes(b"12345")
    assert read_below(tmp_path, "small", most=5) == b"12345"
    with pytest.raises(TooLarge):
        read_below(tmp_path, "small", most=4)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_below(tmp_path, "missing")
    with pytest.raises(FileNotFoundError):
        read_below(tmp_path, "missing", "file")
