"""The Job: what the user brings, and how it is loaded from ``FILE.py:name``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import JobError, JobFileError, JobNameError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Total:
    """A loss given as a sum and the number of terms in it, both scalars.

    Micro-batches are then weighted by their true counts, so that a mean over ragged tokens stays
    the mean over the whole batch.
    """

    sum: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe one training step: model, batch, loss, optimizer and effective batch size.

    Example:
        >>> import torch
        >>> job = Job(
        ...     model=lambda: torch.nn.Linear(8, 1),
        ...     batch=lambda size: torch.randn(size, 8),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     batch_size=4,
        ... )
    """

    model: Callable[[], torch.nn.Module]
    """Build the model: ``() -> nn.Module``."""
    batch: Callable[[int], Any]
    """Build a batch: ``(batch_size) -> pytree of tensors``, the largest that training will see."""
    loss: Callable[[torch.nn.Module, Any], torch.Tensor | Total]
    """Compute the loss: ``(model, batch) -> mean over the batch``, or ``Total(sum, count)``."""
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    """Build the optimizer: ``(parameters) -> torch.optim.Optimizer``."""
    batch_size: int
    """The effective batch size, which every plan keeps."""
    clip_grad_norm: float | None = None
    """Clip the global gradient norm to this before the optimizer steps; None clips nothing."""
    name: str = "job"
    """A name for reports."""

    def __post_init__(self) -> None:
        for function in ("model", "batch", "loss", "optimizer"):
            value = getattr(self, function)
            if not callable(value):
                msg = f"Job.{function} must be a function, not {type(value).__name__}."
                raise JobError(msg)
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            msg = f"Job.batch_size must be a whole number of at least 1, not {self.batch_size!r}."
            raise JobError(msg)
        _check_arity("model", self.model, 0)
        _check_arity("batch", self.batch, 1)
        _check_arity("loss", self.loss, 2)
        _check_arity("optimizer", self.optimizer, 1)


_SIGNATURES = {
    "model": "() -> nn.Module",
    "batch": "(batch_size) -> pytree of tensors",
    "loss": "(model, batch) -> scalar or memfit.Total(sum, count)",
    "optimizer": "(parameters) -> torch.optim.Optimizer",
}


def expected_signature(function: str) -> str:
    """Give the signature that a job's function should have, for messages."""
    return _SIGNATURES[function]


def _check_arity(function: str, value: Callable[..., Any], num_arguments: int) -> None:
    """Refuse a function that cannot be called with so many positional arguments."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # some builtins have no signature; the call itself will tell
    try:
        signature.bind(*range(num_arguments))
    except TypeError as error:
        msg = f"Job.{function} must be {_SIGNATURES[function]}, but it is {signature}: {error}."
        raise JobError(msg) from None


def load_job(reference: str) -> Job:
    """Load a job given as ``FILE.py:name``; the name may be left out when the file has one job.

    The file's folder is importable while it is loaded, as when Python runs the file. A name may
    also be a function without arguments that returns a Job.

    Raises:
        JobFileError: if the file is missing or fails while it is imported.
        JobNameError: if the file has no such job.
    """
    path_text, _, name = reference.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise JobFileError(path_text, "there is no such file")
    namespace = vars(_import_file(path))
    jobs = {key: value for key, value in namespace.items() if isinstance(value, Job)}
    if not name and len(jobs) == 1:
        return next(iter(jobs.values()))
    found = namespace.get(name)
    if callable(found) and not isinstance(found, (Job, type)):
        found = found()
    if not isinstance(found, Job):
        raise JobNameError(path_text, name, sorted(jobs))
    return found


def _import_file(path: Path) -> Any:
    """Import a Python file under a name of its own, with its folder importable."""
    module_name = f"memfit_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise JobFileError(str(path), "it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except JobError:
        raise
    except Exception as error:
        line = _line_in(error, path)
        raise JobFileError(str(path), f"{type(error).__name__}: {error}{line}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _line_in(error: BaseException, path: Path) -> str:
    """Find the last line of the user's file in an error's traceback."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" (line {line})"
