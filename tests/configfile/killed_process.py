"""Runs an apply or an undo in a process that dies at its n-th change of the disk, for every n.

Called as ``killed_process.py FOLDER``; writes one JSON line per death to standard output. Each call
that changes the disk is a place to die: before it, in the middle of a write, and after it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memfit.configfile.transaction import (
    Rewrite,
    put_back_unfinished,
    undo_last,
    unfinished_in,
    write_all,
)

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "utime", "fchmod", "close")
OLD = {
    "conf/config.yaml": b"batch: 45\n" * 50,
    "deep/args.json": b'{"a": 1}\r\n',
    "b.yaml": b"b: 1\n",
}
NEW = {
    "conf/config.yaml": b"batch: 15\n" * 50,
    "deep/args.json": b'{"a": 22}\r\n',
    "b.yaml": b"b: 3\n",
}
KILLED = 9


def die_at(number: int, *, is_after: bool) -> None:
    """Have this process die at its n-th call, before or after it; a write dies half done."""
    count = 0

    def counted(name: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count != number:
                return call(*args, **kwargs)
            if is_after:
                with suppress(OSError):  # such as for a file that is not there to be removed
                    call(*args, **kwargs)
            elif name == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(KILLED)

        return run

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in OLD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told by the exit code and standard error
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def apply(folder: Path) -> None:
    write_all(
        folder,
        [Rewrite(path=folder / name, before=OLD[name], after=NEW[name]) for name in OLD],
    )


def state(folder: Path) -> dict[str, str]:
    """Tell of each file whether it is old, new or broken."""
    words = {}
    for name in OLD:
        content = (folder / name).read_bytes()
        words[name] = {OLD[name]: "old", NEW[name]: "new"}.get(content, "broken")
    return words


def leftovers(folder: Path) -> list[str]:
    """List what lies beside the files; a part of the history's own is written over by the next."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    return [n for n in names if n not in OLD and not n.endswith(("lock", ".json.part"))]


def deaths(folder: Path, prepare: Callable[[], object], work: Callable[[], object]) -> None:
    """Let a piece of work die everywhere, and look at what the next command makes of it."""
    for is_after in (False, True):
        for number in range(1, 1000):
            fresh(folder)
            prepare()

            def dying(number: int = number, is_after: bool = is_after) -> None:
                die_at(number, is_after=is_after)
                work()

            code = in_child(dying)
            found = state(folder)
            is_unfinished = bool(unfinished_in(folder))
            put_back_unfinished(folder)
            facts = {
                "number": number,
                "code": code,
                "killed": found,
                "unfinished": is_unfinished,
                "recovered": state(folder),
                "left": leftovers(folder),
            }
            sys.stdout.write(json.dumps(facts) + "\n")
            if code == 0:
                break


def recovery_deaths(folder: Path) -> None:
    """Let the putting back of a half-written apply die as well."""

    def half_written() -> None:
        def dying() -> None:
            real, count = os.replace, 0

            def replace(*args) -> None:
                nonlocal count
                count += 1
                if count == 3:  # the record, the first file, and not the second
                    os._exit(KILLED)
                real(*args)

            os.replace = replace
            apply(folder)

        assert in_child(dying) == KILLED
        assert sorted(state(folder).values()) == ["new", "old", "old"]

    deaths(folder, half_written, lambda: put_back_unfinished(folder))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    what = sys.argv[2]
    if what == "apply":
        deaths(root, lambda: None, lambda: apply(root))
    elif what == "undo":
        deaths(root, lambda: apply(root), lambda: undo_last(root))
    else:
        recovery_deaths(root)
