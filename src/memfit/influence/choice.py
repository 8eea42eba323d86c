"""Chooses the parameters whose gradients are compared, and gets the model ready for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from memfit.errors import JobError
from memfit.session.block_names import first_few

Choice = int | Sequence[str] | None
"""None for all; a number for the last so many layers; or names of parameters and modules."""


def chosen_parameters(model: nn.Module, choice: Choice) -> dict[str, nn.Parameter]:
    """Return the parameters that are chosen, by name, in the order of the model.

    A layer is a module with parameters of its own; the last ones are those that the model has
    listed last. A parameter that two modules share goes by its first name.

    Raises:
        JobError: if a name is unknown, or nothing that can be differentiated is left.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if choice is None:
        chosen = trained
    elif isinstance(choice, int):
        chosen = _of_last_layers(model, choice, trained)
    else:
        chosen = _named(model, choice, trained)
    if not chosen:
        msg = "None of the chosen parameters needs gradients. Choose others, or unfreeze them."
        raise JobError(msg)
    return chosen


def _of_last_layers(
    model: nn.Module, number: int, trained: dict[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    layers = [
        module
        for module in model.modules()
        if any(each.requires_grad for each in module.parameters(recurse=False))
    ]
    if not 1 <= number <= len(layers):
        msg = (
            f"The model has {len(layers)} layers with parameters; the last {number} are no choice."
        )
        raise JobError(msg)
    own = {id(each) for layer in layers[-number:] for each in layer.parameters(recurse=False)}
    return {name: each for name, each in trained.items() if id(each) in own}


def _named(
    model: nn.Module, names: Sequence[str], trained: dict[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    unknown = []
    for name in names:
        found = [id(each) for key, each in every.items() if f"{key}.".startswith(f"{name}.")]
        chosen.update(found)
        if not found:
            unknown.append(name)
    if unknown:
        msg = (
            f"The model has no parameter or module called {first_few(unknown)}. It has "
            f"{first_few(list(every))}."
        )
        raise JobError(msg)
    return {name: each for name, each in trained.items() if id(each) in chosen}


@contextmanager
def made_ready(model: nn.Module, chosen: dict[str, nn.Parameter]) -> Iterator[None]:
    """Put a model in evaluation mode, with gradients for the chosen parameters alone.

    Afterwards modes and needs are as they were. What lies below the lowest chosen parameter has no
    graph, which saves its memory and time.
    """
    modes = {module: module.training for module in model.modules()}
    needs = {each: each.requires_grad for each in model.parameters()}
    own = {id(each) for each in chosen.values()}
    # cuDNN's recurrent layers have no backward in evaluation mode; torch's own have one.
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in modes)
    model.eval()
    for each in needs:
        each.requires_grad_(id(each) in own)
    try:
        with torch.backends.cudnn.flags(enabled=False) if is_recurrent else nullcontext():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for each, needed in needs.items():
            each.requires_grad_(needed)
