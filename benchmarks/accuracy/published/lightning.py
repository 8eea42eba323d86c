"""Rebuilds rows of Lightning's pages: its demo transformer under FSDP and DDP, and tensor parallel.

Source: docs/source-pytorch/advanced/model_parallel/fsdp.rst, docs/source-fabric/advanced/
model_parallel/tp.rst, and the loop of lightning 2.1, whose closure drops gradients between
forward and backward (loops/optimization/automatic.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from accuracy.packages import CannotRebuild

from .reading import number_after
from .steps import PublishedStep

_STRATEGY = re.compile(r"FULL_SHARD|SHARD_GRAD_OP|NO_SHARD")


def rebuilt(fields: Mapping[str, Any]) -> PublishedStep:
    """Rebuild a row of Lightning's pages."""
    is_feed_forward = str(fields["model"]["name"]).startswith("FeedForward")
    if "cpu_offload=True" in fields["parallelism"]:
        msg = "FSDP1 keeps its parameters on the host, which is not followed here"
        raise CannotRebuild(msg)
    return PublishedStep(setup=partial(_set_up_layers if is_feed_forward else _set_up, fields))


class _Module(nn.Module):
    """Stand in for the LightningModule around the demo."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch, as ``training_step`` does."""
        tokens, target = batch
        output = self.model(tokens, target)
        return F.nll_loss(output, target.view(-1))


def _set_up(fields: Mapping[str, Any]) -> Callable[[], None]:
    from lightning.pytorch.demos import Transformer  # noqa: PLC0415 - slow to import

    name = fields["model"]["name"]
    sizes = {
        key: int(number_after(key, name))
        for key in ("vocab_size", "nlayers", "nhid", "ninp", "nhead")
    }
    module = _Module(Transformer(**sizes))
    wrapped = _wrapped(module, fields["parallelism"])
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1, foreach=True)
    tokens = torch.randint(
        0, sizes["vocab_size"], (2, fields["micro_batch"], fields["sequence"]), device="cuda"
    )

    def step() -> None:
        with _told_causal():
            loss = wrapped((tokens[0], tokens[1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _told_causal() -> Any:
    """Say that a mask is causal, which ``nn.Transformer`` finds out from its values."""
    return patch.object(
        sys.modules["torch.nn.modules.transformer"],
        "_detect_is_causal_mask",
        lambda mask, _is_causal=None, _size=None: mask is not None,
    )


def _wrapped(module: nn.Module, parallelism: str) -> nn.Module:
    if parallelism.startswith("DDP"):
        return nn.parallel.DistributedDataParallel(module.cuda())
    found = _STRATEGY.search(parallelism)
    if found is None:
        raise CannotRebuild(f"it says {parallelism!r} of how it is sharded")
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
        sharding_strategy=ShardingStrategy[found[0]],
        cpu_offload=CPUOffload("cpu_offload=True" in parallelism),
        use_orig_params=True,
        device_id=torch.device("cuda", 0),
    )


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden_width, bias=False)
        self.w2 = nn.Linear(hidden_width, width, bias=False)
        self.w3 = nn.Linear(width, hidden_width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _set_up_layers(fields: Mapping[str, Any]) -> Callable[[], None]:
    width, hidden_width = (int(each) for each in re.findall(r"\d+", fields["model"]["name"]))
    # Fabric makes the model without memory, and gives it some once it is sharded.
    with torch.device("meta"):
        model: nn.Module = _FeedForward(width, hidden_width)
    if fields["ranks"] > 1:
        mesh = init_device_mesh("cuda", (fields["ranks"],))
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        model = parallelize_module(model, mesh, plan)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)

    def step() -> None:
        batch = torch.randn(fields["micro_batch"], width).cuda()
        output = model(batch)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
