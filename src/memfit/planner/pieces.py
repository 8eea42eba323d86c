"""Whether a batch may be cut into pieces at all; looked for once, when it is first asked."""

from __future__ import annotations

from collections.abc import Callable

from memfit.session.coupling import Coupling


class Pieces:
    """Keep what was found out about a loss."""

    def __init__(self, find_coupling: Callable[[], Coupling | None]) -> None:
        self._find_coupling = find_coupling
        self._found: Coupling | None = None
        self._was_asked = False

    def obstacle(self) -> str | None:
        """Say why pieces of a batch would not keep the results; None if they would."""
        if not self._was_asked:
            self._found = self._find_coupling()
            self._was_asked = True
        found = self._found
        return found.sentence if found is not None and found.forbids_pieces else None

    def note(self) -> str:
        """Say what could not be found out; empty where it was, or where nobody asked."""
        found = self._found
        return found.sentence if found is not None and not found.forbids_pieces else ""
