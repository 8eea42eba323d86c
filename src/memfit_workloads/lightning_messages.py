"""What Lightning says of its own accord while a workload plans and trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's advice on workers and loggers to itself; faults are raised all the same."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
