"""What the contrastive step of `memfit train naics` takes under cached gradients.

The step has four encoders with LoRA and dropout, a mixture of experts whose balance is taken over
the whole batch, the Lorentz projection, the decoupled loss with explicit negatives and the
hierarchy loss. Gradients are compared in fp64 with one pass over the batch, under the same masks.
Peaks are measured, by what torch's CPU allocator reports, at batches of 32 and 1024 anchors and one
size of the pieces. Times are CPU seconds of plain and planned steps in turns, so that other work on
the machine does not count; some plans keep pieces instead of running them again. The encoders have
MiniLM's architecture, smaller, and for times its size too, with random weights; the texts are those
that ship.

Run: python benchmarks/bench_naics.py        (about eight minutes on one core)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from results_file import save_result
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import memfit
from memfit import Job, Plan
from memfit.strategies import build_strategy
from memfit_workloads.naics.data_module import NaicsData, StepSettings
from memfit_workloads.naics.embedder import EmbedderSizes
from memfit_workloads.naics.encoders import RANDOM, EncoderSizes
from memfit_workloads.naics.module import LossSettings, NaicsContrastive, OptimizerSettings
from memfit_workloads.naics.sampling import Stage
from memfit_workloads.naics.texts import CHANNELS, read_texts
from memfit_workloads.naics.tokens import token_table
from memfit_workloads.naics.tree import make_tree

_BATCH_SIZES = (32, 1024)
_EXACT_BATCH = 128
_PLAIN_BATCH = 128
_PIECE = 32
_NUM_TOKENS, _NUM_ROUNDS = 12, 3
_ENCODER = EncoderSizes(
    base=RANDOM, vocabulary=4000, width=96, layers=2, heads=4, hidden=384, positions=_NUM_TOKENS
)
_SIZES = EmbedderSizes(encoder=_ENCODER, expert_hidden=128, residual=False)

_MINILM_BATCH, _MINILM_TOKENS = 64, 16
_MINILM = replace(_ENCODER, width=384, layers=6, heads=12, hidden=1536, positions=_MINILM_TOKENS)
_KEPT_PIECES = (0, 1, 2)


def _data(encoder: EncoderSizes) -> NaicsData:
    texts = read_texts()
    tree = make_tree(list(texts))
    lengths = dict.fromkeys(CHANNELS, encoder.positions)
    table = token_table([texts[code] for code in tree.codes], encoder, lengths)
    stage = Stage(name="05", n_positives=1, n_negatives=8)
    return NaicsData(tree, table, range(len(tree)), stage, StepSettings(batch_size=32))


class _Bench:
    """Batches and jobs of one model."""

    def __init__(self, sizes: EmbedderSizes, batch_sizes: Sequence[int]) -> None:
        self._sizes = sizes
        data = _data(sizes.encoder)
        order = torch.randperm(len(data.pairs), generator=torch.Generator().manual_seed(0))
        pairs = [tuple(data.pairs[row]) for row in order]
        self._batches = {size: data.make_step(pairs[:size]) for size in batch_sizes}

    @property
    def encoder(self) -> EncoderSizes:
        return self._sizes.encoder

    def batch(self, size: int) -> Any:
        return self._batches[size]

    def job(self, batch_size: int, *, is_double: bool = False) -> Job:
        def model() -> nn.Module:
            found = NaicsContrastive(self._sizes, LossSettings(), OptimizerSettings())
            return found.double() if is_double else found

        def batch(size: int) -> Any:
            return tree_map_only(Tensor, lambda each: each[:size], self._batches[batch_size])

        return Job(
            model=model,
            batch=batch,
            loss=lambda model, batch: model.loss_terms(batch)["loss"],
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            batch_size=batch_size,
        )


class _InPieces:
    """Call an embedder piece by piece in one pass, which draws the masks of the pieces."""

    def __init__(self, embedder: nn.Module) -> None:
        self._embedder = embedder

    def __call__(self, tokens: dict[str, Tensor]) -> list[Tensor]:
        pieces = zip(*(ids.split(_PIECE) for ids in tokens.values()), strict=True)
        found = [self._embedder(dict(zip(tokens, piece, strict=True))) for piece in pieces]
        return [torch.cat(column) for column in zip(*found, strict=True)]


def _in_one_pass(job: Job) -> Job:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        embedder = model._modules.pop("embedder")
        assert embedder is not None
        try:
            model.__dict__["embedder"] = _InPieces(embedder)
            found: Tensor = job.loss(model, batch)
            return found
        finally:
            del model.__dict__["embedder"]
            model._modules["embedder"] = embedder

    return replace(job, loss=loss)


def _plan(kept_pieces: int = 0) -> Plan:
    settings = {"micro_batch_size": _PIECE, "kept_pieces": kept_pieces}
    return Plan(strategies=(build_strategy("cached-gradients", settings),))


def main() -> None:
    """Compare gradients, peaks and times."""
    torch.set_num_threads(1)
    started = time.process_time()
    bench = _Bench(_SIZES, (*_BATCH_SIZES, _EXACT_BATCH, _PLAIN_BATCH))
    loss_error, gradient_error = _errors(bench)
    peaks = [_peaks(bench, size) for size in _BATCH_SIZES]
    first, last = (row["measured_peak_bytes"] for row in (peaks[0], peaks[-1]))
    print(loss_error, gradient_error, peaks, flush=True)
    small = _in_turns(bench, _PLAIN_BATCH)
    print(small, flush=True)
    sizes = EmbedderSizes(encoder=_MINILM, expert_hidden=1024, residual=False)
    large = _in_turns(_Bench(sizes, (_MINILM_BATCH,)), _MINILM_BATCH)
    print(large, flush=True)
    save_result(
        "naics",
        {
            "piece": _PIECE,
            "tokens": _NUM_TOKENS,
            "width": _ENCODER.width,
            "layers": _ENCODER.layers,
            "exact_batch": _EXACT_BATCH,
            "loss_error": loss_error,
            "gradient_error": gradient_error,
            "peaks": peaks,
            "growth_fraction": round(last / first - 1, 4),
            "times": [small, large],
            "cpu_seconds": round(time.process_time() - started),
        },
    )


def _errors(bench: _Bench) -> tuple[float, float]:
    """Return the relative error of the loss, and the largest of a gradient, in fp64."""
    print("gradients", flush=True)
    job, batch = bench.job(_EXACT_BATCH, is_double=True), bench.batch(_EXACT_BATCH)
    loss, found = _gradients(job, _plan(), batch)
    expected_loss, expected = _gradients(_in_one_pass(job), Plan(), batch)
    errors = [
        float((mine - its).norm() / its.norm().clamp(min=1e-12))
        for mine, its in zip(found, expected, strict=True)
    ]
    return abs(loss / expected_loss - 1), max(errors)


def _gradients(job: Job, plan: Plan, batch: Any) -> tuple[float, list[Tensor]]:
    """Run one step and catch the gradients before the update."""
    torch.manual_seed(0)
    with memfit.start(job, plan, guard=False) as run:
        caught: list[Tensor] = []

        def catch(*_: Any) -> None:
            caught.extend(p.grad.clone() for p in run.model.parameters() if p.grad is not None)

        run.optimizer.register_step_pre_hook(catch)
        torch.manual_seed(2)
        loss = float(run.step(batch).loss)
    return loss, caught


def _peaks(bench: _Bench, size: int) -> dict[str, int]:
    """Return the peak of two steps."""
    print("batch", size, flush=True)
    job = bench.job(size)
    with memfit.start(job, _plan(), guard=False) as run:
        for _ in range(2):
            run.step(bench.batch(size))
        measured = run.measured_peak_bytes
    assert measured is not None, "peaks are measured on the CPU"
    return {
        "batch_size": size,
        "measured_peak_bytes": measured,
    }


def _in_turns(bench: _Bench, batch_size: int) -> dict[str, Any]:
    """Take plain and planned steps in turns; give times and peaks."""
    print("times", batch_size, flush=True)
    job, batch = bench.job(batch_size), bench.batch(batch_size)
    plans = [Plan(), *map(_plan, _KEPT_PIECES)]
    with ExitStack() as stack:
        runs = [stack.enter_context(memfit.start(job, plan, guard=False)) for plan in plans]
        rounds: list[list[float]] = []
        while len(rounds) < _NUM_ROUNDS:
            turns = [_timed(run, batch) for run in runs]
            if not any(is_watched for _, is_watched in turns):  # the first steps are, and slower
                rounds.append([seconds for seconds, _ in turns])
        peaks = [run.measured_peak_bytes for run in runs]
    plain_seconds, *planned_seconds = zip(*rounds, strict=True)
    return {
        "width": bench.encoder.width,
        "layers": bench.encoder.layers,
        "tokens": bench.encoder.positions,
        "plain_batch": batch_size,
        "plain_seconds": [round(each, 3) for each in plain_seconds],
        "plain_measured_peak_bytes": peaks[0],
        "planned": [
            {
                "kept_pieces": kept,
                "seconds": [round(each, 3) for each in seconds],
                "median_ratio": _median_ratio(seconds, plain_seconds),
                "measured_peak_bytes": peak,
                "peak_fraction": round((peak or 0) / (peaks[0] or 1), 3),
            }
            for kept, seconds, peak in zip(_KEPT_PIECES, planned_seconds, peaks[1:], strict=True)
        ],
    }


def _median_ratio(planned: Sequence[float], plain: Sequence[float]) -> float:
    return round(median(mine / its for mine, its in zip(planned, plain, strict=True)), 3)


def _timed(run: Any, batch: Any) -> tuple[float, bool]:
    """Take a step; say how many CPU seconds it took, and whether its memory was watched."""
    started = time.process_time()
    result = run.step(batch)
    return time.process_time() - started, result.measured_peak_bytes is not None


if __name__ == "__main__":
    main()
