"""Embeddings of frozen branches in a file: computed once, checked, and read as a map of memory.

A file holds the clips of one part of the data. Its name ends in a fingerprint of all that it was
made from, so that a file of other weights or clips is never taken for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import memfit
from memfit.errors import DataError
from memfit.files import replace_atomically
from memfit.units import format_bytes

from .clips import Clips, collate
from .frozen_branches import FrozenBranches, embedding_widths, without_branches
from .model import embedding_key
from .sizes import TridentSizes

_FOLDER = "embeddings"
_DIGITS = 16
_OWN = re.compile(rf"(train|valid|test)-[0-9a-f]{{{_DIGITS}}}\.npy")
_FRAMES = {"rgb", "infrared"}
_SMALL: Mapping[str, tuple[Any, ...]] = {
    "kinematics": ("<f4", (3, 9)),
    "class_id": ("<i8",),
    "class_conf": ("<f4",),
    "event": ("<f4",),
    "severe": ("<f4",),
}
"""What a clip has besides frames and their targets."""
Read = Callable[[Sequence[int]], dict[str, Tensor]]
Records = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedClips:
    """Clips of one part of the data, whose frozen branches' embeddings are in a file."""

    records: Records
    clips: Clips | None
    """Read for the branches that are trained; None where these look at nothing but the records."""
    frozen: tuple[str, ...]
    read: Callable[[Clips, Sequence[int]], dict[str, Tensor]] = collate

    def __call__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Put a batch together."""
        found = self.records[np.asarray(rows, dtype=np.int64)]
        names = found.dtype.names or ()
        batch = {name: torch.from_numpy(np.ascontiguousarray(found[name])) for name in names}
        if self.clips is None:
            return batch
        return without_branches(self.read(self.clips, rows), self.frozen) | batch


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCache:
    """Where the embeddings of a run lie, and what they are made from."""

    folder: Path
    """Of the run."""
    branches: FrozenBranches
    sizes: TridentSizes

    @property
    def frozen(self) -> tuple[str, ...]:
        """Return the names of the frozen branches."""
        return tuple(self.branches)

    @property
    def holds_all(self) -> bool:
        """Return whether no clip is read any more once the embeddings are there."""
        return set(self.frozen) >= _FRAMES

    @property
    def kind(self) -> np.dtype[np.void]:
        """Return what is written of each clip, in the order of the job's batches."""
        widths = embedding_widths(self.sizes)
        value = torch.zeros((), dtype=next(self.branches.parameters()).dtype).numpy().dtype
        fields: list[Any] = []
        if self.holds_all:
            fields += [(name, *of) for name, of in _SMALL.items() if name not in self.frozen]
        fields += [(embedding_key(name), value, (widths[name],)) for name in self.frozen]
        return np.dtype(fields)

    def path(self, part: str, clips: Clips) -> Path:
        """Return where the embeddings of these clips lie, or would lie."""
        made_from = {
            "memfit": memfit.__version__,
            "weights": self.branches.fingerprint(),
            "sizes": self.sizes.to_json(),
            "clips": clips.fingerprint(),
            "kind": str(self.kind.descr),
        }
        found = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        return self.folder / _FOLDER / f"{part}-{found[:_DIGITS]}.npy"

    def opened(self, path: Path, num_clips: int) -> Records | None:
        """Map a file into memory; None where it is not there, or not whole."""
        try:
            records = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        is_right = records.dtype == self.kind and records.shape == (num_clips,)
        return records if is_right else None

    def write(self, path: Path, num_clips: int, batches: Iterator[Mapping[str, Tensor]]) -> None:
        """Write what comes in batches, whole or not at all.

        Raises:
            DataError: if the disk is full or cannot be written.
        """
        header = {
            "descr": np.lib.format.dtype_to_descr(self.kind),
            "fortran_order": False,
            "shape": (num_clips,),
        }

        def fill(part: Path) -> None:
            # A map of memory would end the process where the disk is full.
            with part.open("wb") as file:
                np.lib.format.write_array_header_2_0(file, header)
                for batch in batches:
                    names = self.kind.names or ()
                    records = np.empty(len(batch[names[0]]), self.kind)
                    for name in names:
                        records[name] = batch[name].cpu().numpy()
                    file.write(records.tobytes())

        try:
            replace_atomically(path, fill)
        except OSError as error:
            needed = format_bytes(self.kind.itemsize * num_clips)
            reason = (
                f"the embeddings cannot be written ({error.strerror}). Needed are {needed}; make "
                "room, or give another --output-dir."
            )
            raise DataError(str(path), reason) from None

    def remove_others(self, kept: Sequence[Path]) -> None:
        """Remove what was made from other weights or clips."""
        for path in embedding_files(self.folder):
            if path not in kept:
                path.unlink()


def embedding_files(folder: Path) -> list[Path]:
    """List the files of embeddings in a run's folder."""
    return sorted(path for path in (folder / _FOLDER).glob("*.npy") if _OWN.fullmatch(path.name))
