"""Saves and loads what a recorded script saves and loads: tensors without their values."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from memfit.script.mapped_files import MappedFiles
from memfit.virtual.known_values import value_of
from memfit.virtual.with_values import TensorsWithValues

_SUFFIX = b"memfit: an object without the values of its tensors\n"
_FLATTENING = ("_flatten", "_flatten_as_ptr")
"""What turns tensors into bytes in safetensors 0.4 to 0.8, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A tensor as it is saved: what it takes to make one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    storage: int
    offset: int
    storage_bytes: int
    requires_grad: bool
    is_parameter: bool
    content: bytes | None = None
    """Its values, where they are known: data that a script prepares and reads again."""


class SavedObjects:
    """Stand in for ``torch.save`` and ``torch.load`` while a script is recorded.

    Saving copies each storage of the card to the host, one after the other, as torch does
    (``_save`` in torch/serialization.py); what is written are shapes.

    Args:
        mode: whose fake tensors are made of what is loaded.
        writing: entered while something is saved.
        files: makes the tensors of files that are mapped.
    """

    def __init__(
        self,
        mode: TensorsWithValues,
        writing: Callable[[], AbstractContextManager[None]],
        files: MappedFiles,
    ) -> None:
        self._mode = mode
        self._files = files
        self._writing = writing
        self._load_as_torch_does_it = torch.load

    def replacements(self) -> Iterator[Any]:
        """Yield what is replaced."""
        yield patch.object(torch, "save", self.save)
        yield patch.object(torch.serialization, "save", self.save)
        yield patch.object(torch, "load", self.load)
        yield patch.object(torch.serialization, "load", self.load)
        yield patch.object(FakeTensor, "__reduce_ex__", _reduced, create=True)
        safetensors = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            for name in _FLATTENING:
                if hasattr(safetensors, name):
                    yield patch.object(safetensors, name, self._flatten)
            yield patch.object(safetensors, "serialize_file", self._write_flat)

    def save(self, obj: object, f: Any, *_args: Any, **_kwargs: Any) -> None:
        """Save an object without the values of its tensors."""
        with self._writing():
            # Saving takes memory on the host for all that lies on the card.
            seen = set()
            for tensor in tree_flatten(obj)[0]:
                if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                    storage = tensor.untyped_storage()
                    if storage._cdata not in seen:
                        seen.add(storage._cdata)
                        torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
            buffer = io.BytesIO()
            _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
            content = _SUFFIX + buffer.getvalue()
            if isinstance(f, (str, os.PathLike)):
                with open(f, "wb") as file:  # noqa: PTH123 - the name that the overlay replaces
                    file.write(content)
            else:
                f.write(content)

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load an object: one saved here as fake tensors, another with its values."""
        content = content_saved_here(f)
        if content is not None:
            return _Unpickler(io.BytesIO(content), map_location, self._mode).load()
        with _disable_current_modes():
            loaded = self._load_as_torch_does_it(f, "cpu", *args, **kwargs)
        device = torch.device("cpu") if map_location is None else _device_named(map_location, "cpu")
        if kwargs.get("mmap"):
            memory = self._files.take(os.stat(f).st_size)  # noqa: PTH116 - as the overlay has it
            copy = self._files.copies(memory)
            return tree_map_only(torch.Tensor, lambda real: copy(real).to(device), loaded)
        return tree_map_only(
            torch.Tensor, lambda real: self._mode.with_known_values(real, device), loaded
        )

    def _flatten(self, tensors: dict[str, torch.Tensor], *_kept: Any) -> dict[str, Any]:
        """Take the memory that safetensors takes: the tensors of the card on the host at once."""
        with self._writing():
            held = [each.cpu() for each in tensors.values()]
            del held
        return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}

    def _write_flat(self, shapes: dict[str, Any], filename: Any, metadata: Any = None) -> None:
        del metadata
        Path(filename).write_bytes(_SUFFIX + pickle.dumps(shapes))


class _Pickler(pickle.Pickler):
    """Write tensors as shapes."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        storage = obj.untyped_storage()
        value = value_of(obj)
        return _Saved(
            shape=tuple(obj.shape),
            stride=tuple(obj.stride()),
            dtype=obj.dtype,
            device=obj.device.type,
            storage=storage._cdata,
            offset=int(obj.storage_offset()),
            storage_bytes=storage.nbytes(),
            requires_grad=obj.requires_grad,
            is_parameter=isinstance(obj, torch.nn.Parameter),
            content=None if value is None else _bytes_of(value),
        )


class _Unpickler(pickle.Unpickler):
    """Make fake tensors of shapes; only what was saved in this process is read."""

    def __init__(self, file: io.BytesIO, map_location: Any, mode: TensorsWithValues) -> None:
        super().__init__(file)
        self._map_location = map_location
        self._mode = mode
        self._storages: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        saved: _Saved = pid
        if saved.content is not None:
            return self._mode.with_known_values(_tensor_of(saved), self._device(saved))
        if saved.storage not in self._storages:
            memory = torch.empty(saved.storage_bytes, dtype=torch.uint8, device="cpu")
            self._storages[saved.storage] = memory.to(self._device(saved)).untyped_storage()
        tensor = torch.empty(0, dtype=saved.dtype, device=self._device(saved))
        with torch.no_grad():
            storage = self._storages[saved.storage]
            tensor.set_(storage, saved.offset, saved.shape, saved.stride)
        if saved.is_parameter:
            return torch.nn.Parameter(tensor, saved.requires_grad)
        return tensor.requires_grad_(saved.requires_grad)

    def _device(self, saved: _Saved) -> torch.device:
        return _device_named(self._map_location, saved.device)


def _device_named(wanted: Any, saved: str) -> torch.device:
    """Return where a tensor goes that was saved from a device, as ``map_location`` says."""
    if isinstance(wanted, dict):
        wanted = wanted.get(saved) or wanted.get(f"{saved}:0")
    if wanted is None or callable(wanted):
        return torch.device(saved)
    return torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)


def _bytes_of(value: torch.Tensor) -> bytes:
    with no_dispatch():
        flat = value.detach().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _tensor_of(saved: _Saved) -> torch.Tensor:
    with no_dispatch():
        if not saved.content:
            return torch.empty(saved.shape, dtype=saved.dtype)
        raw = torch.frombuffer(bytearray(saved.content), dtype=torch.uint8)
        return raw.view(saved.dtype).reshape(saved.shape)


def content_saved_here(f: Any) -> bytes | None:
    """Return what follows the mark of this module; None for another file."""
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as file:  # noqa: PTH123 - the name that the overlay replaces
            return file.read() if file.read(len(_SUFFIX)) == _SUFFIX else None
    place = f.tell()
    if f.read(len(_SUFFIX)) == _SUFFIX:
        content: bytes = f.read()
        return content
    f.seek(place)
    return None


def _like(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _reduced(tensor: FakeTensor, _protocol: Any) -> Any:
    """Pickle a fake tensor as one of its shape."""
    return _like, (tuple(tensor.shape), tensor.dtype, str(tensor.device))
