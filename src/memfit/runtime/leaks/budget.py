"""Keeps the time that looking around takes within its share."""

from __future__ import annotations

_FREE_SECONDS = 0.05
"""What may be spent in short runs as well."""
_PROBE_FRACTION = 0.3
"""Of the budget, for reading levels; looks have the rest."""
_RESERVE = 3
"""Looks that can wait leave as much as this many take."""
_MOST_EXTRA_LOOKS = 16
"""Beyond the budget, after a suspicion."""


class Budget:
    """Say what can be afforded."""

    def __init__(self, overhead_fraction: float) -> None:
        self._fraction = overhead_fraction
        self._begun_seconds: float | None = None
        self._probe_seconds = 0.0
        self._num_extra = 0
        self.spent_seconds = 0.0
        self.look_seconds = 0.008
        """What the last look took; a guess before the first."""

    def begin(self, now_seconds: float) -> None:
        """Note the first call."""
        if self._begun_seconds is None:
            self._begun_seconds = now_seconds

    def allows_probe(self, now_seconds: float) -> bool:
        """Say whether levels may be read."""
        return self._probe_seconds < _PROBE_FRACTION * self._total(now_seconds)

    def allows_look(self, now_seconds: float, *, can_wait: bool) -> bool:
        """Say whether a look can be taken within the budget."""
        left = self._total(now_seconds) - self.spent_seconds
        return left >= self.look_seconds * (_RESERVE if can_wait else 1)

    def take_extra(self) -> bool:
        """Take one of the looks beyond the budget; False if there is none left."""
        self._num_extra += 1
        return self._num_extra <= _MOST_EXTRA_LOOKS

    def probed(self, seconds: float) -> None:
        """Note what reading levels took."""
        self._probe_seconds += seconds

    def _total(self, now_seconds: float) -> float:
        begun = self._begun_seconds if self._begun_seconds is not None else now_seconds
        return _FREE_SECONDS + self._fraction * (now_seconds - begun)
