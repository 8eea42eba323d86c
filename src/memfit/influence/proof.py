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

_NUM_SAMPLES = 3
_BLOCK_NUMBERS = 2**18
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
    refuse_batch_statistics(reader.model)
    rows = samples.spread(_NUM_SAMPLES)
    _refuse_coupled(reader, samples, rows)
    found = reader.read(samples, rows)
    made = {name: each for name, each in found.factors.items() if name not in reader.unread}
    compared = _Compared.nothing_yet(reader, len(rows))
    for place, row in enumerate(rows):
        for group in _groups(reader.parameters):
            grads = reader.gradient(samples, row[None], group)
            for name in group:
                if name not in reader.unread:
                    compared.add(name, place, grads.get(name), made.get(name, []))
    worst = 0.0
    for name in [name for name in reader.parameters if name not in reader.unread]:
        error = compared.error(name, made.get(name, []), reader.limit_bytes)
        if error <= tolerance_of(reader.parameters[name].dtype):
            worst = max(worst, error)
        else:
            reader.unread[name] = f"its factors were off by {error:.1e} on a few samples"
    return worst


def largest_gradient(reader: GradientReader, samples: Samples) -> None:
    """Make one sample's gradients as the proof makes them, so that its peak can be recorded."""
    for group in _groups(reader.parameters):
        reader.gradient(samples, torch.arange(1), group)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Compared:
    """Whole gradients beside those from factors; of the former one sample's live at a time."""

    differences: dict[str, Tensor]
    """By parameter, the squared norm of the difference for each sample, (n,)."""
    products: dict[str, Tensor]
    """Inner products of each whole gradient with those from factors, (n, n)."""
    norms: dict[str, Tensor]
    """Squared norms of whole gradients, (n,)."""

    @classmethod
    def nothing_yet(cls, reader: GradientReader, number: int) -> Self:
        def zeros(*shape: int) -> dict[str, Tensor]:
            return {name: torch.zeros(shape, dtype=torch.float64) for name in reader.parameters}

        return cls(differences=zeros(number), products=zeros(number, number), norms=zeros(number))

    def add(self, name: str, place: int, grad: Tensor | None, factors: list[Factor]) -> None:
        """Compare one sample's whole gradient, None being zero, a few rows at a time."""
        if grad is None and not factors:
            return
        if grad is None:
            made = [factor.block(0, factor.num_rows) for factor in factors]
            self.differences[name][place] += float(torch.stack(made).sum(0)[place].square().sum())
            return
        whole = grad.reshape(grad.shape[0] if grad.dim() else 1, -1)
        self.norms[name][place] = float(whole.square().sum())
        num_samples = len(self.norms[name])
        for start, stop in block_bounds(len(whole), max(1, _BLOCK_NUMBERS // whole.shape[1])):
            part = whole[start:stop]
            made = part.new_zeros((num_samples, *part.shape))
            for factor in factors:
                made += factor.block(start, stop)
            self.differences[name][place] += float((made[place] - part).square().sum())
            self.products[name][place] += (made * part).sum(dim=(1, 2)).double().cpu()

    def error(self, name: str, factors: list[Factor], limit_bytes: int) -> float:
        """Return the largest error of gradients and of inner products, relative to the norms."""
        scale = float(self.norms[name].max())
        worst = float(self.differences[name].max()) ** 0.5
        products = self.products[name]
        if factors:
            read = SampleGradients(num_samples=len(products), factors={name: factors})
            own = read.inner_products(read, limit_bytes).double().cpu()
            products = products - own
            own_norms = read.squared_norms(limit_bytes).double().cpu()
            products = torch.cat([products, (own.diagonal() - own_norms)[None]])
        if scale == 0.0:
            return 0.0 if worst == 0.0 else math.inf
        return max(worst / scale**0.5, float(products.abs().max()) / scale)


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


def _groups(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
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
