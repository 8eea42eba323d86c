"""The document's two ready-made settings. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

_STANDARD: dict[str, Any] = {
    "batch_size": 1,
    "accumulate_grad_batches": 2,
    "empty_cache_every": 1,
    "gc_every": 25,
    "delete_batches": True,
    "memory_fraction": 0.95,
    "allocator_settings": "max_split_size_mb:128",
}
PRESETS: dict[str, dict[str, Any]] = {
    "standard": _STANDARD,
    "extreme": {
        **_STANDARD,
        "gc_every": 10,
        "limit_val_batches": 0.5,
        "val_check_interval": 0.5,
        "save_top_k": 1,
        "every_n_train_steps": 2000,
        "num_workers_data": 1,
        "max_peaks_n": 80,
        "num_devices": 1,
    },
}
"""What the document describes; the extreme one adds what it keeps for "if still needed"."""


def apply_preset(args: argparse.Namespace, defaults: argparse.Namespace) -> argparse.Namespace:
    """Fill in a preset where nothing else was asked for; what was typed stays.

    Args:
        args: the parsed flags.
        defaults: the same without any flag typed.

    Returns:
        New flags.
    """
    if args.preset is None:
        return args
    filled = {
        name: value
        for name, value in PRESETS[args.preset].items()
        if getattr(args, name) == getattr(defaults, name)
    }
    return argparse.Namespace(**{**vars(args), **filled})
