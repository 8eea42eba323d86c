"""How long a step among ranks takes: collectives on their links, beside the computation.

On a GPU collectives have streams of their own. FSDP2 gathers a block while the one before it is
computed, and reduces a block's gradients while the next ones are; whatever waits for a collective
waits for it here too. On the CPU each collective is waited for where it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from memfit.devices.spec import CUDA, Device
from memfit.trace.events import Operation, Phase, Trace

_LINK, _NETWORK = "rank_link_bytes_per_second", "network_bytes_per_second"
_BASE_SECONDS = 8.4e-6
_HOP_SECONDS, _NETWORK_HOP_SECONDS = 3.4e-6, 14.0e-6
"""Latencies of a ring (Simple): of a call, of a step over NVLink, of one over the network; tables
baseLat and hwLat of NCCL's src/graph/tuning.cc, release 2.19. A guess everywhere else."""
_GATHERS = ("_allgather_base_", "allgather_", "all_gather_into_tensor")
_REDUCES = ("reduce_scatter", "allreduce", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How fast one rank sends, to ranks on its machine and to those on others."""

    within_bytes_per_second: float
    between_bytes_per_second: float

    @classmethod
    def of(cls, device: Device) -> Self:
        """Return a device's links; where the catalogue has none, that to its host stands in."""
        facts = device.facts
        within = facts.get(_LINK) or facts["link_bytes_per_second"]
        between = facts.get(_NETWORK) or within
        return cls(
            within_bytes_per_second=within.value,
            between_bytes_per_second=min(between.value, within.value),
        )

    def seconds(self, operation: Operation) -> float:
        """Return how long a collective takes that has its links to itself, in a ring."""
        is_local = operation.num_nodes == 1
        rate = self.within_bytes_per_second if is_local else self.between_bytes_per_second
        num_network_hops = operation.num_nodes - 1
        num_hops = operation.num_ranks - 1 - num_network_hops
        hops = num_hops * _HOP_SECONDS + num_network_hops * _NETWORK_HOP_SECONDS
        num_rounds = 2 if "reduce_scatter" not in operation.name and _reduces(operation) else 1
        return operation.sent_bytes / rate + _BASE_SECONDS + num_rounds * hops


def seconds_among_ranks(
    trace: Trace, device: Device, computed: Callable[[Operation], float]
) -> float:
    """Return how long a step with collectives takes.

    Args:
        trace: of the step.
        device: it runs on.
        computed: gives the seconds of an operation that is no collective.

    Does not account for what collectives take from the computation beside them.
    """
    clock = _Clock(Links.of(device), runs_beside=device.kind == CUDA)
    for operation in trace.operations:
        if operation.num_ranks:
            clock.exchange(operation)
        else:
            clock.compute(operation.phase, computed(operation))
    return clock.end()


class _Clock:
    """The time of the computation, and what it waits for."""

    def __init__(self, links: Links, *, runs_beside: bool) -> None:
        self._links = links
        self._runs_beside = runs_beside
        self._now = self._link_free_at = self._gathered_at = self._last_wait = 0.0
        self._phase = Phase.FORWARD

    def compute(self, phase: Phase, seconds: float) -> None:
        """Compute; the optimizer begins once all gradients are reduced."""
        if phase is Phase.OPTIMIZER and self._phase is not phase:
            self._wait()
        self._phase = phase
        self._now += seconds

    def exchange(self, operation: Operation) -> None:
        """Start a collective, and wait for it where the step does."""
        seconds = self._links.seconds(operation)
        is_gather = operation.name.rpartition(".")[2].startswith(_GATHERS)
        if not self._runs_beside or not (is_gather or _reduces(operation)):
            self._wait()
            self._now += seconds
        elif is_gather and operation.phase is Phase.FORWARD:
            # Asked for as soon as the block before it could begin, and needed at once.
            self._link_free_at = max(self._link_free_at, self._last_wait) + seconds
            self._now = self._last_wait = max(self._now, self._link_free_at)
        elif is_gather:
            # Asked for one block ahead: what was asked for before is needed now.
            self._now = max(self._now, self._gathered_at)
            self._gathered_at = self._started(seconds)
        else:
            self._started(seconds)
            if operation.phase is Phase.OPTIMIZER:
                self._wait()

    def end(self) -> float:
        """Return the time at which all is done."""
        self._wait()
        return self._now

    def _started(self, seconds: float) -> float:
        self._link_free_at = max(self._link_free_at, self._now) + seconds
        return self._link_free_at

    def _wait(self) -> None:
        self._now = max(self._now, self._link_free_at)


def _reduces(operation: Operation) -> bool:
    name = operation.name.rpartition(".")[2].removeprefix("_")
    return name.startswith(_REDUCES)
