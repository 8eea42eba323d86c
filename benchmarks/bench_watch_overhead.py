"""What ``memfit run`` adds to the steps of a script, side by side in one process.

Run: python benchmarks/bench_watch_overhead.py        (about a minute on two cores)

Short blocks of steps with and without the hooks alternate over the same model, optimizer and data
loader, so that both see the same machine. What is compared is all the time of the one kind with all
the time of the other: a step that is watched event by event takes longer, and must be paid for by
those that are not. The first steps, of which three are always watched, come before and are told
apart, as is the time to attach. On a busy machine the two kinds differ by more than the hooks can
take, so the time inside the hooks is measured as well. Leaks are not looked for.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from paired_timing import take_turns
from results_file import save_result
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset, dataloader

from memfit.journal.folder import JournalWriter
from memfit.journal.records import RunFacts
from memfit.watch.inside.loaders import hook_loaders
from memfit.watch.inside.process_record import ProcessRecord
from memfit.watch.inside.script_watch import ScriptWatch
from memfit.watch.last_words import words_folder
from memfit.watch.settings import WatchSettings, watched_environment

_NUM_BLOCKS = 120
_STEPS_PER_BLOCK = 10
_NUM_STARTS = 7
_BATCH_SIZE = 192
_WIDTH = 512


def main() -> None:
    """Alternate blocks of steps, then starts of Python."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = _Steps(_watch(folder))
        (early_seconds,), (late_seconds,) = take_turns([steps.watched], range(2))
        rounds = list(take_turns([steps.watched, steps.bare], range(_NUM_BLOCKS)))
        hook_fraction = steps.hook_fraction()
        attach_seconds = _attach_seconds(folder)
    watched_seconds, bare_seconds = zip(*rounds, strict=True)
    save_result(
        "watch_overhead",
        {
            "num_steps_each": _NUM_BLOCKS * _STEPS_PER_BLOCK,
            "bare_step_seconds": round(statistics.median(bare_seconds) / _STEPS_PER_BLOCK, 5),
            "ratio_of_all_time": round(sum(watched_seconds) / sum(bare_seconds), 4),
            "median_ratio_of_blocks": round(
                statistics.median(watched / bare for watched, bare in rounds), 4
            ),
            "fraction_in_hooks": round(hook_fraction, 5),
            "first_steps_extra_seconds": round(early_seconds - late_seconds, 3),
            "attach_seconds": round(attach_seconds, 3),
        },
    )


class _Steps:
    """A training that can be watched for a while."""

    def __init__(self, watch: ScriptWatch) -> None:
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(6)]
        self._model = nn.Sequential(*layers, nn.Linear(_WIDTH, 1))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        num_samples = _BATCH_SIZE * _STEPS_PER_BLOCK
        self._loader = DataLoader(
            TensorDataset(torch.randn(num_samples, _WIDTH)), batch_size=_BATCH_SIZE
        )
        self._watch = watch

    def watched(self, _: int) -> None:
        """Go through the loader once with the hooks in their places."""
        with _hooks(self._watch):
            self._watch._ended_seconds = time.perf_counter()  # not the time between blocks
            self.bare(0)

    def bare(self, _: int) -> None:
        """Go through the loader once."""
        for (batch,) in self._loader:
            self._model(batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def hook_fraction(self) -> float:
        """Return the share of the time that is spent in the hooks themselves."""
        in_hooks: list[float] = []
        for name in ("optimizer_stepped", "loader_begun", "batch_wanted", "batch_given"):
            setattr(self._watch, name, _timed(getattr(self._watch, name), in_hooks))
        rounds = take_turns([self.watched], range(_NUM_BLOCKS // 4))
        all_seconds = sum(seconds for (seconds,) in rounds)
        return sum(in_hooks) / all_seconds


def _timed(hook: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    def timed(*args: Any) -> None:
        started = time.perf_counter()
        hook(*args)
        seconds.append(time.perf_counter() - started)

    return timed


@contextmanager
def _hooks(watch: ScriptWatch) -> Iterator[None]:
    """Put the hooks of a watched script in their places, and take them out again."""
    kind: Any = dataloader._BaseDataLoaderIter
    before = kind.__init__, kind.__next__
    handle = register_optimizer_step_post_hook(watch.optimizer_stepped)
    hook_loaders(watch.loader_begun, watch.batch_wanted, watch.batch_given)
    try:
        yield
    finally:
        handle.remove()
        kind.__init__, kind.__next__ = before


def _watch(folder: Path) -> ScriptWatch:
    """Make what a script below ``memfit run`` has."""
    now = datetime.now().astimezone().isoformat()
    facts = RunFacts(title="b", command="b", device="cpu", started_at=now, process_id=1)
    JournalWriter(folder).begin(facts)
    words_folder(folder).mkdir()
    settings = WatchSettings(folder=folder, finds_leaks=False)
    return ScriptWatch(settings, ProcessRecord(folder), None)


def _attach_seconds(folder: Path) -> float:
    """Return how much longer Python takes to import torch when it is watched."""
    bare = dict(os.environ)
    watched = watched_environment(WatchSettings(folder=folder), bare)
    pairs = take_turns([_start(watched), _start(bare)], range(_NUM_STARTS))
    return statistics.median(with_it - without for with_it, without in pairs)


def _start(environment: dict[str, str]) -> Callable[[int], object]:
    command = [sys.executable, "-c", "import torch"]
    return lambda _: subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
