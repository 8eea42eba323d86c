"""Notes for a few steps where tensors and objects are made, to trace what grows to a line.

Tensors are seen by a torch function mode, which also sees what is added to a tensor in place;
``tracemalloc`` sees the rest. Both slow the steps down, so they are on for a few steps after a
suspicion alone. The mode is left out where it could get between modes of the program or make
compiled code compile anew; tracing that the program has begun itself is used and left on.
"""

from __future__ import annotations

import sys
import tracemalloc
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from memfit.trace.modes import FunctionMode

from .roots import is_user_file, user_line

_NUM_FRAMES = 16
"""From an allocation up to the program's own code."""
_MOST_TENSORS = 20_000
_MOST_OUTPUTS = 16


class _TensorLines(FunctionMode):
    """Note the line of the program at which each tensor is made or added to."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if type(out) is torch.Tensor:
            self._note(out)
        elif type(out) in {tuple, list}:
            for each in out[:_MOST_OUTPUTS]:
                if type(each) is torch.Tensor:
                    self._note(each)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        if len(self.lines) < _MOST_TENSORS:
            self.lines[id(tensor)] = (weakref.ref(tensor), user_line())


class LineWatch:
    """Note lines between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self.is_on = False
        self._traces = False
        self._mode: _TensorLines | None = None
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def begin(self) -> None:
        """Begin to note."""
        self.is_on = True
        self._traces = not tracemalloc.is_tracing()
        if self._traces:
            tracemalloc.start(_NUM_FRAMES)
        if not _get_current_function_mode_stack() and not _is_compiling():
            self._mode = _TensorLines()
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            self._noted = self._mode.lines

    def end(self) -> bool:
        """Stop noting; False where a mode of the program is in the way and it has to be later."""
        if self._mode is not None:
            stack = _get_current_function_mode_stack()
            if not stack or stack[-1] is not self._mode:
                return False
            self._mode.__exit__(None, None, None)
            self._mode = None
        if self.is_on and self._traces:
            tracemalloc.stop()
        self.is_on = False
        return True

    def forget(self) -> None:
        """Drop the lines."""
        self._noted = {}

    def line_of(self, value: Any) -> str:
        """Return the innermost line of the program at which an object was made."""
        reference, line = self._noted.get(id(value), (None, ""))
        if reference is not None and reference() is value:
            return line
        trace = tracemalloc.get_object_traceback(value) if tracemalloc.is_tracing() else None
        for frame in reversed(trace or ()):
            if is_user_file(frame.filename):
                return f"{Path(frame.filename).name}:{frame.lineno}"
        return ""


def _is_compiling() -> bool:
    """Return whether anything was compiled with ``torch.compile``."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return bool(counters and counters.get("frames"))
