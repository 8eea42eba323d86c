"""What recordings for analysis share: nothing else is active, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes

from memfit.job import Job
from memfit.live_state import LiveState
from memfit.live_state.reading import contents_of
from memfit.session.deterministic_draws import untouched_randomness
from memfit.session.reachable import roots_of
from memfit.session.session import Session


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep other modes, random states and warnings out of it."""
    with (
        _disable_current_modes(),
        untouched_randomness(),
        torch.enable_grad(),  # an evaluation asks without
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # code for whole batches may warn about small ones
        with patch.object(Distribution, "_validate_args", new=False):  # that looks at values
            yield


def no_gradients(*_: object) -> torch.Tensor:
    """Stand in for a gradient pass where none is run."""
    raise AssertionError("gradients are computed by hand here")


def watched(session: Session, job: Job) -> LiveState:
    """Watch what a recorded step may bind anew: content is fake, and not looked at."""
    roots = roots_of(session, job)
    # Whether a fake tensor is given other memory (``p.data = ...``) is still looked at.
    real = [one for one in contents_of(LiveState(roots)) if not isinstance(one, FakeTensor)]
    return LiveState(roots, leave_out=real)


def generators_in(state: LiveState) -> list[torch.Generator]:
    """List the generators of torch that can be reached."""
    found = (each for part in state.found() for each, _ in part.generators)
    return [each for each in found if isinstance(each, torch.Generator)]
