"""Predictions in files: what ``memfit predict --save`` and ``--json`` write, and ``compare`` reads.

One JSON object. ``memfit_prediction`` is the version of the format; all else has the names of the
data classes. docs/compare.md describes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from memfit._version import __version__
from memfit.errors import DataError
from memfit.figures import BOUNDED_FIGURES, Prediction
from memfit.units import MIB

from .moments import StepMoments
from .plain_values import natural, parts, seconds, text

FORMAT = 1
_NAME = "memfit_prediction"
_MOST_BYTES = 256 * MIB
"""A step of a hundred thousand modules takes less."""
FIRST_STEP, STEADY_STEP = "first step", "steady step"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPrediction:
    """A prediction as it was saved, with what lives at its peak line by line."""

    source: str
    """What was predicted: ``FILE.py:NAME``, or the command line of a script."""
    torch_version: str
    prediction: Prediction
    phases: Mapping[str, int]
    """The peak allocated in each phase of the run."""
    moments: StepMoments
    device_file: str = ""
    """The text of the device's file, where that is one of the user's own."""


def prediction_document(
    source: str, answer: Mapping[str, Any], moments: StepMoments
) -> dict[str, Any]:
    """Return everything that is written of a prediction, as plain JSON values.

    Args:
        source: what was predicted, as the user named it.
        answer: its fields, and what is known beside them.
        moments: what lives where each phase of the steady step is highest.
    """
    return {
        _NAME: FORMAT,
        "memfit_version": __version__,
        "torch_version": _torch_version(),
        "source": source,
        **answer,
        **moments.to_json(),
    }


def read_prediction(path: Path) -> SavedPrediction:
    """Read a saved prediction.

    Raises:
        DataError: if there is none, or it is of another version or malformed.
    """
    content = _object_in(path)
    found = content.get(_NAME)
    if found is None:
        reason = (
            f"it is no prediction: {_NAME}, the version of its format, is missing. Write one with "
            "`memfit predict FILE.py:NAME --save FILE`."
        )
        raise DataError(str(path), reason)
    if isinstance(found, bool) or found != FORMAT:
        reason = (
            f"it is a prediction of format {text(str(found))[:20]}, and this memfit reads format "
            f"{FORMAT}. Predict it again with this memfit, or compare with the one that wrote it."
        )
        raise DataError(str(path), reason)
    try:
        return _saved(content)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        missing = isinstance(error, KeyError)
        what = f"{error} is missing" if missing else text(str(error))
        reason = f"it is no whole prediction: {what}. Write it again with --save."
        raise DataError(str(path), reason) from error


def _saved(content: Mapping[str, Any]) -> SavedPrediction:
    prediction = Prediction.from_json(content)
    _check(prediction)
    prediction = replace(
        prediction,
        device=text(prediction.device),
        strategies=tuple(map(text, prediction.strategies)),
        by_category=parts("by_category", prediction.by_category),
        by_module=parts("by_module", prediction.by_module),
    )
    phases = {
        text(each["phase"]): natural("peak_allocated_bytes", each["peak_allocated_bytes"])
        for each in content.get("phases") or ()
    }
    found = content.get("device_file", "")
    if not isinstance(found, str):
        msg = "device_file is no text"
        raise ValueError(msg)  # noqa: TRY004 - as for everything else that is malformed
    return SavedPrediction(
        source=text(content["source"]),
        torch_version=text(content["torch_version"]),
        prediction=prediction,
        phases=phases
        or {
            FIRST_STEP: prediction.first_step_peak_bytes,
            STEADY_STEP: prediction.peak_allocated_bytes,
        },
        moments=StepMoments.from_json(content),
        device_file=found,
    )


def _check(prediction: Prediction) -> None:
    """Refuse figures that are none.

    Raises:
        ValueError: if one of them is not.
    """
    for name in (*BOUNDED_FIGURES.values(), "first_step_peak_bytes", "ranks", "rank"):
        natural(name, getattr(prediction, name))
    for name in ("batch_size", "budget_bytes"):
        if getattr(prediction, name) is not None:
            natural(name, getattr(prediction, name))
    seconds("step_seconds", prediction.step_seconds)
    if prediction.budget_of not in BOUNDED_FIGURES:
        msg = f"budget_of is none of {', '.join(BOUNDED_FIGURES)}"
        raise ValueError(msg)
    if prediction.fits not in (None, True, False):
        msg = "fits is neither true nor false"
        raise ValueError(msg)


def _object_in(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        DataError: if there is no such file, or something else in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(str(path), _without_path(error)) from error
    if len(data) > _MOST_BYTES:
        raise DataError(str(path), f"it is larger than {_MOST_BYTES // MIB} MiB, so no prediction")
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else text(str(error))
        reason = f"it is not JSON: {what}"
        raise DataError(str(path), reason) from error
    if isinstance(content, list):
        reason = (
            f"it holds a list of {len(content)}, as predictions for several devices are written. "
            "Save each by itself: name one --device."
        )
        raise DataError(str(path), reason)
    if not isinstance(content, dict):
        raise DataError(str(path), f"it holds a {type(content).__name__}, not a JSON object")
    return content


def _without_path(error: OSError) -> str:
    """Return what an error of the system says, in lower case as the rest of the sentence."""
    said = error.strerror or str(error)
    return "there is no such file or folder" if isinstance(error, FileNotFoundError) else said


def _refuse_constant(name: str) -> NoReturn:
    """Refuse what JSON has no word for: ``NaN``, ``Infinity``."""
    msg = f"{name} is no number"
    raise ValueError(msg)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
