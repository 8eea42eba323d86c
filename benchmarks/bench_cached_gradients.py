"""What cached gradients take for losses that couple samples, and how exact they are.

Two losses on a transformer with dropout: supervised contrastive on one view, and in-batch negatives
of queries and documents through one encoder. Gradients are compared in fp64 with one pass that
draws the same masks, and without dropout with the plain step, on an encoder of one layer. Peaks are
predicted and measured on one of four layers. Times are CPU seconds of plain and planned steps in
turns, so that other work on the machine does not count.

Run: python benchmarks/bench_cached_gradients.py        (about ten minutes on one core)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
_WIDTH, _NUM_TOKENS, _NUM_LAYERS, _OUT = 128, 16, 4, 64
_NUM_PAIRS = 3
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
        """Give a job that runs pieces one after the other, and keeps all that backward needs."""

        def loss(model: nn.Module, batch: Any) -> Tensor:
            def encode(ids: Tensor) -> Tensor:
                return torch.cat([model(piece) for piece in ids.split(_PIECE)])

            return self.loss(encode, batch)

        return Job(
            model=job.model,
            batch=job.batch,
            loss=loss,
            optimizer=job.optimizer,
            batch_size=job.batch_size,
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
    found = []
    for case in _CASES:
        print(case.name, flush=True)
        rows = [_peaks(case, batch_size) for batch_size in _BATCH_SIZES]
        growth = rows[-1]["beside_batch_bytes"] / rows[0]["beside_batch_bytes"] - 1
        found.append(
            {
                "loss": case.name,
                "gradient_error_with_dropout": _gradient_error(case, _RATE),
                "gradient_error_without_dropout": _gradient_error(case, 0.0),
                "growth_beside_batch_fraction": round(growth, 4),
                "peaks": rows,
                "seconds": _times(case),
            }
        )
    settings = {"piece": _PIECE, "width": _WIDTH, "tokens": _NUM_TOKENS, "layers": _NUM_LAYERS}
    save_result("cached_gradients", {**settings, "cases": found})


def _peaks(case: _Case, batch_size: int) -> dict[str, Any]:
    """Predict and measure a step; leave out the batch and its representations.

    Representations count twice: as they are, and with their gradients.
    """
    job = case.job(batch_size)
    plain = memfit.predict(job)
    predicted = memfit.predict(job, plan=_plan())
    measured_peak_bytes = _measured_peak_bytes(job)
    batch_bytes = sum(part.nbytes for part in case.batch(batch_size))
    representation_bytes = case.num_views * batch_size * _OUT * 4
    return {
        "batch_size": batch_size,
        "plain_predicted_peak_bytes": plain.peak_allocated_bytes,
        "predicted_peak_bytes": predicted.peak_allocated_bytes,
        "measured_peak_bytes": measured_peak_bytes,
        "batch_bytes": batch_bytes,
        "representation_bytes": representation_bytes,
        "beside_batch_bytes": measured_peak_bytes - batch_bytes - 2 * representation_bytes,
    }


def _measured_peak_bytes(job: Job) -> int:
    """Give the peak of the second step."""
    with memfit.start(job, _plan(), guard=False) as run:
        batch = job.batch(job.batch_size)
        for _ in range(2):
            result = run.step(batch)
    assert result.measured_peak_bytes is not None, "peaks are measured on the CPU"
    return result.measured_peak_bytes


def _gradient_error(case: _Case, rate: float) -> float:
    """Give the largest relative error of a gradient in fp64."""
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
    """Carry out one step and catch the gradients before the update."""
    torch.manual_seed(0)
    with memfit.start(job, plan, guard=False) as run:
        caught: list[Tensor] = []

        def catch(*_: Any) -> None:
            caught.extend(p.grad.clone() for p in run.model.parameters() if p.grad is not None)

        run.optimizer.register_step_pre_hook(catch)
        torch.manual_seed(2)
        run.step(batch)
    return caught


def _times(case: _Case) -> dict[str, Any]:
    """Time plain and planned steps in turns, in this process."""
    job = case.job(_BATCH_SIZES[-1])
    plain, planned = (memfit.start(job, plan, guard=False) for plan in (Plan(), _plan()))
    batch = case.batch(job.batch_size)
    pairs = []
    for number in range(_NUM_PAIRS + 1):
        pair = (_seconds(plain, batch), _seconds(planned, batch))
        pairs += [pair] if number else []  # the first steps make optimizer states
    for run in (plain, planned):
        run.close()
    return {
        "plain_seconds": [round(first, 3) for first, _ in pairs],
        "planned_seconds": [round(second, 3) for _, second in pairs],
        "median_ratio": round(median(second / first for first, second in pairs), 3),
    }


def _seconds(run: Any, batch: Any) -> float:
    started = time.process_time()
    run.step(batch)
    return time.process_time() - started


if __name__ == "__main__":
    main()
