"""Streaming over the kernels of a mixture: how exact, how much memory, how fast, on how many ranks.

Run: python benchmarks/bench_set_losses.py        (about ten minutes on two idle cores)

The direct computation forms every precision matrix, as the document's sequence of operators does.
Memory is read from the allocator's events, beyond the network's weights and gradients; times are
medians of the ratios to storing everything in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results_file import save_result
from torch import Tensor
from torch.multiprocessing import spawn

from memfit.losses import mixture_score_matching
from memfit.observe.allocator_events import AllocatorWatch
from memfit.units import MIB
from memfit_workloads.wpo_sgm.model import KernelMixture
from memfit_workloads.wpo_sgm.sizes import SOFTPLUS, MixtureSizes

_WIDE = {"num_dimensions": 1024, "hidden_units": 8, "depth": 2}
_BATCH_SIZE = 8
_CHUNKS = (1, 4, 16)
_MANY = (100, 1000, 10_000)
_MANY_CHUNK = 4
_Step = Callable[[], Tensor]


def main() -> None:
    """Measure everything, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args()
    save_result(
        "set_losses",
        {
            "exactness": {**_exactness(), "ranks": _over_ranks()},
            "memory": _memory(args.num_rounds),
            "many": _many_centres(),
        },
    )


def build(num_centres: int, seed: int = 0, **sizes: int) -> KernelMixture:
    """Build a mixture whose kernels differ."""
    torch.manual_seed(seed)
    shape = MixtureSizes(num_centres=num_centres, precision=SOFTPLUS, **sizes)
    mixture = KernelMixture(shape, torch.randn(num_centres, shape.num_dimensions))
    with torch.no_grad():
        mixture.network.last.weight.normal_(0.0, 0.02)
    return mixture


def direct(mixture: KernelMixture, samples: Tensor) -> Tensor:
    """Compute the objective by forming every precision matrix."""
    centres, size = mixture.centres, mixture.sizes.num_dimensions
    outputs = mixture.network(centres)
    lower = outputs.new_zeros(len(centres), size * size)
    lower = lower.index_copy(1, mixture.places, outputs).reshape(-1, size, size)
    diagonal = torch.nn.functional.softplus(lower.diagonal(dim1=1, dim2=2)) + 1e-6
    lower = lower.tril(-1) + torch.diag_embed(diagonal)
    precision = lower @ lower.transpose(1, 2)
    delta = samples[:, None] - centres
    u = torch.einsum("kij,bkj->bki", precision, delta)
    weight = torch.softmax(diagonal.log().sum(1) - 0.5 * (delta * u).sum(2), 1)
    a = u.square().sum(2) - precision.diagonal(dim1=1, dim2=2).sum(1)
    score = -(weight[..., None] * u).sum(1)
    return (2 * (weight * a).sum(1) - score.square().sum(1)).mean()


def _exactness() -> dict[str, float]:
    """Compare in fp64 over chunk sizes and tiles, and with an autograd Hessian."""
    mixture = build(13, num_dimensions=6, hidden_units=8, depth=2).double()
    samples = torch.randn(5, 6, dtype=torch.float64)
    expected = _with_gradients(mixture, direct(mixture, samples))
    worst = 0.0
    for chunk in (1, 2, 3, 5, 12, 13, 50):
        for tile in (None, 1, 2):
            found = _streamed(mixture, samples, chunk=chunk, tile=tile)
            worst = max(worst, _error(_with_gradients(mixture, found), expected))
    hessian = abs(float(direct(mixture, samples).detach() - _by_hessian(mixture, samples)))
    return {
        "largest_error": worst,
        "error_of_the_objective": hessian / abs(float(expected[0])),
    }


def _streamed(
    mixture: KernelMixture, samples: Tensor, *, chunk: int | None, tile: int | None = None
) -> Tensor:
    return mixture_score_matching(
        mixture.kernels, mixture.centres, samples, chunk=chunk, tile=tile, group=mixture.group
    )


def _by_hessian(mixture: KernelMixture, samples: Tensor) -> float:
    total = 0.0
    for sample in samples:

        def density(point: Tensor) -> Tensor:
            return mixture.log_density(point[None])[0]

        score = torch.autograd.functional.jacobian(density, sample)
        hessian = torch.autograd.functional.hessian(density, sample)
        total += float(2 * hessian.trace() + score.square().sum())
    return total / len(samples)


