"""Describes an error that ended a script: its kind, and where in the script it was raised."""

from __future__ import annotations

import os
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

import memfit
from memfit.errors import GIVEN_UP, LostContextError
from memfit.journal.records import Reason
from memfit.observe.enforced_budget import BudgetExceededError
from memfit.observe.out_of_memory import (
    chain_of,
    has_lost_context,
    is_out_of_memory,
    tells_out_of_memory,
)
from memfit.watch.last_words import ErrorWords

_MOST_CHARACTERS = 500
_LIMITED_CARD = " allowed; "
"""In CUDA's message where ``set_per_process_memory_fraction`` is in force
(c10/cuda/CUDACachingAllocator.cpp, read at torch 2.13)."""
_LIBRARIES = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        *memfit.__path__,
        str(Path(torch.__file__).parent),
    }
    if folder
)


def describe_error(
    error: BaseException, *, step: int, is_uncaught: bool, thread: str = ""
) -> ErrorWords:
    """Describe an error by itself and by its traceback."""
    words = _words(error, list(_frames(error.__traceback__)), step)
    return replace(words, is_uncaught=is_uncaught, thread=thread)


def describe_here(error: BaseException, *, step: int) -> ErrorWords:
    """Describe an error that is just being raised, by the functions that are under way."""
    stack: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.insert(0, (frame, frame.f_lineno))
        frame = frame.f_back
    return _words(error, stack, step)


def _words(error: BaseException, frames: list[tuple[FrameType, int]], step: int) -> ErrorWords:
    budget_error = _budget_error(error)
    child_signal, child_ids = _killed_children(error)
    lines = str(error).strip().splitlines()
    return ErrorWords(
        failure=_failure(error),
        type_name=type(error).__name__,
        message=lines[0][:_MOST_CHARACTERS] if lines else "",
        noted_at_seconds=time.time(),
        step=step,
        is_uncaught=False,
        is_handed_on=_is_handed_on(error),
        place=_place(frames),
        phase=_phase([frame for frame, _ in frames]),
        module=_module([frame for frame, _ in frames]),
        operator=budget_error.operator if budget_error else "",
        wanted_bytes=budget_error.wanted_bytes if budget_error else None,
        live_bytes=budget_error.live_bytes if budget_error else None,
        child_signal=child_signal,
        child_ids=child_ids,
    )


def _budget_error(error: BaseException) -> BudgetExceededError | None:
    chain = chain_of(error, also_handled=True)
    return next((each for each in chain if isinstance(each, BudgetExceededError)), None)


def _failure(error: BaseException) -> Reason:
    if isinstance(error, KeyboardInterrupt):
        return Reason.INTERRUPTED
    if isinstance(error, LostContextError) or has_lost_context(error):
        return Reason.LOST_CONTEXT
    text = str(error)
    if _budget_error(error):
        return Reason.BUDGET_EXCEEDED
    is_handed_on = _is_handed_on(error)
    if is_handed_on and BudgetExceededError.__name__ in text:
        return Reason.BUDGET_EXCEEDED
    if (
        isinstance(error, GIVEN_UP)
        or is_out_of_memory(error)
        or (is_handed_on and tells_out_of_memory(text))
    ):
        return Reason.BUDGET_EXCEEDED if _LIMITED_CARD in text else Reason.OUT_OF_MEMORY
    return Reason.ERROR


def _is_handed_on(error: BaseException) -> bool:
    """Test whether it has the traceback of a child as its text: torch.multiprocessing does that."""
    return type(error).__name__ == "ProcessRaisedException"


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """Name the last line that is not a library's."""
    own = [(f, line) for f, line in frames if not f.f_code.co_filename.startswith(_LIBRARIES)]
    if not own:
        return ""
    frame, line = own[-1]
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"


def _phase(frames: list[FrameType]) -> str:
    """Tell the part of the step by the functions of torch that were under way."""
    for frame in reversed(frames):
        module = frame.f_globals.get("__name__", "")
        if module == "torch.autograd.graph" or frame.f_code.co_name == "backward":
            return "backward"
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return "update"
        if isinstance(frame.f_locals.get("self"), nn.Module):
            return "forward"
    return ""


def _module(frames: list[FrameType]) -> str:
    """Name the innermost module under way, as the outermost one knows it."""
    modules = [
        self for frame in frames if isinstance(self := frame.f_locals.get("self"), nn.Module)
    ]
    if not modules:
        return ""
    inner = modules[-1]
    names = [name for name, module in modules[0].named_modules() if module is inner]
    kind = type(inner).__name__
    return f"{names[0]} ({kind})" if names and names[0] else kind


def _killed_children(error: BaseException) -> tuple[int | None, tuple[int, ...]]:
    """Read how a launcher's processes were killed, as torchrun and subprocess tell it.

    A launcher whose process is killed asks the others to end, so SIGKILL counts before SIGTERM.
    """
    failures = getattr(error, "failures", None)
    told = [error, *failures.values()] if isinstance(failures, dict) else [error]
    codes = [(_exit_code(each), getattr(each, "pid", None)) for each in told]
    killed = [(-code, process_id) for code, process_id in codes if code < 0]
    if not killed:
        return None, ()
    number = min((each for each, _ in killed), key=lambda each: each != signal.SIGKILL)
    return number, tuple(pid for each, pid in killed if each == number and isinstance(pid, int))


def _exit_code(told: object) -> int:
    codes = (getattr(told, name, None) for name in ("exitcode", "returncode"))
    return next((code for code in codes if isinstance(code, int)), 0)
