"""Diverts what a script writes into a folder that is dropped, and shows it as if it had stayed."""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from memfit.script.question import Diverted

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev", "/proc", "/sys")
_READING = (
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "access",
    "readlink",
    "statvfs",
    "listxattr",
    "getxattr",
    "pathconf",
)
_CHANGING = ("chmod", "utime", "truncate", "chown", "setxattr", "removexattr")
_MOVING = ("rename", "replace")


class Overlay:
    """Show a script the real files, with its own changes laid over them.

    Files are copied before they are changed; deleted ones are hidden. Reading and writing by
    Python code is diverted; compiled code goes to the real paths, where ``kernel_lock`` stops it.

    Args:
        folder: where changed files lie, each under its own absolute path.
        untouched: folders in which everything is allowed, such as that of temporary files.
    """

    def __init__(self, folder: Path, untouched: Sequence[Path] = ()) -> None:
        self._folder = str(folder.resolve())
        self._untouched = (self._folder, *(str(each.resolve()) for each in untouched), *_DEVICES)
        self._hidden: set[str] = set()
        self._real: dict[str, Any] = {}

    def diverted(self) -> Sequence[Diverted]:
        """Return the files that were written, by their intended paths."""
        found = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = Path(folder, name)
                intended = "/" + str(path.relative_to(self._folder))
                found.append(Diverted(path=intended, num_bytes=path.stat().st_size))
        return sorted(found, key=lambda each: each.path)

    def replacements(self) -> Iterator[Any]:
        """Yield what diverts Python's own ways to files."""
        self._real = {
            name: getattr(os, name)
            for name in (
                *_READING,
                *_CHANGING,
                *_MOVING,
                "chdir",
                "open",
                "mkdir",
                "rmdir",
                "unlink",
                "link",
            )
            if hasattr(os, name)
        }
        opened = self._opened(io.open)
        yield patch.object(builtins, "open", opened)
        yield patch.object(io, "open", opened)
        yield patch.object(io, "FileIO", self._file_io())
        yield patch.object(os, "open", self._os_open)
        for name in _READING:
            if name not in self._real:
                continue
            yield patch.object(os, name, self._reader(name))
        yield patch.object(os, "listdir", self._listdir)
        yield patch.object(os, "scandir", self._scandir)
        for name in _CHANGING:
            if name in self._real:
                yield patch.object(os, name, self._changer(name))
        for name in _MOVING:
            yield patch.object(os, name, self._move)
        yield patch.object(os, "mkdir", self._mkdir)
        yield patch.object(os, "chdir", self._chdir)
        for name in ("unlink", "remove", "rmdir"):
            yield patch.object(os, name, self._remove)
        for name in ("link", "symlink"):
            yield patch.object(os, name, self._link)
        yield patch.object(shutil, "_USE_CP_SENDFILE", False, create=True)
        yield patch.object(shutil, "_use_fd_functions", False, create=True)
        yield patch.object(shutil.rmtree, "avoids_symlink_attacks", False, create=True)

    def for_writing(self, path: Any, *, keeps_content: bool = True) -> str:
        """Return where a path is written instead, with its content so far."""
        absolute = _absolute(path)
        if self._is_free(absolute):
            return absolute
        inside = self._inside(absolute)
        self._real["stat"](self.for_reading(Path(absolute).parent))  # raises, as it would for real
        self._make_folders(Path(inside).parent)
        if (
            keeps_content
            and not os.path.lexists(inside)
            and absolute not in self._hidden
            and os.path.isfile(absolute)
        ):
            shutil.copy2(absolute, inside)
        self._hidden.discard(absolute)
        return inside

    def for_reading(self, path: Any) -> Any:
        """Return where a path is read."""
        if isinstance(path, int):
            return path
        absolute = _absolute(path)
        if self._is_free(absolute):
            return path
        inside = self._inside(absolute)
        if _exists(self._real["lstat"], inside):
            return inside
        hidden = any(str(each) in self._hidden for each in (absolute, *Path(absolute).parents))
        return inside if hidden else path

    def _is_free(self, absolute: str) -> bool:
        return any(absolute == each or absolute.startswith(each + "/") for each in self._untouched)

    def _inside(self, absolute: str) -> str:
        return self._folder + absolute

    def _make_folders(self, folder: Path) -> None:
        """Make the folders of a diverted path."""
        missing = []
        while not _exists(self._real["lstat"], str(folder)):
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            self._real["mkdir"](str(each))

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int):
                return real(file, mode, *args, **kwargs)
            if set(mode) & set("wax+"):
                if "x" in mode and _exists(self._real["lstat"], self.for_reading(file)):
                    raise FileExistsError(17, "File exists", str(file))
                return real(
                    self.for_writing(file, keeps_content="w" not in mode), mode, *args, **kwargs
                )
            return real(self.for_reading(file), mode, *args, **kwargs)

        return opened

    def _file_io(self) -> type:
        overlay = self

        class DivertedFile(io.FileIO):
            """Open a file where the overlay has it."""

            def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                if not isinstance(file, int):
                    writes = bool(set(mode) & set("wax+"))
                    file = overlay.for_writing(file) if writes else overlay.for_reading(file)
                super().__init__(file, mode, *args, **kwargs)

        return DivertedFile

    def _os_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITE_FLAGS and kwargs.get("dir_fd") is None:
            wanted = self.for_reading(path)
            there = _exists(self._real["lstat"], wanted)
            if flags & os.O_EXCL and there:
                raise FileExistsError(17, "File exists", str(path))
            if not flags & os.O_CREAT and not there:
                raise FileNotFoundError(2, "No such file or directory", str(path))
            path = self.for_writing(path, keeps_content=not flags & os.O_TRUNC)
        elif kwargs.get("dir_fd") is None:
            path = self.for_reading(path)
        number: int = self._real["open"](path, flags, *args, **kwargs)
        return number

    def _reader(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return real(path, *args, **kwargs)
            return real(self.for_reading(path), *args, **kwargs)

        return read

    def _changer(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int):
                path = self.for_writing(path)
            return real(path, *args, **kwargs)

        return change

    def _listdir(self, path: Any = ".") -> list[Any]:
        if isinstance(path, int):
            return list(self._real["listdir"](path))
        return (
            sorted(self._names(path))
            if not isinstance(path, bytes)
            else list(self._real["listdir"](path))
        )

    def _names(self, path: Any) -> set[str]:
        """Return the names in a folder: the real ones and those laid over them."""
        absolute = _absolute(path)
        if self._is_free(absolute):
            return set(self._real["listdir"](path))
        inside = self._inside(absolute)
        laid_over = (
            set(self._real["listdir"](inside)) if _exists(self._real["lstat"], inside) else None
        )
        if laid_over is None or _exists(self._real["lstat"], absolute):
            hidden = {
                Path(each).name for each in self._hidden if str(Path(each).parent) == absolute
            }
            return set(
                self._real["listdir"](self.for_reading(path) if laid_over is None else absolute)
            ) - hidden | (laid_over or set())
        return laid_over

    def _scandir(self, path: Any = ".") -> Any:
        if isinstance(path, (int, bytes)) or self._is_free(_absolute(path)):
            return self._real["scandir"](path)
        return _Entries([_Entry(self, os.fspath(path), name) for name in sorted(self._names(path))])

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if _exists(self._real["lstat"], self.for_reading(path)):
            raise FileExistsError(17, "File exists", str(path))
        self._real["mkdir"](self.for_writing(path), *args, **kwargs)

    def _chdir(self, path: Any) -> None:
        """Go into a folder; into that of the overlay where there is no other."""
        is_real = isinstance(path, int) or _exists(self._real["lstat"], path)
        self._real["chdir"](path if is_real else self.for_reading(path))

    def _remove(self, path: Any, *_args: Any, **_kwargs: Any) -> None:
        absolute = _absolute(path)
        found = self.for_reading(path)
        is_folder = os.path.isdir(found) and not os.path.islink(found)
        self._real["lstat"](found)
        if not self._is_free(absolute):
            self._hidden.add(absolute)
            if str(found) != self._inside(absolute):
                return
        self._real["rmdir" if is_folder else "unlink"](found)

    def _move(self, source: Any, target: Any, **_kwargs: Any) -> None:
        origin = self.for_reading(source)
        self._real["lstat"](origin)
        where = self.for_writing(target, keeps_content=False)
        if os.path.isdir(origin):
            shutil.copytree(origin, where, dirs_exist_ok=True)
            shutil.rmtree(source)
            return
        if str(origin) == self._inside(_absolute(source)) or self._is_free(_absolute(source)):
            self._real["replace"](origin, where)
        else:
            shutil.copyfile(origin, where)
        if not self._is_free(_absolute(source)):
            self._hidden.add(_absolute(source))

    def _link(self, source: Any, target: Any, *_args: Any, **_kwargs: Any) -> None:
        """Copy instead: a link would lead out of the overlay."""
        origin = Path(_absolute(target)).parent / os.fspath(source)
        found = self.for_reading(origin if os.path.lexists(self.for_reading(origin)) else source)
        where = self.for_writing(target, keeps_content=False)
        if os.path.isdir(found):
            shutil.copytree(found, where, dirs_exist_ok=True)
        else:
            shutil.copyfile(found, where)


class _Entry:
    """An entry of a folder, as ``os.scandir`` gives it."""

    def __init__(self, overlay: Overlay, folder: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)
        self._found = overlay.for_reading(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._found) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._found) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self._found)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._found, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat().st_ino

    def __fspath__(self) -> str:
        return self.path


class _Entries:
    """The iterator that ``os.scandir`` gives, which can be entered."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _absolute(path: Any) -> str:
    return os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))


def _exists(lstat: Callable[..., Any], path: Any) -> bool:
    try:
        lstat(path)
    except OSError:
        return False
    return True
