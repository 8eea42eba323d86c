"""Every strategy's entry in the conformance suite, gathered from the files of their families."""

from __future__ import annotations

from . import (
    entries_attention,
    entries_cached_gradients,
    entries_convolution_tiling,
    entries_first,
    entries_four_bit,
    entries_frozen,
    entries_host,
    entries_linear_cross_entropy,
    entries_offload,
    entries_optimizer,
    entries_precision,
    entries_tiling,
)
from .builders import Entry

ENTRIES: tuple[Entry, ...] = (
    *entries_first.ENTRIES,
    *entries_linear_cross_entropy.ENTRIES,
    *entries_attention.ENTRIES,
    *entries_optimizer.ENTRIES,
    *entries_offload.ENTRIES,
    *entries_four_bit.ENTRIES,
    *entries_frozen.ENTRIES,
    *entries_host.ENTRIES,
    *entries_precision.ENTRIES,
    *entries_tiling.ENTRIES,
    *entries_convolution_tiling.ENTRIES,
    *entries_cached_gradients.ENTRIES,
)
