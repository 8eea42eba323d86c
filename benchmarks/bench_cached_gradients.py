"""What cached gradients take for losses that couple samples, and how exact they are.

Two losses on a transformer with dropout: supervised contrastive on one view, and in-batch negatives
of queries and documents through one encoder. Gradients are compared in fp64 with one pass over the
whole batch that draws the same masks, and without dropout with the plain step, on an encoder of one
layer. Peaks are measured on one of three layers, by what torch's CPU allocator reports. Times are
CPU seconds of plain and planned steps in turns, so that other work on the machine does not count.

Run: python benchmarks/bench_cached_gradients.py        (about five minutes on one core)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from results_file import save_result
from torch import Tensor, nn

import memfit
from memfit import Job, Plan
from memfit.strategies import build_strategy

_BATCH_SIZES = (256, 1024)
_PIECE = 32
_WIDTH, _NUM_TOKENS, _NUM_LAYERS, _OUT = 128, 16, 3, 64
_NUM_ROUNDS = 4

_RATE = 0.1


class _Encoder(nn.Module):
    """Tokens to one vector of unit length."""

    def __init__(self, rate: float, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, 4, 4 * _WIDTH, rate, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _OUT)

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.head(self.layers(self.embedding(ids)).mean(1)), dim=-1)


def _supervised_contrastive(encode: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    ids, labels = batch
    z = encode(ids)
    scores = z @ z.T / 0.1
    itself = torch.eye(len(z), dtype=torch.bool)
    logs = scores - scores.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positives = (labels[:, None] == labels) & ~itself
    return -((logs * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


def _in_batch_negatives(encode: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    queries, documents = batch
    scores = encode(queries) @ encode(documents).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def _labelled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 1000, (size, _NUM_TOKENS)), torch.randint(0, 32, (size,))


def _pairs(size: int) -> tuple[Tensor, Tensor]:
    shape = (size, _NUM_TOKENS)
    return torch.randint(0, 1000, shape), torch.randint(0, 1000, shape)


@dataclass(frozen=True)
class _Case:
    """A loss with its batches, and how many representations a sample has."""

    name: str
    loss: Callable[[Callable[[Tensor], Tensor], Any], Tensor]
    batch: Callable[[int], Any]
    num_views: int

    def job(self, batch_size: int, *, rate: float = _RATE, double: bool = False) -> Job:
        def model() -> nn.Module:
            return _Encoder(rate, 1).double() if double else _Encoder(rate, _NUM_LAYERS)

        return Job(
            model=model,
            batch=self.batch,
            loss=self.loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            batch_size=batch_size,
        )

    def in_one_pass(self, job: Job) -> Job:
        """Return a job that runs pieces one after the other, and keeps all that backward needs."""

        def loss(model: nn.Module, batch: Any) -> Tensor:
            def encode(ids: Tensor) -> Tensor:
                return torch.cat([model(piece) for piece in ids.split(_PIECE)])

            return self.loss(encode, batch)

        return replace(job, loss=loss)

    def of_representations(self, batch_size: int) -> Job:
        """Return a job of the loss alone, on representations that are there."""

        def loss(model: nn.ParameterList, batch: Any) -> Tensor:
            views = iter(model)
            return self.loss(lambda _: next(views), batch)

        return Job(
            model=lambda: nn.ParameterList(
                torch.randn(batch_size, _OUT) for _ in range(self.num_views)
            ),
            batch=self.batch,
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=batch_size,
        )


_CASES = (
    _Case("supervised contrastive", _supervised_contrastive, _labelled, 1),
    _Case("in-batch negatives", _in_batch_negatives, _pairs, 2),
)


def _plan() -> Plan:
    return Plan(strategies=(build_strategy("cached-gradients", {"micro_batch_size": _PIECE}),))


def main() -> None:
    """Compare gradients, peaks and times."""
    torch.set_num_threads(1)
    started = time.process_time()
    cases = [_figures(case) for case in _CASES]
    sizes = {"piece": _PIECE, "width": _WIDTH, "tokens": _NUM_TOKENS, "layers": _NUM_LAYERS}
    seconds = round(time.process_time() - started)
    save_result("cached_gradients", {**sizes, "out": _OUT, "cases": cases, "cpu_seconds": seconds})


def _figures(case: _Case) -> dict[str, Any]:
    print(case.name, flush=True)
    small, large = (_memory(case, batch_size) for batch_size in _BATCH_SIZES)
    small["measured_peak_bytes"] = _peak_bytes(case)
    times, plain_peak_bytes, large["measured_peak_bytes"] = _in_turns(case)
    for row in (small, large):
        beside = row["batch_bytes"] + row["representation_bytes"] + row["their_gradient_bytes"]
        row["beside_bytes"] = row["measured_peak_bytes"] - beside
    peaks, besides = (
        large[name] / small[name] - 1 for name in ("measured_peak_bytes", "beside_bytes")
    )
    return {
        "loss": case.name,
        "gradient_error_with_dropout": _gradient_error(case, _RATE),
        "gradient_error_without_dropout": _gradient_error(case, 0.0),
        "growth_fraction": round(peaks, 4),
        "growth_beside_fraction": round(besides, 4),
        "plain_measured_peak_bytes": plain_peak_bytes,
        "peaks": [small, large],
        "seconds": times,
    }


def _memory(case: _Case, batch_size: int) -> dict[str, Any]:
    """Count what must grow with the batch, and what the loss alone takes, representations included.

    The loss has freed its matrices of all pairs when backward comes to the first piece.
    """
    representation_bytes = case.num_views * batch_size * _OUT * torch.float32.itemsize
    alone = memfit.predict(case.of_representations(batch_size))
    return {
        "batch_size": batch_size,
        "batch_bytes": sum(part.nbytes for part in case.batch(batch_size)),
        "representation_bytes": representation_bytes,
        "their_gradient_bytes": representation_bytes,
        "matrix_of_pairs_bytes": batch_size**2 * torch.float32.itemsize,
        "loss_alone_peak_bytes": alone.peak_allocated_bytes,
    }


def _peak_bytes(case: _Case) -> int:
    """Return the peak of two steps at the smaller batch."""
    job = case.job(_BATCH_SIZES[0])
    with memfit.start(job, _plan(), guard=False) as run:
        batch = job.batch(job.batch_size)
        for _ in range(2):
            run.step(batch)
        return _highest(run)


def _gradient_error(case: _Case, rate: float) -> float:
    """Return the largest relative error of a gradient in fp64."""
    job = case.job(_BATCH_SIZES[-1], rate=rate, double=True)
    reference = case.in_one_pass(job) if rate else job
    torch.manual_seed(1)
    batch = case.batch(job.batch_size)
    planned = _gradients(job, _plan(), batch)
    expected = _gradients(reference, Plan(), batch)
    return max(
        float((mine - its).norm() / its.norm().clamp(min=1e-12))
        for mine, its in zip(planned, expected, strict=True)
    )


def _gradients(job: Job, plan: Plan, batch: Any) -> list[Tensor]:
    """Run one step and catch the gradients before the update."""
    torch.manual_seed(0)
    with memfit.start(job, plan, guard=False) as run:
        caught: list[Tensor] = []

        def catch(*_: Any) -> None:
            caught.extend(p.grad.clone() for p in run.model.parameters() if p.grad is not None)

        run.optimizer.register_step_pre_hook(catch)
        torch.manual_seed(2)
        run.step(batch)
    return caught


def _in_turns(case: _Case) -> tuple[dict[str, Any], int, int]:
    """Take plain and planned steps at the larger batch in turns; give times, and both peaks."""
    job = case.job(_BATCH_SIZES[-1])
    batch = case.batch(job.batch_size)
    seconds: list[tuple[float, float]] = []
    with (
        memfit.start(job, Plan(), guard=False) as plain,
        memfit.start(job, _plan(), guard=False) as planned,
    ):
        while len(seconds) < _NUM_ROUNDS:
            turns = [_timed(run, batch) for run in (plain, planned)]
            if not any(is_watched for _, is_watched in turns):  # the first steps are, and slower
                seconds.append((turns[0][0], turns[1][0]))
        peaks = _highest(plain), _highest(planned)
    times = {
        "plain_seconds": [round(first, 3) for first, _ in seconds],
        "planned_seconds": [round(second, 3) for _, second in seconds],
        "median_ratio": round(median(second / first for first, second in seconds), 3),
    }
    return times, *peaks


def _timed(run: Any, batch: Any) -> tuple[float, bool]:
    """Take a step; say how many CPU seconds it took, and whether its memory was watched."""
    started = time.process_time()
    result = run.step(batch)
    return time.process_time() - started, result.measured_peak_bytes is not None


def _highest(run: Any) -> int:
    peak_bytes: int | None = run.measured_peak_bytes
    assert peak_bytes is not None, "peaks are measured on the CPU"
    return peak_bytes


if __name__ == "__main__":
    main()
