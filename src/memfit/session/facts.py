"""What strategies and the planner need to know of a job, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.session.attention import find_explicit_attention
from memfit.session.evaluation_mode import modules_in_evaluation
from memfit.session.normalisation import BatchNorm
from memfit.session.optimizer_facts import (
    attachments_of,
    options_in_use,
    package_of,
    parameter_dtypes_of,
)
from memfit.session.separation import Separation
from memfit.session.session import Session
from memfit.session.tileable import EffectfulBlock, TileableBlock, judged_blocks

_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Describe a job to the strategies."""

    batch_size: int
    device_type: str
    batch_norms: tuple[str, ...]
    """Modules whose training statistics couple the samples of a batch."""
    has_dropout: bool
    """Whether a module draws random masks; see ``draws_random`` too."""
    block_levels: tuple[tuple[str, ...], ...]
    """Names of repeated modules: the outermost repetition first, then the ones inside it."""
    optimizer: str
    optimizer_implementations: tuple[str, ...]
    """The implementations that this optimizer offers, the one it uses by itself last."""
    streamable_candidates: int | None
    """The most candidates that a streamable loss of the step scores; 0 for none, None where no
    step has been seen yet."""
    streamable_chunk: int = 1
    """The fewest of them that are worth streaming at a time."""
    linear_cross_entropy_classes: int | None = None
    """The most classes that a linear layer scores for nothing but a cross-entropy; 0 for none, None
    where no step has been seen yet."""
    linear_cross_entropy_rows: int = 0
    """The most rows that it scores at once."""
    module_names: tuple[str, ...] = ()
    """Every module below the model, by name."""
    clips_gradients: bool = False
    """Whether the global gradient norm is clipped, so that every gradient is needed at once."""
    tileable_blocks: tuple[str, ...] = ()
    """The outermost modules that treat positions (tokens, space, time) apart."""
    tileable_blocks_with_dropout: tuple[str, ...] = ()
    """Those of them that draw random masks."""
    blocks_with_effects: tuple[tuple[str, str], ...] = ()
    """Modules that only their effects keep from being tileable: name and sentence."""
    optimizer_package: str = "torch.optim"
    """The package that the optimizer comes from."""
    optimizer_options: tuple[str, ...] = ()
    """The optimizer's settings that are neither zero, False nor None in some parameter group."""
    optimizer_attachments: tuple[str, ...] = ()
    """What has been attached to the optimizer's step; see memfit.session.optimizer_facts."""
    parameter_dtypes: tuple[str, ...] = ()
    """The types of the parameters that are trained."""
    modules_in_evaluation: tuple[str, ...] = ()
    """The outermost modules in evaluation mode; see memfit.session.evaluation_mode."""
    lstms: tuple[str, ...] = ()
    """Modules that are an LSTM, which the CPU does not train in every type."""
    explicit_attention: tuple[str, ...] = ()
    """Modules that may compute attention scores as whole matrices and could do without."""
    draws_random: bool | None = None
    """Whether a step draws random numbers at all, by whatever library; None where no step has been
    seen yet."""
    attention_may_drop: bool = False
    """Whether those modules may draw random masks over attention weights."""
    separation: Separation | None = field(default=None, compare=False, repr=False)
    """Says whether pieces of a batch keep the results; None where that cannot be asked."""


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
    """Say whether a module draws random masks in training."""
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
    """Say which implementation torch takes when none is asked for: foreach on CUDA, else a loop.

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
