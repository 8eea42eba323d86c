"""Why pieces of a batch may not be taken, as sentences."""

from __future__ import annotations

from memfit.errors import JobFunctionError, MemfitError, RecordingError
from memfit.trace.modules import line_of_error


def not_recorded(error: object) -> str:
    """Say that a step cannot be recorded, and why."""
    return f"the step cannot be recorded: {_short(error)}"


def _short(error: object) -> str:
    if isinstance(error, JobFunctionError):
        return error.reason.rstrip(".")
    if isinstance(error, RecordingError):
        line = line_of_error(error)
        return f"{error.what.rstrip('.')} ({line})" if line else error.what.rstrip(".")
    return str(error).partition("\n")[0].rstrip(".")


def fails_on_parts(num_samples: int, error: MemfitError) -> str:
    """Say that a step fails on fewer samples, and why."""
    return (
        f"the step fails on {_samples(num_samples)} of its batch ({_short(error)}), so the batch "
        "cannot be cut into such pieces."
    )


def _samples(count: int) -> str:
    return f"{count} samples" if count != 1 else "one sample"


ODD = "pairs of neighbours cannot be cut into pieces of an odd number of samples."
ALONE = (
    "a single sample is computed in another way than several ({}), so that nothing is known of "
    "micro-batches of one; choose larger ones."
)


def differs(num_samples: int, place: str) -> str:
    """Say that a step does something else for another number of samples."""
    return (
        f"the step does something else for a batch of {num_samples} samples ({place}), so "
        "micro-batches would train something else; keep the batch whole."
    )


LOOP = (
    "a loop over the samples could not be followed ({}): it has to do the same for each of them, "
    "write nothing in place, and end in torch.stack, torch.cat or a sum."
)
NUMBERS = (
    "{} is a list of numbers of the samples, and what becomes of them is not followed; give them "
    "as a tensor of the batch to have it cut."
)
ENDS_INSIDE = "the loss, or a gradient, belongs to single samples of a loop over them."
HOOKED = (
    "{} has a hook that is called once its gradient is accumulated; in pieces it would be called "
    "for each, with the sum so far. A hook on the gradient itself (register_hook) is followed."
)
OTHER_STATE = "the job's code reaches other tensors when it is built for a batch of {} samples."
