"""The measurements of ``memfit calibrate``: what a card's figures are, read from the card itself.

``measure_card`` says what is measured and how figures follow from readings; a ``Card`` carries the
work out. ``TorchCard`` is the real one; it is handed the torch module, so that this file can be
imported and tested without torch and without a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from memfit.units import GIB, MIB

from .calibration import CardIdentity
from .occupancy import ManagedCard

Work = Callable[[], object]

# Tensor cores know TF32 and bfloat16 since compute capability 8.0 and float16 since 7.0.
# Source: NVIDIA CUDA C++ Programming Guide, arithmetic instructions.
_OLDEST_BY_RATE = {"float32": (0, 0), "tf32": (8, 0), "float16": (7, 0), "bfloat16": (8, 0)}
_COPY_BYTES = 512 * MIB
_SMALL_CARD_BYTES = 14 * GIB
_WIDTH = 8192
_SMALL_WIDTH = 4096
_PROBE_WIDTH = 256
_FLOAT32_BYTES = 4
_NUM_LAUNCHES = 2000
_NUM_ROUNDS = 3
_ROUND_SECONDS = 0.4
_MOST_REPEATS = 200

STAGES = (
    ("context_after_init_bytes", "CUDA context after torch.cuda.init"),
    ("context_after_cublas_bytes", "CUDA context after a matrix product"),
    ("context_bytes", "CUDA context after a convolution"),
    ("cublas_workspace_bytes", "cuBLAS workspace of one thread"),
    ("cublaslt_workspace_bytes", "what a product with a bias takes beside it"),
    ("memory_bandwidth_bytes_per_second", "copies on the card"),
    ("link_bytes_per_second", "copies from pinned host memory"),
    ("matrix_<dtype>_flops_per_second", "matrix products in each dtype that the card has"),
    ("launch_seconds", "the smallest operators, one after another"),
)
"""What is measured, as ``--dry-run`` shows it."""


class Card(Protocol):
    """What the measurements ask of a card; it has not been used by this process before."""

    def identity(self) -> CardIdentity:
        """Return which card this is; makes no context."""

    def start(self) -> None:
        """Make the CUDA context."""

    def occupied_bytes(self) -> int:
        """Read what this process occupies on the card."""

    def allocated_bytes(self) -> int:
        """Read what torch's allocator has handed out."""

    def reserved_bytes(self) -> int:
        """Read what torch's allocator holds."""

    def peak_bytes(self, work: Work) -> int:
        """Return the highest number of allocated bytes while the work is done."""

    def product(self, width: int, dtype: str) -> Work:
        """Prepare a square matrix product; ``tf32`` is float32 on tensor cores."""

    def product_with_bias(self, width: int) -> Work:
        """Prepare a linear layer in float32; its result is dropped."""

    def convolution(self) -> Work:
        """Prepare a small convolution with its backward."""

    def copy(self, num_bytes: int) -> Work:
        """Prepare a copy on the card."""

    def copy_from_host(self, num_bytes: int) -> Work:
        """Prepare a copy from pinned host memory."""

    def smallest_operator(self) -> Work:
        """Prepare an operator whose work takes no time."""

    def seconds(self, work: Work, num_repeats: int) -> float:
        """Time the work, done several times and waited for, in seconds for all of them."""

    def release(self) -> None:
        """Give cached memory back."""


