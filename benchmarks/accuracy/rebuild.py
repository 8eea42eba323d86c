"""A row's training step, rebuilt: the model, the optimizer and the batch as the authors had them.

``rebuild(row)`` checks what can be checked without building; ``Rebuilt.setup()`` then makes
everything on the device and gives the step. Inside a fake-tensor mode with a virtual card nothing
takes memory; on ``device="cpu"`` a small row really runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .attention import attention_implementation
from .batches import make_batch
from .configurations import configuration_of
from .losses import loss_of
from .models import build_model, parameter_dtype
from .optimizers import build_optimizer
from .packages import load_package
from .protocols import Parts, Protocol, Step, make_step, probe_context, protocol_of
from .published.rebuild import rebuild_published
from .published.steps import PublishedStep
from .rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A row as something to run."""

    row: Row
    setup: Callable[[], Step]
    """Makes model, optimizer and batch on the device, and gives the function of one step."""
    num_steps: int
    """How many steps to run, warm-up included."""
    measured_from_step: int
    """The step (counted from 0) before which peaks are reset; 0 where the authors reset nothing."""
    prelude: tuple[Callable[[], None], ...] = ()
    """What happened on the device before, in the same process."""
    notes: tuple[str, ...] = ()
    """What is not known or differs from the authors' run."""
    readings: tuple[Rebuilt, ...] = ()
    """What the row's description allows as well."""


def rebuild(row: Row, device: str = "cuda") -> Rebuilt:
    """Rebuild a row's step for a device.

    Raises:
        CannotRebuild: if the row lacks something, or asks for what is not supported. What only the
            building itself finds out is raised by ``setup``.
    """
    if row.published:
        return _of_the_collection(row, rebuild_published(row))
    protocol = protocol_of(row)
    loss_of(row)
    parameter_dtype(row)
    if row.model_library != "custom":
        package = load_package(row.model_library)
        if row.model_library == "transformers":
            configuration_of(row, package)
    num_warmup_steps = row.num_warmup_steps if protocol.resets_peak else 0
    return Rebuilt(
        row=row,
        setup=partial(_set_up, row, protocol, device),
        num_steps=row.num_warmup_steps + row.num_measured_steps,
        measured_from_step=num_warmup_steps,
        prelude=(partial(probe_context, device),) if protocol.has_context_probe else (),
        notes=_notes(row),
    )


def _of_the_collection(row: Row, step: PublishedStep) -> Rebuilt:
    return Rebuilt(
        row=row,
        setup=step.setup,
        num_steps=step.num_steps,
        measured_from_step=step.measured_from_step,
        notes=step.notes,
        readings=tuple(_of_the_collection(row, each) for each in step.readings),
    )


def _set_up(row: Row, protocol: Protocol, device: str) -> Step:
    """Make everything on the device, in the order of the authors' programs."""
    model = build_model(row, device)
    optimizer = build_optimizer(row, model, device)
    batch = make_batch(row, model, "cpu" if protocol.copies_batch_each_step else device)
    parts = Parts(model=model, optimizer=optimizer, batch=batch, loss=loss_of(row), device=device)
    return make_step(row, protocol, parts)


def _notes(row: Row) -> tuple[str, ...]:
    """Return what is assumed about a row."""
    notes = []
    if row.precision_detail.get("autocast_dtype_inferred"):
        notes.append("the autocast dtype is inferred, not recorded")
    for name, version in sorted(row.library_versions.items()):
        found = getattr(load_package(name), "__version__", None)
        if found != version:
            notes.append(f"measured with {name} {version}, rebuilt with {found}")
    if "flash" in (row.attention or "").lower() and attention_implementation(row) == "sdpa":
        notes.append("FlashAttention is stood in for by the flash kernel of SDPA")
    return tuple(notes)
