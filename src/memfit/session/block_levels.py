"""Finds the repeated blocks of a model, level by level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def block_levels(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
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
