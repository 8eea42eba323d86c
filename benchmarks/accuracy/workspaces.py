"""What convolutions took inside themselves on a card, beside what memfit says of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.convolution_choice import Convolution, Kernel, Pass
from memfit.kernels.cuda.convolution_workspace import workspace_bytes
from memfit.kernels.tensor_bytes import num_bytes
from memfit.units import MIB

FILES: Mapping[str, str] = {
    "development": "workspaces_h200.json",
    "held-out": "workspaces_h200_held_out.json",
}
"""By what they were for, the recordings of ``record_workspaces.py``."""
_NEAR_FRACTION = 0.03
_NEAR_BYTES = MIB
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_PRECISIONS = {"fp16": "half", "bf16": "half", "fp32": "TF32", "ieee": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One pass of one convolution: what it took and what was predicted."""

    kind: str
    which: Pass
    measured_bytes: int
    predicted_bytes: int
    high_bytes: int
    operand_bytes: int
    """The bytes of image, weight and result."""

    @property
    def is_near(self) -> bool:
        """Return whether the prediction is within 3 % of the operands, or a MiB."""
        allowed = max(_NEAR_FRACTION * self.operand_bytes, _NEAR_BYTES)
        return abs(self.measured_bytes - self.predicted_bytes) <= allowed


def readings(part: str) -> Iterator[Reading]:
    """Yield every pass that cuDNN computes, of one of ``FILES``."""
    content = json.loads((Path(__file__).parent / FILES[part]).read_text("utf-8"))
    for values in content["rows"]:
        row = dict(zip(content["columns"], values, strict=True))
        conv, card = _convolution(row), _card(row)
        if conv.kernel(card) is not Kernel.CUDNN:
            continue
        operands = sum(map(num_bytes, (conv.image, conv.weight, conv.result)))
        for which in Pass:
            likely, high = workspace_bytes(conv, which, card)
            yield Reading(
                kind=_kind(row),
                which=which,
                measured_bytes=row[f"{which} bytes"],
                predicted_bytes=likely,
                high_bytes=high,
                operand_bytes=operands,
            )


def near_shares(part: str) -> dict[str, dict[str, float]]:
    """Return, by kind of convolution and pass, the share of near predictions, and their number."""
    found: dict[str, dict[str, list[Reading]]] = defaultdict(lambda: defaultdict(list))
    for reading in readings(part):
        found[reading.kind][reading.which].append(reading)
    return {
        kind: {"convolutions": len(next(iter(passes.values())))}
        | {which: sum(r.is_near for r in each) / len(each) for which, each in passes.items()}
        | {"below_high": _below_high(passes)}
        for kind, passes in sorted(found.items())
    }


def _below_high(passes: Mapping[str, list[Reading]]) -> float:
    each = [
        reading.measured_bytes <= reading.high_bytes for some in passes.values() for reading in some
    ]
    return sum(each) / len(each)


def _kind(row: Mapping[str, Any]) -> str:
    """Name a class of convolutions that engines tell apart."""
    if row["groups"] > 1:
        groups = "one channel a group" if row["weight"][1] == 1 else "groups"
        return f"{groups}, {_layout(row)}{_PRECISIONS[row['precision']]}"
    is_product = all(size == 1 for size in row["weight"][2:])
    size = "transposed" if row["transposed"] else "1 x 1" if is_product else "larger kernels"
    return f"{size}, {_layout(row)}{_PRECISIONS[row['precision']]}"


def _layout(row: Mapping[str, Any]) -> str:
    return "channels last, " if row["channels_last"] else ""


def _card(row: Mapping[str, Any]) -> Card:
    return Card(
        capability=(9, 0),
        torch_version=(2, 11),
        num_multiprocessors=132,
        allow_tf32=row["precision"] != "ieee",
    )


def _convolution(row: Mapping[str, Any]) -> Convolution:
    layout = torch.channels_last if row["channels_last"] else torch.contiguous_format
    dtype = _DTYPES.get(row["precision"], torch.float32)
    image, weight, result = (
        torch.empty(row[name], dtype=dtype, device="meta").to(memory_format=layout)
        for name in ("image", "weight", "result")
    )
    return Convolution(
        image=image,
        weight=weight,
        result=result,
        stride=row["stride"],
        padding=row["padding"],
        dilation=row["dilation"],
        is_transposed=row["transposed"],
        groups=row["groups"],
    )
