"""One of two ranks, each with half of a sequence, held against attention over the whole sequence."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed.comm as ds_comm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

SAMPLES, WORDS, WIDTH = 2, 8, 4


class Attention(nn.Module):
    """Causal attention over tensors of samples, words, heads and width."""

    def forward(self, query, key, value):
        turned = (each.transpose(1, 2) for each in (query, key, value))
        found = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2)


class OverRanks(DistributedAttention):
    """Leave out what DeepSpeed passes on besides queries, keys and values."""

    def __init__(self, group) -> None:
        super().__init__(_Three(), group, scatter_idx=2, gather_idx=1)


class _Three(Attention):
    def forward(self, *tensors, **_):
        return super().forward(*tensors[:3])


def largest_difference(rank: int, num_ranks: int, num_heads: int, num_shared: int) -> float:
    """Compare results and gradients of this rank's part with those of the whole sequence."""
    torch.manual_seed(0)
    shapes = [(SAMPLES, WORDS, heads, WIDTH) for heads in (num_heads, num_shared, num_shared)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64)
    expected = Attention()(*whole)
    (expected * weights).sum().backward()
    part = slice(rank * WORDS // num_ranks, (rank + 1) * WORDS // num_ranks)
    own = [each.detach()[:, part].clone().requires_grad_() for each in whole]
    found = OverRanks(dist.group.WORLD)(*own, 0)
    (found * weights[:, part]).sum().backward()
    pairs = [(found, expected[:, part])]
    pairs += [(mine.grad, each.grad[:, part]) for mine, each in zip(own, whole, strict=True)]
    return max((first - second).abs().max().item() for first, second in pairs)


def main(folder: str, rank: str, num_ranks: str, num_heads: str, num_shared: str) -> None:
    place = f"file://{folder}/store"
    dist.init_process_group("gloo", place, rank=int(rank), world_size=int(num_ranks))
    ds_comm.init_distributed("gloo", verbose=False)
    sizes = (int(rank), int(num_ranks), int(num_heads), int(num_shared))
    Path(folder, f"difference-{rank}").write_text(str(largest_difference(*sizes)), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
