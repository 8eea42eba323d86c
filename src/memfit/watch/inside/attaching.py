"""Attaches the watch to this process, which has just imported torch, and to a trainer in it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit.errors import MemfitError
from memfit.observe.enforced_budget import BudgetExceededError
from memfit.watch.settings import WatchSettings, settings_from

from .budgets import WatchedBudget, limit_cards
from .errors_seen import describe_error, describe_here
from .loaders import hook_loaders
from .process_record import ProcessRecord
from .script_watch import ScriptWatch, is_recorded

_METHODS = {
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
    "transformers.trainer": "train",
}
"""What begins the training of a module's Trainer."""


def attach() -> None:
    """Watch this process to its end."""
    settings = settings_from(os.environ)
    if settings is not None:
        _Attachment(settings).begin()


class _Attachment:
    """The hooks in a process, and what they are attached to."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._record = ProcessRecord(settings.folder)
        self._budget = self._enforced(settings.budget_bytes)
        self._watch = ScriptWatch(settings, self._record, self._budget)
        self._process_id = os.getpid()
        self._noted: BaseException | None = None

    def begin(self) -> None:
        """Put the hooks in their places."""
        register_optimizer_step_post_hook(self._watch.optimizer_stepped)
        hook_loaders(self._watch.loader_begun, self._watch.batch_wanted, self._watch.batch_given)
        os.register_at_fork(after_in_child=self._watch.leave)
        atexit.register(self._end)
        self._chain_exception_hooks()
        if self._settings.fit is not None:
            _fit_trainers(self._settings.fit, self._record)

    def _enforced(self, budget_bytes: int | None) -> WatchedBudget | None:
        if budget_bytes is None:
            return None
        limit_cards(budget_bytes)
        if threading.current_thread() is not threading.main_thread():
            self._record.note("the budget is not enforced: torch was imported by a side thread")
            return None
        budget = WatchedBudget(budget_bytes, self._exceeded)
        budget.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it so
        return budget

    def _exceeded(self, error: BudgetExceededError) -> None:
        """Note it at once: the script may catch the error and end in its own way."""
        try:
            self._record.add_error(describe_here(error, step=self._watch.num_steps))
        except Exception as failure:  # noqa: BLE001 - the script's own error comes first
            self._record.note(f"the error was not described: {failure}")

    def _chain_exception_hooks(self) -> None:
        before, threads_before = sys.excepthook, threading.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._note_error(error)
            before(kind, error, traceback)

        def thread_hook(args: Any) -> None:
            if args.exc_value is not None:
                name = args.thread.name if args.thread is not None else "unknown"
                self._note_error(args.exc_value, thread=name)
            threads_before(args)

        sys.excepthook, threading.excepthook = hook, thread_hook

    def _note_error(self, error: BaseException, thread: str = "") -> None:
        if error is self._noted or os.getpid() != self._process_id:
            return
        if not thread:  # the script goes on after a thread, whose tensors must not be kept
            self._noted = error
        try:
            words = describe_error(
                error, step=self._watch.num_steps, is_uncaught=True, thread=thread
            )
            self._record.add_error(words)
        except Exception as failure:  # noqa: BLE001 - the script's own error comes first
            self._record.note(f"the error was not described: {failure}")

    def _end(self) -> None:
        if os.getpid() != self._process_id:
            return
        # Python keeps an uncaught error here, also where the script has an exception hook of its
        # own that does not call ours.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self._note_error(error)
        self._watch.finish()
        self._record.update(
            has_ended=True,
            highest_bytes=None if self._budget is None else self._budget.most_bytes,
        )


def _fit_trainers(settings: Mapping[str, Any], record: ProcessRecord) -> None:
    """Have every trainer of a framework that begins from here on do so under a plan.

    Args:
        settings: what the framework's integration is given, and ``refuses``: whether what is not
            planned may not train.
        record: of this process, which keeps what is planned and why something is not.
    """
    wanted = dict(settings)
    refuses = wanted.pop("refuses")

    def refuse(reason: str) -> None:
        record.update(unplanned=reason)
        if refuses:
            raise MemfitError(f"Nothing is trained without a plan: {reason}")
        hook.remove()
        sys.stderr.write(f"memfit: training WITHOUT A PLAN: {reason}\n")

    def before_step(optimizer: Any, *_: object) -> None:
        if not record.words.is_planned and not is_recorded(optimizer):
            refuse("no Trainer of Lightning or transformers has begun it")

    def wrap(module: ModuleType) -> None:
        _wrap(module, {**wanted, "on_refusal": refuse}, record)

    hook = register_optimizer_step_pre_hook(before_step)
    for name in _METHODS:
        if name in sys.modules:
            wrap(sys.modules[name])
    sys.meta_path.insert(0, _TrainerFinder(wrap))


class _TrainerFinder:
    """Find the modules of trainers as other finders do, and wrap them once they have been run."""

    def __init__(self, wrap: Callable[[ModuleType], None]) -> None:
        self._wrap = wrap

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a trainer's module, to be followed by the wrapping; else nothing."""
        if name not in _METHODS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap_after(spec.loader)
                return spec
        return None

    def _wrap_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._wrap(module)

        loader.exec_module = exec_module


def _wrap(module: ModuleType, wanted: Mapping[str, Any], record: ProcessRecord) -> None:
    """Have trainings of a module's Trainer planned, unless the script does so itself."""
    kind: Any = module.Trainer
    method = _METHODS[module.__name__]
    begin = getattr(kind, method)
    join = _add_callback if method == "fit" else _attach

    @wraps(begin)
    def begun(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        record.update(is_planned=True)
        try:
            join(trainer, wanted)
        except Exception as error:  # noqa: BLE001 - whatever fails here, it is not planned
            wanted["on_refusal"](f"the trainer is not planned: {type(error).__name__}: {error}")
        return begin(trainer, *args, **kwargs)

    setattr(kind, method, begun)


def _add_callback(trainer: Any, wanted: Mapping[str, Any]) -> None:
    callback: Any = import_module("memfit.integrations.lightning").MemfitCallback
    if not any(isinstance(each, callback) for each in trainer.callbacks):
        trainer.callbacks.append(callback(**wanted))


def _attach(trainer: Any, wanted: Mapping[str, Any]) -> None:
    integration: Any = import_module("memfit.integrations.transformers")
    if not integration.is_attached(trainer):
        integration.attach(trainer, **wanted)
