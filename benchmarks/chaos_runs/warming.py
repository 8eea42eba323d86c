"""Has the parent know and import what its children need, so that each of them starts at once."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import memfit
from chaos_runs.jobs import job_of
from chaos_runs.lives import Place, live
from chaos_runs.processes import adopt_orphans, forked, room, wait_for
from chaos_runs.stories import MEMORY, draw

_MOST_SECONDS = 240.0
_LAYERS = ("mlp", "norm", "dropout", "attention", "recurrent", "noise")


def warm_up() -> None:
    """Find out in a child what a training imports, and import it; set up a run, but train nothing.

    Backward would begin threads here, which a child does not have.
    """
    adopt_orphans()
    story = replace(draw(1), kind=MEMORY, num_ranks=1, shares="", saves="shards", has_journal=True)
    job = replace(story.job, layers=_LAYERS, loss="classes", dtype="fp32", loader="list")
    story = replace(story, job=job)
    with tempfile.TemporaryDirectory(dir=room()) as name:
        place = Place(Path(name))
        place.make()
        said = place.told / "modules.json"

        def run() -> None:
            live(story, place, 0, (), num_operators=1, strategies=())
            said.write_text(json.dumps([*sys.modules]))

        wait_for({forked(run, place.told / "said.txt"): None}, _MOST_SECONDS)
        _import_all(json.loads(said.read_text()))
        seen = dict(os.environ)
        with warnings.catch_warnings(), memfit.start(job_of(job)) as started:
            warnings.simplefilter("ignore")
            started.save_sharded(Path(name, "checkpoint"))
        os.environ.clear()
        os.environ.update(seen)
    gc.collect()
    gc.freeze()


def _import_all(modules: list[str]) -> None:
    for module in modules:
        if module not in sys.modules and not module.startswith("__"):
            try:
                importlib.import_module(module)
            except ImportError:
                continue
