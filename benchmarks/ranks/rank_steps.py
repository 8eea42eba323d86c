"""Steps of sharded and data-parallel training, as a script under torchrun would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
_VOCABULARY, _LENGTH = 4096, 64


class Attention(nn.Module):
    """Attend causally."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what every position attends to."""
        q, k, v = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in self.inner(x).chunk(3, dim=-1)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer; ``is_checkpointed`` computes it again in backward."""

    def __init__(self, width: int, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, 4)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform every position."""
        if self.is_checkpointed:
            return checkpoint(self._block, x, use_reentrant=False)
        return self._block(x)

    def _block(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(
        self, width: int = 256, num_blocks: int = 4, *, is_checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(
            [Block(width, is_checkpointed=is_checkpointed) for _ in range(num_blocks)]
        )
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Perceptron(nn.Module):
    """Blocks of two wide layers, and a square for a loss."""

    def __init__(self, width: int = 512, inner: int = 2048, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
                for _ in range(num_blocks)
            ]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Convolutions(nn.Module):
    """A convolution net with batch normalisation, whose statistics are buffers."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(width if i else 3, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
                for i in range(6)
            ]
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).logsumexp(1).mean()


def tokens(batch_size: int) -> Tensor:
    """Return a batch for the decoder."""
    return torch.randint(_VOCABULARY, (batch_size, _LENGTH))


def vectors(batch_size: int, width: int = 512) -> Tensor:
    """Return a batch for the perceptron."""
    return torch.randn(batch_size, width)


def images(batch_size: int) -> Tensor:
    """Return a batch for the convolutions."""
    return torch.randn(batch_size, 3, 16, 16)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that most use."""
    return torch.optim.AdamW(parameters)


def adamw_foreach(parameters: Any) -> torch.optim.Optimizer:
    """Return the same, all parameters at once, as it is the default on GPUs."""
    return torch.optim.AdamW(parameters, foreach=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return gradient descent with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """A step of one rank among several."""

    name: str
    num_ranks: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    wrapper: str = "fsdp2"
    """``fsdp2`` or ``ddp``."""
    batch_size: int = 8
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the wrapper is given."""
    num_micro_batches: int = 1
    syncs_last_only: bool = False
    """Whether gradients are exchanged in the last micro-batch alone."""
    clips: bool = False
    shape: tuple[int, ...] = ()
    """Of a mesh of ranks; all in one row if left out."""
    shards_blocks: bool = True

    def wrapped(self, device: str = "cpu") -> nn.Module:
        """Build the model in the process group that is open."""
        with torch.device(device):
            model = self.model()
        if self.wrapper == "ddp":
            return DistributedDataParallel(model, **self.options)
        names = ("replicated", "sharded") if self.shape else ("sharded",)
        shape = self.shape or (dist.get_world_size(),)
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        for block in model.blocks if self.shards_blocks else ():
            fully_shard(block, mesh=mesh, **self.options)
        fully_shard(model, mesh=mesh, **self.options)
        return model

    def setup(self, device: str = "cpu") -> Step:
        """Build everything, and return what does one step."""
        model = self.wrapped(device)
        optimizer = self.optimizer(model.parameters())
        batch = self.batch(self.batch_size).to(device)

        def step() -> None:
            pieces = batch.chunk(self.num_micro_batches)
            for number, piece in enumerate(pieces):
                with self._exchange(model, is_last=number == len(pieces) - 1):
                    (model(piece) / len(pieces)).backward()
            if self.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _exchange(self, model: Any, *, is_last: bool) -> AbstractContextManager[None]:
        if not self.syncs_last_only:
            return nullcontext()
        if self.wrapper == "ddp":
            return nullcontext() if is_last else model.no_sync()
        model.set_requires_gradient_sync(is_last)
        return nullcontext()


def _uneven() -> nn.Module:
    return Perceptron(width=509, inner=1021, num_blocks=6)


def _uneven_vectors(batch_size: int) -> Tensor:
    return vectors(batch_size, 509)


def _checkpointed() -> nn.Module:
    return Decoder(is_checkpointed=True)


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
_MLP: dict[str, Any] = {"model": Perceptron, "batch": vectors}
_DECODER: dict[str, Any] = {"model": Decoder, "batch": tokens}
_NETS: dict[str, Any] = {"model": Convolutions, "batch": images, "batch_size": 16}
_UNEVEN: dict[str, Any] = {"model": _uneven, "batch": _uneven_vectors}
_KEEPS = {"reshard_after_forward": False}

CASES = (
    RankCase(name="perceptron", num_ranks=2, **_MLP),
    RankCase(name="perceptron", num_ranks=4, **_MLP),
    RankCase(name="perceptron, kept", num_ranks=4, **_MLP, options=_KEEPS),
    RankCase(
        name="perceptron, resharded to 2",
        num_ranks=4,
        **_MLP,
        options={"reshard_after_forward": 2},
    ),
    RankCase(name="perceptron, root alone", num_ranks=2, **_MLP, shards_blocks=False),
    RankCase(name="perceptron, 2 x 2 replicated", num_ranks=4, **_MLP, shape=(2, 2)),
    RankCase(name="uneven shards", num_ranks=4, **_UNEVEN),
    RankCase(name="uneven shards, SGD", num_ranks=2, **_UNEVEN, optimizer=sgd),
    RankCase(name="decoder", num_ranks=2, **_DECODER),
    RankCase(name="decoder", num_ranks=4, **_DECODER),
    RankCase(name="decoder, foreach", num_ranks=2, **_DECODER, optimizer=adamw_foreach),
    RankCase(name="decoder, clipped", num_ranks=4, **_DECODER, clips=True),
    RankCase(
        name="decoder, bf16 reduced in fp32",
        num_ranks=4,
        **_DECODER,
        options={"mp_policy": _BF16},
    ),
    RankCase(name="decoder, bf16", num_ranks=2, **_DECODER, options={"mp_policy": _ALL_BF16}),
    RankCase(
        name="decoder, checkpointed",
        num_ranks=2,
        model=_checkpointed,
        batch=tokens,
        batch_size=32,
    ),
    RankCase(name="decoder, 4 micro-batches", num_ranks=2, **_DECODER, num_micro_batches=4),
    RankCase(
        name="decoder, 4 micro-batches, one exchange",
        num_ranks=4,
        **_DECODER,
        num_micro_batches=4,
        syncs_last_only=True,
    ),
    RankCase(name="convolutions", num_ranks=2, wrapper="ddp", **_NETS),
    RankCase(name="convolutions", num_ranks=4, wrapper="ddp", **_NETS, optimizer=sgd),
    RankCase(name="decoder", num_ranks=2, wrapper="ddp", **_DECODER),
    RankCase(
        name="decoder, views",
        num_ranks=2,
        wrapper="ddp",
        **_DECODER,
        options={"gradient_as_bucket_view": True},
    ),
    RankCase(
        name="decoder, unused looked for",
        num_ranks=2,
        wrapper="ddp",
        **_DECODER,
        options={"find_unused_parameters": True},
    ),
    RankCase(
        name="decoder, 4 micro-batches, one exchange",
        num_ranks=4,
        wrapper="ddp",
        **_DECODER,
        num_micro_batches=4,
        syncs_last_only=True,
    ),
)
"""What is predicted and measured."""