def measure_card(card: Card) -> dict[str, float]:
    """Measure a card; takes well under a minute.

    The order matters: libraries are loaded one by one, and the context is read after each.
    """
    identity = card.identity()
    values: dict[str, float] = {
        "memory_bytes": identity.memory_bytes,
        "num_multiprocessors": identity.num_multiprocessors,
    }
    values |= context_and_workspaces(card)
    is_small = identity.memory_bytes < _SMALL_CARD_BYTES
    copied_bytes = _COPY_BYTES // 4 if is_small else _COPY_BYTES
    # A copy on the card reads and writes every byte.
    values["memory_bandwidth_bytes_per_second"] = (
        2 * copied_bytes / _best_seconds(card, card.copy(copied_bytes))
    )
    card.release()
    values["link_bytes_per_second"] = copied_bytes / _best_seconds(
        card, card.copy_from_host(copied_bytes)
    )
    card.release()
    for rate, flops_per_second in _matrix_rates(card, _SMALL_WIDTH if is_small else _WIDTH):
        values[f"matrix_{rate}_flops_per_second"] = flops_per_second
        card.release()
    work = card.smallest_operator()
    card.seconds(work, _NUM_LAUNCHES)
    rounds = [card.seconds(work, _NUM_LAUNCHES) for _ in range(_NUM_ROUNDS)]
    values["launch_seconds"] = min(rounds) / _NUM_LAUNCHES
    return values


def context_and_workspaces(card: Card) -> dict[str, float]:
    """Load the libraries one by one; read the context after each, and the workspaces they keep.

    Gives the facts by name, in bytes. The card must be new to this process.
    """
    card.start()
    after_init = _context_bytes(card)
    multiply = card.product(_PROBE_WIDTH, "float32")
    before = card.allocated_bytes()
    multiply()
    workspace = card.allocated_bytes() - before
    after_cublas = _context_bytes(card)
    linear = card.product_with_bias(_PROBE_WIDTH)
    before = card.allocated_bytes()
    result_bytes = _PROBE_WIDTH**2 * _FLOAT32_BYTES
    beside = card.peak_bytes(linear) - before - result_bytes
    card.convolution()()
    return {
        "context_after_init_bytes": after_init,
        "context_after_cublas_bytes": after_cublas,
        "context_bytes": _context_bytes(card),
        "cublas_workspace_bytes": workspace,
        "cublaslt_workspace_bytes": max(0, beside),
    }


def _context_bytes(card: Card) -> int:
    """Return what the process occupies outside torch's allocator."""
    return max(0, card.occupied_bytes() - card.reserved_bytes())


def _matrix_rates(card: Card, width: int) -> Iterator[tuple[str, float]]:
    """Measure the dense matrix rate of each dtype that the card multiplies by itself."""
    capability = card.identity().compute_capability
    for rate, oldest in _OLDEST_BY_RATE.items():
        if capability >= oldest:
            work = card.product(width, rate)
            yield rate, 2 * width**3 / _best_seconds(card, work)


def _best_seconds(card: Card, work: Work) -> float:
    """Time one unit of work: the best of a few rounds, each long enough for the clock."""
    card.seconds(work, 1)  # the first time loads kernels
    once = card.seconds(work, 1)
    num_repeats = max(1, min(_MOST_REPEATS, int(_ROUND_SECONDS / max(once, 1e-6))))
    return min(card.seconds(work, num_repeats) for _ in range(_NUM_ROUNDS)) / num_repeats


