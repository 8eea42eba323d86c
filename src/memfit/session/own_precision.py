"""Sees what a step's own code does to its precision: autocast, and a loss that is scaled."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch

from memfit.errors import JobFunctionError
from memfit.job import expected_signature
from memfit.trace.origins import line_of_caller

_MEMFIT = f"{Path(__file__).parents[1]}{os.sep}"
_PASSED_BY = (f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__, __file__)
_SCALED_REMEDY = (
    "Return the loss as it is. The strategy fp16 scales it and divides the gradients again: "
    "`memfit plan --allow fp16`, with autocast left out of the loss."
)


@dataclass(frozen=True, slots=True)
class OwnPrecision:
    """What a step's own code does to its precision, with the lines of code."""

    autocast: str = ""
    """The type of its autocast, such as ``bfloat16``; empty where it has none."""
    autocast_line: str = ""
    scaler_line: str = ""
    """Where it calls a ``GradScaler``, be that switched off here; empty where it does not."""

    def notes_of_a_job(self) -> list[str]:
        """Say what it means for a job."""
        notes = []
        if self.autocast:
            then = "and stays so: results are kept as they are under it"
            if self.autocast == "float16":
                then = (
                    "and nothing scales it, so that small gradients become zero: take autocast out "
                    "of the loss and allow fp16, which scales"
                )
            notes.append(
                f"the loss runs under an autocast of its own, in {self.autocast} "
                f"({self.autocast_line}), {then}"
            )
        if self.scaler_line:
            notes.append(
                f"the loss calls a GradScaler ({self.scaler_line}) that is switched off here; "
                "where it is on, as on a card, the run is refused: take it out and allow fp16, "
                "which scales"
            )
        return notes

    def notes_of_a_step(self) -> list[str]:
        """Say what any code would leave to memfit in a job."""
        autocast = f"runs under autocast in {self.autocast} ({self.autocast_line})"
        if self.scaler_line:
            calls = f"calls a GradScaler ({self.scaler_line})"
            both = f"{autocast} and {calls}" if self.autocast else calls
            return [f"the step {both}: in a memfit.Job that is the strategy fp16, and is left out"]
        if self.autocast == "bfloat16":
            return [f"the step {autocast}: in a memfit.Job that is the strategy bf16"]
        return []


class OwnPrecisionWatch:
    """Note enabled autocasts for a device type, and calls of scalers, but for memfit's own.

    Limits: autocast that is switched on without ``torch.autocast`` is not seen.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._patches = ExitStack()
        self.found = OwnPrecision()

    def __enter__(self) -> Self:
        enter: Callable[[Any], Any] = torch.autocast.__enter__
        scale: Callable[..., Any] = torch.amp.GradScaler.scale

        def entered(autocast: Any) -> Any:
            if autocast._enabled and autocast.device == self._device_type and not _is_own_call():
                dtype = str(autocast.fast_dtype).removeprefix("torch.")
                self._note(autocast=dtype, autocast_line=line_of_caller())
            return enter(autocast)

        def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            if not _is_own_call():
                self._note(scaler_line=line_of_caller())
            return scale(scaler, outputs)

        self._patches.enter_context(patch.object(torch.autocast, "__enter__", entered))
        self._patches.enter_context(patch.object(torch.amp.GradScaler, "scale", scaled))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patches.close()

    def _note(self, **values: str) -> None:
        """Note what has not been seen before."""
        new = {name: value for name, value in values.items() if not getattr(self.found, name)}
        self.found = replace(self.found, **new)


@contextmanager
def scaling_refused() -> Iterator[None]:
    """Refuse a job's loss that scales itself: nothing would divide its gradients again.

    Raises:
        JobFunctionError: with the line and the strategy that scales.
    """
    scale: Callable[..., Any] = torch.amp.GradScaler.scale

    def refused(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if not scaler.is_enabled() or _is_own_call():
            return scale(scaler, outputs)
        reason = (
            f"it scales itself with a GradScaler ({line_of_caller()}), and gradients would stay "
            "scaled when the optimizer steps"
        )
        raise JobFunctionError("loss", expected_signature("loss"), reason, _SCALED_REMEDY)

    with patch.object(torch.amp.GradScaler, "scale", refused):
        yield


def _is_own_call() -> bool:
    """Return whether memfit calls what calls this, be it through torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_BY):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_MEMFIT)
