"""Proves on a few samples that factors give the inner products that backward passes give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from memfit.errors import CoupledSamplesError
from memfit.session.block_names import first_few
from memfit.units import MIB

from .factors import Factor
from .gradients import GradientReader, SampleGradients, check_number
from .layouts import tolerance_of
from .products import block_bounds
from .samples import Samples

NUM_PROVED = 3
_BLOCK_NUMBERS = 2**16
_GROUP_BYTES = 32 * MIB
"""How much of the parameters has its gradients made at a time, beyond a single one."""


def prove(reader: GradientReader, samples: Samples) -> float:
    """Compare inner products from factors with those of backward passes, parameter by parameter.

    Where they disagree, the parameter is left to backward passes from then on, by name.

    Returns:
        The largest error that was accepted, relative to the norms of the two gradients.

    Raises:
        CoupledSamplesError: if a sample's loss depends on the others of its batch.

    Limits: a few samples, from the first to the last. What a model does on others alone, such as a
    branch that none of these takes, is read by the same formulas without having been compared.
    """
    rows = look_at(reader, samples)
    compared = compare(reader, samples, rows)
    worst = 0.0
    for name in [name for name in reader.parameters if name not in reader.unread]:
        if name in reader.unproved:
            continue
        error = compared.error(name)
        if error <= tolerance_of(reader.types.get(name, reader.parameters[name].dtype)):
            worst = max(worst, error)
        else:
            reader.unread[name] = f"its factors were off by {error:.1e} on a few samples"
    return worst


def look_at(reader: GradientReader, samples: Samples) -> Tensor:
    """Have a reader find out how a few samples lie in what it reads; return their numbers, (n,).

    Raises:
        CoupledSamplesError: if a sample's loss depends on the others of its batch.
    """
    refuse_batch_statistics(reader.model)
    rows = samples.spread(NUM_PROVED)
    _refuse_coupled(reader, samples, rows)
    reader.read(samples, rows)
    return rows


def compare(reader: GradientReader, samples: Samples, rows: Tensor) -> Compared:
    """Compare the gradients of a few samples, rows (n,) int64; of whole ones a group lives at once.

    It looks at no values, so that what it takes can be recorded.
    """
    found = reader.read(samples, rows)
    compared = Compared.nothing_yet(reader, len(rows))
    # Where nothing is compared one sample stands for all.
    places = range(len(rows) if reader.has_values else 1)
    proved = {name: each for name, each in reader.parameters.items() if name not in reader.unproved}
    for group in _groups(proved):
        names = [name for name in group if name not in reader.unread]
        for place in places:
            grads = reader.gradient(samples, rows[place : place + 1], group)
            for name in names:
                compared.add(name, place, grads.get(name), found.factors.get(name, []))
            del grads  # before the next are made
    for name in proved:
        if name not in reader.unread and (factors := found.factors.get(name)):
            read = SampleGradients(num_samples=len(rows), factors={name: factors})
            own = read.inner_products(read, reader.limit_bytes).double().cpu()
            compared.own_products[name] = own
            compared.own_norms[name] = read.squared_norms(reader.limit_bytes).double().cpu()
    return compared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Whole gradients of n samples beside those from factors, by parameter."""

    differences: dict[str, Tensor]
    """The squared norm of the difference for each sample, (n,)."""
    norms: dict[str, Tensor]
    """Squared norms of whole gradients, (n,)."""
    products: dict[str, Tensor]
    """Inner products of each whole gradient with those from factors, (n, n)."""
    own_products: dict[str, Tensor]
    """The same of both from factors, as a scan computes them."""
    own_norms: dict[str, Tensor]
    """The diagonal of these, as a scan for self-influence computes it."""
    has_values: bool
    """Whether there is anything to compare; else the first and the last rows stand for all."""

    @classmethod
    def nothing_yet(cls, reader: GradientReader, number: int) -> Self:
        """Begin with zeros."""

        def zeros(*shape: int) -> dict[str, Tensor]:
            return {name: torch.zeros(shape, dtype=torch.float64) for name in reader.parameters}

        square, line = (number, number), (number,)
        return cls(
            differences=zeros(*line),
            norms=zeros(*line),
            products=zeros(*square),
            own_products=zeros(*square),
            own_norms=zeros(*line),
            has_values=reader.has_values,
        )

    def add(self, name: str, place: int, grad: Tensor | None, factors: list[Factor]) -> None:
        """Compare one sample's whole gradient, None being zero, a few rows at a time."""
        if grad is None and not factors:
            return
        num_samples = len(self.norms[name])
        whole = None if grad is None else grad.reshape(grad.shape[0] if grad.dim() else 1, -1)
        num_rows, num_columns = whole.shape if whole is not None else _matrix_of(factors[0])
        bounds = list(block_bounds(num_rows, max(1, _BLOCK_NUMBERS // num_columns)))
        for start, stop in bounds if self.has_values else bounds[:: max(1, len(bounds) - 1)]:
            blocks = [factor.block(start, stop) for factor in factors]
            part = torch.zeros_like(blocks[0][0]) if whole is None else whole[start:stop]
            made = part.new_zeros((num_samples, *part.shape))
            for block in blocks:
                made += block
            self.norms[name][place] += part.square().sum().double().cpu()
            self.products[name][place] += (made * part).sum(dim=(1, 2)).double().cpu()
            self.differences[name][place] += (made[place] - part).square().sum().double().cpu()

    def error(self, name: str) -> float:
        """Return the largest error of gradients and of inner products, relative to the norms."""
        scale = float(self.norms[name].max())
        worst = math.sqrt(float(self.differences[name].max()))
        if scale == 0.0:
            return 0.0 if worst == 0.0 else math.inf
        own = self.own_products[name]
        off = [self.products[name] - own, own.diagonal() - self.own_norms[name]]
        return max(worst / math.sqrt(scale), *(float(each.abs().max()) / scale for each in off))


def _matrix_of(factor: Factor) -> tuple[int, int]:
    return factor.num_rows, factor.num_columns


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse batch normalisation that takes its statistics from the batch.

    Raises:
        CoupledSamplesError: with the names of the layers.
    """
    kinds = nn.modules.batchnorm._BatchNorm
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, kinds) and (module.training or module.running_mean is None)
    ]
    if names:
        raise CoupledSamplesError(
            f"{first_few(names)} normalise with the statistics of the batch",
            "Scan in evaluation mode, with running statistics",
        )


def _refuse_coupled(reader: GradientReader, samples: Samples, rows: Tensor) -> None:
    """Compare losses in a batch with those of the samples alone."""
    if len(rows) < 2:
        return
    with torch.no_grad():
        together = reader.losses(samples.batch(rows))
        check_number(together, len(rows))
        alone = [reader.losses(samples.batch(row[None])) for row in rows]
    for each in alone:
        check_number(each, 1)
    apart = torch.cat(alone)
    scale = max(float(apart.abs().max()), torch.finfo(apart.dtype).tiny)
    error = float((together - apart).abs().max()) / scale
    if not error <= tolerance_of(together.dtype):
        row = int(rows[int((together - apart).abs().argmax())])
        raise CoupledSamplesError(
            f"the loss of sample {row} is off by {error:.1e} of the largest without the others",
            "Needed is a loss that computes each sample as if it were alone, without dropout",
        )


def _groups(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield parameters so many at a time that their gradients stay small."""
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, each in parameters.items():
        if group and num_bytes + each.nbytes > _GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
        group[name] = each
        num_bytes += each.nbytes
    if group:
        yield group
