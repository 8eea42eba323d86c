"""What recordings depend on: files that were read, installed packages, settings, the machine."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import site
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from memfit.units import MIB

_LARGE_BYTES = 8 * MIB
"""Of larger files size and time of the last change stand for the content."""
_NO_INPUTS = ("/proc", "/sys", "/dev")
_PASSING = frozenset(
    {
        "_",
        "SHLVL",
        "OLDPWD",
        "COLUMNS",
        "LINES",
        "WINDOWID",
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
"""Variables that shells and terminals change by themselves, and one that torch sets."""
_PASSING_GROUPS = (
    "TERM",
    "SSH_",
    "TMUX",
    "XDG_SESSION",
    "DBUS_",
    "VSCODE_",
    "GPG_",
    "MEMFIT_CACHE",
)


def digest_of(values: Iterable[object]) -> str:
    """Return a digest of the texts of some values."""
    found = hashlib.sha256()
    for value in values:
        found.update(repr(value).encode())
        found.update(b"\0")
    return found.hexdigest()


def surroundings() -> list[object]:
    """List what recordings depend on besides the job's own files."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _PASSING and not name.startswith(_PASSING_GROUPS)
    }
    return [
        *(sys.version, platform.platform(), _processor(), _cards()),
        str(Path.cwd()),
        sorted(variables.items()),
        *(_torch_version(), _installed(), _own_source()),
    ]


def _torch_version() -> str | None:
    """Return what stands for torch's version, which may be built in place; does not import it."""
    found = importlib.util.find_spec("torch")
    origin = None if found is None else found.origin
    return None if origin is None else content_of(str(Path(origin).with_name("version.py")))


def _cards() -> list[str]:
    """Name the GPUs of this machine, which a file may ask for: a home may be that of others too."""
    found = (Path("/dev").glob(pattern) for pattern in ("nvidia[0-9]*", "kfd"))
    return sorted(path.name for paths in found for path in paths)


def _processor() -> list[object]:
    """Say what torch chooses its kernels and its number of threads by."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    kind: list[object] = [platform.processor(), os.cpu_count(), usable]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return kind


def _installed() -> list[str]:
    """Name every installed distribution with its version, as its metadata's folder does."""
    folders = [Path(each) for each in sys.path if each and Path(each).is_dir()]
    return sorted(
        entry.name for folder in folders for entry in folder.iterdir() if "-info" in entry.suffix
    )


def _own_source() -> list[tuple[str, int, int]]:
    """Return sizes and times of memfit's own files, which change in a checkout."""
    found = []
    for path in sorted(_OWN.rglob("*.py")):
        status = path.stat()
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


_OWN = Path(__file__).resolve().parents[2]


def content_of(path: str) -> str | None:
    """Return what stands for a file's content; None if it cannot be read."""
    try:
        status = Path(path).stat()
        if status.st_size > _LARGE_BYTES:
            return f"{status.st_size} bytes of {status.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


class FilesRead:
    """The files that this process reads while it is watched, and the modules that are loaded.

    Does not see what is read by other processes, or by libraries past Python's ``open`` unless they
    map it into memory and hold it.

    Args:
        besides: a folder whose files do not count.
    """

    def __init__(self, besides: Path) -> None:
        self._besides = f"{os.path.realpath(besides)}{os.sep}"
        self._opened: set[str] = set()
        self._begun_ns = time.time_ns()
        self._known: dict[str, bool] = {}
        """Whether a path is an input, of all that were asked for: following links takes long."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is opened for reading inside."""
        _hook().listeners.append(self._opened)
        try:
            yield
        finally:
            _hook().listeners = [each for each in _hook().listeners if each is not self._opened]

    def contents(self) -> Mapping[str, str | None] | None:
        """Return what stands for the content of every file, by its path.

        None if one was written since this watches: what was read may not be what is there now.
        Files that were looked for in vain count as well, with None for their content.
        """
        modules = [*sys.modules.values()]
        loaded = (getattr(module, "__file__", None) for module in modules)
        seen = (*loaded, *self._opened, *_mapped())
        paths = sorted({str(Path(each).absolute()) for each in seen if each})
        found = {path: content_of(path) for path in paths if self._is_input(path)}
        is_new = any(
            Path(path).stat().st_mtime_ns >= self._begun_ns
            for path, content in found.items()
            if content is not None
        )
        return None if is_new else found

    def _is_input(self, path: str) -> bool:
        """Return whether a file counts; links are kept by their own names, as they may be moved."""
        if path not in self._known:
            real = os.path.realpath(path)
            self._known[path] = _is_input(real) and not real.startswith(self._besides)
        return self._known[path]


def _is_input(path: str) -> bool:
    """Return whether a file is none of Python's, of an installed package or of memfit itself."""
    return not path.endswith(".pyc") and not path.startswith(_known_folders())


@cache
def _known_folders() -> tuple[str, ...]:
    """Return the folders whose content versions stand for."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(_OWN)}
    real = {os.path.realpath(folder) for folder in folders if folder}
    return (*sorted(f"{folder}{os.sep}" for folder in real), *_NO_INPUTS)


def _mapped() -> set[str]:
    """Return the files that this process has mapped, as libraries do past Python's ``open``.

    Shared libraries do not count.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not on Linux
        return set()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return {each for each in paths if not each.endswith(" (deleted)") and ".so" not in each}


class _Hook:
    """Hears of every file that Python opens."""

    def __init__(self) -> None:
        self.listeners: list[set[str]] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Note a file that is opened for reading."""
        if event != "open" or not self.listeners:
            return
        path, mode, flags = args
        if not isinstance(path, (str, bytes)) or (isinstance(mode, str) and "r" not in mode):
            return
        if mode is None and flags & (os.O_WRONLY | os.O_RDWR):
            return
        with suppress(OSError):  # the working directory may be gone
            whole = str(Path(os.fsdecode(path)).absolute())
            for listener in self.listeners:
                listener.add(whole)


@cache
def _hook() -> _Hook:
    """Return the hook of this process, which Python keeps until it ends."""
    hook = _Hook()
    sys.addaudithook(hook.hear)
    return hook
