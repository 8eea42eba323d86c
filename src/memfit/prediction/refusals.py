"""Says clearly why a step could not be recorded: which line is at fault, and what may help."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memfit.errors import JobFunctionError, MemfitError, RecordingError
from memfit.kernels.cuda.card import Card
from memfit.trace.events import Phase
from memfit.trace.modules import user_frames
from memfit.trace.recorder import Recorder
from memfit.virtual.process_group import ALONE, SAY_RANKS, is_about_ranks
from memfit.virtual.tensors import ValuesNeededError

_WEIGHT_LIBRARIES = ("huggingface_hub", "safetensors")
_GIVEN_NAME = "pretrained_model_name_or_path"
"""What `from_pretrained` of transformers and diffusers is given, by the name of its argument."""
_NO_WEIGHTS_NEEDED = (
    "No weights are needed for a prediction: build the model from its configuration, with "
    "Model(config) or AutoModel.from_config(config), or under torch.device('meta') followed by "
    "model.to_empty(device=...)."
)
_NO_GROUP = "process group has not been initialized"
_BLAMED = {Phase.BACKWARD: ("loss", "backward pass"), Phase.OPTIMIZER: ("optimizer", "step")}
"""The function that made what fails in a phase, and what that phase is called."""


@contextmanager
def clear_refusals() -> Iterator[None]:
    """Name the user's line where values are needed, and say that weights are not."""
    try:
        yield
    except ValuesNeededError as error:
        place = _place_of(error.__cause__ or error)
        where = f" ({place})" if place else ""
        raise ValuesNeededError(f"{error.what}{where}", error.remedy) from error
    except JobFunctionError as error:
        if _NO_GROUP in str(error.__cause__):
            raise JobFunctionError(
                error.function, error.expected, error.reason, remedy=SAY_RANKS
            ) from error.__cause__
        if error.function != "model" or not _is_about_files(error.__cause__):
            raise
        raise JobFunctionError(
            error.function, error.expected, error.reason, remedy=_NO_WEIGHTS_NEEDED
        ) from error.__cause__


@contextmanager
def code_at_fault(card: Card | None) -> Iterator[None]:
    """Say where code of any kind failed while it was recorded, and what may help."""
    try:
        yield
    except (MemfitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        place = _place_of(error)
        where = f" ({place})" if place else ""
        what = f"the code raised {type(error).__name__}: {str(error).rstrip('.')}{where}"
        remedy = "If it runs without memfit, --debug shows where it goes wrong here."
        if _is_about_files(error):
            remedy = _NO_WEIGHTS_NEEDED
            folder = _absent_folder(error)
            if folder:
                what = (
                    f"{folder} is no folder on this machine, and is not among the downloads{where}"
                )
        elif is_about_ranks(error):
            remedy = f"torchrun and accelerate launch set it. {ALONE}."
        elif card is None and "cuda" in str(error).lower():
            remedy = "Name the GPU that it wants with --device; `memfit devices` lists them."
        raise RecordingError(what, remedy) from error


@contextmanager
def step_at_fault(recorder: Recorder) -> Iterator[None]:
    """Say which of a job's functions is to blame where torch refuses the rest of a step.

    Raises:
        JobFunctionError: with torch's own sentence, where backward or the optimizer's step fails.
    """
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        blamed = _BLAMED.get(recorder.phase)
        if blamed is None or type(error).__module__.startswith("torch._subclasses"):
            raise
        function, part = blamed
        place = _place_of(error)
        where = f" ({place})" if place else ""
        reason = f"its {part} raised {type(error).__name__}: {str(error).rstrip('.')}{where}"
        raise JobFunctionError(function, "", reason) from error


def check_placed(recorder: Recorder, card: Card | None) -> None:
    """Refuse a recording that never touched the card: its figures would be zeros.

    Raises:
        RecordingError: if nothing was placed on the card.
    """
    if card is not None and not any(a.num_bytes for a in recorder.history.allocations):
        raise RecordingError(
            f"nothing was placed on the GPU ({card.title})",
            "Move model and batch there, with model.cuda(), batch.cuda() or device='cuda', or "
            "predict with --device cpu. For a memfit.Job memfit moves both by itself.",
        )


def _place_of(error: BaseException) -> str:
    """Name the innermost line that belongs neither to torch nor to memfit."""
    own = user_frames(error)
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


def _absent_folder(error: BaseException) -> str:
    """Return what `from_pretrained` was given where it is no local folder; "" for other errors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_locals.get(_GIVEN_NAME)
        if isinstance(name, (str, os.PathLike)) and not Path(name).exists():
            return repr(os.fspath(name))
    return ""


def _is_about_files(error: BaseException | None) -> bool:
    """Return whether an error is about a file or a download that is not there."""
    while error is not None:
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, OSError) or library in _WEIGHT_LIBRARIES:
            return True
        error = error.__cause__ or error.__context__
    return False
