"""Tells which parts of a model are in evaluation mode, which is left as it is and said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from memfit.session.block_names import first_few

_NORMALISING = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
)
"""What is often frozen by itself, on purpose."""
THE_MODEL = "the model"


def modules_in_evaluation(model: torch.nn.Module) -> tuple[str, ...]:
    """Name the outermost modules in evaluation mode; normalisations by themselves do not count."""
    if not model.training:
        return (THE_MODEL,)
    return tuple(_outermost(model, ""))


def evaluation_notes(names: Sequence[str]) -> list[str]:
    """Return what it means that modules are in evaluation mode; empty if none are."""
    if not names:
        return []
    subject = f"{first_few(names)} {'is' if len(names) == 1 else 'are'}"
    note = (
        f"{subject} in eval mode: dropout and batch normalisation act as in evaluation; call "
        ".train() first if that is not meant"
    )
    return [note]


def _outermost(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if child.training:
            yield from _outermost(child, f"{path}.")
        elif not isinstance(child, _NORMALISING):
            yield path
