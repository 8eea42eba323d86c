"""Tells which parts of a model are in evaluation mode, which is left as it is and said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.session.block_names import first_few

_NORMALISING = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
)
"""What is often frozen by itself, on purpose."""
THE_MODEL = "the model"


def modules_in_evaluation(model: torch.nn.Module) -> tuple[str, ...]:
    """Name the outermost modules in evaluation mode; normalisations by themselves do not count."""
    if not model.training:
        return (THE_MODEL,)
    return tuple(_outermost(model, ""))


def evaluation_notes(names: Sequence[str]) -> list[str]:
    """Return what it means that modules are in evaluation mode; empty if none are."""
    if not names:
        return []
    subject = f"{first_few(names)} {'is' if len(names) == 1 else 'are'}"
    note = (
        f"{subject} in eval mode: dropout and batch normalisation act as in evaluation; call "
        ".train() first if that is not meant"
    )
    return [note]


class ModesSeen:
    """See which modules are in evaluation mode when a step calls them.

    That is what counts: a loss may switch modes itself. Calls without gradients do not count, nor
    do modules beside the model that train nothing, such as a teacher.

    Limits: a module that switches a part of itself while it runs is seen as it was before.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._model = model
        self._names = {} if model is None else {id(m): name for name, m in model.named_modules()}
        self._depth = 0
        self._is_called = False
        self._found: dict[str, None] = {}
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

    @property
    def found(self) -> tuple[str, ...]:
        """Name the outermost ones so far; by the model's state where no call of it was seen."""
        if self._model is not None and not self._is_called:
            return modules_in_evaluation(self._model)
        return tuple(self._found)

    def _entered(self, module: torch.nn.Module, _inputs: object) -> None:
        if self._depth == 0 and torch.is_grad_enabled():
            self._note(module)
        self._depth += 1

    def _left(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        self._depth -= 1

    def _note(self, module: torch.nn.Module) -> None:
        name = self._names.get(id(module))
        if name is None:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            name, prefix = type(module).__name__, ""
        else:
            self._is_called = True
            prefix = f"{name}." if name else ""
        if module.training:
            self._found.update(dict.fromkeys(_outermost(module, prefix)))
        elif not isinstance(module, _NORMALISING):
            self._found[name or THE_MODEL] = None


def _outermost(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if child.training:
            yield from _outermost(child, f"{path}.")
        elif not isinstance(child, _NORMALISING):
            yield path
