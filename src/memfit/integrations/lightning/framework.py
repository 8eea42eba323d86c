"""Lightning as it is installed: ``lightning`` or ``pytorch_lightning``, imported where used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from memfit.errors import MemfitError, MissingExtraError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_class() -> Any:
    """Return the base class of callbacks, of the package that the training has imported.

    Raises:
        MissingExtraError: if neither package is installed.
    """
    loaded = [name for name in _PACKAGES if name in sys.modules]
    for name in (*loaded, *_PACKAGES):
        try:
            return import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise MissingExtraError("memfit.integrations.lightning", "lightning", "lightning")


def part_of(trainer: Any, name: str) -> ModuleType:
    """Import a module of the package that a trainer is from, such as ``trainer.call``.

    Args:
        trainer: Lightning's own, or one of a class below it.
        name: of the module below the package.
    """
    for kind in type(trainer).__mro__:
        for package in _PACKAGES:
            if kind.__module__.startswith(f"{package}."):
                return import_module(f"{package}.{name}")
    msg = f"A Trainer of Lightning is needed, not a {type(trainer).__name__}."
    raise MemfitError(msg)


@contextmanager
def inside_hook(module: Any, name: str) -> Iterator[None]:
    """Have what is logged belong to a hook, as it does when Lightning calls it."""
    before = module._current_fx_name
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def callbacks_muted(trainer: Any) -> Iterator[None]:
    """Call no callbacks, and of what is logged tell nobody."""
    before = trainer.callbacks, trainer.loggers
    trainer.callbacks, trainer.loggers = [], []
    try:
        yield
    finally:
        trainer.callbacks, trainer.loggers = before


@contextmanager
def hooks_muted(trainer: Any, names: frozenset[str]) -> Iterator[None]:
    """Leave out some hooks of callbacks and module, wherever Lightning would call them."""
    call: Any = part_of(trainer, "trainer.call")
    callbacks, module = call._call_callback_hooks, call._call_lightning_module_hook

    def of_callbacks(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return None if name in names else callbacks(trainer, name, *args, **kwargs)

    def of_module(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return None if name in names else module(trainer, name, *args, **kwargs)

    call._call_callback_hooks, call._call_lightning_module_hook = of_callbacks, of_module
    try:
        yield
    finally:
        call._call_callback_hooks, call._call_lightning_module_hook = callbacks, module


def call_hook(trainer: Any, name: str, *args: Any) -> None:
    """Call a hook of the callbacks, then the module's, in Lightning's order."""
    call: Any = part_of(trainer, "trainer.call")
    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)
