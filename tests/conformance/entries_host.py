"""The entry of the strategy that computes modules on the host."""

from __future__ import annotations

from memfit.strategies import HostModules

from .builders import Entry, batch_normalised, large_residual, residual

TWO = HostModules(modules=("0", "1"))

ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=HostModules,
        settings=(TWO, HostModules(modules=("1",))),
        jobs=(residual, batch_normalised),
        large_job=large_residual,
        large_settings=(TWO,),
        refusal=(TWO, residual, "the host is the device"),
        device="a100-40gb",
        is_offered=False,
    ),
)
