"""Keeps what was recorded for a job on disk, until something that it depends on changes."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from memfit.devices.spec import Device
from memfit.errors import MemfitError
from memfit.files import remove_own_folder, write_atomically
from memfit.planner.cache.inputs import FilesRead, content_of, digest_of, surroundings
from memfit.units import MIB

if sys.platform != "win32":
    import fcntl

MOST_BYTES = 512 * MIB
"""Of all jobs together; what was not used for longest goes first."""
_INPUTS = "inputs.json"
_JOB_FOLDER = re.compile(r"[0-9a-f]{64}")
_OWN_FILE = re.compile(r"inputs\.json|[0-9a-f]{64}\.pickle|\..*\.part")
_WRITABLE_BY_OTHERS = 0o022


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where recordings are kept; None where they are not, or there is no home folder.

    It is ``MEMFIT_CACHE_DIR``, else ``memfit`` in ``XDG_CACHE_HOME``, else in ``~/.cache``. An
    empty ``MEMFIT_CACHE_DIR`` keeps nothing.
    """
    own = environment.get("MEMFIT_CACHE_DIR")
    if own is not None:
        return Path(own) if own else None
    shared = environment.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "memfit"
    try:
        return Path.home() / ".cache" / "memfit"
    except RuntimeError:
        return None


class RecordingCache:
    """What was recorded for one job on one device, on disk.

    What is kept counts as long as every file that the job's code was seen to read is as it was, and
    Python, installed packages, environment variables and the working directory are too. Not seen is
    what code reads past Python's ``open``, such as a network or a clock. The folder may be deleted
    at any time. It holds pickles, so it is used only where nobody else may write to it.

    Args:
        folder: of all jobs.
        reference: of the job, ``FILE.py:NAME``.
        device: what it would run on.
        most_bytes: that all jobs may take.
    """

    def __init__(
        self, folder: Path, reference: str, device: Device, most_bytes: int = MOST_BYTES
    ) -> None:
        self._all = folder / "recordings"
        self._folder = self._all / digest_of([reference, device, *surroundings()])
        self._most_bytes = most_bytes
        self._files = FilesRead(besides=self._all)
        self._inputs: dict[str, str | None] = {}
        self._lock: IO[str] | None = None
        self._is_usable = False
        self.num_found = 0
        """How many recordings were not made again."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have what is recorded inside kept, if it can be; drop what is out of date."""
        with self._files.watched():
            self._is_usable = self._opens()
            try:
                yield
            finally:
                if self._is_usable:
                    with suppress(OSError):
                        self._make_room()
                self._is_usable = False
                if self._lock is not None:
                    self._lock.close()

    def has(self, *name: object) -> bool:
        """Return whether something was kept under a name."""
        return self._is_usable and self._path(name).exists()

    def get(self, *name: object) -> Any | None:
        """Return what was kept under a name; None if nothing was."""
        if not self.has(*name):
            return None
        try:
            found = pickle.loads(zlib.decompress(self._path(name).read_bytes()))
        except Exception:  # noqa: BLE001 - whatever is wrong with it, it is recorded again
            return None
        return found

    def put(self, value: object, *name: object) -> None:
        """Keep a value under a name, where it can be."""
        if not self._is_usable:
            return
        with suppress(OSError, MemfitError, pickle.PickleError, AttributeError, TypeError):
            content = zlib.compress(pickle.dumps(value), 1)
            # First, so that nothing lies there whose inputs are not known.
            if self._note_inputs():
                write_atomically(self._path(name), content)

    def _path(self, name: tuple[object, ...]) -> Path:
        return self._folder / f"{digest_of(name)}.pickle"

    def _opens(self) -> bool:
        """Make ready for reading and writing; False where that cannot be, or is not safe."""
        if sys.platform == "win32":
            return False
        try:
            self._all.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = self._all.stat()
            if status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
                return False
            self._lock = (self._all / f"{self._folder.name}.lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            known = self._up_to_date_inputs()
            if known is None and remove_own_folder(self._folder, _OWN_FILE) is not None:
                return False
            self._inputs = known or {}
            self._folder.mkdir(exist_ok=True, mode=0o700)
            os.utime(self._folder)
        except OSError:  # another process has it open, among other reasons
            return False
        return True

    def _up_to_date_inputs(self) -> dict[str, str | None] | None:
        """Return what the recordings that are there depend on; None where it has changed."""
        try:
            known = json.loads((self._folder / _INPUTS).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(known, dict):
            return None
        is_same = all(content_of(path) == content for path, content in known.items())
        return known if is_same else None

    def _note_inputs(self) -> bool:
        """Write what everything depends on that was recorded so far, by earlier calls as well.

        False if that is not known.
        """
        read = self._files.contents()
        if read is None:
            return False
        inputs = {**self._inputs, **read}
        if inputs != self._inputs:
            write_atomically(self._folder / _INPUTS, json.dumps(inputs))
            self._inputs = inputs
        return True

    def _make_room(self) -> None:
        """Delete what was not used for longest, beyond the bytes that all may take."""
        folders = [each for each in self._all.iterdir() if _JOB_FOLDER.fullmatch(each.name)]
        left = self._most_bytes
        for folder in sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True):
            left -= sum(file.stat().st_size for file in folder.iterdir())
            if left < 0 and folder != self._folder:
                remove_own_folder(folder, _OWN_FILE)
                folder.with_suffix(".lock").unlink(missing_ok=True)
