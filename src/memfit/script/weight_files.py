"""Reads files of weights while a script is recorded: shapes, and the memory of a mapped file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils._mode_utils import no_dispatch

from memfit.script.mapped_files import MOST_KNOWN_VALUES, MappedFiles
from memfit.script.saved_objects import content_saved_here

_TORCH = ("pt", "torch", "pytorch")
_LENGTH_BYTES = 8
"""Of the length of the header, with which a file begins (docs/source/index.mdx of safetensors)."""
_IN_ORDER: Mapping[str, str] = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "HF_ENABLE_PARALLEL_LOADING": "false",
}
"""Has transformers 5 and 4.5x load weights one after the other: threads see no virtual tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor in a file: its shape, and where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    first_byte: int | None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """Stand in for ``safetensors.safe_open`` while a script is recorded.

    A file is mapped as a whole when it is opened, and stays so until it is closed and the last of
    its tensors is gone; the tensors take no memory besides (``Storage::Torch`` in
    bindings/python/src/lib.rs, safetensors 0.8).

    Args:
        files: makes the tensors.
    """

    def __init__(self, files: MappedFiles) -> None:
        self._files = files

    def replacements(self) -> Iterator[Any]:
        """Yield what is replaced."""
        yield patch.dict(os.environ, _IN_ORDER)
        if importlib.util.find_spec("safetensors") is not None:
            real = importlib.import_module("safetensors.torch").safe_open
            yield _everywhere("safe_open", real, self._opener(real))

    def _opener(self, real: Any) -> Any:
        files = self._files

        def safe_open(
            filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any
        ) -> Any:
            if framework not in _TORCH:
                return real(filename, framework, device, **options)
            try:
                return _OpenFile(files, filename, device)
            except (ValueError, KeyError, TypeError):
                return real(filename, framework, device, **options)  # which says what is wrong

        return safe_open


class _OpenFile:
    """Do what an open file of safetensors does."""

    def __init__(self, files: MappedFiles, filename: Any, device: Any) -> None:
        self._files = files
        self._filename = filename
        self._device = torch.device("cuda", device) if isinstance(device, int) else device
        self._metadata: dict[str, str] | None = None
        saved = _saved_here(filename)
        self._entries = self._read_header() if saved is None else saved
        if saved is None:
            num_bytes = os.stat(filename).st_size  # noqa: PTH116 - what the overlay replaces
        else:
            num_bytes = sum(each.num_bytes for each in saved.values())
        self._memory: torch.UntypedStorage | None = files.take(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._memory = None

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of the file."""
        return sorted(self._entries, key=lambda name: self._entries[name].first_byte or 0)

    def metadata(self) -> dict[str, str] | None:
        """Return the text that was saved beside the tensors."""
        return self._metadata

    def get_slice(self, name: str) -> _Slice:
        """Return what gives a tensor, or a part of it."""
        return _Slice(self, name, self.entry(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the device that was asked for.

        Raises:
            SafetensorError: if it is not in the file, or the file was closed.
        """
        entry = self.entry(name)
        if self._memory is None:
            raise _error("File is closed")
        storage = self._files.storage_in(self._memory, entry.num_bytes)
        values = self._values(entry)
        tensor = self._files.tensor_in(storage, entry.shape, entry.dtype, values=values)
        return tensor if str(self._device) == "cpu" else tensor.to(self._device)

    def entry(self, name: str) -> _Entry:
        """Return what the file says of a tensor.

        Raises:
            SafetensorError: if it is not in the file.
        """
        if name not in self._entries:
            raise _error(f"File does not contain tensor {name}")
        return self._entries[name]

    def _read_header(self) -> dict[str, _Entry]:
        types = sys.modules["safetensors.torch"]._TYPES
        with open(self._filename, "rb") as file:  # noqa: PTH123 - the name that the overlay replaces
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            content = file.read(length) if length < os.fstat(file.fileno()).st_size else b""
        header = json.loads(content)
        self._metadata = header.pop("__metadata__", None)
        return {
            name: _Entry(
                shape=tuple(each["shape"]),
                dtype=types[each["dtype"]],
                kind=each["dtype"],
                first_byte=_LENGTH_BYTES + length + each["data_offsets"][0],
            )
            for name, each in header.items()
        }

    def _values(self, entry: _Entry) -> torch.Tensor | None:
        """Read the values of what is no weight."""
        num_values = prod(entry.shape)
        is_weight = entry.dtype.is_floating_point and num_values > MOST_KNOWN_VALUES
        if entry.first_byte is None or is_weight or not num_values:
            return None
        with open(self._filename, "rb") as file:  # noqa: PTH123 - the name that the overlay replaces
            file.seek(entry.first_byte)
            content = bytearray(file.read(entry.num_bytes))
        with no_dispatch():
            raw = torch.frombuffer(content, dtype=torch.uint8)
            return raw.view(entry.dtype).reshape(entry.shape)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Do what a tensor of an open file does that has not been read yet."""

    file: _OpenFile
    name: str
    entry: _Entry

    def get_shape(self) -> Sequence[int]:
        """Return the shape."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Return the type of the elements, as safetensors calls it."""
        return self.entry.kind

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.file.get_tensor(self.name)[place]


def _saved_here(filename: Any) -> dict[str, _Entry] | None:
    """Return what a file holds that the script itself has saved; None for another file."""
    content = content_saved_here(filename)
    if content is None:
        return None
    kinds = {dtype: kind for kind, dtype in sys.modules["safetensors.torch"]._TYPES.items()}
    return {
        name: _Entry(shape=shape, dtype=dtype, kind=kinds[dtype], first_byte=None)
        for name, (shape, dtype) in pickle.loads(content).items()
    }


def _error(what: str) -> Exception:
    error: Exception = sys.modules["safetensors"].SafetensorError(what)
    return error


@contextmanager
def _everywhere(name: str, real: object, stand_in: object) -> Iterator[None]:
    """Replace a function in every module that has it under its name, later ones among them."""
    _exchange(name, real, stand_in)
    try:
        yield
    finally:
        _exchange(name, stand_in, real)


def _exchange(name: str, old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
