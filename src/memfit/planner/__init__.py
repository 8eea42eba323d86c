"""Finds the fastest plan that fits a budget and keeps the results."""

from __future__ import annotations

from memfit.planner.planning import plan

__all__ = ["plan"]
