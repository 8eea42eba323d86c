"""Rows of published measurements, read from JSON lines and checked while they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memfit.errors import DataError

from .errata import corrected
from .published.reading import fields_of, is_published

PRECISIONS = ("fp32", "fp16", "bf16", "amp")
LIBRARIES = ("torchvision", "transformers", "timm", "custom")
OUTCOMES = ("ok", "oom")
_NEEDED = ("id", "source", "precision", "model", "model_library", "input", "optimizer", "measured")
_MEASURED = ("allocated_bytes", "reserved_bytes", "process_bytes", "context_bytes")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RowError(ValueError):
    """Say what is wrong in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensor:
    """One tensor of the batch."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    same_tensor_as: str | None = None
    """The other name of this very tensor, which then takes memory once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBytes:
    """What the authors read; None where they did not."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    context_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration that somebody ran, and the peaks they read."""

    id: str
    source: str
    source_path: str | None = None
    source_revision: str | None = None
    licence: str | None = None
    device: str | None = None
    device_total_bytes: int | None = None
    torch_version: str | None = None
    cuda_version: str | None = None
    library_versions: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    precision: str
    precision_detail: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    model: str
    model_library: str
    constructor: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    model_config: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    params_total: int | None = None
    params_trainable: int | None = None
    inputs: tuple[InputTensor, ...]
    batch_size: int | None = None
    seq_len: int | None = None
    attention: str | None = None
    optimizer: str
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    loss: str | None = None
    zero_grad: str | None = None
    num_warmup_steps: int = 1
    num_measured_steps: int = 1
    accumulation_steps: int = 1
    """How many batches give one update."""
    gradient_checkpointing: Mapping[str, Any] | None = None
    lora: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    measured: MeasuredBytes
    process_source: str | None = None
    measured_extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    outcome: str = "ok"
    split: str | None = None
    """``development`` or ``held-out``; rows of other people have none."""
    notes: tuple[str, ...] = ()
    ranks: int = 1
    """How many train together."""
    published: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """All fields of a row that is rebuilt by the code of its source; empty for the others."""


_MAPPINGS = (
    "library_versions",
    "precision_detail",
    "constructor",
    "model_config",
    "optimizer_kwargs",
    "measured_extra",
)
_READ_OTHERWISE = {
    *_MAPPINGS,
    "inputs",
    "num_warmup_steps",
    "num_measured_steps",
    "gradient_checkpointing",
    "measured",
    "outcome",
    "notes",
    "published",
}
_PLAIN = tuple(each.name for each in fields(Row) if each.name not in _READ_OTHERWISE)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read a file of JSON lines; empty lines are skipped.

    Raises:
        DataError: if the file cannot be read, or a line is no row, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(path), f"the file cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(json.loads(line)))
        except json.JSONDecodeError as error:
            reason = f"this is no JSON ({error.msg}); each line must be one JSON object"
            raise DataError(str(path), reason, number) from error
        except RowError as error:
            raise DataError(str(path), str(error), number) from error
    return tuple(rows)


def parse_row(value: object) -> Row:
    """Make a row of one parsed JSON object.

    Raises:
        RowError: if a field is missing or has an unexpected value.
    """
    if not isinstance(value, dict):
        raise RowError(f"found {type(value).__name__}; a row is a JSON object")
    if is_published(value):
        return _published_row(value)
    value = corrected(value)
    missing = [name for name in _NEEDED if value.get(name) is None]
    if missing:
        raise RowError(f"a row needs {', '.join(missing)}; add what is missing")
    _check_choice("precision", value["precision"], PRECISIONS)
    _check_choice("model_library", value["model_library"], LIBRARIES)
    _check_choice("outcome", value.get("outcome", "ok"), OUTCOMES)
    found = {name: value[name] for name in _PLAIN if value.get(name) is not None}
    found |= {name: _mapping(name, value[name]) for name in _MAPPINGS if value.get(name)}
    steps = _mapping("steps", value.get("steps") or {"warmup": 1, "measured": 1})
    _count("accumulation_steps", found.get("accumulation_steps", 1), at_least=1)
    return Row(
        **found,
        inputs=_inputs(value["input"], value.get("seq_len")),
        num_warmup_steps=_count("steps.warmup", steps.get("warmup", 0), at_least=0),
        num_measured_steps=_count("steps.measured", steps.get("measured", 1), at_least=1),
        gradient_checkpointing=_checkpointing(value.get("gradient_checkpointing")),
        measured=_measured(value["measured"]),
        outcome=value.get("outcome", "ok"),
        notes=tuple(value.get("notes") or ()),
    )


def _published_row(value: Mapping[str, Any]) -> Row:
    """Make a row of the collection's own fields."""
    found = fields_of(value)
    return Row(**{**found, "measured": _measured(found["measured"])})


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RowError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{name} is {value!r}; it must be a JSON object")
    return MappingProxyType(value)


def _count(name: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise RowError(f"{name} is {value!r}; it must be a whole number of at least {at_least}")
    return value


def _checkpointing(value: object) -> Mapping[str, Any] | None:
    """Return the settings of gradient checkpointing, None where it is off."""
    if not value:
        return None
    if value is True:
        return MappingProxyType({"enabled": True})
    settings = _mapping("gradient_checkpointing", value)
    return settings if settings.get("enabled", True) else None


def _measured(value: object) -> MeasuredBytes:
    measured = _mapping("measured", value)
    for name in _MEASURED:
        if measured.get(name) is not None:
            _count(f"measured.{name}", measured[name], at_least=0)
    return MeasuredBytes(**{name: measured.get(name) for name in _MEASURED})


def _inputs(value: object, seq_len: int | None) -> tuple[InputTensor, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(f"input is {value!r}; it must be a list of tensors")
    return tuple(_input(entry, seq_len) for entry in value)


def _input(value: object, seq_len: int | None) -> InputTensor:
    entry = _mapping("input", value)
    name = entry.get("name")
    if not isinstance(name, str):
        raise RowError(f"an input has the name {name!r}; it must be text")
    if entry.get("same_tensor_as"):
        return InputTensor(name=name, same_tensor_as=entry["same_tensor_as"])
    shape = entry.get("shape")
    if not isinstance(shape, list):
        raise RowError(f"input {name} has the shape {shape!r}; it must be a list")
    sizes = tuple(_dimension(name, each, seq_len) for each in shape)
    return InputTensor(name=name, shape=sizes, dtype=entry.get("dtype", "float32"))


def _dimension(name: str, value: object, seq_len: int | None) -> int:
    """Read one dimension; of a bound such as ``<=128`` the bound itself."""
    if isinstance(value, str):
        digits = re.search(r"\d+", value)
        value = int(digits[0]) if digits else seq_len
    return _count(f"a dimension of input {name}", value, at_least=0)
