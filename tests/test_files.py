"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat

import pytest

from memfit import files
from memfit.files import replace_atomically, write_atomically


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["text with a é\n", b"\x00bytes", ""])
def test_what_was_written_can_be_read(tmp_path, content):
    path = tmp_path / "file"
    write_atomically(path, content)
    expected = content.encode() if isinstance(content, str) else content
    assert path.read_bytes() == expected
    assert names_in(tmp_path) == ["file"]


def test_missing_folders_are_made(tmp_path):
    write_atomically(tmp_path / "a" / "b" / "file", "x")
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"


def test_earlier_content_is_replaced(tmp_path):
    path = tmp_path / "file"
    path.write_text("a long earlier content")
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_everyone_may_read_what_was_written(tmp_path):
    write_atomically(tmp_path / "file", "x")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_a_writer_that_fails_leaves_the_earlier_content_and_no_part(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")

    def write(part) -> None:
        part.write_text("half of")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        replace_atomically(path, write)
    assert path.read_text() == "earlier"
    assert names_in(tmp_path) == ["file"]


def test_a_writer_that_fails_makes_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError):
        replace_atomically(tmp_path / "file", lambda part: 1 / 0)
    assert names_in(tmp_path) == []


def test_nobody_sees_a_part_under_the_name_of_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")
    seen = []

    def write(part) -> None:
        part.write_text("half of")
        seen.append(path.read_text())
        assert part.parent == path.parent, "a move within a folder is one step"
        part.write_text("the new content")

    replace_atomically(path, write)
    assert seen == ["earlier"]
    assert path.read_text() == "the new content"


def test_content_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path = tmp_path / "file"
    synced = []
    real_fsync = os.fsync

    def fsync(descriptor) -> None:
        synced.append(path.exists())
        real_fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomically(path, "x")
    assert synced[0] is False


def test_who_has_the_file_open_goes_on_reading_the_earlier_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")
    with path.open() as reader:
        write_atomically(path, "new")
        assert reader.read() == "earlier"
    assert path.read_text() == "new"
