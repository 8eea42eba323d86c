"""The file that cut updates go back to: the content of all large tensors at one moment."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.runtime.guard.large_tensors import LargeTensors, local_part, options_of, parameters_of
from memfit.session.session import Session
from memfit.units import format_bytes

_MOST_DISK_FRACTION = 0.5
"""The file takes no more of what is free on the disk."""


class StateFile:
    """Write large tensors to a temporary file and read them back.

    Args:
        large: the tensors.
        session: whose; its buffers are written as well, for a checkpoint in an emergency.
    """

    def __init__(self, large: LargeTensors, session: Session) -> None:
        self._large = large
        self._session = session
        self._file: Any = None

    def write(self) -> None:
        """Write all as they are.

        Raises:
            OSError: if there is no room.
            RuntimeError: if writing fails.
        """
        session, optimizer = self._session, self._session.optimizer
        states: dict[Any, Any] = {
            number: optimizer.state[parameter]
            for number, parameter in enumerate(parameters_of(optimizer))
            if parameter in optimizer.state
        }
        named = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
        content = {
            "large": {name: local_part(each) for name, each in self._large.named().items()},
            "parameters": self._large.parameters(),
            "buffers": dict(session.model.named_buffers()),
            "optimizer": {**states, **named},
            "options": [options_of(group) for group in optimizer.param_groups],
            "stateful": {name: part.state_dict() for name, part in session.stateful.items()},
        }
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="memfit-")  # noqa: SIM115 - kept open
            weakref.finalize(self, self._file.close)
        _check_room(content, self._file.seek(0, os.SEEK_END))
        self._file.seek(0)
        torch.save(content, self._file)
        self._file.truncate()
        self._file.flush()

    def content(self) -> dict[str, Any]:
        """Read the file, to the CPU."""
        self._file.seek(0)
        # Nobody else can write to it: it has no name.
        content: dict[str, Any] = torch.load(self._file, map_location="cpu", weights_only=False)
        return content

    @torch.no_grad()
    def read_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the content of the file into the tensors of the same names."""
        for name, value in self.content()["large"].items():
            tensor = local_part(tensors[name])
            if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device)

    def close(self) -> None:
        """Drop the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _check_room(content: dict[str, Any], length_bytes: int) -> None:
    """Refuse to fill the disk with a file that takes ``length_bytes`` already."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)}
    needed_bytes = sum(t.numel() * t.element_size() for t in tensors.values()) - length_bytes
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if needed_bytes > _MOST_DISK_FRACTION * free_bytes:
        msg = (
            f"{format_bytes(needed_bytes)} are too much for {tempfile.gettempdir()}, which has "
            f"{format_bytes(free_bytes)} free; TMPDIR names another place"
        )
        raise OSError(msg)
