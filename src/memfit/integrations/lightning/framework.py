"""Lightning as it is installed: ``lightning`` or ``pytorch_lightning``, imported where used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import getmro
from types import ModuleType
from typing import Any, cast

from memfit.errors import MemfitError, MissingExtraError
from memfit.integrations.lightning.muted_loggers import muted

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
    return _part(cast(Hashable, type(trainer)), name)


@cache
def _part(kind: Hashable, name: str) -> ModuleType:
    """Import a module of the package that a class of trainers is from."""
    for base in getmro(cast(type, kind)):
        for package in _PACKAGES:
            if base.__module__.startswith(f"{package}."):
                return import_module(f"{package}.{name}")
    msg = f"A Trainer of Lightning is needed, not a {kind}."
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
def log_replaced(module: Any, log: Callable[..., None]) -> Iterator[None]:
    """Have another function called for ``module.log``, however it is reached.

    A bound method that a module has kept, as in ``self._log = self.log``, is Lightning's own; what
    it hands on to the results of the loop is turned around there.
    """
    results = module.trainer.fit_loop.epoch_loop._results
    check = module._LightningModule__check_allowed

    def of_results(fx: str, name: str, value: Any, **settings: Any) -> None:
        del fx
        settings.pop("sync_dist_fn", None)
        log(name, value, **settings)

    def stand_ins_allowed(value: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(value, "stands_for_metric", False):
            check(value, *args, **kwargs)

    own = vars(module)
    own["log"], vars(results)["log"] = log, of_results
    own["_LightningModule__check_allowed"] = stand_ins_allowed
    try:
        yield
    finally:
        del own["log"], vars(results)["log"], own["_LightningModule__check_allowed"]


@contextmanager
def callbacks_muted(trainer: Any) -> Iterator[None]:
    """Call no callbacks, and of what is logged tell nobody."""
    before = trainer.callbacks, trainer.loggers
    trainer.callbacks, trainer.loggers = [], muted(trainer.loggers)
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


class Progress:
    """Keeps the counters of a loop, and puts them back.

    Args:
        counters: of Lightning, which hold others.
    """

    def __init__(self, counters: Any) -> None:
        self._parts = [*_with_parts(counters)]
        self._values: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Keep the counters as they are."""
        self._values = [dict(vars(part)) for part in self._parts]

    @contextmanager
    def as_kept(self) -> Iterator[None]:
        """Have the counters be for a while what was kept."""
        now = [dict(vars(part)) for part in self._parts]
        self.put_back()
        try:
            yield
        finally:
            for part, values in zip(self._parts, now, strict=True):
                vars(part).update(values)

    def put_back(self) -> None:
        """Set the counters to what was kept."""
        for part, values in zip(self._parts, self._values, strict=True):
            vars(part).update(values)


def _with_parts(counters: Any) -> Iterator[Any]:
    yield counters
    for value in vars(counters).values():
        if hasattr(value, "__dict__"):
            yield from _with_parts(value)


def call_hook(trainer: Any, name: str, *args: Any) -> None:
    """Call a hook of the callbacks, then the module's, in Lightning's order."""
    call: Any = part_of(trainer, "trainer.call")
    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)
