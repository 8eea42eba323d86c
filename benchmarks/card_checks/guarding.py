"""The guard on a card: a step that really runs out of memory, undone and run in smaller pieces."""

from __future__ import annotations

import gc
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import memfit

from .card_lock import card_alone
from .jobs import card_jobs

_NUM_STEPS = 3
_SHARE = 0.75
_MOST_SECONDS = 60


def guarded(task: dict[str, Any]) -> dict[str, Any]:
    """Run steps without a limit, then with one that the plain step passes, and compare."""
    job = card_jobs(task["size"])[task["job"]]()
    with card_alone(_MOST_SECONDS):
        torch.backends.cudnn.allow_tf32 = False
        begin = {name: each.detach().clone() for name, each in job.model().named_parameters()}
        free = _run(job)
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        # What the plain run holds between its steps has to stay possible.
        limit = int(
            free["between_steps_bytes"]
            + _SHARE * (free["peak_allocated_bytes"] - free["between_steps_bytes"])
        )
        torch.cuda.set_per_process_memory_fraction(limit / total)
        limited = _run(job)
        torch.cuda.set_per_process_memory_fraction(1.0)
    off = moved = 0.0
    for name, value in free["weights"].items():
        off += float((limited["weights"][name].double() - value.double()).norm()) ** 2
        moved += float((value.double() - begin[name].double()).norm()) ** 2
    free.pop("weights"), limited.pop("weights")
    return {
        "held_before_bytes": held,
        "limit_bytes": limit,
        "free": free,
        "limited": limited,
        "parameters_of_change": (off / moved) ** 0.5,
        "ran_out": bool(limited["events"]),
    }


def _run(job: memfit.Job) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    run = memfit.start(job, memfit.Plan(), device="cuda")
    batch = tree_map_only(Tensor, lambda each: each.to("cuda"), job.batch(job.batch_size))
    with closing(run):
        losses = [float(run.step(batch).loss) for _ in range(_NUM_STEPS)]
        torch.cuda.synchronize()
        found = {
            "losses": losses,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "between_steps_bytes": torch.cuda.memory_allocated(),
            "events": [str(event)[:600] for event in run.events],
            "plan_at_end": list(run.plan.labels()),
            "not_put_back": [str(each) for each in run.not_put_back],
            "weights": {name: each.detach().cpu() for name, each in run.model.named_parameters()},
        }
    del run
    gc.collect()
    return found
