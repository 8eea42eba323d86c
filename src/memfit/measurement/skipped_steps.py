"""Counts the steps to measure: more where a gradient scaler skips the first ones.

A scaler begins with a large scale and skips the optimizer's step until the gradients fit their
type. An optimizer that has not stepped has no states, so such a step takes less than later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch

_MOST_STEPS = 40


class SkippedSteps:
    """Look on while active, and say how often to step."""

    def __init__(self) -> None:
        self._is_skipped = False
        self._step: Any = torch.amp.GradScaler._maybe_opt_step
        self._patch = patch.object(torch.amp.GradScaler, "_maybe_opt_step", self._noting())

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()

    def until_steady(self) -> Iterator[None]:
        """Yield before each step to take, until two were not skipped, the last one among them."""
        num_taken = 0
        for _ in range(_MOST_STEPS):
            self._is_skipped = False
            yield
            num_taken += not self._is_skipped
            if num_taken == 2:
                return

    def _noting(self) -> Any:
        """Make a step of a scaler that notes whether it is skipped."""

        def note(
            scaler: torch.amp.GradScaler,
            optimizer: torch.optim.Optimizer,
            optimizer_state: dict[str, Any],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            found = optimizer_state["found_inf_per_device"].values()
            self._is_skipped = any(bool(each.item()) for each in found)
            return self._step(scaler, optimizer, optimizer_state, *args, **kwargs)

        return note
