"""What other ways to predict say of the same rows, stored as data so that pages need none of them.

Run: python benchmarks/accuracy/peers.py [--tools FOLDER] [--only TOOL]
Writes benchmarks/accuracy/peer_figures.json. FOLDER has torch-preflight and torch-kitsune, which
memfit does not need; without it their stored figures stay:
pip install --no-deps --target FOLDER torch-preflight torch-kitsune libcst
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # its neighbours are modules of a package, not top-level ones
    sys.path[0] = str(Path(__file__).parent.parent)

import torch

from accuracy.models import build_blank
from accuracy.packages import load_package
from accuracy.peer_file import PATH, read_peers
from accuracy.rebuild import rebuild
from accuracy.rows import Row, read_rows
from memfit.allocator.simulate import CUDA_RULES
from memfit.devices.catalogue import load_device
from memfit.errors import MemfitError
from memfit.files import write_atomically
from memfit.prediction.recording import StepRecording, record_steps

_FOLDER = Path(__file__).parent
_ADAPTERS = "it has no option for adapters on a frozen or 4-bit model"
_VISION = ("torchvision", "timm")
_LIMIT_SECONDS = 300
Figure = int | str
"""Bytes, or why there are none."""


def main(argv: Sequence[str] | None = None) -> None:
    """Ask each tool about each row, and store what it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", type=Path, help="has torch-preflight and torch-kitsune")
    parser.add_argument("--only", action="append", help="this tool; may be repeated")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rows = [row for file in sorted((_FOLDER / "rows").glob("*.jsonl")) for row in read_rows(file)]
    peers = {peer["tool"]: peer for peer in read_peers()}
    for tool, ask in _asked(options.tools).items():
        if options.only is None or tool in options.only:
            peers[tool] = ask(rows)
            write_atomically(PATH, json.dumps(list(peers.values()), indent=1) + "\n")


def _asked(folder: Path | None) -> Mapping[str, Callable[[Sequence[Row]], dict[str, Any]]]:
    tools = {"accelerate": _accelerate, "FakeTensor alone": _fake_tensors}
    if folder is not None:
        tools["torch-preflight"] = partial(_preflight, folder)
        tools["torch-kitsune"] = partial(_kitsune, folder)
    return tools


def _stored(
    tool: str, version: str, quantity: str, command: str, figures: Mapping[str, Figure]
) -> dict[str, Any]:
    """Return one tool's entry; what it could not answer is kept as its reason."""
    return {
        "tool": tool,
        "version": version,
        "date": date.today().isoformat(),
        "quantity": quantity,
        "command": command,
        "figures": {
            row: figure if isinstance(figure, int) else f"not applicable: {figure}"
            for row, figure in figures.items()
        },
    }


# --- accelerate: weights times a factor ----------------------------------------------------------


def _accelerate(rows: Sequence[Row]) -> dict[str, Any]:
    return _stored(
        "accelerate",
        importlib.metadata.version("accelerate"),
        "allocated",
        (
            "accelerate estimate-memory: calculate_maximum_sizes(model on meta), then "
            "estimate_training_usage(bytes, dtype)['step'] with dtype float32 for fp32 rows, "
            "float16 for fp16 rows, the dtype of autocast for mixed precision"
        ),
        {row.id: _guarded(_accelerate_bytes, row) for row in rows},
    )


def _accelerate_bytes(row: Row) -> Figure:
    if row.quantization is not None:
        return "it gives no training figure for 4-bit weights"
    estimate = load_package("accelerate.commands.estimate")
    sizes = load_package("accelerate.utils").calculate_maximum_sizes
    with torch.device("meta"):
        model = build_blank(row).float()
    kinds = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    kind = kinds.get(row.precision) or row.precision_detail.get("autocast_dtype", "float16")
    return int(estimate.estimate_training_usage(sizes(model)[0], kind)["step"])


# --- FakeTensor alone: the sum of the tensors that a CPU's operators make ------------------------


def _fake_tensors(rows: Sequence[Row]) -> dict[str, Any]:
    return _stored(
        "FakeTensor alone",
        torch.__version__.partition("+")[0],
        "allocated",
        (
            "the row's steps, rebuilt as for memfit, under FakeTensorMode with device cpu; highest "
            "sum of storages from "
            "the measured step on, each rounded to 512 bytes; no virtual GPU, no workspaces, no "
            "scratch, no allocator"
        ),
        {row.id: _guarded(_fake_tensor_bytes, row) for row in rows},
    )


