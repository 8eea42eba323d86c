"""The commands of WPO-SGM's document, as they stand there and at a size for a CPU."""

from __future__ import annotations

from pathlib import Path

from .lines import Document, Line

_ORIGINAL, _COMMAND = "python train_wpo_sgm_memory_efficient.py", "memfit train wpo-sgm"
_EXAMPLES = (
    "--train_kernel_size 1000 --data cifar10",
    "--strategy chunked --chunk_size 50",
    "--strategy model_parallel --train_kernel_size 2000",
    "--train_kernel_size 100",
    "--train_kernel_size 500 --strategy chunked --chunk_size 50",
    "--train_kernel_size 2000 --strategy model_parallel",
    "--train_kernel_size 5000 --strategy gradient_accumulation --accumulation_steps 8",
)
_SMALL = "--data patches8 --niters 2 --eval_every 2 --num_generated 4 --no-gpu"
"""192 dimensions in place of 3,072, and two steps in place of a thousand."""


def _prepare(_: Path) -> None:
    """Put nothing there: CIFAR-10 is not to be had without a download."""


WPO_SGM = Document(
    workload="wpo-sgm",
    lines=(
        *(
            Line(document=f"{_ORIGINAL} {flags}", typed=f"{_COMMAND} {flags}")
            for flags in _EXAMPLES
        ),
        *(
            Line(
                document=f"{_ORIGINAL} {flags}",
                typed=f"{_COMMAND} {flags.replace(' --data cifar10', '')} {_SMALL}",
            )
            for flags in _EXAMPLES
        ),
    ),
    prepare=_prepare,
)
