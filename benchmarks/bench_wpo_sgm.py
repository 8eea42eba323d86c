"""WPO-SGM as a whole: the document's scale on a CPU, and how good the trained mixtures are.

Run: python benchmarks/bench_wpo_sgm.py        (about half an hour on two idle cores)
     python benchmarks/bench_wpo_sgm.py --only scale
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, load_result, save_result
from torch import Tensor

import memfit
from memfit.losses import mixture_score_matching
from memfit.units import GIB, format_bytes
from memfit_workloads.wpo_sgm import WORKLOAD
from memfit_workloads.wpo_sgm.data import DataSizes, Samples, load_samples
from memfit_workloads.wpo_sgm.evaluation import compare, negative_log_likelihood
from memfit_workloads.wpo_sgm.job import build_job, build_mixture, sizes_for
from memfit_workloads.wpo_sgm.model import KernelMixture
from memfit_workloads.wpo_sgm.sampling import draw
from memfit_workloads.wpo_sgm.settings import settings_from
from memfit_workloads.wpo_sgm.sizes import EPS, MixtureSizes

_SCALE_BUDGET_BYTES = 8 * GIB
_SEEDS = (0, 1, 2)
_ENTROPY = 2.84
_NUM_CENTRES, _NUM_STEPS, _BATCH_SIZE, _LEARNING_RATE = 64, 500, 256, 2e-3
_FIGURES = Path(__file__).parents[1] / "docs" / "figures"
_PART = 16
"""Centres per part of the naive way."""
_Loss = Callable[[KernelMixture, Tensor], Tensor]
# Whitened data vary by 1 in every direction, no cluster by more: a precision is I at least.
_RUNS = {
    "digits": (
        *("--data", "digits", "--train_kernel_size", "50", "--train_samples_size", "1200"),
        *("--validation_samples_size", "200", "--test_samples_size", "397"),
        *("--data_noise", "0.1"),
    ),
    "patches8": (
        *("--data", "patches8", "--train_kernel_size", "100", "--train_samples_size", "4000"),
        *("--validation_samples_size", "500", "--test_samples_size", "1000"),
        *("--data_noise", "0.02"),
    ),
}
_TRAINING = (
    *("--stability", "1", "--niters", "1000", "--batch_size", "64", "--lr", "1e-3"),
    *("--whiten", "--centers", "kmeans"),
    *("--eval_every", "100", "--num_generated", "1000", "--no-gpu"),
)


def main() -> None:
    """Run the parts that are asked for, and keep them beside the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("scale", "toy", "pictures"))
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(_one_step()))
        return
    kept = load_result("wpo_sgm") if (RESULTS / "wpo_sgm.json").exists() else {}
    parts = {"scale": _scale, "toy": _toy, "pictures": _pictures}
    found = {name: make() for name, make in parts.items() if args.only in (None, name)}
    save_result("wpo_sgm", {name: found.get(name, kept.get(name)) for name in parts})


def _scale() -> dict[str, Any]:
    """Run one step of the document's size in a process of its own."""
    words = [sys.executable, __file__, "--step"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    error = figures["predicted_process_bytes"] / figures["measured_process_bytes"] - 1
    figures["error_fraction"] = round(error, 4)
    print(json.dumps(figures), file=sys.stderr)
    return figures


def _one_step() -> dict[str, Any]:
    """Plan for 3072 dimensions and 1000 centres; measure the second step, as the plan means it.

    The first step makes the optimizer's states, after the backward pass has freed what it held.
    """
    job = _scale_job()
    started = time.perf_counter()
    plan = memfit.plan(job, "cpu", _SCALE_BUDGET_BYTES, budget_of="process")
    planned_seconds = time.perf_counter() - started
    run = memfit.start(job, plan)
    batch = job.batch(job.batch_size)
    first = run.step(batch)
    started = time.perf_counter()
    result = run.step(batch)
    step_seconds = time.perf_counter() - started
    assert plan.prediction is not None, "a plan that was found has one"
    return {
        "num_parameters": sum(each.numel() for each in run.model.parameters()),
        "budget_bytes": _SCALE_BUDGET_BYTES,
        "strategies": list(plan.labels()),
        "plan_seconds": round(planned_seconds, 1),
        "step_seconds": round(step_seconds, 1),
        "losses": [float(first.loss), float(result.loss)],
        "predicted_process_bytes": plan.prediction.process_bytes,
        "measured_process_bytes": _highest_process_bytes(),
        "measured_peak_bytes": result.measured_peak_bytes,
        "predicted_peak_bytes": plan.prediction.peak_allocated_bytes,
    }


def _scale_job() -> Any:
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    words = "--train_kernel_size 1000 --train_samples_size 1000 --precision softplus --batch_size 8"
    settings = settings_from(parser.parse_args(words.split()), "")
    torch.manual_seed(0)
    data = torch.randn(1000, 3072)
    samples = Samples(name="noise", train=data, validation=data[:1], test=data[:1])
    return build_job(settings, sizes_for(settings, 3072), data.clone(), samples)


def _highest_process_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _toy() -> list[dict[str, Any]]:
    """Train on eight Gaussians in the exact way and in both wrong ones."""
    ways: dict[str, _Loss] = {
        "exact": lambda mixture, x: mixture.score_matching(x, chunk=_PART),
        "mean over parts": _naive,
        "|P d|^2 in the weights": _wrong_weights,
    }
    rows = []
    for seed in _SEEDS:
        parts = DataSizes(num_train=4000, num_validation=1000, num_test=4000)
        samples = load_samples("8gaussians", parts, seed=seed)
        for name, loss in ways.items():
            mixture = _trained(samples, loss, seed)
            nll = negative_log_likelihood(mixture, samples.test, chunk=_NUM_CENTRES)
            generator = torch.Generator().manual_seed(seed)
            drawn = draw(mixture, 2000, generator, chunk=_NUM_CENTRES)
            row = {"seed": seed, "way": name, "test_nll": nll, "entropy": _ENTROPY}
            row |= compare(drawn, samples.test[:2000], samples.train, generator)
            rows.append(row)
            print(f"{name:24s} seed {seed}: NLL {nll:.3f}")
    return rows


def _trained(samples: Samples, loss: _Loss, seed: int) -> KernelMixture:
    sizes = MixtureSizes(num_dimensions=2, num_centres=_NUM_CENTRES, precision=EPS)
    mixture = build_mixture(sizes, samples.train[:_NUM_CENTRES].clone(), seed)
    optimizer = torch.optim.Adam(mixture.parameters(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_NUM_STEPS):
        rows = torch.randint(0, len(samples.train), (_BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss(mixture, samples.train[rows]).backward()
        optimizer.step()
    return mixture


def _naive(mixture: KernelMixture, samples: Tensor) -> Tensor:
    """Average the losses of parts, each a mixture of its own."""
    parts = mixture.centres.split(_PART)
    losses = [mixture_score_matching(mixture.kernels, part, samples) for part in parts]
    return torch.stack(losses).mean()


def _wrong_weights(mixture: KernelMixture, samples: Tensor) -> Tensor:
    """Weight kernels by |P d|^2 where the quadratic form d^T P d belongs."""
    kernels = mixture.kernels(mixture.centres)
    precision = kernels.factors @ kernels.factors.transpose(1, 2)
    precision = precision + torch.diag_embed(kernels.diagonals)
    delta = samples[:, None] - mixture.centres
    u = torch.einsum("kij,bkj->bki", precision, delta)
    weight = torch.softmax(0.5 * kernels.log_determinants - 0.5 * u.square().sum(2), 1)
    a = u.square().sum(2) - precision.diagonal(dim1=1, dim2=2).sum(1)
    score = -(weight[..., None] * u).sum(1)
    return (2 * (weight * a).sum(1) - score.square().sum(1)).mean()


def _pictures() -> list[dict[str, Any]]:
    """Train on digits and patches by the command line, and read what it reports."""
    rows = []
    for name, words in _RUNS.items():
        folder = Path("runs") / f"bench-{name}"
        command = [sys.executable, "-m", "memfit", "train", "wpo-sgm", *words, *_TRAINING]
        command += ["--save", str(folder), "--overwrite", "--json"]
        started = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        shutil.copy(Path(found["run_folder"]) / "samples.png", _FIGURES / f"wpo_sgm_{name}.png")
        rows.append(
            {
                "data": name,
                "command": " ".join(["memfit train wpo-sgm", *words, *_TRAINING]),
                "seconds": round(time.perf_counter() - started, 1),
                **{key: found[key] for key in ("predicted_peak_bytes", "measured_peak_bytes")},
                "metrics": found["metrics"],
            }
        )
        peak = format_bytes(found["measured_peak_bytes"])
        print(f"{name}: {found['metrics']}, peak {peak}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
