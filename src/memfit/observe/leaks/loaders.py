"""Tells how far the running data loaders have come, where nobody says when a pass is over."""

from __future__ import annotations

import gc

from torch.utils.data import dataloader

from .contents import Attributes, lineage


def batches_given() -> list[int]:
    """Return the number of batches that each live iterator of a loader has given."""
    base = dataloader._BaseDataLoaderIter
    found = []
    for each in gc.get_objects():
        if base in lineage(type(each)):
            held = dict(Attributes(type(each)).of(each))
            given = held.get("_num_yielded")
            if type(given) is int:
                found.append(given)
    return found
