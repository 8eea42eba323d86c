"""Runs a script for real on the CPU up to its first update, and notes what the loop had there."""

from __future__ import annotations

import ast
import copy
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.script.job_file.facts import OptimizerGroup, SeenOptimizer, SeenScript
from memfit.script.job_file.loop import TrainingLoop
from memfit.script.job_file.next_batch import first_line_with_batch
from memfit.script.steps import EnoughRecordedError

_DEVICES = ("cpu", "cuda")
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
Tracer = Callable[[FrameType, str, Any], Any]
_PLAIN = (bool, int, float, str, type(None))
_CONDITIONS = (
    "p.requires_grad",
    "p.ndim >= 2",
    "p.ndim < 2",
    "p.requires_grad and p.ndim >= 2",
    "p.requires_grad and p.ndim < 2",
    "name.endswith('bias')",
    "not name.endswith('bias')",
)


class Start:
    """How things stood when the first iteration began: weights, random states, the batch."""

    def __init__(self, frame: FrameType, model: torch.nn.Module) -> None:
        self.weights = copy.deepcopy(model.state_dict())
        self.training = {
            name: module.training for name, module in model.named_modules(remove_duplicate=False)
        }
        self.random_states = RandomStates()
        self.names = {**frame.f_globals, **frame.f_locals}


