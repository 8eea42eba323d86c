"""A replayed peak with what is not known of it, and the interval that follows.

Three things are unknown, each for a reason of its own: what kernels take inside and in which order
things came (both are replayed with the ends of what may be), what the simulation leaves out (a
margin), and what lies outside the allocator (a doubt). Independent deviations are not at their
worst all at once, so their squares are added: the root of the sum is the half-width on each side.
Source: GUM (JCGM 100:2008), 5.1.2, the law of propagation of uncertainty for uncorrelated
quantities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from memfit.figures import Certainty, Interval

_MARGINS: Mapping[str, float] = MappingProxyType({"allocated": 0.01, "reserved": 0.045})
"""How far readings lie beyond the replays, 19 times out of 20. Source: docs/accuracy.md, the steps
on one card whose program is known and whose kernels' scratch follows from their source. Of 124
readings of reserved bytes 119 lie within 4.5 %, the farthest 12 %; of as many of allocated bytes
the farthest lies 0.2 %."""
_GUESSED_MARGINS: Mapping[str, float] = MappingProxyType({"allocated": 0.02, "reserved": 0.15})
"""The same where a library chooses its scratch by rules that are not published, as cuDNN does: the
farthest of xMem's readings of convolution nets lies 9 % beyond the replays, of six."""
_SHARED_MARGINS: Mapping[str, float] = MappingProxyType({"allocated": 0.08, "reserved": 0.15})
"""The same of one rank among several, half as much again as 19 of 20 rows of the source that needs
most: 5.6 % of allocated bytes under FSDP1, whose blocks wait for other streams, and 10 % of
reserved bytes, of which FSDP1 keeps more than the simulation. Source: docs/accuracy.md, the rows
of torchtitan and fsdp_qlora."""
NOTICEABLE_FRACTION = 0.01
"""A guess of less than this part of the peak changes no margin."""
_DOUBTS: Mapping[Certainty, float] = MappingProxyType(
    {Certainty.EXACT: 0.0, Certainty.TABLE: 0.1, Certainty.GUESS: 0.5}
)
"""How far what lies outside the allocator may be off, as a part of it. A T4 is read with 135 and
141 MiB; guesses for a card stand on 287 MB with kernels loaded lazily and 667 MB with all of them
(https://github.com/pytorch/pytorch/issues/86509)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRange:
    """A replayed peak: as is likely, and as it is with the least and the most that may be."""

    likely_bytes: int
    low_bytes: int
    high_bytes: int
    is_guessed: bool = False
    """Whether a noticeable part of the most is scratch that only the library can compute."""
    is_shared: bool = False
    """Whether the step is that of one rank among several."""
    doubt_bytes: int = 0
    """How far off what was added by ``plus`` may be."""

    def plus(self, num_bytes: int, certainty: Certainty = Certainty.EXACT) -> PeakRange:
        """Add what lies outside the allocator, such as the CUDA context."""
        doubt_bytes = self.doubt_bytes + int(num_bytes * _DOUBTS[certainty])
        known = replace(self, doubt_bytes=doubt_bytes)
        return known.plus_between(num_bytes, num_bytes, num_bytes)

    def plus_between(self, num_bytes: int, low_bytes: int, high_bytes: int) -> PeakRange:
        """Add what lies outside the allocator and is known within bounds alone, such as NCCL's."""
        return replace(
            self,
            likely_bytes=self.likely_bytes + num_bytes,
            low_bytes=self.low_bytes + low_bytes,
            high_bytes=self.high_bytes + high_bytes,
        )

    def interval(self, figure: str) -> Interval:
        """Return where the peak lies in all likelihood.

        Args:
            figure: ``allocated``, ``reserved`` or ``process``, which says whose margin holds.
        """
        alone = _GUESSED_MARGINS if self.is_guessed else _MARGINS
        margins = _SHARED_MARGINS if self.is_shared else alone
        margin_bytes = margins.get(figure, margins["reserved"]) * self.likely_bytes
        others = (margin_bytes, self.doubt_bytes)
        below = math.hypot(self.likely_bytes - self.low_bytes, *others)
        above = math.hypot(self.high_bytes - self.likely_bytes, *others)
        return Interval(
            low_bytes=max(0, int(self.likely_bytes - below)),
            high_bytes=int(self.likely_bytes + above),
        )
