"""The sizes that define a model, as every checkpoint holds them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Everything needed to build a model again."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; unknown or missing names raise TypeError."""
        missing = {field.name for field in fields(cls)} - set(values)
        if missing:
            msg = f"missing {', '.join(sorted(missing))}"
            raise TypeError(msg)
        return cls(**values)