class RandomStates:
    """The random states of torch, NumPy and Python at one moment."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Set the states back."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class FirstStep:
    """Watch a script until its first update is over and the next iteration begins.

    Args:
        loop: where the script trains.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._file = str(loop.script)
        self._body_line = first_line_with_batch(loop.loop.body)
        function = loop.levels[-1].function
        self._function = "<module>" if function is None else function.name
        self._stack = ExitStack()
        self._made_with: dict[int, tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = {}
        self._frames: dict[str, Any] = {}
        self.lines: set[int] = set()
        self.start: Start | None = None
        self.iterations: list[Mapping[str, Any]] = []
        """The names of each iteration of the first update, where it began."""
        self.losses: list[float] = []
        """What was differentiated before the first update, without what a scaler multiplied."""
        self._expressions: list[float] = []
        self._scale = 1.0
        self.updated: list[torch.optim.Optimizer] = []
        self.candidates: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        hook = register_optimizer_step_post_hook(self._note_update)
        self._stack.callback(hook.remove)
        self._stack.enter_context(
            patch.object(torch.optim.Optimizer, "__init__", self._noting_groups())
        )
        self._stack.enter_context(patch.object(torch.Tensor, "backward", self._noting_loss()))
        self._stack.enter_context(patch.object(torch.amp.GradScaler, "scale", self._noting_scale()))
        before = sys.gettrace()
        self._stack.callback(sys.settrace, before)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> Tracer | None:
        return self._trace_line if frame.f_code.co_filename == self._file else None

    def _trace_line(self, frame: FrameType, event: str, _argument: Any) -> Tracer:
        if event == "line":
            if not self.updated:
                self.lines.add(frame.f_lineno)
            if frame.f_lineno == self._body_line and frame.f_code.co_name == self._function:
                self._iteration_begins(frame)
        return self._trace_line

    def _iteration_begins(self, frame: FrameType) -> None:
        if self.updated:
            raise EnoughRecordedError
        self.iterations.append({**frame.f_globals, **frame.f_locals})
        if self.start is None:
            names = {**frame.f_globals, **frame.f_locals}
            outer = frame.f_back
            while outer is not None and outer.f_code.co_filename == self._file:
                names = {**outer.f_locals, **names}
                outer = outer.f_back
            self._frames = names
            self.start = Start(frame, _all_modules(names))

    def _noting_groups(self) -> Callable[..., None]:
        made: Callable[..., None] = torch.optim.Optimizer.__init__

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            groups = [{**group} for group in optimizer.param_groups]
            self._made_with[id(optimizer)] = (optimizer, groups)

        return init

    def _noting_loss(self) -> Callable[..., None]:
        backward: Callable[..., None] = torch.Tensor.backward

        def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self.updated and self.start is not None:
                self.losses.append(float(tensor.detach()) / self._scale)
                self._expressions.append(self._loss_behind())
            backward(tensor, *args, **kwargs)

        return note

    def _loss_behind(self) -> float:
        """Return the value of the script's own expression: a scaler may have multiplied it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        value = self._loop.loss
        if frame is None or any(isinstance(each, ast.Call) for each in ast.walk(value)):
            return self.losses[-1]
        code = compile(ast.unparse(value), self._file, "eval")
        found = eval(code, frame.f_globals, frame.f_locals)  # noqa: S307 - a name of the script's
        return float(found.detach())

    def _noting_scale(self) -> Callable[..., Any]:
        scale = torch.amp.GradScaler.scale

        def note(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            self._scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
            return scale(scaler, outputs)

        return note

    def _loss_factor(self) -> int:
        """Return what the script's expression is multiplied by, over all backwards of an update.

        Raises:
            NoJobError: if that is no whole number.
        """
        expression = self._expressions[0]
        share = self.losses[0] / expression if expression else 1.0
        factor = round(share * len(self.losses))
        if factor < 1 or abs(share * len(self.losses) - factor) > 1e-3:
            raise self._loop.refuse(
                self._loop.backward,
                f"what is differentiated is {share:.4g} times the loss that the line names",
            )
        return factor

    def _note_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.start is not None and not any(optimizer is each for each in self.updated):
            self.updated.append(optimizer)

    def seen(self) -> tuple[SeenScript, torch.nn.Module]:
        """Return what was seen, and the live model.

        Raises:
            NoJobError: if no job can be made of it.
        """
        loop = self._loop
        if self.start is None or not self.updated or not self.losses:
            raise loop.refuse(loop.loop, "the loop made no update")
        if len(self.updated) > 1:
            kinds = " and ".join(type(each).__name__ for each in self.updated)
            raise loop.refuse(
                loop.loop, f"{len(self.updated)} optimizers make updates in one step ({kinds})"
            )
        optimizer = self.updated[0]
        name, model, modules = self._model_of(optimizer)
        made_with = self._made_with.get(id(optimizer), (None, optimizer.param_groups))[1]
        try:
            described = _describe_optimizer(optimizer, made_with, model)
        except _NotDescribedError as reason:
            raise loop.refuse(loop.loop, str(reason)) from None
        names = self._frames
        found = SeenScript(
            model=name,
            modules=modules,
            devices={key: kind for key, value in names.items() if (kind := _device_kind(value))},
            tensors_outside={
                key: kind for key, value in names.items() if (kind := _tensors_in(value))
            },
            schedulers={
                key
                for key, value in names.items()
                if isinstance(value, _SCHEDULERS)
                or isinstance(getattr(value, "scheduler", None), _SCHEDULERS)  # Accelerate's
            },
            lines=self.lines,
            optimizer=described,
            num_backwards=len(self.losses),
            loss_factor=self._loss_factor(),
            micro_batch_size=0,
        )
        return found, model

    def _model_of(self, optimizer: torch.optim.Optimizer) -> tuple[str, torch.nn.Module, set[str]]:
        """Find the module that holds all that is trained, and the names of those that hold some."""
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        modules = {
            name: value
            for name, value in self._frames.items()
            if isinstance(value, torch.nn.Module)
            and any(id(each) in trained for each in value.parameters())
        }
        whole = {
            name: value
            for name, value in modules.items()
            if trained <= {id(each) for each in value.parameters()}
        }
        if not whole:
            raise self._loop.refuse(
                self._loop.loop, "no name in the loop holds all that the optimizer trains"
            )
        used = {
            node.func.id
            for node in ast.walk(self._loop.loop)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        name = next((each for each in whole if each in used), next(iter(whole)))
        return name, whole[name], set(modules)


class _AllModules(torch.nn.Module):
    """Holds every module of a frame, so that one copy keeps all of their weights."""


def _all_modules(names: Mapping[str, Any]) -> torch.nn.Module:
    whole = _AllModules()
    for name, value in names.items():
        if isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            whole.add_module(name or "_", value)
    return whole


def _device_kind(value: object) -> str:
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, str) and value.partition(":")[0] in _DEVICES:
        return "text"
    return ""


def _tensors_in(value: object) -> str:
    """Name what holds tensors outside a model; empty for what holds none."""
    if isinstance(value, torch.nn.Module):
        holds = any(True for _ in value.parameters()) or any(True for _ in value.buffers())
        return f"a {type(value).__name__}" if holds else ""
    return "a tensor" if isinstance(value, torch.Tensor) else ""


class _NotDescribedError(Exception):
    """Say why an optimizer cannot be written down."""


def _describe_optimizer(
    optimizer: torch.optim.Optimizer,
    made_with: Sequence[Mapping[str, Any]],
    model: torch.nn.Module,
) -> SeenOptimizer:
    """Describe an optimizer by its class, its settings, and the names of its parameters.

    Args:
        optimizer: which is described.
        made_with: its groups as they were when it was made, before a scheduler changed them.
        model: whose names its parameters have.

    Raises:
        NotDescribedError: if it holds parameters of nothing in the model, or settings that
            cannot be written down.
    """
    if len(made_with) != len(optimizer.param_groups):
        raise _NotDescribedError("groups were added to the optimizer after it was made")
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    accepted = set(inspect.signature(type(optimizer).__init__).parameters)
    groups = []
    for group in made_with:
        names = [own.get(id(parameter), "") for parameter in group["params"]]
        if "" in names:
            raise _NotDescribedError("the optimizer holds parameters from outside the model")
        settings = {key: value for key, value in group.items() if key in accepted - {"params"}}
        unplain = [key for key, value in settings.items() if not _is_plain(value)]
        if unplain:
            raise _NotDescribedError(f"its setting {unplain[0]} is no plain value")
        condition = _condition(set(names), model)
        groups.append(OptimizerGroup(names=names, condition=condition, settings=settings))
    kind = type(optimizer)
    return SeenOptimizer(module=kind.__module__, name=kind.__qualname__, groups=groups)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


def _condition(names: set[str], model: torch.nn.Module) -> str:
    """Return an expression that chooses these parameters: a rule, else their names."""
    everything = dict(model.named_parameters())
    if names == set(everything):
        return ""
    for condition in _CONDITIONS:
        rule = eval(f"lambda name, p: {condition}")  # noqa: S307 - one of the conditions above
        if names == {name for name, parameter in everything.items() if rule(name, parameter)}:
            return condition
    others = set(everything) - names
    if len(others) < len(names):
        return f"name not in {_set_text(others)}"
    return f"name in {_set_text(names)}"


def _set_text(names: set[str]) -> str:
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"
