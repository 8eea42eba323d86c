"""Keeps the time that looking around takes within its share."""

from __future__ import annotations

import time

_FREE_SECONDS = 0.05
"""What may be spent in short runs as well."""
_SHARES = {"probe": 0.25, "frequent probe": 0.1, "look": 0.6, "look that can wait": 0.3}
"""Of the budget; what is more frequent leaves room for what has its one moment."""
_MOST_EXTRA_LOOKS = 40
"""Beyond the budget, after a suspicion."""
_FREE_EXTRA_SECONDS, _EXTRA_FRACTION = 3.0, 0.02
"""All calls together may have taken so long before another look beyond the budget is taken."""
_NUM_RECENT = 4


class TimeBudget:
    """Say what can be afforded."""

    def __init__(self, overhead_fraction: float) -> None:
        self._fraction = overhead_fraction
        self._begun_seconds: float | None = None
        self._probe_seconds = 0.0
        self._look_seconds = 0.0
        self._recent: list[float] = [0.004]  # a guess before the first
        self._num_extra = 0
        self.spent_seconds = 0.0
        """Of all calls together, what a suspicion led to included."""

    def begin(self, now_seconds: float) -> None:
        """Note the first call."""
        if self._begun_seconds is None:
            self._begun_seconds = now_seconds

    def allows_probe(self, now_seconds: float, *, is_frequent: bool) -> bool:
        """Return whether memory in use may be read."""
        share = _SHARES["frequent probe" if is_frequent else "probe"]
        return self._probe_seconds < share * self._total(now_seconds)

    def allows_look(self, now_seconds: float, *, can_wait: bool) -> bool:
        """Return whether a look can be taken within the budget."""
        share = _SHARES["look that can wait" if can_wait else "look"]
        needed_seconds = self._look_seconds + min(self._recent)
        return needed_seconds <= share * self._total(now_seconds)

    def take_extra(self) -> bool:
        """Take one of the looks beyond the budget; False if there is none left, or no time."""
        now_seconds = time.perf_counter()
        begun = self._begun_seconds if self._begun_seconds is not None else now_seconds
        most_seconds = _FREE_EXTRA_SECONDS + max(_EXTRA_FRACTION, self._fraction) * (
            now_seconds - begun
        )
        if self.spent_seconds > most_seconds:
            return False
        self._num_extra += 1
        return self._num_extra <= _MOST_EXTRA_LOOKS

    def probed(self, seconds: float) -> None:
        """Note what reading it took."""
        self._probe_seconds += seconds

    def looked(self, seconds: float) -> None:
        """Note what a look within the budget took."""
        self._look_seconds += seconds
        self._recent = [*self._recent[-_NUM_RECENT + 1 :], seconds]

    def _total(self, now_seconds: float) -> float:
        begun = self._begun_seconds if self._begun_seconds is not None else now_seconds
        return _FREE_SECONDS + self._fraction * (now_seconds - begun)
