"""Tiling: blocks that treat positions apart are computed tile by tile, forward and backward."""

from __future__ import annotations

from .strategy import Tiling as Tiling

__all__ = ["Tiling"]