def _with_gradients(mixture: KernelMixture, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(mixture.network.parameters()))]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def _over_ranks() -> list[dict[str, Any]]:
    """Split uneven numbers of centres over ranks; compare loss, gradients and memory with one."""
    rows = []
    for num_ranks in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (num_ranks, folder), nprocs=num_ranks)
            found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(num_ranks)]
        rows.append(
            {
                "num_ranks": num_ranks,
                "largest_error": max(each["error"] for each in found),
                "is_in_step": all(each["gradients"] == found[0]["gradients"] for each in found),
                "peak_bytes": [each["peak_bytes"] for each in found],
            }
        )
    return rows


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    """Be one of several ranks: hold a part of the centres, and store all of its kernels at once."""
    torch.set_num_threads(1)
    address = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    sizes = {"num_dimensions": 96, "hidden_units": 8, "depth": 2}
    num_centres = 50 * 4 + 3
    whole = build(num_centres, **sizes).double()
    torch.manual_seed(1)
    samples = torch.randn(4, 96, dtype=torch.float64)
    expected = _with_gradients(whole, direct(whole, samples))
    own = build(num_centres, **sizes).double()
    own.centres = whole.centres.tensor_split(num_ranks)[rank].clone()
    own.group = dist.group.WORLD
    with AllocatorWatch() as watch:
        found = _with_gradients(own, _streamed(own, samples, chunk=num_centres))
    content = {
        "error": _error(found, expected),
        "gradients": float(sum(each.sum() for each in found)),
        "peak_bytes": watch.highest_growth_bytes() - _weight_bytes(own),
    }
    torch.save(content, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _memory(num_rounds: int) -> dict[str, Any]:
    """Take the ways side by side: peaks, and times in turns."""
    mixture = build(200, **_WIDE)
    samples = torch.randn(_BATCH_SIZE, _WIDE["num_dimensions"])
    ways: dict[str, _Step] = {
        "direct": partial(direct, mixture, samples),
        "stored": partial(_streamed, mixture, samples, chunk=None),
        **{
            f"streamed, {chunk} at a time": partial(_streamed, mixture, samples, chunk=chunk)
            for chunk in _CHUNKS
        },
    }
    peaks = {name: _peak_bytes(mixture, step) for name, step in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, step in ways.items():
            seconds[name].append(_seconds(mixture, step))
    rows = []
    for name in ways:
        pairs = zip(seconds[name], seconds["stored"], strict=True)
        ratios = [a / b for a, b in pairs]
        row = {
            "name": name,
            "peak_bytes": peaks[name],
            "seconds": round(statistics.median(seconds[name]), 3),
            "time_over_stored": round(statistics.median(ratios), 3),
        }
        rows.append(row)
        print(f"{name:28s} {peaks[name] / MIB:8.1f} MiB  {row['time_over_stored']:.2f} x")
    return {
        **_WIDE,
        "num_centres": 200,
        "batch_size": _BATCH_SIZE,
        "precision_bytes": 200 * _WIDE["num_dimensions"] ** 2 * 4,
        "rows": rows,
    }


def _many_centres() -> list[dict[str, Any]]:
    """Let the number of centres grow."""
    rows = []
    for num_centres in _MANY:
        mixture = build(num_centres, **_WIDE)
        samples = torch.randn(_BATCH_SIZE, _WIDE["num_dimensions"])
        step = partial(_streamed, mixture, samples, chunk=_MANY_CHUNK)
        peak_bytes = _peak_bytes(mixture, step)
        seconds = min(_seconds(mixture, step) for _ in range(3 if num_centres < 5000 else 1))
        rows.append(
            {
                "num_centres": num_centres,
                "chunk": _MANY_CHUNK,
                "peak_bytes": peak_bytes,
                "seconds_per_centre": seconds / num_centres,
            }
        )
        print(f"{num_centres:6d} centres: {peak_bytes / MIB:.1f} MiB, {seconds:.2f} s")
    return rows


def _peak_bytes(mixture: KernelMixture, step: _Step) -> int:
    """Return what a step takes beyond the network's weights and gradients."""
    step().backward()
    _clear(mixture)
    with AllocatorWatch() as watch:
        step().backward()
    _clear(mixture)
    return watch.highest_growth_bytes() - _weight_bytes(mixture)


def _seconds(mixture: KernelMixture, step: _Step) -> float:
    started = time.perf_counter()
    step().backward()
    seconds = time.perf_counter() - started
    _clear(mixture)
    return seconds


def _clear(mixture: KernelMixture) -> None:
    for parameter in mixture.parameters():
        parameter.grad = None


def _weight_bytes(mixture: KernelMixture) -> int:
    return sum(each.numel() * each.element_size() for each in mixture.parameters())


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
