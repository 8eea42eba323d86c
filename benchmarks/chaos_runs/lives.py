"""One process of a training: it goes on from what is there, and tells what it ends with."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import memfit
from chaos_runs.faults import AtOperators, at_numbers
from chaos_runs.jobs import batches_from, job_of, plan_of, planned, usable_strategies
from chaos_runs.stories import BUDGET, Fault, Story
from memfit import Plan
from memfit.errors import GIVEN_UP, MemfitError
from memfit.runtime.guard import step_log
from memfit.runtime.run import Run
from memfit_workloads.checkpoint_files import read_checkpoint, save_checkpoint

CHECKPOINT = "checkpoint.pt"
OLD_PLAN = Plan(reasons=("the plan before",))
_GROUP_TIMEOUT = timedelta(seconds=40)


class Place:
    """Where a run's files are: what it writes, what is temporary, and what is told of it."""

    def __init__(self, root: Path) -> None:
        self.work, self.tmp, self.told = root / "work", root / "tmp", root / "told"
        self.shards = self.work / "checkpoint"
        self.file = self.work / CHECKPOINT
        self.journal = self.work / "run"
        self.plan = self.work / "plan.yaml"

    def make(self) -> None:
        """Make the folders."""
        for each in (self.work, self.tmp, self.told):
            each.mkdir(parents=True)


def everything(run: Run) -> dict[str, torch.Tensor]:
    """Return all that a run's next step depends on, as plain tensors of this rank."""
    own = {
        "torch random": torch.get_rng_state(),
        "python random": torch.tensor(random.getstate()[1]),
        "numpy random": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
        "num_steps": torch.tensor(run.num_steps),
    }
    for name, value in run.model.state_dict().items():
        own[f"model.{name}"] = _plain(value)
    options = run.optimizer.state_dict()
    for number, state in options["state"].items():
        own |= {f"optimizer.{number}.{name}": _plain(value) for name, value in state.items()}
    for number, group in enumerate(options["param_groups"]):
        own[f"rate.{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    return own


def _plain(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        value = value.to_local()
    return torch.as_tensor(value).detach().clone()


def live(
    story: Story,
    place: Place,
    number: int,
    faults: Sequence[Fault],
    *,
    num_operators: int,
    strategies: Sequence[Mapping[str, Any]] | None,
    rank: int = 0,
) -> None:
    """Train from the latest checkpoint to the end, and tell how that went.

    Args:
        story: what is trained.
        place: where.
        number: of this process among those of the run.
        faults: that befall it.
        num_operators: of the undisturbed run, which faults are placed by.
        strategies: of the plan; None takes those of the story that its job takes.
        rank: of this process.
    """
    os.environ["TMPDIR"] = str(place.tmp)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    step_log._FREE_SECONDS = math.inf  # a busy machine is no reason to have nothing to go back to
    mode = AtOperators(at_numbers(faults, num_operators))
    told: dict[str, Any] = {"states": {}, "losses": {}, "events": 0, "peak_bytes": None}
    try:
        plan, told["strategies"] = _plan(story, place, strategies)
        with _joined(story, place, number, rank):
            _trained(story, place, mode, plan, told)
        told["ended"] = "done"
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        told |= {"ended": "error", **_words_of(error)}
    told |= {"num_operators": mode.seen, "struck": mode.struck}
    torch.save(told, place.told / f"life-{number}-{rank}.pt")


def _plan(
    story: Story, place: Place, strategies: Sequence[Mapping[str, Any]] | None
) -> tuple[Plan, Sequence[Mapping[str, Any]]]:
    """Return the plan of a story, and its strategies, found out where they are not given."""
    if strategies is None and story.kind == BUDGET:
        strategies = planned(story, place.told.parent.parent / "budget.txt")
    if strategies is None:
        strategies = usable_strategies(story)
    return plan_of(story, strategies), strategies


@contextlib.contextmanager
def _joined(story: Story, place: Place, number: int, rank: int) -> Any:
    if story.num_ranks == 1:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{place.told}/store-{number}"
    dist.init_process_group("gloo", store, _GROUP_TIMEOUT, story.num_ranks, rank)
    yield
    dist.destroy_process_group()


def _trained(
    story: Story, place: Place, mode: AtOperators, plan: Plan, told: dict[str, Any]
) -> None:
    seed = story.seed * 10 + (dist.get_rank() if dist.is_initialized() else 0)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    plan.save(place.plan) if seed % 10 == 0 else None
    folder = place.journal if story.has_journal else None
    with memfit.start(
        job_of(story.job, is_sharded=story.shares == "sharded"),
        plan,
        folder=folder,
        earlier_run="continue",
        average_gradients=story.shares == "averaged",
    ) as run:
        try:
            _steps(story, place, mode, run, told)
        except GIVEN_UP:
            told["given up"] = everything(run)
            raise
        finally:
            told["events"] = len(run.events)
            told["peak_bytes"] = run.measured_peak_bytes


def _steps(story: Story, place: Place, mode: AtOperators, run: Run, told: dict[str, Any]) -> None:
    rates = [group["lr"] for group in run.optimizer.param_groups]
    _go_on(story, place, run)
    told["states"][run.num_steps] = everything(run)
    for batch in batches_from(story.job, run.num_steps, story.num_steps):
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 0.9**run.num_steps
        own = _own(run, story, batch)
        with mode:
            result = run.step(own)
        told["losses"][run.num_steps] = result.loss.clone()
        told["states"][run.num_steps] = everything(run)
        if run.num_steps % story.save_every == 0 or run.num_steps == story.num_steps:
            _save(story, place, run)


def _own(run: Run, story: Story, batch: Any) -> Any:
    if story.shares in ("averaged", "sharded"):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return tuple(each[rank::num_ranks].contiguous() for each in batch)
    return run.part(batch) if story.num_ranks > 1 else batch


def _save(story: Story, place: Place, run: Run) -> None:
    if story.saves == "shards":
        run.save_sharded(place.shards)
    elif story.saves == "file":
        numpy_state = list(np.random.get_state())
        numpy_state[1] = torch.from_numpy(numpy_state[1].astype(np.int64))
        content = {
            "run": run.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy_state,
        }
        save_checkpoint(place.file, content)


def _go_on(story: Story, place: Place, run: Run) -> None:
    """Take up the latest checkpoint, where there is one."""
    if story.saves == "shards" and (place.shards / "latest.json").exists():
        run.load_sharded(place.shards)
    elif story.saves == "file" and place.file.exists():
        content = read_checkpoint(place.file, "the run", ("run", "torch"))
        run.load_state_dict(content["run"])
        torch.set_rng_state(content["torch"])
        version, words, gauss = content["python"]
        random.setstate((version, tuple(words), gauss))
        kept = content["numpy"]
        kept[1] = kept[1].numpy().astype(np.uint32)
        np.random.set_state(tuple(kept))


def _words_of(error: BaseException) -> dict[str, Any]:
    """Return plain facts of an error."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and len(chain) < 10:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return {
        "type": type(error).__name__,
        "message": str(error),
        "is_memfit": isinstance(error, MemfitError),
        "is_given_up": isinstance(error, GIVEN_UP),
        "errno": getattr(error, "errno", None),
        "filename": str(getattr(error, "filename", None) or ""),
        "chain": [f"{type(each).__name__}: {each}" for each in chain],
    }


def write_told(place: Place, name: str, content: Any) -> None:
    """Tell something in plain JSON."""
    (place.told / name).write_text(json.dumps(content))
