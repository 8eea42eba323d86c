"""Follows the streams of steps, and tells where a pass over the data begins and ends."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_LOOK = 3
"""By then gradients and optimizer states exist."""
_LOOK_GROWTH = 1.35
_POSTPONE_GROWTH = 1.1
_SOON = 8
_LONG_GAP = 16
_GAP_FACTOR = 1.5


@dataclass(slots=True)
class Stream:
    """The boundaries of one stream; other streams run in between."""

    name: str
    count: int = 0
    """Boundaries so far."""
    pass_number: int = 1
    position: int = 0
    """Boundaries in this pass."""
    previous_length: int = 0
    """Of the pass before."""
    next_look: int = _FIRST_LOOK
    looked_after_pass: int = 0
    """The last pass after which a look was taken or given up."""
    batch_bytes: int | None = None
    """Of the last step, where known."""
    _last_index: int = 0
    _last_step: int = -1
    _usual_gap: int | None = None
    _is_ended: bool = field(default=False)

    def note(self, index: int, step: int, batch_bytes: int | None = None) -> None:
        """Note a boundary, the ``index``-th of all streams."""
        gap = index - self._last_index - 1
        is_new_pass = self.count > 0 and (
            self._is_ended or step < self._last_step or self._is_over(gap)
        )
        if is_new_pass:
            self.previous_length = self.position
            self.pass_number += 1
            self.position = 0
            self._is_ended = False
        elif self.count > 0:
            # The smaller one: a gap may hold a pass of another stream.
            self._usual_gap = gap if self._usual_gap is None else min(self._usual_gap, gap)
        self.count += 1
        self.position += 1
        self._last_index, self._last_step = index, step
        self.batch_bytes = batch_bytes

    def last_index(self) -> int:
        """Return when it last ran."""
        return self._last_index

    def end_pass(self) -> None:
        """Note that its pass is over."""
        self._is_ended = True

    def is_between_passes(self, index: int) -> bool:
        """Say, at another stream's boundary, whether this one's pass is over."""
        return self._is_ended or self._is_over(index - self._last_index)

    def _is_over(self, gap: int) -> bool:
        if self._usual_gap is None:
            return gap > _LONG_GAP
        return gap > _GAP_FACTOR * self._usual_gap

    def look_soon(self) -> None:
        """Look again after a few steps."""
        self.next_look = self.count + _SOON

    def postpone_look(self) -> None:
        """Come back to a look that could not be afforded."""
        self.next_look = max(self.count + 2, int(self.count * _POSTPONE_GROWTH))

    def plan_next_look(self) -> None:
        """Look again when about a third more steps have gone by."""
        self.next_look = max(self.count + 3, int(self.count * _LOOK_GROWTH))
