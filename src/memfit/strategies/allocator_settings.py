"""Allocator settings: how PyTorch's caching allocator cuts a GPU's memory into segments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.spec import CPU
from memfit.errors import StrategyError, UsageError
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category
from memfit.units import MIB, format_bytes

_KEY = re.compile(r"(?:^|,)\s*([a-z]\w*)\s*:")
_CHANGEABLE = (
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
)
# What a new text leaves as it was, unless it names it (c10/core/AllocatorConfig.cpp, parseArgs).
_STAYING = {
    "expandable_segments": "False",
    "large_segment_size_mb": "20",
    "max_non_split_rounding_mb": "20",
}
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_BLOCK_BYTES = 512
_GROWING = "expandable_segments:True"
_TOLERATED_BYTES = 64 * MIB  # workspaces of libraries, which earlier work may have left


@dataclass(frozen=True, kw_only=True)
class AllocatorConf(Strategy):
    """Set PyTorch's caching allocator, by the text that ``PYTORCH_ALLOC_CONF`` holds.

    ``expandable_segments:True`` lets one segment grow instead of cutting many of fixed size, which
    leaves less memory cached and unused. Tensors and results stay the same.

    Limits: on GPUs only. What is reserved already keeps its segments, as do the model's parameters;
    where other work lies on the GPU, it is refused as too late. Memory shared between processes
    (CUDA IPC) may refuse expandable segments.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, on optimizing memory usage with
    PYTORCH_ALLOC_CONF; which settings stay: c10/core/AllocatorConfig.cpp of torch 2.13.
    """

    conf: str

    name: ClassVar[str] = "allocator-settings"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.PROCESS})
    goes_with_shards: ClassVar[bool] = True
    acts_on: ClassVar[Mapping[Category, float]] = {}

    @property
    def allocator_conf(self) -> str:
        """Return the text."""
        return self.conf

    def __post_init__(self) -> None:
        found = _keys(self.conf)
        if not found or not set(found) <= set(_CHANGEABLE):
            msg = f"conf must hold some of {', '.join(_CHANGEABLE)}, not {self.conf!r}"
            raise ValueError(msg)
        try:
            AllocatorSettings.parse(self.conf)
        except UsageError as error:
            raise ValueError(str(error).rstrip(".")) from None

    @property
    def needs_card(self) -> bool:
        """Return that it does."""
        return True

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer segments that grow: other settings pay only after a look at the segments."""
        if facts.device_type != CPU:
            yield cls(conf=_GROWING)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse the CPU."""
        if facts.device_type != CPU:
            return None
        return (
            "PyTorch's caching allocator serves GPUs only; on the cpu the C library gives out "
            "memory."
        )

    def apply(self, session: Session) -> Undo:
        """Tell torch's allocator; nothing is told while a step is recorded.

        Raises:
            StrategyError: if it is too late, or torch does not take the text.
        """
        before = "" if session.is_virtual else _settings_now()
        if session.is_virtual or before == self.conf:
            return lambda: None
        if (other_bytes := _other_bytes(session.model, self.conf)) > _TOLERATED_BYTES:
            raise StrategyError(
                self.name,
                f"it is too late: {format_bytes(other_bytes)} of other work lie on the GPU, in "
                f"segments that stay as they are. {self._remedy()}, or free them first.",
            )
        try:
            _tell(_completed(self.conf, before))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise StrategyError(
                self.name, f"torch did not take it ({reason}). {self._remedy()}."
            ) from error
        return lambda: _tell(_completed(before, self.conf))

    def _remedy(self) -> str:
        return f"Start the program with PYTORCH_ALLOC_CONF={self.conf} in its environment"


def _keys(conf: str) -> list[str]:
    return _KEY.findall(conf)


def _completed(conf: str, replaced: str) -> str:
    """Add what the replaced text had changed and the new one would leave as it was."""
    missing = [key for key in _STAYING if key in _keys(replaced) and key not in _keys(conf)]
    return ",".join(filter(None, [conf, *(f"{key}:{_STAYING[key]}" for key in missing)]))


_told: list[str] = []
"""What the allocator was last told here; empty while its settings are those of the environment."""


def _settings_now() -> str:
    """Return the allocator's settings; torch 2.11 cannot be asked, so what it was told counts."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    if _told:
        return _told[-1]
    return next(filter(None, map(os.environ.get, _VARIABLES)), "")


def _tell(conf: str) -> None:
    """Set the allocator, and give back what is cached, so that new segments follow the settings."""
    torch._C._accelerator_setAllocatorSettings(conf)
    _told[:] = [conf]
    torch.cuda.empty_cache()


def _other_bytes(model: torch.nn.Module, conf: str) -> int:
    """Count the bytes on the GPU that are not the model's, in segments that the text would change.

    What lies in segments that grow already, as an earlier run with the same plan leaves it, is as
    it would be.
    """
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    own = sum(-(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES for num_bytes in storages.values())
    found = torch.cuda.memory_allocated() - own
    if found > _TOLERATED_BYTES and _keys(conf) == _keys(_GROWING):
        return found - _growing_bytes()
    return found


def _growing_bytes() -> int:
    """Count the bytes in use in segments that grow."""
    segments = torch.cuda.memory_snapshot()
    return sum(int(each["active_size"]) for each in segments if each.get("is_expandable"))
