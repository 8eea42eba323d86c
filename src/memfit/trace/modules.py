"""Tells which module an operator belongs to, in forward, backward and recomputation."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleTracker:
    """Follow the module that is running, by its name in the tracked model.

    In backward, an operator belongs to the module whose forward created the autograd node that is
    running: both share the node's sequence number, the link torch's profiler uses as well
    (https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.profiler.emit_nvtx).
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._last_in_backward = ""
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def name_modules(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's modules."""
        self._names = {id(module): name for name, module in model.named_modules()}

    @property
    def is_recomputing(self) -> bool:
        """Say whether a forward is running inside backward: only there gradients are wanted."""
        return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()

    def in_forward(self) -> str:
        """Name the running module and note it for the autograd node just made."""
        name = self._stack[-1] if self._stack else ""
        # The node was made before the operator was dispatched, so its number is one behind.
        self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = name
        return name

    def in_backward(self) -> str:
        """Name the module whose gradient is being computed."""
        if self._stack:
            return self.in_forward()
        node = torch._C._current_autograd_node()
        if node is not None:
            name = self._module_of_node.get(node._sequence_nr())
            if name is not None:
                self._last_in_backward = name
        return self._last_in_backward

    def forget_nodes(self) -> None:
        """Drop what was learnt about the nodes of a finished step."""
        self._module_of_node.clear()
        self._last_in_backward = ""

    def _entered(self, module: torch.nn.Module, _inputs: object) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _left(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        if self._stack:
            self._stack.pop()
