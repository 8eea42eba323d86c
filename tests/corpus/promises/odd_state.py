"""State that is reached by an import, a registry, a class or another job."""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
from typing import Any

import torch
from tests.corpus.promises.case import CASES, case, layers, make_job, rows, squared_error
from torch import Tensor, nn

from memfit import Job

_REMOTE = "tests.corpus.promises.remote"
_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def _remote_model(kind: str) -> nn.Module:
    return importlib.import_module(_REMOTE).build(kind)


for _kind in (
    "CountsInGlobal",
    "CountsInClass",
    "RemembersLosses",
    "RemembersFew",
    "DrawsByNumpy",
    "SkipsByChance",
    "GoesBackScaled",
    "AsksMeter",
    "ImportsInForward",
    "HoldsByName",
):
    CASES[f"remote_{_kind}"] = functools.partial(make_job, functools.partial(_remote_model, _kind))


@case
def from_a_registry() -> Job:
    """Take the model's class from a registry of another module."""

    def model() -> nn.Module:
        return layers(importlib.import_module(_REMOTE).REGISTRY["CountsInClass"]())

    return make_job(model)


@case
def by_target() -> Job:
    """Instantiate what a configuration names, as Hydra does."""
    config = {"_target_": f"{_REMOTE}.build", "kind": "CountsInGlobal"}

    def model() -> nn.Module:
        module, _, name = config["_target_"].rpartition(".")
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        return getattr(importlib.import_module(module), name)(**arguments)

    return make_job(model)


@case
def optimizer_behind_an_import() -> Job:
    """Take an optimizer whose class counts its updates."""
    return make_job(
        layers,
        optimizer=lambda parameters: importlib.import_module(_REMOTE).SlowingSGD(parameters, lr=1),
    )


@case
def loss_behind_an_import() -> Job:
    """Weigh the loss by a count in another module."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) * importlib.import_module(_REMOTE).count()

    return make_job(layers, loss=loss)


@case
def batch_behind_an_import() -> Job:
    """Scale the batch by a count in another module."""

    def batch(size: int) -> Any:
        inputs, targets = rows(size)
        return inputs * (1 + 0.01 * importlib.import_module(_REMOTE).count()), targets

    return make_job(layers, batch=batch)


@case
def loss_of_another_job() -> Job:
    """Ask another job for the loss, which counts."""
    calls = [0]

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return squared_error(model, batch) * calls[0]

    other = make_job(layers, loss=counted)
    return make_job(lambda: other.model(), loss=lambda model, batch: other.loss(model, batch))


@case
def hook_with_a_closure() -> Job:
    """Scale by a count that a hook's closure keeps."""

    def model() -> nn.Module:
        built, calls = layers(), [0]

        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            calls[0] += 1
            return output * (1 + 0.1 * calls[0])

        built[2].register_forward_hook(hook)
        return built

    return make_job(model)


@case
def partial_of_a_list() -> Job:
    """Weigh the loss by a list that a partial holds."""

    def loss(calls: list[int], model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return squared_error(model, batch) * len(calls)

    return make_job(layers, loss=functools.partial(loss, []))


@case
def environment() -> Job:
    """Keep a count in the environment."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls = int(os.environ.get("CORPUS_CALLS", "0")) + 1
        os.environ["CORPUS_CALLS"] = str(calls)
        return squared_error(model, batch) * calls

    return make_job(layers, loss=loss)


@case
def context_variable() -> Job:
    """Keep the scale in a context variable."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        _SCALE.set(_SCALE.get() * 1.1)
        return squared_error(model, batch) * _SCALE.get()

    return make_job(layers, loss=loss)


@case
def generator_behind_a_default() -> Job:
    """Go on with a Python generator that a default argument holds."""

    def numbers() -> Any:
        value = 0
        while True:
            value += 1
            yield value

    def loss(model: nn.Module, batch: Any, source: Any = numbers()) -> Tensor:  # noqa: B008  # in question
        return squared_error(model, batch) * next(source)

    return make_job(layers, loss=loss)


@case
def attribute_of_a_function() -> Job:
    """Keep the count on the loss function itself."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        return squared_error(model, batch) * loss.calls  # type: ignore[attr-defined]

    return make_job(layers, loss=loss)


@case
def default_dtype_of_the_process() -> Job:
    """Write a setting of torch in the loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        torch.set_num_threads(torch.get_num_threads())
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return squared_error(model, batch) * (1 + torch.backends.cudnn.benchmark)

    return make_job(layers, loss=loss)
