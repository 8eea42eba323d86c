"""Attaches the watch to this process, which has just imported torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.observe.enforced_budget import BudgetExceededError
from memfit.watch.settings import WatchSettings, settings_from

from .budgets import WatchedBudget, limit_cards
from .errors_seen import describe_error, describe_here
from .loaders import hook_loaders
from .process_record import ProcessRecord
from .script_watch import ScriptWatch
from .trainers import fit_trainers


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
            fit_trainers(self._settings.fit, self._record.note)

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