class TorchCard:
    """A CUDA card of this machine, used through torch.

    What other processes hold on the card is subtracted where NVML is there; without it the figures
    are right only on a card that nothing else uses.
    """

    def __init__(self, torch: ModuleType, index: int = 0) -> None:
        self._torch = torch
        self._device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)
        uuid = getattr(self._properties, "uuid", None)
        self._managed = ManagedCard.find(None if uuid is None else str(uuid))
        found = None if self._managed is None else self._managed.occupancy()
        self._before_bytes = 0 if found is None else found.card_bytes

    def identity(self) -> CardIdentity:
        """Return which card this is, and with which software it is used."""
        found = self._properties
        return CardIdentity(
            driver_name=found.name,
            memory_bytes=found.total_memory,
            num_multiprocessors=found.multi_processor_count,
            compute_capability=(found.major, found.minor),
            torch_version=str(self._torch.__version__),
            cuda_version=self._torch.version.cuda,
            driver_version=None if self._managed is None else self._managed.driver_version(),
        )

    def start(self) -> None:
        """Make the CUDA context."""
        self._torch.cuda.init()
        self._torch.cuda.set_device(self._device)
        self._wait()

    def occupied_bytes(self) -> int:
        """Read what this process occupies: by process, else as the change of the whole card."""
        return next(iter(self.occupied_in_every_way().values()))

    def occupied_in_every_way(self) -> dict[str, int]:
        """Read what this process occupies, in bytes, the surest way first.

        ``nvml_process`` is this process alone, ``nvml_card`` the change of the whole card, and
        ``mem_get_info`` the whole card.
        """
        self._wait()
        found = None if self._managed is None else self._managed.occupancy()
        readings = {}
        if found is not None and found.process_bytes is not None:
            readings["nvml_process"] = found.process_bytes
        if found is not None:
            readings["nvml_card"] = found.card_bytes - self._before_bytes
        free_bytes, total_bytes = self._torch.cuda.mem_get_info(self._device)
        return {**readings, "mem_get_info": int(total_bytes - free_bytes)}

    def allocated_bytes(self) -> int:
        """Read what torch's allocator has handed out."""
        return int(self._torch.cuda.memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        """Read what torch's allocator holds."""
        return int(self._torch.cuda.memory_reserved(self._device))

    def peak_bytes(self, work: Work) -> int:
        """Return the highest number of allocated bytes while the work is done."""
        self._wait()
        self._torch.cuda.reset_peak_memory_stats(self._device)
        work()
        self._wait()
        return int(self._torch.cuda.max_memory_allocated(self._device))

    def product(self, width: int, dtype: str) -> Work:
        """Prepare a square matrix product into memory that is there already."""
        real = self._torch.float32 if dtype == "tf32" else getattr(self._torch, dtype)
        left = self._random(width, width, real)
        right, result = self._random(width, width, real), self._torch.empty_like(left)

        def multiply() -> None:
            backend = self._torch.backends.cuda.matmul
            usual = backend.fp32_precision
            backend.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
            try:
                self._torch.mm(left, right, out=result)
            finally:
                backend.fp32_precision = usual

        return multiply

    def product_with_bias(self, width: int) -> Work:
        """Prepare a linear layer; torch hands it to cuBLASLt."""
        inputs = self._random(width, width, self._torch.float32)
        weight = self._random(width, width, self._torch.float32)
        bias = self._torch.zeros(width, device=self._device)
        linear = self._torch.nn.functional.linear

        def apply() -> None:
            linear(inputs, weight, bias)

        return apply

    def convolution(self) -> Work:
        """Prepare a small convolution with its backward."""
        layer = self._torch.nn.Conv2d(3, 16, 3, padding=1, device=self._device)
        images = self._torch.zeros(1, 3, 64, 64, device=self._device)

        def convolve() -> None:
            layer(images).sum().backward()

        return convolve

    def copy(self, num_bytes: int) -> Work:
        """Prepare a copy on the card."""
        source = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=self._device)
        target = self._torch.empty_like(source)
        return lambda: target.copy_(source)

    def copy_from_host(self, num_bytes: int) -> Work:
        """Prepare a copy from pinned host memory."""
        source = self._torch.zeros(num_bytes, dtype=self._torch.uint8, pin_memory=True)
        target = self._torch.empty_like(source, device=self._device, pin_memory=False)
        return lambda: target.copy_(source, non_blocking=True)

    def smallest_operator(self) -> Work:
        """Prepare an addition to one number."""
        number = self._torch.zeros(1, device=self._device)
        return lambda: number.add_(1)

    def seconds(self, work: Work, num_repeats: int) -> float:
        """Time the work on the clock of the host, from an idle card to an idle card."""
        self._wait()
        started = time.perf_counter()
        for _ in range(num_repeats):
            work()
        self._wait()
        return time.perf_counter() - started

    def release(self) -> None:
        """Give cached memory back."""
        self._torch.cuda.empty_cache()

    def _random(self, rows: int, columns: int, dtype: Any) -> Any:
        return self._torch.randn(rows, columns, dtype=dtype, device=self._device)

    def _wait(self) -> None:
        self._torch.cuda.synchronize(self._device)
