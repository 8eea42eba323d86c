"""Hold what memfit promises against what happens: state, draws and buffers in odd places.

Run: python benchmarks/bench_promises.py        (half an hour on two cores)

Each case of ``tests/corpus/promises`` goes through processes of its own. One asks (predict, plan,
measure, verify) and looks whether anything was left changed. Others train sixty steps under the
plan, guarded and unguarded, and note the peak of each step. Two more run in fp64, the plan beside a
direct loop. ``--only NAME ...`` prints the rows of some cases and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guard_scenarios.digest import differences, digest
from results_file import save_result

import memfit

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.corpus.promises import buffers, draws, odd_state, remote, sets, trials
from tests.corpus.promises.case import CASES

NAME = "promises"
FRACTIONS = (0.6, 0.75, 0.9)
NUM_STEPS = 60
NUM_EXACT_STEPS = 6
EQUAL_BELOW = 1e-8
"""Relative differences of losses and parameters in fp64, after a few steps, are rounding."""
_MODULES = (buffers, draws, odd_state, remote, sets, trials)
_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL"}
"""What torch writes into the environment as it is imported further."""


def asked(name: str, folder: Path) -> dict[str, Any]:
    """Ask everything about a case, and say what that left changed."""
    job = _seeded(name)
    # torch wraps the update of an optimizer's class when the first one is built.
    job.optimizer([torch.nn.Parameter(torch.zeros(1))])
    look = partial(_world, job, folder)
    plain = look()
    row: dict[str, Any] = {"left_changed": []}

    def ask(what: str, question: Any) -> Any:
        answer = None
        try:
            answer = question()
        except memfit.MemfitError as error:
            row[f"{what}_refused"] = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  # a raw error is what is looked for
            row[f"{what}_raised"] = f"{type(error).__name__}: {error}"
        row["left_changed"] += [f"{what}: {path}" for path in differences(look(), plain)][:3]
        return answer

    prediction = ask("predict", lambda: memfit.predict(job))
    plan = None
    for fraction in FRACTIONS if prediction else ():
        budget = int(fraction * prediction.peak_allocated_bytes)
        row.pop("plan_refused", None)
        plan = ask("plan", lambda: memfit.plan(job, budget=budget))  # noqa: B023  # asked at once
        if plan is not None:
            break
    if plan is None:
        return row
    plan.save(folder / "plan.yaml")
    row |= {
        "strategies": [*plan.labels()],
        "numerics": str(plan.numerics),
        "budget_bytes": budget,
        "predicted_bytes": plan.prediction.peak_allocated_bytes,
        "planned_says_not_put_back": "put back" in " ".join([*plan.prediction.notes, *plan.notes]),
    }
    (folder / "plan.yaml").rename(folder.with_suffix(".yaml"))
    ask("measure", lambda: memfit.measure(job, plan=plan))
    verified = ask("verify", lambda: memfit.verify(job, plan))
    if verified is not None:
        row |= {"earned": str(verified.earned), "verified_claim": str(verified.numerics)}
    return row


def trained(name: str, folder: Path, *, guard: bool) -> dict[str, Any]:
    """Train under the plan and give the highest peak until each step."""
    job, plan = _seeded(name), memfit.Plan.load(folder.with_suffix(".yaml"))
    peaks = []
    with memfit.start(job, plan, guard=guard) as run:
        for step in range(NUM_STEPS):
            run.step(_batch(job, step))
            peaks.append(run.measured_peak_bytes)
        not_put_back = [str(each) for each in run.not_put_back]
    return {"peaks": [peaks[0], peaks[1], peaks[-1]], "not_put_back": not_put_back}


def followed(name: str, folder: Path, *, planned: bool) -> dict[str, Any]:
    """Train a few steps in fp64, under the plan or in a direct loop; give losses and weights."""
    torch.set_default_dtype(torch.float64)
    job, losses = _seeded(name), []
    if planned:
        with memfit.start(job, memfit.Plan.load(folder.with_suffix(".yaml"))) as run:
            batches = (_batch(job, step) for step in range(NUM_EXACT_STEPS))
            losses.extend(float(run.step(batch).loss) for batch in batches)
            model = run.model
    else:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        for step in range(NUM_EXACT_STEPS):
            loss = job.loss(model, _batch(job, step))
            losses.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    sums = [float(each.detach().abs().sum()) for each in model.state_dict().values()]
    return {"losses": losses, "sums": sums}


def _seeded(name: str) -> memfit.Job:
    """Build a case's job anew, with every source of random numbers seeded."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return CASES[name]()


