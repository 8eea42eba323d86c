"""Activation offload: what blocks save for backward waits on the host or on disk."""

from __future__ import annotations

from .strategy import ActivationOffload as ActivationOffload

__all__ = ["ActivationOffload"]
