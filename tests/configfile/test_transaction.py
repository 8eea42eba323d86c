"""Several files are written as one, also by a process that is killed at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.configfile import killed_process

from memfit.configfile.history import HISTORY, records
from memfit.configfile.transaction import (
    Rewrite,
    common_folder,
    put_back_unfinished,
    undo_last,
    write_all,
)
from memfit.errors import ConfigFileError, UndoError

ROOT = Path(__file__).parents[2]


def deaths(folder: Path, what: str) -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, killed_process.__file__, str(folder), what],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "least"), [("apply", 50), ("undo", 25), ("recovery", 8)])
def test_a_process_killed_at_any_change_of_the_disk_leaves_each_file_old_or_new(
    what, least, tmp_path
):
    found = deaths(tmp_path / "work", what)
    killed = [each for each in found if each["code"] == killed_process.KILLED]
    finished = [each for each in found if each["code"] == 0]

    assert len(killed) >= 2 * least
    assert len(finished) == 2
    assert len(killed) + len(finished) == len(found)
    for each in killed:
        assert "broken" not in each["killed"].values(), each
        recovered = set(each["recovered"].values())
        assert len(recovered) == 1, each
        if recovered == {"old"} and (what != "undo" or each["unfinished"]):
            assert each["left"] == [], each
    states = {tuple(sorted(each["killed"].values())) for each in killed}
    assert len(states) >= 2, "some deaths are before, some after"


def rewrite(path: Path, after: bytes) -> Rewrite:
    return Rewrite(path=path, before=path.read_bytes(), after=after)


def test_backups_are_numbered_and_never_overwritten(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    (tmp_path / "a.yaml.backup-1").write_bytes(b"somebody's own")
    write_all(tmp_path, [rewrite(file, b"2")])
    write_all(tmp_path, [rewrite(file, b"3")])

    assert (tmp_path / "a.yaml.backup-1").read_bytes() == b"somebody's own"
    assert (tmp_path / "a.yaml.backup-2").read_bytes() == b"1"
    assert (tmp_path / "a.yaml.backup-3").read_bytes() == b"2"

    undo_last(tmp_path)
    assert file.read_bytes() == b"2"
    undo_last(tmp_path)
    assert file.read_bytes() == b"1"
    assert [path.name for path in tmp_path.glob("*backup*")] == ["a.yaml.backup-1"]
    with pytest.raises(UndoError, match="Nothing has been applied"):
        undo_last(tmp_path)


def test_mode_and_time_of_a_file_come_back(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    file.chmod(0o640)
    os.utime(file, ns=(10**18, 10**18))
    write_all(tmp_path, [rewrite(file, b"2")])
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.stat().st_mtime_ns > 10**18

    undo_last(tmp_path)

    assert file.stat().st_mode & 0o777 == 0o640
    assert file.stat().st_mtime_ns == 10**18


def test_a_file_that_was_changed_since_is_put_back_only_if_asked_to(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_bytes(b"1")
    second.write_bytes(b"x")
    write_all(tmp_path, [rewrite(first, b"2"), rewrite(second, b"y")])
    second.write_bytes(b"by hand")

    with pytest.raises(UndoError, match=r"b.yaml has changed since"):
        undo_last(tmp_path)
    assert (first.read_bytes(), second.read_bytes()) == (b"2", b"by hand")

    undo_last(tmp_path, even_if_changed=True)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"x")


def test_a_file_that_is_gone_is_put_back_only_if_asked_to(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    write_all(tmp_path, [rewrite(file, b"2")])
    file.unlink()

    with pytest.raises(UndoError, match="is gone since"):
        undo_last(tmp_path)
    undo_last(tmp_path, even_if_changed=True)
    assert file.read_bytes() == b"1"


@pytest.mark.parametrize("content", [None, b"rotten"])
def test_a_backup_that_is_not_what_it_was_is_never_put_back(content, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    write_all(tmp_path, [rewrite(file, b"2")])
    backup = tmp_path / "a.yaml.backup-1"
    backup.unlink() if content is None else backup.write_bytes(content)

    for even_if_changed in (False, True):
        with pytest.raises(UndoError, match="is gone or has changed"):
            undo_last(tmp_path, even_if_changed=even_if_changed)
    assert file.read_bytes() == b"2"


def test_what_somebody_has_put_under_the_name_of_a_backup_stays(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    write_all(tmp_path, [rewrite(file, b"2")])
    file.write_bytes(b"1")  # put back by hand, and the name used for something else
    (tmp_path / "a.yaml.backup-1").write_bytes(b"somebody's own")

    undo_last(tmp_path)

    assert (tmp_path / "a.yaml.backup-1").read_bytes() == b"somebody's own"
    assert records(tmp_path) == []


@pytest.mark.slow
def test_two_processes_write_one_after_the_other(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"0")
    code = (
        "import sys; from pathlib import Path\n"
        "from memfit.configfile.transaction import Rewrite, write_all\n"
        "from memfit.errors import ConfigFileError\n"
        "file, done = Path(sys.argv[1]), 0\n"
        "while done < 10:\n"
        "    before = file.read_bytes()\n"
        "    try:\n"
        "        after = b'%d' % (int(before) + 1)\n"
        "        write_all(file.parent, [Rewrite(path=file, before=before, after=after)])\n"
        "        done += 1\n"
        "    except ConfigFileError:\n"
        "        continue\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(file)], env=environment) for _ in range(2)
    ]

    assert [each.wait() for each in both] == [0, 0]
    assert file.read_bytes() == b"20"
    assert [record.number for record in records(tmp_path)] == list(range(1, 21))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    late = rewrite(file, b"2")
    file.write_bytes(b"another's")

    with pytest.raises(ConfigFileError, match="changed while it was read"):
        write_all(tmp_path, [late])
    assert file.read_bytes() == b"another's"
    assert records(tmp_path) == []


def test_a_disk_that_is_full_leaves_everything_as_it_was(tmp_path, monkeypatch):
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_bytes(b"1")
    real, count = os.replace, 0

    def replace(*args):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device", "b.yaml")
        real(*args)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConfigFileError, match="No space left on device"):
        write_all(tmp_path, [rewrite(file, b"2") for file in files])

    assert [file.read_bytes() for file in files] == [b"1", b"1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".memfit", "a.yaml", "b.yaml"]
    assert records(tmp_path) == []


def test_a_disk_that_fills_up_is_named_with_what_is_needed(tmp_path, monkeypatch):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1" * 5000)
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if len(data) >= 5000:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    needed = r"No space left on the disk that holds .*: 9\.8 KiB needed, .* free"
    with pytest.raises(ConfigFileError, match=needed):
        write_all(tmp_path, [rewrite(file, b"2" * 5000)])
    assert file.read_bytes() == b"1" * 5000


@pytest.mark.parametrize(
    ("number", "words"),
    [(28, "No space left on the disk"), (30, "Read-only file system"), (5, "Input/output error")],
)
def test_an_undo_on_a_disk_that_fails_says_where_and_can_be_done_again(
    tmp_path, monkeypatch, number, words
):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"1")
    write_all(tmp_path, [rewrite(file, b"2")])

    def fails(*_) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fails)
        with pytest.raises(OSError, match=words) as caught:
            undo_last(tmp_path)
    assert str(tmp_path / HISTORY) in str(caught.value)
    assert file.read_bytes() == b"2"
    undo_last(tmp_path)
    assert file.read_bytes() == b"1"


def test_a_record_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    (tmp_path / HISTORY).mkdir(parents=True)
    (tmp_path / HISTORY / "0001.json").write_text("{")

    with pytest.raises(UndoError, match=r"0001.json cannot be read"):
        put_back_unfinished(tmp_path)


def test_history_is_kept_here_or_above_the_files(tmp_path):
    here = tmp_path / "here"

    assert common_folder([Path("conf/a.yaml")], here) == here
    assert common_folder([tmp_path / "x/a.yaml", tmp_path / "x/y/b.yaml"], here) == tmp_path / "x"
    assert common_folder([Path("../a.yaml")], here) == tmp_path
