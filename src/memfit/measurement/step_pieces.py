"""Pieces of training steps, of the kinds that most models are made of, to be timed.

Each is several layers deep: what backward reads has left the caches by then, as in a whole step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Piece = Callable[[], object]
"""Runs forward, backward or an update once."""

_TOKENS, _WIDTH, _HEADS, _VOCABULARY = 128, 192, 4, 2048
_CHANNELS, _SIDE = 32, 32
_DEPTH = 3
_NUM_UPDATED = 12
_SMALL = 0.3


def step_pieces(num_samples: int) -> Iterator[Piece]:
    """Yield pieces in float32 on the CPU, for a batch of this many samples."""
    tokens = torch.randn(num_samples, _TOKENS, _WIDTH, requires_grad=True)
    image = torch.randn(num_samples, _CHANNELS, _SIDE, _SIDE, requires_grad=True)
    ids = torch.randint(0, _VOCABULARY, (num_samples, _TOKENS))
    yield _of_modules(_perceptron(), tokens)
    yield _backward(lambda: _attentions(tokens, fused=True), tokens)
    yield _backward(lambda: _attentions(tokens, fused=False), tokens)
    yield _of_modules(_convolutions(), image)
    recurrent = nn.LSTM(_WIDTH, _WIDTH, batch_first=True)
    yield _backward(lambda: recurrent(tokens)[0], tokens, *recurrent.parameters())
    yield _language_loss(ids)
    yield _backward(lambda: _functions(tokens), tokens)
    yield lambda: tokens.detach().sort(dim=-1)
    yield _update(fused=True)
    yield _update(foreach=True)
    yield _update(foreach=False)
    yield _update_one_by_one()


def _of_modules(modules: nn.Module, data: Tensor) -> Piece:
    return _backward(lambda: modules(data), data, *modules.parameters())


def _backward(forward: Callable[[], Tensor], *leaves: Tensor) -> Piece:
    """Return forward, a mean of squares for a loss, and backward."""
    return lambda: torch.autograd.grad(forward().square().mean(), leaves)


def _perceptron() -> nn.Module:
    layers = (
        (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )
        for _ in range(_DEPTH)
    )
    return nn.Sequential(*itertools.chain(*layers))


def _attentions(tokens: Tensor, *, fused: bool) -> Tensor:
    for _ in range(_DEPTH):
        tokens = _attention(tokens, fused=fused)
    return tokens


def _attention(tokens: Tensor, *, fused: bool) -> Tensor:
    """Attend, with scores as a matrix unless it is fused.

    Scores are kept small: a saturated softmax leaves denormal numbers, which take 15 times as long.
    """
    small = F.layer_norm(tokens, tokens.shape[-1:]) * _SMALL
    heads = small.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
    if fused:
        out = F.scaled_dot_product_attention(heads, heads, heads)
    else:
        scores = heads @ heads.mT * heads.shape[-1] ** -0.5
        out = F.dropout(scores.softmax(-1), 0.1) @ heads
    return tokens + out.transpose(1, 2).flatten(2)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
        nn.BatchNorm2d(_CHANNELS),
        nn.ReLU(),
        nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
        nn.GroupNorm(4, _CHANNELS),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(_CHANNELS, 2 * _CHANNELS, 3, padding=1),
        nn.BatchNorm2d(2 * _CHANNELS),
        nn.ReLU(),
        nn.Conv2d(2 * _CHANNELS, _CHANNELS, 1),
    )


def _language_loss(ids: Tensor) -> Piece:
    embedding = nn.Embedding(_VOCABULARY, _WIDTH)

    def forward() -> Tensor:
        logits = F.linear(embedding(ids), embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return _backward(forward, embedding.weight)


def _functions(data: Tensor) -> Tensor:
    """Compute some functions of each element, sums, copies and a selection."""
    gate, rest = torch.cat([data.tanh(), data.sigmoid() * 2.0], dim=-1).chunk(2, dim=-1)
    kept = torch.where(gate > 0, rest, gate).transpose(1, 2).contiguous()
    return kept.square().sum(-1) + kept.amax(-1)


def _update_one_by_one() -> Piece:
    """Return an update of each parameter by itself, as in backward."""
    shapes = [(width, _WIDTH) for width in (1, _WIDTH, 4 * _WIDTH) for _ in range(_DEPTH)]
    updates = [
        torch.optim.AdamW(_parameters([shape]), lr=1e-6, fused=True).step for shape in shapes
    ]
    return lambda: [update() for update in updates]


def _update(*, fused: bool | None = None, foreach: bool | None = None) -> Piece:
    shapes = [(4 * _WIDTH, _WIDTH), (1, _WIDTH), (_WIDTH, _WIDTH)] * _NUM_UPDATED
    return torch.optim.AdamW(_parameters(shapes), lr=1e-6, fused=fused, foreach=foreach).step


def _parameters(shapes: Iterable[tuple[int, int]]) -> list[nn.Parameter]:
    """Make parameters with gradients."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters
