"""What computing U-Nets in rows takes, how exact it is, and what it costs.

A 2-D U-Net with transposed convolutions, group norms, resizing and skips, and the 3-D U-Net of
TRIDENT-Net, each at sizes whose rows no number of tiles divides. The plan has to come down to a
quarter of the plain step's peak. Gradients are compared in fp64 with the plain step. Peaks are
measured by torch's CPU allocator. Times are CPU seconds of plain and planned steps in turns, so
that other work on the machine does not count.

Run: python benchmarks/bench_unet.py        (about ten minutes on one core)
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
from memfit_workloads.trident.sizes import DOCUMENT
from memfit_workloads.trident.video_frag import VideoFrag3Dv2

_NUM_ROUNDS = 3
_CHECKED = ((3, 0.0), (7, 0.25), (64, 0.25))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1)
        layers += [convolution, nn.GroupNorm(8, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """Three levels down by pools, and up by transposed convolutions and resizing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(map(_block, [3, *widths[:2]], widths[:3]))
        self.middle = _block(widths[2], widths[3])
        ups = list(zip(widths[:0:-1], widths[2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.join = nn.ModuleList(_block(2 * b, b) for _, b in ups)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            skip = skips.pop()
            x = F.interpolate(up(x), size=skip.shape[2:], mode="bilinear")
            x = join(torch.cat([x, skip], dim=1))
        out: Tensor = self.head(x)
        return out


def _loss_2d(model: nn.Module, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x), (x[:, :2] > 0).to(x.dtype))


def _loss_3d(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    logits: Tensor = out.mask_logits
    return F.softplus(logits).mean() + out.embedding.square().mean()


@dataclass(frozen=True)
class _Case:
    """A network with the shape of a sample, and a smaller shape for fp64."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]
    num_tiles: int
    recompute: float

    def plan(self) -> Plan:
        return _plan(self.num_tiles, self.recompute)

    def job(self, *, double: bool = False) -> Job:
        shape = self.small_shape if double else self.shape
        dtype = torch.float64 if double else torch.float32
        return Job(
            model=lambda: self.model().to(dtype),
            batch=lambda count: torch.randn(count, *shape, dtype=dtype),
            loss=self.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            batch_size=1,
        )


_CASES = (
    _Case("2-D U-Net", _UNet, _loss_2d, (3, 1201, 907), (3, 131, 97), 64, 1.0),
    _Case(
        "3-D U-Net of TRIDENT-Net",
        lambda: VideoFrag3Dv2(replace(DOCUMENT, video_channels=16)),
        _loss_3d,
        (3, 17, 197, 269),
        (3, 9, 37, 53),
        48,
        0.25,
    ),
)


def main() -> None:
    """Compare gradients, peaks and times."""
    torch.set_num_threads(1)
    started = time.process_time()
    cases = [_figures(case) for case in _CASES]
    seconds = round(time.process_time() - started)
    save_result("unet", {"cases": cases, "cpu_seconds": seconds})


def _plan(num_tiles: int, recompute: float) -> Plan:
    settings = {"num_tiles": num_tiles, "recompute": recompute}
    return Plan(strategies=(build_strategy("convolution-tiling", settings),))


def _figures(case: _Case) -> dict[str, Any]:
    print(case.name, flush=True)
    job, plan, times = case.job(), case.plan(), _Times()
    with memfit.start(job, guard=False) as plain, memfit.start(job, plan, guard=False) as tiled:
        batch = job.batch(1)
        for _ in range(_NUM_ROUNDS + 1):
            times.add(lambda: plain.step(batch), lambda: tiled.step(batch))
    plain_bytes, tiled_bytes = (memfit.measure(job, plan=each) for each in (Plan(), plan))
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    return {
        "network": case.name,
        "shape": list(case.shape),
        "num_tiles": case.num_tiles,
        "recompute": case.recompute,
        "plain_measured_peak_bytes": plain_bytes.peak_allocated_bytes,
        "measured_peak_bytes": tiled_bytes.peak_allocated_bytes,
        "predicted_peak_bytes": predicted,
        "peak_fraction": round(
            tiled_bytes.peak_allocated_bytes / plain_bytes.peak_allocated_bytes, 4
        ),
        "seconds": times.figures(),
        "checked_shape": list(case.small_shape),
        "gradient_errors": [
            {"num_tiles": tiles, "recompute": again, "error": _gradient_error(case, tiles, again)}
            for tiles, again in _CHECKED
        ],
    }


class _Times:
    """CPU seconds of two steps in turns; the first round warms up."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float]] = []

    def add(self, *steps: Callable[[], Any]) -> None:
        marks = [time.process_time()]
        for step in steps:
            step()
            marks.append(time.process_time())
        self._rows.append((marks[1] - marks[0], marks[2] - marks[1]))

    def figures(self) -> dict[str, Any]:
        rows = self._rows[1:]
        ratios = [tiled / plain for plain, tiled in rows]
        return {
            "plain": [round(plain, 2) for plain, _ in rows],
            "tiled": [round(tiled, 2) for _, tiled in rows],
            "median_ratio": round(median(ratios), 3),
        }


def _gradient_error(case: _Case, num_tiles: int, recompute: float) -> float:
    """Return the largest difference of a gradient in fp64, as a part of the largest of its tensor.

    Biases ahead of a group norm have gradients of rounding alone; they are left out.
    """
    job = case.job(double=True)
    torch.manual_seed(1)
    batch = job.batch(1)
    found, expected = (
        _gradients(job, plan, batch) for plan in (_plan(num_tiles, recompute), Plan())
    )
    largest = max(float(each.abs().max()) for each in expected)
    return max(
        float((mine - its).abs().max() / its.abs().max())
        for mine, its in zip(found, expected, strict=True)
        if its.abs().max() > 1e-12 * largest
    )


def _gradients(job: Job, plan: Plan, batch: Tensor) -> list[Tensor]:
    """Run one step and catch the gradients before the update."""
    torch.manual_seed(0)
    with memfit.start(job, plan, guard=False) as run:
        caught: list[Tensor] = []

        def catch(*_: Any) -> None:
            caught.extend(p.grad.clone() for p in run.model.parameters() if p.grad is not None)

        run.optimizer.register_step_pre_hook(catch)
        run.step(batch)
        return caught


if __name__ == "__main__":
    main()
