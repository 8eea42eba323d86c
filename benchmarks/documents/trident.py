"""The commands of TRIDENT-Net's document."""

from __future__ import annotations

from pathlib import Path

import memfit_workloads.trident

from .lines import Document, Line

_MAKEFILE = Path(memfit_workloads.trident.__file__).parent / "Makefile"
_ORIGINAL, _MODULE = "trident.runtime.memory_efficient_cli", "memfit_workloads.trident"
_SHORT = f"python -m {_ORIGINAL} --config tasks.yml --synthetic"
"""What the document's single flags are added to."""
_VARIANTS = (
    (
        f"deepspeed --num_gpus 1 -m {_ORIGINAL} --config tasks.yml --use-fp16 "
        "--checkpoint-every-layer --grad-accum-steps 4 --optimizer adamw8bit --zero-stage 2 "
        "--synthetic"
    ),
    (
        f"python -m {_ORIGINAL} --config tasks.yml --use-fp16 --checkpoint-every-layer "
        "--grad-accum-steps 4 --optimizer paged_adamw8bit --device-map auto --max-gpu-mem 39GiB "
        "--cpu-mem 30GiB --zero-stage 0 --synthetic"
    ),
    (
        f"python -m {_ORIGINAL} --config tasks.yml --use-bf16 --checkpoint-every-layer "
        "--grad-accum-steps 16 --optimizer paged_adamw8bit --qlora --device-map auto "
        "--max-gpu-mem 39GiB --synthetic"
    ),
)
_FLAGS = (
    "--grad-accum-steps 8 --batch-size 2",
    "--max-gpu-mem 39GiB --cpu-mem 70GiB --offload-folder ./offload",
    "--checkpoint-every-layer",
    "--no-checkpointing",
    "--grad-accum-steps 16",
    "--batch-size 1",
    "--zero-stage 3",
    "--zero-stage 2",
    "--qlora",
    "--deepspeed-config ds_config.json",
    "--device-map balanced",
    "--device-map custom",
    "--no-fp16",
)
_TARGETS = (
    *("deps", "verify-install", "test-cpu", "test-smoke", "train-deepspeed", "train-accelerate"),
    *("train-qlora", "monitor-memory", "check-gpu"),
)
_OTHERS = ("nvidia-smi", 'python -c "import torch; print(torch.cuda.is_available())"')


def _line(command: str) -> Line:
    typed = command.replace(_ORIGINAL, _MODULE)
    if typed.startswith("deepspeed"):
        typed = typed.replace(" -m ", " --module ")
    return Line(document=command, typed=typed)


def _prepare(_: Path) -> None:
    """Need no file: where tasks.yml and ds_config.json are missing, the workload's own serve."""


TRIDENT = Document(
    workload="trident",
    lines=(
        *(_line(command) for command in _VARIANTS),
        *(_line(f"{_SHORT} {flags}") for flags in _FLAGS),
        *(
            Line(document=f"make {target}", typed=f'make -f "{_MAKEFILE}" {target}')
            for target in _TARGETS
        ),
        *(Line(document=command, typed=command) for command in _OTHERS),
    ),
    prepare=_prepare,
)
