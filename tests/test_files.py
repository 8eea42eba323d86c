"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from memfit import files
from memfit.configfile import disk
from memfit.errors import FullDiskError
from memfit.files import (
    check_place,
    fill_atomically,
    remove_own_folder,
    replace_atomically,
    write_atomically,
)


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


@contextmanager
def umask(mode: int):
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read_what_was_written(tmp_path, mask, mode):
    with umask(mask):
        write_atomically(tmp_path / "file", "x")
        disk.write_whole(tmp_path / "record", b"x")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "record")]
    assert modes == [mode, mode]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file"
    path.write_text("earlier")
    path.chmod(mode)
    write_atomically(path, "x")
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_device_is_written_to_and_stays_what_it_is():
    null = Path("/dev/null")
    write_atomically(null, "x")
    assert null.is_char_device()


# --- Folders ---

OWN = re.compile(r"a|in/[0-9]\.pt")


@pytest.mark.parametrize("foreign", ["b", "in/x.pt", "in/deep/1.pt", "in/a"])
def test_a_folder_with_something_foreign_is_left_whole(tmp_path, foreign):
    folder = tmp_path / "folder"
    for name in ("a", "in/1.pt", foreign):
        write_atomically(folder / name, "x")
    assert remove_own_folder(folder, OWN) == folder / foreign
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 3
    (folder / foreign).unlink()
    assert remove_own_folder(folder, OWN) is None
    assert not folder.exists()


def test_a_link_in_a_folder_is_foreign_and_what_it_leads_to_stays(tmp_path):
    write_atomically(tmp_path / "mine" / "1.pt", "x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in").symlink_to(tmp_path / "mine")
    assert remove_own_folder(tmp_path / "folder", OWN) == tmp_path / "folder" / "in"
    assert (tmp_path / "mine" / "1.pt").exists()


# --- A full disk ---


def test_a_full_disk_is_named_with_what_is_needed():
    with pytest.raises(FullDiskError, match=r"No space left .* /dev/full: 3 B needed, .* free"):
        write_atomically(Path("/dev/full"), "abc")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EFBIG, "File too large"),
    ],
)
def test_what_a_full_disk_raises_inside_of_another_error_is_found(tmp_path, number, words):
    def write(part) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch.save does

    with pytest.raises(FullDiskError, match=words) as caught:
        replace_atomically(tmp_path / "file", write, needed_bytes=2**20)
    assert isinstance(caught.value, OSError), "who expects a full disk catches OSError"
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.needed_bytes == 2**20
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_fails_is_named_also_where_torch_hides_it(tmp_path, number):
    """The system says it to a write, which names no file, and ``torch.save`` says something else."""

    class Failing(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _data) -> int:
            raise OSError(number, os.strerror(number))

    path = tmp_path / "checkpoint.pt"
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        fill_atomically(path, lambda _: torch.save(torch.zeros(10), Failing()))
    assert caught.value.filename == str(path)
    assert names_in(tmp_path) == []


def test_tensors_that_find_no_room_are_told_as_a_full_disk():
    with pytest.raises(FullDiskError, match="No space left"):
        fill_atomically(Path("/dev/full"), lambda file: torch.save(torch.zeros(10_000), file))


def test_other_errors_of_a_write_stay_what_they_are(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "file", "x")


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


def test_a_place_where_no_file_can_be_written_is_refused_beforehand(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    check_place(file)
    check_place(tmp_path / "new" / "deeper" / "file")
    check_place(Path(os.devnull))
    with pytest.raises(IsADirectoryError):
        check_place(tmp_path)
    with pytest.raises(NotADirectoryError, match="file"):
        check_place(file / "below")
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "kept"
