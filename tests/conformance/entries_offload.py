"""Entries of the strategies that act on where memory lies: other memory, and a GPU's segments."""

from __future__ import annotations

from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.allocator_settings import AllocatorConf

from .builders import (
    Entry,
    batch_normalised,
    ragged_tokens,
    residual,
    residual_with_clipping,
)

EVERYTHING = ActivationOffload(to="disk", min_tensor_bytes=1)


def residual_of_megabytes():
    return residual(width=64, batch_size=4096)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=ActivationOffload,
        settings=(EVERYTHING, ActivationOffload(to="disk", min_tensor_bytes=700)),
        jobs=(residual, residual_with_clipping, ragged_tokens, batch_normalised),
        large_job=residual_of_megabytes,
        large_settings=(
            EVERYTHING,
            ActivationOffload(to="disk"),
            ActivationOffload(to="disk", blocks=("0-1", "3")),
        ),
        refusal=(ActivationOffload(to="host"), residual, "the host's memory is the device"),
    ),
    Entry(
        strategy=AllocatorConf,
        settings=(
            AllocatorConf(conf="expandable_segments:True"),
            AllocatorConf(conf="max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]"),
        ),
        jobs=(residual,),
        large_job=residual_of_megabytes,
        large_settings=(),
        refusal=(
            AllocatorConf(conf="expandable_segments:True"),
            residual,
            "caching allocator serves GPUs only",
        ),
        device="a100-40gb",
    ),
)
