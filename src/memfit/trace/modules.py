"""Tells which module and which line an operator belongs to, in forward, backward, recomputation."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.trace.events import CodeLine

OWN_FOLDERS = (
    *(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])),
    "<",
)
"""How the paths of torch's and memfit's own code begin, and of code that is in no file."""
_COMMANDS = str(Path(__file__).parents[1] / "cli" / "main.py")
"""What starts a command: the frames around it are no code that is trained."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator was called: the module, and the line of code as ``file.py:12``."""

    module: str = ""
    source_line: str = ""


class ModuleTracker:
    """Follow the module that is running, by its name in the tracked model, and the line of code.

    In backward, an operator belongs to the module whose forward created the autograd node that is
    running: both share the node's sequence number, the link torch's profiler uses as well
    (https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.profiler.emit_nvtx).
    """

    def __init__(
        self,
        entered: Callable[[str], None] | None = None,
        left: Callable[[], None] | None = None,
        lines: dict[str, CodeLine] | None = None,
    ) -> None:
        self._tell_entered = entered
        self._tell_left = left
        self._lines = {} if lines is None else lines
        self._names: dict[int, str] = {}
        self._holders: dict[int, str] = {}
        self._stack: list[str] = []
        self._place_of_node: dict[int, Place] = {}
        self._last_in_backward = Place()
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def name_modules(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's modules."""
        for name, module in model.named_modules():
            self._names[id(module)] = name
        for name, parameter in model.named_parameters():
            self._holders[id(parameter)] = name.rpartition(".")[0]

    def module_of(self, parameter: torch.Tensor) -> str:
        """Name the module that holds a parameter; empty where it is not known."""
        return self._holders.get(id(parameter), "")

    @property
    def is_recomputing(self) -> bool:
        """Return whether a forward is running inside backward: only there gradients are wanted."""
        return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()

    def in_forward(self) -> Place:
        """Tell the running module and line, and note them for the autograd node just made."""
        place = Place(self._stack[-1] if self._stack else "", self._line_of_caller())
        # The node was made before the operator was dispatched, so its number is one behind.
        self._place_of_node[torch._C._autograd._get_sequence_nr() - 1] = place
        return place

    def in_backward(self) -> Place:
        """Tell the module and line whose gradient is being computed."""
        if self._stack:
            return self.in_forward()
        node = torch._C._current_autograd_node()
        if node is not None:
            place = self._place_of_node.get(node._sequence_nr())
            if place is not None:
                self._last_in_backward = place
        return self._last_in_backward

    def forget_nodes(self) -> None:
        """Drop what was learnt about the nodes of a finished step."""
        self._place_of_node.clear()
        self._last_in_backward = Place()

    def _line_of_caller(self) -> str:
        """Name the line that asks for an operator, and note where it is."""
        frame = _frame_of_caller()
        if frame is None:
            return ""
        code, number = frame.f_code, frame.f_lineno
        line = f"{name_of_file(code.co_filename)}:{number}"
        if line not in self._lines:
            self._lines[line] = CodeLine(code.co_filename, code.co_qualname, number)
        return line

    def _entered(self, module: torch.nn.Module, _inputs: object) -> None:
        if not self._stack and id(module) not in self._names:
            self.name_modules(module)  # a model that nobody has told of
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        if self._tell_entered is not None:
            self._tell_entered(self._stack[-1])

    def _left(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        if self._stack:
            self._stack.pop()
            if self._tell_left is not None:
                self._tell_left()


def line_of_caller() -> str:
    """Name the innermost line that belongs neither to torch nor to memfit."""
    frame = _frame_of_caller()
    return "" if frame is None else f"{name_of_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def _frame_of_caller() -> FrameType | None:
    """Return the innermost frame that belongs neither to torch nor to memfit.

    None where memfit does something of its own under a command.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not name_of_file(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename == _COMMANDS else frame.f_back
    return frame


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that belong neither to torch nor to memfit, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(OWN_FOLDERS)]


def line_of_error(error: BaseException) -> str:
    """Name the innermost line of the user's code that an error, or its cause, came through."""
    found: BaseException | None = error
    line = ""
    while found is not None:
        frames = user_frames(found)
        line = f"{name_of_file(frames[-1].filename)}:{frames[-1].lineno}" if frames else line
        found = found.__cause__
    return line


@functools.cache
def name_of_file(path: str) -> str:
    """Shorten a path to its last folder and name; empty for torch's and memfit's own files."""
    if path.startswith(OWN_FOLDERS):
        return ""
    return "/".join(Path(path).parts[-2:])