def _batch(job: memfit.Job, step: int) -> Any:
    torch.manual_seed(1000 + step)
    return job.batch(job.batch_size)


def _world(job: memfit.Job, folder: Path) -> dict[str, Any]:
    """Take all that asking may not change: job, modules, random states, environment, files."""
    found = digest(
        job=[job.model, job.batch, job.loss, job.optimizer],
        modules={module.__name__: dict(vars(module)) for module in _MODULES},
        farther=getattr(sys.modules.get("tests.corpus.promises.farther"), "COUNTS", {"forward": 0}),
        environment={key: os.environ.get(key) for key in {*os.environ} - _SET_BY_TORCH},
        python=random.getstate(),
        numpy=np.random.get_state()[1],
        torch=torch.get_rng_state(),
        settings=[torch.backends.cudnn.benchmark, odd_state._SCALE.get()],
    )
    return found | {"files": str(sorted(folder.rglob("*")))}


def _child(mode: str, name: str, folder: Path) -> dict[str, Any]:
    """Run one part of a case in a process of its own, which has all modules imported."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_part, mode, name, folder).result(timeout=900)
        except Exception as error:  # noqa: BLE001  # whatever ends a part is what is noted
            return {"failed": f"{type(error).__name__}: {error}"}


def _part(mode: str, name: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        row = PARTS[mode](name, folder)
    return json.loads(json.dumps(row, default=str))


def judged(name: str) -> dict[str, Any]:
    """Put a case through all parts and name what is broken."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        folder.mkdir()
        row = {"name": name} | _child("ask", name, folder)
        broken = [key for key in row if key.endswith(("_raised", "failed"))]
        broken += ["left changed"] if row.get("left_changed") and not _is_said(row) else []
        if "strategies" in row:
            for mode in ("guarded", "unguarded"):
                row[mode] = _child(mode, name, folder)
                broken += _broken_budget(mode, row)
            broken += _broken_numerics(
                row, *(_child(m, name, folder) for m in ("planned", "direct"))
            )
    return row | {"broken": broken}


def _is_said(row: dict[str, Any]) -> bool:
    """Return whether the plan says that something cannot be put back, so that a run begins there.

    Nothing puts back how far an iterator of Python has come.
    """
    return bool(row.get("planned_says_not_put_back"))


def _broken_budget(mode: str, row: dict[str, Any]) -> Iterator[str]:
    if "failed" in row[mode]:
        yield f"{mode} failed"
    elif max(row[mode]["peaks"]) > row["budget_bytes"]:
        yield f"{mode} over budget"


def _broken_numerics(
    row: dict[str, Any], planned: dict[str, Any], direct: dict[str, Any]
) -> Iterator[str]:
    if "failed" in planned:
        row["planned"] = planned
        yield "planned failed in fp64"
        return
    pairs = [
        (a, b) for key in ("losses", "sums") for a, b in zip(planned[key], direct[key], strict=True)
    ]
    row["error"] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    if row["numerics"] == "exact" and row["error"] > EQUAL_BELOW and not _is_said(row):
        yield "false exact"
    if row["numerics"] not in ("exact", "same-in-law"):
        yield f"chose {row['numerics']}"
    if row.get("verified_claim", row["numerics"]) != row["numerics"]:
        yield "verify claims another class"


PARTS = {
    "ask": asked,
    "guarded": partial(trained, guard=True),
    "unguarded": partial(trained, guard=False),
    "planned": partial(followed, planned=True),
    "direct": partial(followed, planned=False),
}


def main() -> None:
    """Put all cases through their parts, print what is broken and write the table."""
    parser = argparse.ArgumentParser(description="Hold promises against what happens.")
    parser.add_argument("--only", nargs="*", default=())
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["__main__"])
    rows = []
    for name in arguments.only or CASES:
        rows.append(judged(name))
        print(f"{name:36} {rows[-1]['broken'] or 'holds'}", flush=True)
        if arguments.only:
            print(json.dumps(rows[-1], indent=1))
    if not arguments.only:
        num_broken = sum(bool(row["broken"]) for row in rows)
        save_result(NAME, {"num_jobs": len(rows), "num_broken": num_broken, "rows": rows})


if __name__ == "__main__":
    main()
