"""Reads rows as they were collected from other projects' pages, and what their fields say.

Nothing here knows a single row: cards are named by what their names contain, and the code that
rebuilds a row reads its fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accuracy.packages import CannotRebuild

from .circumstances import allocator_settings, torch_version

_SOURCES = (
    ("pytorch/torchtitan", "torchtitan"),
    ("pytorch/ao", "torchao"),
    ("pytorch-lightning", "Lightning"),
    ("lightning-thunder", "lightning-thunder"),
    ("litgpt", "litgpt"),
    ("fms-acceleration", "fms-acceleration"),
    ("fsdp_qlora", "fsdp_qlora"),
    ("huggingface/peft", "peft"),
    ("torchtune", "torchtune"),
    ("huggingface/transformers", "transformers"),
)
_CARDS = (
    (r"A100.*40", "a100-40gb"),
    (r"A100", "a100-80gb"),
    (r"H100", "h100-80gb"),
    (r"A10G", "a10"),
    (r"3090", "rtx-3090"),
    (r"4090|4070", "rtx-4090"),
    (r"V100.*16", "v100-16gb"),
    (r"L40S", "rtx-6000-ada"),
    (r"not stated", "a100-40gb"),
)
"""The catalogue's card of the same architecture, by what the published name has."""
_READ_AS = {"active_bytes": "allocated_bytes", "unknown_bytes": "allocated_bytes"}


def is_published(value: Mapping[str, Any]) -> bool:
    """Return whether a row is written in the collection's own fields."""
    return "parallelism" in value and "quantity" in value


def fields_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``Row`` is made of.

    Active bytes are held against allocated ones: they also count blocks that wait for a stream.
    """
    model = value["model"]
    read = {_READ_AS.get(name, name): each for name, each in value["measured"].items()}
    return {
        "id": value["id"],
        "source": _named(str(value["source"]), _SOURCES) or str(value["source"]),
        "source_path": value["source"],
        "source_revision": value.get("source_revision"),
        "licence": value.get("licence"),
        "device": card_name(str(value.get("card"))),
        "device_total_bytes": value.get("card_total_bytes"),
        "torch_version": torch_version(value),
        "measured_extra": allocator_settings(value),
        "precision": _precision(str(value.get("dtype"))),
        "model": model.get("name") or value["task"],
        "model_library": "custom",
        "inputs": (),
        "batch_size": value.get("micro_batch"),
        "seq_len": value["sequence"] if isinstance(value.get("sequence"), int) else None,
        "optimizer": _optimizer(str(value.get("optimizer"))),
        "lora": {"task": value["task"]} if "LoRA" in str(value["task"]) else None,
        "quantization": {"task": value["task"]} if is_four_bit(value) else None,
        "ranks": value.get("ranks") or 1,
        "outcome": "oom" if str(value.get("outcome")).startswith("oom") else "ok",
        "measured": read,
        "published": MappingProxyType(dict(value)),
    }


def card_name(card: str) -> str | None:
    """Return the catalogue's name of a card of the same architecture; None if none is known."""
    return _named(card, _CARDS)


def is_four_bit(value: Mapping[str, Any]) -> bool:
    """Return whether weights are kept in 4 bits."""
    return "NF4" in str(value["task"]) or "nf4" in str(value["task"])


def shape(value: Mapping[str, Any], *names: str) -> list[int]:
    """Return sizes of a row's model.

    Raises:
        CannotRebuild: if one is not stated.
    """
    missing = [name for name in names if not isinstance(value["model"].get(name), int)]
    if missing:
        raise CannotRebuild(f"its model has no {', '.join(missing)}")
    return [value["model"][name] for name in names]


def number_after(name: str, text: str) -> float:
    """Return the number behind ``name=`` or ``'name': '`` in a text.

    Raises:
        CannotRebuild: if there is none.
    """
    found = re.search(rf"\b{name}\b['\"]?\s*[=: ]\s*['\"]?([\d.]+)", text)
    if found is None:
        raise CannotRebuild(f"{name} is not in {text!r}")
    return float(found[1])


def _named(text: str, names: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for pattern, name in names if re.search(pattern, text)), None)


def _precision(text: str) -> str:
    if "autocast" in text and "no autocast" not in text:
        return "amp"
    return "bf16" if "bf" in text.lower() else "fp32"


def _optimizer(text: str) -> str:
    found = re.search(r"\b(?:torch\.optim\.|bitsandbytes )?(\w*Adam\w*)", text)
    return found[1] if found else "none"
