"""Looks at a job and finds what strategies and the planner need to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.separation.separation import Separation
from memfit.session.attention import find_explicit_attention
from memfit.session.evaluation_mode import modules_in_evaluation
from memfit.session.optimizer_facts import (
    attachments_of,
    options_in_use,
    package_of,
    parameter_dtypes_of,
)
from memfit.session.session import Session
from memfit.strategies.batchnorm_replay.normalisation import BatchNorm
from memfit.strategies.facts import JobFacts
from memfit.strategies.tiling.tileable import EffectfulBlock, TileableBlock, judged_blocks

_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


def gather_facts(
    session: Session,
    streamable_candidates: int | None = None,
    *,
    streamable_chunk: int | None = None,
    linear_cross_entropy_classes: int | None = None,
    linear_cross_entropy_rows: int = 0,
    draws_random: bool | None = None,
) -> JobFacts:
    """Look at a session's model and optimizer: once, before strategies change them.

    What only a step shows is added to what is known.
    """
    if session.facts is None:
        session.facts = _gathered(session)
    seen: dict[str, Any] = {
        "streamable_candidates": streamable_candidates,
        "streamable_chunk": streamable_chunk,
        "linear_cross_entropy_classes": linear_cross_entropy_classes,
        "linear_cross_entropy_rows": linear_cross_entropy_rows or None,
        "draws_random": draws_random,
    }
    return replace(
        session.facts, **{name: value for name, value in seen.items() if value is not None}
    )


def _gathered(session: Session) -> JobFacts:
    if session.separation is None:
        session.separation = Separation(session.job, session.layout)
    named = dict(session.model.named_modules())
    judged = judged_blocks(session.model)
    tileable = [block for block in judged if isinstance(block, TileableBlock)]
    attention = find_explicit_attention(session.model)
    return JobFacts(
        batch_size=session.job.batch_size,
        device_type=session.device_type,
        batch_norms=tuple(
            name
            for name, module in named.items()
            if isinstance(module, BatchNorm) and module.training
        ),
        has_dropout=any(_drops(module) for module in named.values()),
        block_levels=_block_levels(session.model),
        optimizer=type(session.optimizer).__name__,
        optimizer_implementations=_implementations(session.optimizer, session.device_type),
        streamable_candidates=None,
        module_names=tuple(name for name in named if name),
        clips_gradients=session.job.clip_grad_norm is not None,
        tileable_blocks=tuple(block.name for block in tileable),
        tileable_blocks_with_dropout=tuple(block.name for block in tileable if block.draws),
        blocks_with_effects=tuple(
            (block.name, block.sentence) for block in judged if isinstance(block, EffectfulBlock)
        ),
        optimizer_package=package_of(session.optimizer),
        optimizer_options=options_in_use(session.optimizer),
        optimizer_attachments=attachments_of(session.optimizer),
        parameter_dtypes=parameter_dtypes_of(session.optimizer),
        lstms=tuple(
            name or "the model"
            for name, module in named.items()
            if isinstance(module, torch.nn.LSTM)
        ),
        modules_in_evaluation=modules_in_evaluation(session.model),
        explicit_attention=attention.names,
        attention_may_drop=attention.may_drop,
        separation=session.separation,
    )


def _drops(module: torch.nn.Module) -> bool:
    """Return whether a module draws random masks in training."""
    if isinstance(module, _DROPOUTS):
        return module.training and module.p > 0
    rates = (getattr(module, name, 0.0) for name in ("dropout", "attention_dropout"))
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


def _implementations(optimizer: torch.optim.Optimizer, device_type: str) -> tuple[str, ...]:
    """List the implementations that torch.optim offers for an optimizer, its default last."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ()
    offered = [name for name in ("fused", "foreach") if name in optimizer.defaults]
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if "fused" in offered and not all(dtype.is_floating_point for dtype in dtypes):
        offered.remove("fused")
    if not offered:
        return ()
    default = _default_implementation(optimizer.defaults, device_type)
    others = [name for name in (*offered, "loop") if name != default]
    return (*others, default)


def _default_implementation(defaults: Mapping[str, Any], device_type: str) -> str:
    """Return which implementation torch takes when none is asked for: foreach on CUDA, else a loop.

    Source: ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py, torch 2.13.
    """
    if defaults.get("fused"):
        return "fused"
    foreach = defaults.get("foreach")
    if foreach is None:
        foreach = device_type == "cuda" and not defaults.get("differentiable")
    return "foreach" if foreach else "loop"


def _block_levels(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Find repeated modules, level by level from the outside in."""
    levels: list[tuple[str, ...]] = []
    roots: list[tuple[str, torch.nn.Module]] = [("", model)]
    while roots:
        blocks = [block for name, root in roots for block in _outermost_blocks(name, root)]
        if blocks:
            levels.append(tuple(name for name, _ in blocks))
        roots = blocks
    return tuple(levels)


def _outermost_blocks(prefix: str, root: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the repeated members of the first containers found below a module."""
    members = list(_repeated_members(root)) if _is_container(root) else []
    for child_name, child in root.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if child in members:
            yield name, child
        elif not members or any(True for _ in child.children()):
            yield from _outermost_blocks(name, child)


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))


def _repeated_members(container: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield members that have parts of their own and a sibling of the same class."""
    children = list(container.children())
    classes = [type(child) for child in children]
    for child in children:
        has_parts = any(True for _ in child.children())
        if has_parts and classes.count(type(child)) > 1:
            yield child
