"""Records what convolutions take inside themselves on a card: cuDNN says it nowhere.

Run: PYTHONPATH=src python benchmarks/record_workspaces.py --out workspaces.json   (about a minute)

Each convolution of the recorded image models, and further ones that are drawn, is run alone:
forward, gradient of the image, gradient of the weight. Written is how far the allocator's peak
passed what went in and came out. `--device cpu` tries the whole here, where nothing is read.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accuracy.batches import make_batch
from accuracy.models import build_blank
from accuracy.packages import load_package
from accuracy.rows import parse_row
from card_checks.card_lock import card_alone
from recording.matrix import Entry, all_entries
from recording.rowfile import unmeasured_row
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.files import write_atomically

_MODELS = (
    "cnn",
    "resnet",
    "convnext",
    "unet",
    "video",
    "audio",
    "mixer",
    "vae",
    "vgg16",
    "efficientnet_b0",
    "convnext_tiny",
    "mobilenet",
)
_PASSES = {"input gradient": (True, False, False), "weight gradient": (False, True, False)}
_MOST_ELEMENTS = 2**28
_WRITE_EVERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One convolution to run; ``precision`` is fp32 (with TF32), ieee (without), fp16 or bf16."""

    source: str
    image: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    precision: str = "fp32"
    channels_last: bool = False


def main(words: Sequence[str] | None = None) -> int:
    """Run as many convolutions as there is time for."""
    args = _parser().parse_args(words)
    deadline = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    written = 0.0
    with card_alone():
        models = [] if args.no_models else _model_cases()
        cases = _shared_out([*models, *_drawn_cases(args.seed, args.drawn)])
        for case in cases[: args.most]:
            if time.monotonic() > deadline:
                break
            rows.append({**asdict(case), **_tried(case, args.device)})
            if time.monotonic() - written > _WRITE_EVERY_SECONDS:
                _write(args.out, rows)
                written = time.monotonic()
    _write(args.out, rows)
    print(f"{len(rows)} of {len(cases)} convolutions in {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("workspaces.json"))
    parser.add_argument("--seconds", type=float, default=60.0, help="stop before so long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drawn", type=int, default=1500, help="so many drawn ones at most")
    parser.add_argument("--no-models", action="store_true", help="drawn ones alone")
    parser.add_argument("--most", type=int, help="so many in all at most")
    return parser


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    about = {
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps(about)[:-1]
    write_atomically(path, f'{head},\n"rows": [\n{lines}\n]}}\n')


class _Seen(TorchDispatchMode):
    """Notes the convolutions that a model runs."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source
        self.cases: list[Case] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if function is torch.ops.aten.convolution.default:
            image, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
            self.cases.append(
                Case(
                    source=self._source,
                    image=tuple(image.shape),
                    weight=tuple(weight.shape),
                    stride=tuple(stride),
                    padding=tuple(padding),
                    dilation=tuple(dilation),
                    transposed=transposed,
                    output_padding=tuple(output_padding),
                    groups=groups,
                )
            )
        return function(*args, **(kwargs or {}))


def _model_cases() -> list[Case]:
    """List the convolutions of the recorded models, in fp32 and in bf16, each once."""
    found: dict[Case, None] = {}
    for name in _MODELS:
        entry = next(each for each in all_entries() if each.workload == name)
        try:
            seen = _convolutions_of(entry)
        except Exception as error:  # noqa: BLE001 - a model that is missing is no reason to stop
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for case in seen:
            found[case] = found[replace(case, precision="bf16")] = None
    return list(found)


def _convolutions_of(entry: Entry) -> list[Case]:
    row = parse_row(unmeasured_row(entry, "meta", None))
    if row.model_library != "custom":
        load_package(row.model_library)
    with torch.device("meta"):
        model = build_blank(row).to("meta")
        batch = make_batch(row, model, "meta")
    seen = _Seen(entry.workload)
    inputs = {name: each for name, each in batch.items() if name not in ("target", "labels")}
    with seen:
        model(*inputs.values())
    return seen.cases


def _drawn_cases(seed: int, number: int) -> Iterator[Case]:
    """Draw convolutions such as networks have."""
    draw = random.Random(seed)
    left = number
    while left:
        case = _drawn(draw)
        if case is not None:
            left -= 1
            yield case


def _drawn(draw: random.Random) -> Case | None:
    dims = draw.choices((1, 2, 3), (1, 8, 1))[0]
    extents = {1: (128, 500, 1000, 4000), 2: (4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224)}
    extent = draw.choice(extents.get(dims, (8, 16, 32)))
    channels = (3, 8, 16, 24, 32, 33, 48, 64, 96, 100, 128, 192, 256, 320, 384, 512, 768, 1024)
    inputs, outputs = draw.choice(channels), draw.choice(channels)
    kernel = draw.choices((1, 2, 3, 4, 5, 7), (4, 1, 9, 2, 2, 2))[0]
    stride = draw.choices((1, 2, kernel), (7, 3, 1))[0]
    dilation = draw.choices((1, 2), (9, 1))[0]
    groups = draw.choices((1, math.gcd(inputs, 8), inputs), (8, 1, 2))[0]
    outputs = inputs if groups > 1 else outputs
    transposed = groups == 1 and draw.random() < 0.1
    size = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    case = Case(
        source="drawn",
        image=(2 ** draw.randint(0, 8), inputs, *[extent] * dims),
        weight=(*size, *[kernel] * dims),
        stride=(stride,) * dims,
        padding=(draw.choice((0, dilation * (kernel // 2))),) * dims,
        dilation=(dilation,) * dims,
        transposed=transposed,
        output_padding=(0,) * dims,
        groups=groups,
        precision=draw.choices(("fp32", "ieee", "fp16", "bf16"), (5, 1, 2, 4))[0],
        channels_last=dims == 2 and draw.random() < 0.15,
    )
    largest = math.prod(case.image) * max(1, math.ceil(outputs / inputs))
    is_possible = extent > dilation * (kernel - 1)
    return case if is_possible and largest <= _MOST_ELEMENTS else None


def _shared_out(cases: list[Case]) -> list[Case]:
    """Mix both kinds, so that a cut leaves some of each."""
    random.Random(0).shuffle(cases)
    return cases


def _tried(case: Case, device: str) -> dict[str, Any]:
    try:
        return _scratch(case, device)
    except Exception as error:  # noqa: BLE001 - what cannot be run is a finding too
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def _scratch(case: Case, device: str) -> dict[str, Any]:
    """Read how far each pass went beyond what it was given and gave."""
    torch.backends.cudnn.allow_tf32 = case.precision == "fp32"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.precision, torch.float32)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    image = torch.ones(case.image, dtype=dtype, device=device).to(memory_format=layout)
    weight = torch.ones(case.weight, dtype=dtype, device=device).to(memory_format=layout)
    settings = (
        case.stride,
        case.padding,
        case.dilation,
        case.transposed,
        case.output_padding,
        case.groups,
    )
    result, inside = _read(
        lambda: torch.ops.aten.convolution(image, weight, None, *settings), device
    )
    found: dict[str, Any] = {"result": list(result.shape), "scratch_bytes": {"forward": inside}}
    for name, mask in _PASSES.items():
        _, found["scratch_bytes"][name] = _read(
            lambda mask=mask: torch.ops.aten.convolution_backward(
                result, image, weight, None, *settings, mask
            ),
            device,
        )
    return found


def _read(work: Any, device: str) -> tuple[Any, int]:
    if device == "cpu":
        return work(), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


if __name__ == "__main__":
    sys.exit(main())
