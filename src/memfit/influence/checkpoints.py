"""Checkpoints of a scan, loaded one after the other into the one model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from memfit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights that training has passed through, and the learning rate there."""

    name: str
    load: Callable[[], Mapping[str, Any]]
    """Give the state dict, when its turn has come."""
    learning_rate: float = 1.0
    """``eta``: what its inner products are multiplied with."""

    @classmethod
    def of_file(
        cls, path: str | Path, learning_rate: float = 1.0, *, key: str | None = None
    ) -> Self:
        """Take the weights of a file that ``torch.save`` wrote.

        They are mapped into memory and copied into the model, so no second copy is made on the way.

        Args:
            path: of the file.
            learning_rate: of the steps around it.
            key: under which the file has the state dict; None if it is the state dict.
        """
        path = Path(path)
        return cls(name=path.name, load=lambda: _state_in(path, key), learning_rate=learning_rate)

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model.

        Raises:
            DataError: if they cannot be read, or are those of another model.
        """
        state = self.load()
        try:
            model.load_state_dict(state)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            msg = f"these weights do not fit the model ({reason:.200})"
            raise DataError(self.name, msg) from None


def _state_in(path: Path, key: str | None) -> Mapping[str, Any]:
    """Read the state dict in a file.

    Raises:
        DataError: if there is none.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise DataError(str(path), "there is no such checkpoint") from None
    except Exception as error:  # noqa: BLE001 - torch.load raises what its readers raise
        reason = " ".join(str(error).split())
        msg = f"it cannot be read as a checkpoint ({reason:.200})"
        raise DataError(str(path), msg) from None
    if key is not None:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        where = "" if key is None else f" under {key!r}"
        raise DataError(str(path), f"it holds no state dict{where}")
    return found


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """Return a number that tells weights or samples from others."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.stride() != (1,):  # a single number is contiguous with any stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        flat = flat.view(torch.uint8)
        found = zlib.crc32(flat.numpy().data, found)
    return found