def _fake_tensor_bytes(row: Row) -> Figure:
    rebuilt = rebuild(row, device="cpu")
    recording = record_steps(rebuilt.setup, load_device("cpu"), num_steps=rebuilt.num_steps)
    first_event = recording.marks[rebuilt.measured_from_step].first_event
    return _highest_sum(recording, first_event if rebuilt.measured_from_step else 0)


def _highest_sum(recording: StepRecording, first_event: int) -> int:
    """Return the highest sum of tensors; what comes and goes inside one operator is none.

    Scratch is recorded as blocks that are freed right after they were taken, so that they are in
    the sum only between two events that no tensor lies between.
    """
    events, allocations = recording.history.events, recording.history.allocations
    current = highest = 0
    for position, event in enumerate(events):
        index = event if event >= 0 else -1 - event
        num_bytes = CUDA_RULES.rounded(allocations[index].num_bytes)
        current += num_bytes if event >= 0 else -num_bytes
        is_scratch = event >= 0 and events[position + 1 : position + 2] == [-1 - event]
        if position >= first_event and not is_scratch:
            highest = max(highest, current)
    return highest


# --- tools in a folder of their own --------------------------------------------------------------


def _output(folder: Path, *words: str) -> str:
    """Run Python with the tools in the folder and give what it prints.

    Raises:
        MemfitError: with the last line of its error if it prints nothing.
    """
    ran = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    if not ran.stdout.strip():
        lines = ran.stderr.strip().splitlines() or ["it printed nothing"]
        raise MemfitError(lines[-1])
    return ran.stdout


def _version(folder: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return _output(folder, "-c", code).strip()


def _preflight(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    return _stored(
        "torch-preflight",
        _version(folder, "torch-preflight"),
        "process",
        (
            "torch-preflight estimate --model NAME --batch-size B --seq-len S | --image-size I "
            "--dtype fp32|amp --optimizer NAME --gpu-memory 16GiB -f json"
        ),
        {row.id: _guarded(partial(_preflight_bytes, folder), row) for row in rows},
    )


def _preflight_bytes(folder: Path, row: Row) -> Figure:
    if row.lora is not None:
        return _ADAPTERS
    words = ["-m", "torch_preflight", "estimate", "-f", "json", "--gpu-memory", "16GiB"]
    words += ["--model", row.model.rpartition("/")[2]]
    words += ["--batch-size", str(row.inputs[0].shape[0])]
    words += ["--dtype", "amp" if row.precision == "amp" else "fp32"]
    words += ["--optimizer", row.optimizer.rpartition(".")[2].lower()]
    is_image = row.model_library in _VISION
    words += ["--image-size" if is_image else "--seq-len", str(row.inputs[0].shape[-1])]
    report = json.loads(_output(folder, *words))
    return int(report["total_bytes"]) or "its list of architectures has no such model"


_KITSUNE = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.append(str(folder.parent))
from accuracy.models import build_blank
from accuracy.rows import read_rows
from kitsune.predict import predict_memory
for file in sorted((folder / "rows").glob("*.jsonl")):
    for row in read_rows(file):
        if row.id == sys.argv[2]:
            num_rows, *shape = row.inputs[0].shape
            name = row.optimizer.rpartition(".")[2].lower()
            print(predict_memory(
                build_blank(row), tuple(shape), batch_size=num_rows, dtype="float32",
                optimizer=name, training=True).total_bytes)
"""


def _kitsune(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    return _stored(
        "torch-kitsune",
        _version(folder, "torch-kitsune"),
        "process",
        "kitsune.predict.predict_memory(model, input_shape, batch_size, float32, optimizer)",
        {row.id: _guarded(partial(_kitsune_bytes, folder), row) for row in rows},
    )


def _kitsune_bytes(folder: Path, row: Row) -> Figure:
    if row.model_library not in _VISION:
        return "asked about vision models only, whose input is one float tensor"
    return int(_output(folder, "-c", _KITSUNE, str(_FOLDER), row.id).split()[-1])


def _guarded(ask: Callable[[Row], Figure], row: Row) -> Figure:
    """Ask about one row; what goes wrong is the answer."""
    sys.stderr.write(f"{row.id}\n")
    try:
        return ask(row)
    except (MemfitError, RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    main()
