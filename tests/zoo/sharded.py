"""Steps of one rank of several under FSDP2, on a group of ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, NUM_BLOCKS, BATCH = 128, 4, 8
NUM_PARAMETERS = NUM_BLOCKS * (4 * WIDTH**2 + 3 * WIDTH)


@contextmanager
def ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Open torch's fake process group, whose collectives exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_ranks(device: str = "cpu") -> DeviceMesh:
    """Return a mesh of all ranks of the group."""
    return init_device_mesh(device, (dist.get_world_size(),))


def whole_model() -> nn.Module:
    """Return an MLP of blocks."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(NUM_BLOCKS)
    ]
    return nn.Sequential(*blocks)


def sharded_model(mesh: DeviceMesh, *, reshards: bool = True) -> nn.Module:
    """Return the same, each block sharded over a mesh."""
    with torch.device(mesh.device_type):
        model = whole_model()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    return model


def sharded_step(
    optimizer: Callable[..., torch.optim.Optimizer], device: str = "cpu", *, reshards: bool = True
) -> Callable[[], Callable[[], None]]:
    """Return a function that builds a sharded model and gives a function that does one step."""

    def setup():
        model = sharded_model(all_ranks(device), reshards=reshards)
        built = optimizer(model.parameters())
        batch = torch.randn(BATCH, WIDTH, device=device)

        def step():
            built.zero_grad()
            model(batch).square().mean().backward()
            built.step()

        return step

    return setup
