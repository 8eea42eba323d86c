"""Proves on a few samples that factors give the inner products that backward passes give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from memfit.errors import CoupledSamplesError
from memfit.session.block_names import first_few
from memfit.units import MIB

from .gradients import GradientReader, check_number
from .layouts import tolerance_of
from .samples import Samples

_NUM_SAMPLES = 3
_GROUP_BYTES = 32 * MIB
"""How much of the parameters has its gradients compared at a time, beyond a single one."""


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
    worst = 0.0
    for group in _groups(reader.parameters):
        each = [reader.gradient(samples, row[None], group) for row in rows]
        for name in group:
            if name in reader.unread:
                continue
            factors = found.factors.get(name, [])
            expected = _gram([grads.get(name) for grads in each])
            got = _zero_gram(len(rows))
            if factors:
                single = type(found)(num_samples=len(rows), factors={name: factors})
                got = single.inner_products(single, reader.limit_bytes).double().cpu()
            error = _relative_error(got, expected)
            if error <= tolerance_of(reader.parameters[name].dtype):
                worst = max(worst, error)
            else:
                reader.unread[name] = f"its factors were off by {error:.1e} on a few samples"
    return worst


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


def _gram(gradients: list[Tensor | None]) -> Tensor:
    """Return the inner products of dense gradients, None being zero: (n, n) in float64."""
    gram = _zero_gram(len(gradients))
    for i, one in enumerate(gradients):
        for j, other in enumerate(gradients):
            if one is not None and other is not None:
                gram[i, j] = float((one * other).sum())
    return gram


def _zero_gram(num_samples: int) -> Tensor:
    return torch.zeros((num_samples, num_samples), dtype=torch.float64)


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest squared norm."""
    scale = float(expected.diagonal().max())
    error = float((got - expected).abs().max())
    if scale == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / scale
