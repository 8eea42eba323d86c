"""A case carried out: what it takes, how long, and whether it gives what the plain step gives."""

from __future__ import annotations

import copy
import gc
import statistics
import time
import traceback
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from recording.cards import CudaCard
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import memfit
from memfit import Job, Plan
from memfit.runtime.run import Run, open_plain_session, unguarded_run
from memfit.session.batches import find_layout, real_batch

from .card_lock import card_alone
from .jobs import card_jobs

_NUM_TIMED = 5
_NUM_COMPARED = 3
_MOST_SECONDS = 40


def carried_out(task: dict[str, Any]) -> dict[str, Any]:
    """Measure a case, then hold three steps of it against three plain ones."""
    job = card_jobs(task["size"])[task["job"]]()
    plan = Plan.from_json(task["plan"])
    device = "cpu" if task["device"] == "cpu" else "cuda"
    ready = _Ready(job)
    with card_alone(_MOST_SECONDS):
        started = time.perf_counter()
        found = _tried(lambda: _measured(ready, plan, device))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        found |= {"same": _tried(lambda: _compared(ready, plan, device))}
        found["card_seconds"] = time.perf_counter() - started
    return found


class _Ready:
    """A job whose model and batch are built before the card is taken."""

    def __init__(self, job: Job) -> None:
        self.own_job = job
        self.layout = find_layout(job)
        self.batch = real_batch(job, job.batch_size)
        self._model = job.model()

    def job(self) -> Job:
        """Give the job with a model of the same weights each time."""
        model = copy.deepcopy(self._model)
        return replace(self.own_job, model=lambda: model)


def _open(ready: _Ready, plan: Plan, device: str) -> tuple[Run, Any]:
    session = open_plain_session(ready.job(), device, ready.layout, plan)
    batch = tree_map_only(Tensor, lambda each: each.to(device), ready.batch)
    return unguarded_run(session, plan), batch


def _measured(ready: _Ready, plan: Plan, device: str) -> dict[str, Any]:
    """Measure the second step, as memfit predicts it, and time some more."""
    if device == "cpu":
        return _measured_on_cpu(ready, plan)
    card = CudaCard()
    card.start()
    found: dict[str, Any] = {"context_after_init_bytes": card.process().process_bytes}
    run, batch = _open(ready, plan, device)
    with closing(run):
        card.wait()
        found["setup_allocated_bytes"] = card.allocated_bytes()
        run.step(batch)
        card.wait()
        found["first_step_peak_bytes"], _ = card.peaks()
        card.reset_peaks()
        run.step(batch)
        card.wait()
        allocated, reserved = card.peaks()
        process = card.process()
        found |= {
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
            "process_bytes": process.process_bytes,
            "process_source": process.source,
            "reserved_at_reading_bytes": card.reserved_bytes(),
            **process.every_way,
            **card.further(),
            **_timed(run, batch, card),
        }
    return found


def _measured_on_cpu(ready: _Ready, plan: Plan) -> dict[str, Any]:
    found = memfit.measure(ready.own_job, plan)
    return {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "first_step_peak_bytes": found.first_step_peak_bytes,
        "step_seconds": found.step_seconds,
    }


def _timed(run: Run, batch: Any, card: Any) -> dict[str, Any]:
    """Time steps, each from an idle card to an idle card."""
    seconds = []
    for _ in range(_NUM_TIMED):
        card.wait()
        started = time.perf_counter()
        run.step(batch)
        card.wait()
        seconds.append(time.perf_counter() - started)
    return {"step_seconds": statistics.median(seconds), "all_step_seconds": seconds}


def _compared(ready: _Ready, plan: Plan, device: str) -> dict[str, Any]:
    """Run three steps with the plan and three without, in full fp32, from the same weights."""
    _compute_exactly()
    planned = _trained(ready, plan, device)
    plain = _trained(ready, Plan(), device)
    again = _trained(ready, Plan(), device)
    begin = {name: each.detach() for name, each in ready.job().model().named_parameters()}
    return {
        "with_plan": _difference(plain, planned, begin),
        "plain_again": _difference(plain, again, begin),
        "losses": plain[0],
        "losses_with_plan": planned[0],
    }


def _compute_exactly() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


Trained = tuple[list[float], dict[str, Tensor]]


def _trained(ready: _Ready, plan: Plan, device: str) -> Trained:
    run, batch = _open(ready, plan, device)
    with closing(run):
        losses = [float(run.step(batch).loss) for _ in range(_NUM_COMPARED)]
        # On the host, since a plan may leave some of them there.
        weights = {name: each.detach().cpu() for name, each in _parameters(run.model)}
    del run
    gc.collect()
    return losses, weights


def _parameters(model: nn.Module) -> Any:
    return model.named_parameters()


def _difference(plain: Trained, other: Trained, begin: dict[str, Tensor]) -> dict[str, Any]:
    """Compare losses and parameters; parameters relative to what the steps changed of them."""
    losses = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(plain[0], other[0], strict=True)]
    worst, worst_name, off, moved = 0.0, "", 0.0, 0.0
    largest = 0.0
    for name, value in plain[1].items():
        found = other[1].get(name)
        if found is None:
            return {"missing": name}
        apart = float((found.double() - value.double()).norm())
        change = float((value.double() - begin[name].to(value.device).double()).norm())
        off, moved = off + apart**2, moved + change**2
        largest = max(largest, float((found.double() - value.double()).abs().max()))
        if change and apart / change > worst:
            worst, worst_name = apart / change, name
    return {
        "loss": max(losses),
        "parameters_of_change": (off / moved) ** 0.5 if moved else None,
        "worst_parameter_of_change": worst,
        "worst_parameter": worst_name,
        "largest_difference": largest,
        "to_the_bit": all(torch.equal(v, other[1][n]) for n, v in plain[1].items()),
    }


def _tried(work: Any) -> dict[str, Any]:
    """Do some work, or say how it failed."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a figure too, and the next case is not to suffer
        return {
            "error": f"{type(error).__name__}: {error}"[:1500],
            "trace": traceback.format_exc()[-2500:],
        }
