"""Tells which module and which line an operator belongs to, in forward, backward, recomputation."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.trace.events import CodeLine
from memfit.trace.origins import (
    OWN_FOLDERS,
    code_line,
    line_of_caller,
    lines_of_members,
    name_of_file,
)


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
        self._code_lines = {} if lines is None else lines
        self._names: dict[int, str] = {}
        self._holders: dict[int, str] = {}
        self._member_lines: dict[int, str] = {}
        self._models: list[weakref.ref[torch.nn.Module]] = []
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
        """Learn the names of a model's modules, and the lines that made what they hold."""
        self._models.append(weakref.ref(model))
        for name, module in model.named_modules():
            self._names[id(module)] = name
            lines = lines_of_members(module)
            for members in (module._parameters, module._buffers):
                for member, tensor in members.items():
                    if tensor is not None:
                        self._member_lines[id(tensor)] = lines.get(member, "")
        for name, parameter in model.named_parameters():
            self._holders[id(parameter)] = name.rpartition(".")[0]

    def models(self) -> Iterator[torch.nn.Module]:
        """Yield the models that have been named and are still there."""
        self._models = [each for each in self._models if each() is not None]
        for each in self._models:
            model = each()
            if model is not None:
                yield model

    def module_of(self, parameter: torch.Tensor) -> str:
        """Name the module that holds a parameter; empty where it is not known."""
        return self._holders.get(id(parameter), "")

    def line_of_member(self, tensor: torch.Tensor) -> str:
        """Name the line that gave a module a parameter or a buffer; empty where it is not known."""
        return self._member_lines.get(id(tensor), "")

    @property
    def depth(self) -> int:
        """Return how many modules are running, each called by the one before."""
        return len(self._stack)

    @property
    def is_recomputing(self) -> bool:
        """Return whether a forward is running inside backward: only there gradients are wanted."""
        return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()

    def in_forward(self, line: Callable[[], str] = line_of_caller) -> Place:
        """Tell the running module and line, and note them for the autograd node just made."""
        place = Place(self._stack[-1] if self._stack else "", self.noted(line()))
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

    def noted(self, line: str) -> str:
        """Keep where a line of code is, and give it back."""
        if line and line not in self._code_lines:
            found = code_line(line)
            if found is not None:
                self._code_lines[line] = found
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
