"""What operators of each class reach of a processor's rates, timed in pieces of training steps."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.cost.operator_classes import OperatorClass, class_of
from memfit.cost.operator_times import Line, bare_seconds
from memfit.devices.facts import call_fact, share_fact
from memfit.devices.spec import CPU, Device
from memfit.measurement.timing import OperatorTimer
from memfit.trace.events import Operation

Timed = tuple[Operation, float]

_BATCH_SIZES = (1, 4, 16)
_NUM_ROUNDS = 3
_LEAST_OWN_SHARE = 0.1
"""Of a call's seconds, so much at least is its own work, however long a launch is said to take."""
_Piece = Callable[[], object]
"""Runs forward, backward or an update once."""

_TOKENS, _WIDTH, _HEADS, _VOCABULARY = 128, 192, 4, 2048
_CHANNELS, _SIDE = 32, 32
_DEPTH = 3
_NUM_UPDATED = 12
_SMALL = 0.3


def measure_class_shares(device: Device) -> dict[str, float]:
    """Time pieces of training steps here; takes a few seconds.

    Args:
        device: this machine's processor, with the rates that were measured of it.
    """
    return class_shares(timed_pieces(_BATCH_SIZES), device)


def class_shares(timed: Iterable[Timed], device: Device) -> dict[str, float]:
    """Return what timed operators reach of a device's roofline, and what a call takes, by class."""
    points: dict[OperatorClass, list[tuple[float, float]]] = defaultdict(list)
    for operation, seconds in timed:
        points[class_of(operation.name)].append((bare_seconds(operation, device), seconds))
    found: dict[str, float] = {}
    for kind, of_kind in points.items():
        line = _line_through(of_kind, device.value("launch_seconds"))
        found[share_fact(kind)] = 1.0 / line.ratio
        found[call_fact(kind)] = line.fixed_seconds
    return found


def _line_through(points: Sequence[tuple[float, float]], launch_seconds: float) -> Line:
    """Fit seconds to roofline seconds by least squares, so that the largest calls say most.

    Where no line rises from above zero, a call takes a launch and its share of all the rest.
    """
    rooflines, seconds = zip(*points, strict=True)
    if len(set(rooflines)) > 1:
        ratio, fixed_seconds = statistics.linear_regression(rooflines, seconds)
        if ratio > 0 and fixed_seconds > 0:
            return Line(ratio, fixed_seconds)
    own_seconds = sum(max(each - launch_seconds, _LEAST_OWN_SHARE * each) for each in seconds)
    return Line(own_seconds / sum(rooflines), launch_seconds)


def timed_pieces(batch_sizes: Iterable[int]) -> list[Timed]:
    """Time the operators of pieces: of each the least of a few rounds, which is least disturbed.

    Rounds go through all pieces, so that each finds its tensors out of the caches, as a step does.
    """
    with torch.random.fork_rng(devices=()):
        pieces = [piece for size in batch_sizes for piece in _step_pieces(size)]
        for piece in pieces:
            piece()
        rounds = [[each for piece in pieces for each in _timed(piece)] for _ in range(_NUM_ROUNDS)]
    return [
        (calls[0][0], min(seconds for _, seconds in calls)) for calls in zip(*rounds, strict=True)
    ]


def _timed(piece: _Piece) -> list[Timed]:
    timer = OperatorTimer(CPU)
    with timer:
        piece()
    return timer.timed


def _step_pieces(num_samples: int) -> Iterator[_Piece]:
    """Yield pieces in float32 on the CPU, for a batch of this many samples.

    Each is several layers deep: what backward reads has left the caches by then, as in a whole
    step.
    """
    tokens = torch.randn(num_samples, _TOKENS, _WIDTH, requires_grad=True)
    image = torch.randn(num_samples, _CHANNELS, _SIDE, _SIDE, requires_grad=True)
    ids = torch.randint(0, _VOCABULARY, (num_samples, _TOKENS))
    yield _of_modules(_perceptron(), tokens)
    yield _backward(lambda: _attentions(tokens, fused=True), tokens)
    yield _backward(lambda: _attentions(tokens, fused=False), tokens)
    yield _of_modules(_convolutions(), image)
    recurrent = nn.LSTM(_WIDTH, _WIDTH, batch_first=True)
    yield _backward(lambda: recurrent(tokens)[0], tokens, *recurrent.parameters())
    embedding = nn.Embedding(_VOCABULARY, _WIDTH)

    def forward() -> Tensor:
        logits = F.linear(embedding(ids), embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    yield _backward(forward, embedding.weight)
    yield _backward(lambda: _functions(tokens), tokens)
    yield lambda: tokens.detach().sort(dim=-1)
    yield _update(fused=True)
    yield _update(foreach=True)
    yield _update(foreach=False)
    yield _update_one_by_one()


def _of_modules(modules: nn.Module, data: Tensor) -> _Piece:
    return _backward(lambda: modules(data), data, *modules.parameters())


def _backward(forward: Callable[[], Tensor], *leaves: Tensor) -> _Piece:
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
        # Scores are kept small: a saturated softmax leaves denormal numbers, which take 15 times as
        # long.
        small = F.layer_norm(tokens, tokens.shape[-1:]) * _SMALL
        heads = small.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
        if fused:
            out = F.scaled_dot_product_attention(heads, heads, heads)
        else:
            scores = heads @ heads.mT * heads.shape[-1] ** -0.5
            out = F.dropout(scores.softmax(-1), 0.1) @ heads
        tokens = tokens + out.transpose(1, 2).flatten(2)
    return tokens


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


def _functions(data: Tensor) -> Tensor:
    """Compute some functions of each element, sums, copies and a selection."""
    gate, rest = torch.cat([data.tanh(), data.sigmoid() * 2.0], dim=-1).chunk(2, dim=-1)
    kept = torch.where(gate > 0, rest, gate).transpose(1, 2).contiguous()
    return kept.square().sum(-1) + kept.amax(-1)


def _update_one_by_one() -> _Piece:
    """Return an update of each parameter by itself, as in backward."""
    shapes = [(width, _WIDTH) for width in (1, _WIDTH, 4 * _WIDTH) for _ in range(_DEPTH)]
    updates = [
        torch.optim.AdamW(_parameters([shape]), lr=1e-6, fused=True).step for shape in shapes
    ]
    return lambda: [update() for update in updates]


def _update(*, fused: bool | None = None, foreach: bool | None = None) -> _Piece:
    shapes = [(4 * _WIDTH, _WIDTH), (1, _WIDTH), (_WIDTH, _WIDTH)] * _NUM_UPDATED
    return torch.optim.AdamW(_parameters(shapes), lr=1e-6, fused=fused, foreach=foreach).step


def _parameters(shapes: Iterable[tuple[int, int]]) -> list[nn.Parameter]:
    """Make parameters with gradients."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters
