"""The Job: what the user brings, and how it is loaded from ``FILE.py:name`` without training."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from memfit.errors import (
    JobError,
    JobFileError,
    JobNameError,
    JobNeededError,
    MemfitError,
    StepBuilderError,
)

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
class StepOrder:
    """How the loop around a step orders it; by default as memfit's own loop does."""

    keeps_gradients: bool = False
    """Whether the gradients of one update live until the first backward after it, the order of
    loops that clear them between forward and backward; or until the first piece of a batch."""
    num_batches: int = 1
    """How many batches are held and passed over for one update."""
    before_update: Callable[[torch.optim.Optimizer], None] | None = None
    """What is done to whole gradients before the optimizer steps, such as clipping."""


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
    optimizer: (
        Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
        | Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
    )
    """Build the optimizer: ``(parameters) -> torch.optim.Optimizer``.

    A function whose first argument is called ``named_parameters`` is given pairs of name and
    parameter, as ``model.named_parameters()`` yields them: for groups that are chosen by name. They
    may be handed on to optimizers of ``torch.optim`` as they are.
    """
    batch_size: int
    """The effective batch size, which every plan keeps."""
    clip_grad_norm: float | None = None
    """Clip the global gradient norm to this before the optimizer steps; None clips nothing."""
    name: str = "job"
    """A name for reports."""
    order: StepOrder = field(default_factory=StepOrder)
    """How the loop around the step orders it, where that is not memfit's."""

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


NAMED_PARAMETERS = "named_parameters"
"""What the first argument of an optimizer function is called if it wants names."""
_SIGNATURES = {
    "model": "() -> nn.Module",
    "batch": "(batch_size) -> pytree of tensors",
    "loss": "(model, batch) -> scalar or memfit.Total(sum, count)",
    "optimizer": "(parameters) or (named_parameters) -> torch.optim.Optimizer",
}


def expected_signature(function: str) -> str:
    """Return the signature that a job's function should have, for messages."""
    return _SIGNATURES[function]


def build_optimizer(
    job: Job, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Call a job's optimizer function, with names if its first argument asks for them by its own.

    Nobody else calls that function, so that names reach it wherever an optimizer is made.
    """
    named = list(named_parameters)
    function: Callable[[Any], torch.optim.Optimizer] = job.optimizer
    wants_names = _first_argument(function) == NAMED_PARAMETERS
    return function(named if wants_names else [parameter for _, parameter in named])


def _first_argument(function: Callable[..., object]) -> str:
    """Name the first argument of a function; empty where that is not known."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""  # some builtins have no signature
    return next(iter(parameters), "")


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
        JobNeededError: if the name is a function that gives something else, or fails.
        BuildsTrainerError: if it is, or gives, a framework's trainer.
    """
    path_text, name, jobs, found = _find(reference)
    if is_trainer(found):
        raise BuildsTrainerError(reference, found)
    if callable(found) and not isinstance(found, (Job, type)):
        return _given_job(reference, Path(path_text), found)
    if not isinstance(found, Job):
        raise JobNameError(path_text, name, sorted(jobs))
    return found


def _given_job(reference: str, path: Path, function: Callable[..., object]) -> Job:
    """Call a function that may give a Job, and say what it gives if that is something else."""
    if needed := _needed_arguments(function):
        raise JobNeededError(reference, f"needs {needed}")
    try:
        given = _refusing_to_train(reference, path, function)()
    except MemfitError:
        raise
    except Exception as error:
        reason = f"was called, and raised {type(error).__name__}: {error}{_line_in(error, path)}"
        raise JobNeededError(reference, reason) from error
    if isinstance(given, Job):
        return given
    if is_trainer(given):
        raise BuildsTrainerError(reference, given)
    kind = "function, as one that runs a step would be" if callable(given) else type(given).__name__
    raise JobNeededError(reference, f"gives a {kind}")


class BuildsJobError(MemfitError):
    """Tell that a function taken for a step builder gives a Job; call it outside a recording."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} gives a memfit.Job, not a step. Load it with load_job.")


class BuildsTrainerError(MemfitError):
    """Tell that a name stands for what trains by itself; it is recorded as scripts are."""

    def __init__(
        self,
        name: str,
        trainer: object = None,
        what: str = "is a framework's trainer, not a memfit.Job",
    ) -> None:
        self.trainer = trainer
        super().__init__(f"{name} {what}. `memfit predict {name}` predicts it as it is.")


_TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer", "pytorch_lightning.trainer")


def is_trainer(value: object) -> bool:
    """Return whether a value is a Trainer of transformers, or a tuple that begins with Lightning's.

    A name is enough: neither framework is imported to find out.
    """
    first = value[0] if isinstance(value, tuple) and value else value
    return any(kind.__module__.startswith(_TRAINERS) for kind in type(first).__mro__) and (
        hasattr(first, "train") or hasattr(first, "fit")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuilder:
    """A function that builds everything and gives a step, not called yet: it may want a GPU."""

    name: str
    """How it was referred to: ``FILE.py:name``."""
    function: Callable[[], Any]

    def __call__(self) -> Callable[[], object]:
        """Build everything and give the function that does one step.

        Raises:
            StepBuilderError: if it gives no function, or one that needs arguments.
            BuildsJobError: if it gives a Job.
            BuildsTrainerError: if it gives a framework's trainer.
        """
        step = self.function()
        if isinstance(step, Job):
            raise BuildsJobError(self.name)
        if is_trainer(step):
            raise BuildsTrainerError(self.name)
        if not callable(step):
            reason = f"it returned a {type(step).__name__}, not a function that does one step"
            raise StepBuilderError(self.name, reason)
        if needed := _needed_arguments(step):
            raise StepBuilderError(self.name, f"the step that it returned needs {needed}")
        return step  # type: ignore[no-any-return]  # callable() tells nothing of what it gives


def load_target(reference: str) -> Job | StepBuilder:
    """Load what a prediction is made for: a Job, or a function that builds a step.

    The function is not called here. It may as well return a Job, which shows when it is called.

    Raises:
        JobFileError: if the file is missing or fails while it is imported.
        JobNameError: if the file has nothing of that name.
        StepBuilderError: if what bears the name can be neither.
        BuildsTrainerError: if it is a framework's trainer.
    """
    path_text, name, jobs, found = _find(reference)
    if isinstance(found, Job):
        return found
    if found is None:
        raise JobNameError(path_text, name, sorted(jobs))
    if is_trainer(found):
        raise BuildsTrainerError(reference)
    if isinstance(found, type) or not callable(found):
        kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise StepBuilderError(reference, f"it is {kind}")
    if needed := _needed_arguments(found):
        raise StepBuilderError(reference, f"it needs {needed}")
    return StepBuilder(
        name=reference, function=_refusing_to_train(reference, Path(path_text), found)
    )


def _refusing_to_train(
    reference: str, path: Path, function: Callable[..., object]
) -> Callable[..., object]:
    """Return a function that ends where the given one would train."""

    def refusal(what: str) -> MemfitError:
        needed = (
            "a memfit.Job is needed: model, batch, loss and optimizer, as functions, and batch_size"
        )
        return BuildsTrainerError(
            reference, what=f"{what}, and {needed}. `memfit job {path.name}` writes one"
        )

    return _untrained(path, refusal)(function)


def path_of(reference: str) -> Path:
    """Return the file of ``FILE.py:name``; it is not read.

    Raises:
        JobFileError: if it is not there.
    """
    path_text = reference.partition(":")[0]
    path = Path(path_text)
    if not path.is_file():
        raise JobFileError(path_text, "there is no such file")
    return path


def _find(reference: str) -> tuple[str, str, dict[str, Job], Any]:
    """Import the file of a reference; give file, name, the jobs there, and what has the name."""
    path_text, _, name = reference.partition(":")
    path = path_of(reference)
    namespace = vars(_import_file(path, name))
    jobs = {key: value for key, value in namespace.items() if isinstance(value, Job)}
    if not name and len(jobs) == 1:
        return path_text, name, jobs, next(iter(jobs.values()))
    return path_text, name, jobs, namespace.get(name)


def _needed_arguments(function: Callable[..., object]) -> str:
    """Name the arguments without which a function cannot be called; empty if there are none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""  # some builtins have no signature; the call itself will tell
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    if not needed:
        return ""
    return f"{'an argument' if len(needed) == 1 else 'arguments'} ({', '.join(needed)})"


_MAKE_NAMES = ("*", "exec", "globals", "locals", "setattr", "vars")
"""By which a file may get names that are not written in it as such."""
_GUARD = (
    'Put that below `if __name__ == "__main__":`, or give the '
    "arguments that it needs after `--`. `memfit predict FILE.py` predicts a script as it is."
)


def makes_jobs(path: Path) -> bool:
    """Return whether a file calls ``memfit.Job``; it is not run to find out."""
    source = path.read_bytes()
    try:
        return b"memfit" in source and any(map(_is_job, ast.walk(ast.parse(source))))
    except (SyntaxError, ValueError):
        return False


def _check_name(path: Path, name: str) -> None:
    """Refuse a file that cannot have a name, or its only job, before anything of it is run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # its import says in which line
    kinds = ("id", "name", "asname")
    words = {getattr(node, kind, "") for node in ast.walk(tree) for kind in kinds}
    words.update(*(node.names for node in ast.walk(tree) if isinstance(node, ast.Global)))
    jobs: list[str] = []
    for each in tree.body:
        value = each.value if isinstance(each, ast.Assign) else None
        if isinstance(each, ast.Assign) and (_is_job(value) or getattr(value, "id", "") in jobs):
            jobs += [target.id for target in each.targets if isinstance(target, ast.Name)]
    wanted = (name, *_MAKE_NAMES) if name else ("memfit", "Job")
    if words.isdisjoint(wanted) or (not name and len(jobs) > 1):
        raise JobNameError(str(path), name, sorted(jobs))


def _is_job(node: ast.AST | None) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return "Job" in (getattr(function, "attr", ""), getattr(function, "id", ""))


class _TrainsError(BaseException):
    """End code that trains where nothing may; no script catches it by accident."""


@contextmanager
def _untrained(path: Path, refusal: Callable[[str], MemfitError]) -> Iterator[None]:
    """Refuse code that trains inside, at its first backward or update, or ends the program.

    Args:
        path: of the file whose line is told.
        refusal: makes the error out of what the code does.
    """
    import torch  # noqa: PLC0415 - jobs are described without it
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: PLC0415

    ended: list[tuple[str, BaseException]] = []

    def refuse(*_args: object, **_kwargs: object) -> None:
        ended.append(("trains", _TrainsError()))
        raise ended[-1][1]

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        with patch.object(torch.autograd, "_engine_run_backward", refuse):
            yield
    except SystemExit as end:
        ended.append((f"ends the program with sys.exit({end.code!r})", end))
    except BaseException:
        if not ended:
            raise
    finally:
        hook.remove()
    if ended:  # whatever the code made of it
        what, error = ended[0]
        raise refusal(f"{what}{_line_in(error, path)}") from error


def _import_file(path: Path, name: str) -> ModuleType:
    """Import a Python file that may have a name, with its folder importable.

    Raises:
        JobFileError: if it fails, or trains, or ends the program.
        JobNameError: before it is run, if it cannot have the name, or its only job without one.
    """
    module_name = f"memfit_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise JobFileError(str(path), "it is not a Python file")
    _check_name(path, name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with _untrained(path, lambda what: JobFileError(str(path), f"importing it {what}", _GUARD)):
            spec.loader.exec_module(module)
    except JobError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{_line_in(error, path)}"
        raise JobFileError(str(path), reason) from error
    finally:
        # Last from now on: functions of the file import its neighbours when they are called.
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def _line_in(error: BaseException, path: Path) -> str:
    """Find the last line of the user's file in an error's traceback."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename).resolve() == path.resolve():
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" (line {line})"
