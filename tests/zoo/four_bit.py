"""Small models on a base of 4-bit weights, with and without adapters."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from memfit import Job

WIDTH, HIDDEN = 128, 512
NAMES = ("rise", "fall")
BLOCK_VALUES = 64


class Block(nn.Module):
    """Two layers around a bend, and a way past them."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.rise = nn.Linear(width, hidden)
        self.fall = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.tanh(self.rise(x)))


def library():
    """Import bitsandbytes, which warns of kernels that only inference would want."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return pytest.importorskip("bitsandbytes")


def packed(
    model: nn.Module,
    *,
    kind: str = "nf4",
    double: bool = True,
    compute=torch.bfloat16,
    storage=torch.uint8,
    device: str = "cpu",
) -> nn.Module:
    """Pack the linear layers of a model into 4 bits, as transformers does."""
    layers = library().nn
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        settings = {"compress_statistics": double, "quant_type": kind, "quant_storage": storage}
        other = layers.Linear4bit(
            layer.in_features, layer.out_features, compute_dtype=compute, device="meta", **settings
        )
        other.weight = layers.Params4bit(
            layer.weight.data, requires_grad=False, module=other, **settings
        )
        other.bias = nn.Parameter(layer.bias.data, requires_grad=False)
        model.set_submodule(name, other)
    model.is_loaded_in_4bit = True
    return model.to(device)


def base(dtype=torch.float32, num_blocks: int = 2, **settings) -> nn.Module:
    """Build a small packed base whose output layer stays as it is."""
    blocks = nn.Sequential(*(Block() for _ in range(num_blocks))).to(dtype)
    return packed(blocks, **settings).requires_grad_(False)


def with_adapters(model: nn.Module, rank: int = 4) -> nn.Module:
    """Add adapters to the packed layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(NAMES))
    return peft.get_peft_model(model, config)


def build(**settings) -> nn.Module:
    """Build a model of packed blocks with adapters."""
    torch.manual_seed(0)
    return with_adapters(base(**settings))


def job(model=build, num_tokens: int = 4, **settings) -> Job:
    """Return a job that trains what is not frozen."""
    return Job(
        model=lambda: model(**settings),
        batch=lambda size: torch.randn(size, num_tokens, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(
            [each for each in parameters if each.requires_grad], lr=1e-3
        ),
        batch_size=2,
    )


def weight_bytes(num_values: int, *, double: bool, kind_bytes: int = 16 * 4) -> int:
    """Return what one packed weight takes.

    Half a byte per value and a scale per 64 values: four bytes, or with double quantisation one,
    and four for every 256 scales, a table of 256 values and one mean. The codes have a table.
    """
    num_scales = -(-num_values // BLOCK_VALUES)
    scales_bytes = num_scales + 4 * -(-num_scales // 256) + 256 * 4 + 4
    return num_values // 2 + kind_bytes + (scales_bytes if double else 4 * num_scales)
