"""Collectives on their links, against timelines worked out by hand, and what each of them sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.zoo.sharded import ranks

from memfit.cost.collectives import Links, seconds_among_ranks
from memfit.devices.catalogue import load_device
from memfit.trace.collectives import exchange_of
from memfit.trace.events import Operation, Phase, Trace

GATHER, REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
H100, CPU = load_device("h100-80gb"), load_device("cpu")


def work(phase: Phase, seconds: int) -> Operation:
    return Operation(name="aten.mm", phase=phase, dtype="float32", num_flops=seconds, moved_bytes=0)


def exchange(name: str, phase: Phase, seconds: float, device: Any = H100) -> Operation:
    """Return a collective of two ranks that takes so many seconds."""
    one = Operation(
        name=name, phase=phase, dtype="float32", num_flops=0, moved_bytes=0, num_ranks=2
    )
    links = Links.of(device)
    rest = seconds - links.seconds(one)
    return replace(one, sent_bytes=round(rest * links.within_bytes_per_second))


def step_seconds(operations: list[Operation], device: Any = H100) -> float:
    trace = Trace(operations=operations)
    return seconds_among_ranks(trace, device, lambda each: float(each.num_flops))


def test_the_cpu_waits_for_every_collective():
    operations = [
        exchange(GATHER, Phase.FORWARD, 2, CPU),
        work(Phase.FORWARD, 3),
        exchange(REDUCE, Phase.BACKWARD, 4, CPU),
        work(Phase.BACKWARD, 5),
    ]
    assert step_seconds(operations, CPU) == pytest.approx(14, rel=1e-6)


def test_a_block_is_gathered_while_the_one_before_it_is_computed():
    """Gather 0-2, compute 2-5 while the second is gathered 2-4, then 5-8: three seconds saved 2."""
    operations = [
        exchange(GATHER, Phase.FORWARD, 2),
        work(Phase.FORWARD, 3),
        exchange(GATHER, Phase.FORWARD, 2),
        work(Phase.FORWARD, 3),
    ]
    assert step_seconds(operations) == pytest.approx(8, rel=1e-6)


def test_slow_gathers_hold_the_forward_up():
    operations = [
        exchange(GATHER, Phase.FORWARD, 4),
        work(Phase.FORWARD, 1),
        exchange(GATHER, Phase.FORWARD, 4),
        work(Phase.FORWARD, 1),
    ]
    assert step_seconds(operations) == pytest.approx(9, rel=1e-6)


def test_gradients_are_reduced_beside_backward_and_the_update_waits_for_them():
    """Backward 0-2, reduced 2-7 beside 2-4; the update begins at 7."""
    operations = [
        work(Phase.BACKWARD, 2),
        exchange(REDUCE, Phase.BACKWARD, 5),
        work(Phase.BACKWARD, 2),
        work(Phase.OPTIMIZER, 1),
    ]
    assert step_seconds(operations) == pytest.approx(8, rel=1e-6)


def test_ranks_on_other_machines_are_reached_over_the_network():
    links = Links.of(H100)
    near = replace(exchange(GATHER, Phase.FORWARD, 1), num_ranks=16)
    far = replace(near, num_nodes=2)
    assert links.between_bytes_per_second < links.within_bytes_per_second
    assert links.seconds(far) > 5 * links.seconds(near)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.11 has the old names alone
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_ring_sends_what_it_sends(num_ranks):
    """Of n ranks each sends all but one share of what is gathered, and twice that of an average."""
    seen = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if (found := exchange_of(func, args)) is not None:
                seen[str(func.overloadpacket).rpartition(".")[2]] = found
            return func(*args, **(kwargs or {}))

    part, whole = torch.zeros(64), torch.zeros(64 * num_ranks)
    with ranks(num_ranks), Watch():
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_reduce(whole)
        dist.broadcast(part, 0)
        dist.barrier()
    share = (num_ranks - 1) / num_ranks
    assert {name: each.sent_bytes for name, each in seen.items()} == {
        "_allgather_base_": share * 4 * whole.numel(),
        "_reduce_scatter_base_": share * 4 * whole.numel(),
        "allreduce_": 2 * share * 4 * whole.numel(),
        "broadcast_": share * 4 * part.numel(),
    }
    assert {each.num_ranks for each in seen.values()} == {num_ranks}


def test_one_rank_sends_nothing():
    with ranks(1):
        group = dist.distributed_c10d._get_default_group()
        assert dist.get_world_size(group) == 1
        args = ([torch.zeros(4)], group.boxed(), 0)
        assert exchange_of(torch.ops.c10d.broadcast_.default, args) is None
