"""A knowledge graph of a million entities and 18.6 million triples, planned, trained and traced.

The graph is generated: entities of 20 kinds, relations between kinds, heads, tails and relations by
Zipf's law. A hundredth of an epoch is trained inside a budget, and a hundredth of the training
triples is traced; both are killed on the way and go on from what they kept.

Run: python benchmarks/bench_large_graph.py [graph] [plan] [train] [trace] [trace_peak]
(about two hours in all)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from results_file import RESULTS, load_result, save_result
from rich.console import Console

from memfit import influence
from memfit.files import write_atomically
from memfit_workloads.conve import tracin
from memfit_workloads.conve.tracin.checkpoints import find_checkpoints
from memfit_workloads.conve.tracin.labels import Labels
from memfit_workloads.conve.tracin.questions import read_question
from memfit_workloads.conve.tracin.scans import Scans
from memfit_workloads.conve.tracin.settings import settings_from

_FOLDER = Path(tempfile.gettempdir()) / "memfit_large_graph"
_NUM_ENTITIES, _NUM_RELATIONS, _NUM_KINDS = 1_000_000, 100, 20
_NUM_TRAIN, _NUM_OTHER = 18_600_000, 2_000
_LINES_AT_A_TIME = 1_000_000
_FLAT = 30
"""How many entities of a kind are about equally frequent before Zipf's law shows."""
_BATCH_SIZE = 8192
_BUDGET = "1GiB"
_KILLED_AFTER_STEPS = 3
_NUM_TEST = 5
_FIRST_STEPS = 5

Numbers = npt.NDArray[np.int64]


def main() -> None:
    """Run the parts that are named, or all of them."""
    parts: dict[str, Callable[[], Any]] = {
        "graph": _graph,
        "plan": _plan,
        "train": _train,
        "trace": _trace,
        "trace_peak": _trace_peak,
    }
    figures: dict[str, Any] = {}
    if (RESULTS / "large_graph.json").exists():
        figures = {key: load_result("large_graph").get(key) for key in parts}
    for name in sys.argv[1:] or parts:
        figures[name] = parts[name]()
        save_result("large_graph", figures)


def _graph() -> dict[str, Any]:
    """Generate the graph, and write its files as the document has them."""
    draw = np.random.default_rng(7)
    weight = 1.0 / np.arange(1, _NUM_RELATIONS + 1)
    num_drawn = int(1.35 * _NUM_TRAIN)
    relations = draw.choice(_NUM_RELATIONS, num_drawn, p=weight / weight.sum())
    of_heads, of_tails = draw.integers(0, _NUM_KINDS, (2, _NUM_RELATIONS))
    num_each = _NUM_ENTITIES // _NUM_KINDS
    heads = of_heads[relations] * num_each + _ranks(draw, num_each, num_drawn)
    tails = of_tails[relations] * num_each + _ranks(draw, num_each, num_drawn)
    keys = (heads * _NUM_RELATIONS + relations) * _NUM_ENTITIES + tails
    keys.sort()
    keys = keys[np.flatnonzero(np.diff(keys, prepend=-1))]
    keys = keys[draw.permutation(len(keys))[: _NUM_TRAIN + 2 * _NUM_OTHER]]
    queries, tails = keys // _NUM_ENTITIES, keys % _NUM_ENTITIES
    names = draw.permutation(_NUM_ENTITIES)
    triples = (names[queries // _NUM_RELATIONS], queries % _NUM_RELATIONS, names[tails])

    _FOLDER.mkdir(exist_ok=True)
    ends = (0, _NUM_OTHER, 2 * _NUM_OTHER, len(keys))
    for name, start, stop in zip(("valid", "test", "train"), ends, ends[1:], strict=False):
        _write_triples(_FOLDER / f"{name}.txt", triples, range(start, stop))
    for name, letter, count in (("node", "e", _NUM_ENTITIES), ("rel", "r", _NUM_RELATIONS)):
        lines = "".join(f"{letter}{number}\t{number}\n" for number in range(count))
        write_atomically(_FOLDER / f"{name}_dict.txt", lines)
    return {
        "num_entities": _NUM_ENTITIES,
        "num_relations": _NUM_RELATIONS,
        "num_train": ends[-1] - ends[-2],
        "file_bytes": sum(path.stat().st_size for path in _FOLDER.glob("*.txt")),
    }


def _ranks(draw: np.random.Generator, count: int, size: int) -> Numbers:
    """Draw numbers below a count, a number k with a chance of about 1 / (k + 30)."""
    found = _FLAT * ((count / _FLAT + 1) ** draw.random(size) - 1)
    return np.minimum(found.astype(np.int64), count - 1)


def _write_triples(path: Path, triples: tuple[Numbers, Numbers, Numbers], rows: range) -> None:
    with path.open("w") as file:
        for start in range(rows.start, rows.stop, _LINES_AT_A_TIME):
            part = slice(start, min(start + _LINES_AT_A_TIME, rows.stop))
            parts = zip(*(column[part].tolist() for column in triples), strict=True)
            file.writelines(f"e{head}\tr{relation}\te{tail}\n" for head, relation, tail in parts)


def _plan() -> dict[str, Any]:
    """Plan for a card that is not here, and for this machine."""
    return {
        "a10-24gb": _planned("--device", "a10-24gb", "--batch-size", "32768"),
        "cpu": _planned("--device", "cpu", "--budget", _BUDGET),
    }


def _planned(*words: str) -> dict[str, Any]:
    started = time.perf_counter()
    result = _result_of(*_training(), "--dry-run", *words)
    wanted = (
        *("strategies", "numerics", "budget_bytes", "plain_peak_bytes", "predicted_peak_bytes"),
        *("step_seconds", "epoch_steps", "epoch_seconds"),
    )
    return {
        "flags": " ".join(words),
        **{name: result[name] for name in wanted},
        "whole_process_seconds": round(time.perf_counter() - started, 1),
    }


def _train() -> dict[str, Any]:
    """Train a hundredth of an epoch; kill it, and have it go on."""
    folder = _FOLDER / "run"
    shutil.rmtree(folder, ignore_errors=True)
    num_steps = -(-load_result("large_graph")["plan"]["cpu"]["epoch_steps"] // 100)
    words = (
        *(*_training(), "--device", "cpu", "--budget", _BUDGET, "--checkpoint-steps", "1"),
        *("--max-steps", str(num_steps), "--output-dir", str(folder)),
    )
    steps, kept = folder / "steps.jsonl", folder / "checkpoints" / "checkpoint_interrupted.pt"

    def is_far() -> bool:
        return kept.exists() and len(steps.read_text().splitlines()) >= _KILLED_AFTER_STEPS

    _kill_when(is_far, *words)
    before = [json.loads(line) for line in steps.read_text().splitlines()]
    result = _result_of(*words, "--resume-from-checkpoint", "auto")
    every = [json.loads(line) for line in steps.read_text().splitlines()]
    predicted, measured = result["predicted_peak_bytes"], result["measured_peak_bytes"]
    seconds = sorted(line["step_seconds"] for line in every)[len(every) // 2]
    return {
        "batch_size": _BATCH_SIZE,
        "num_steps": num_steps,
        "killed_after_steps": len(before),
        "steps_seen": [line["step"] for line in every],
        "budget_bytes": result["budget_bytes"],
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured,
        "error_fraction": predicted / measured - 1,
        "median_step_seconds": seconds,
        "host_bytes": max(line["host_bytes"] for line in every),
        "metrics": result["metrics"],
    }


def _trace() -> dict[str, Any]:
    """Trace test triples through a hundredth of the training triples; kill it, and go on."""
    output = _FOLDER / "traced.json"
    progress = _FOLDER / "traced.json.progress"
    shutil.rmtree(progress, ignore_errors=True)
    output.unlink(missing_ok=True)
    words = ("tracin", *_tracing(), "--output", str(output))
    started = time.perf_counter()
    dry = _result_of(*words, "--dry-run")
    planned_seconds = time.perf_counter() - started

    def is_far() -> bool:
        return (progress / "progress.npz").exists()

    _kill_when(is_far, *words)
    assert not output.exists(), "a tracing that was killed writes nothing"
    started = time.perf_counter()
    result = _result_of(*words)
    return {
        "num_train": result["num_train"],
        "num_train_rows": result["num_train_rows"],
        "num_test": result["num_test"],
        "loss": result["loss_in_words"],
        "budget_bytes": result["budget_bytes"],
        "train_chunk": dry["train_chunk"],
        "predicted_peak_bytes": result["predicted_peak_bytes"],
        "measured_peak_bytes": result["measured_peak_bytes"],
        "error_fraction": result["predicted_peak_bytes"] / result["measured_peak_bytes"] - 1,
        "predicted_seconds": dry["predicted_seconds"],
        "dry_run_seconds": round(planned_seconds, 1),
        "whole_process_seconds_after_kill": round(time.perf_counter() - started, 1),
        "proof_error": result["proof_error"],
        "unproved": result["unproved"],
    }


def _trace_peak() -> dict[str, Any]:
    """Measure the same tracing's proof and first steps, which is all that a tracing measures."""
    parser = argparse.ArgumentParser()
    tracin.add_arguments(parser)
    settings = settings_from(parser.parse_args([*_tracing()]))
    checkpoints = find_checkpoints(settings)
    console = Console(stderr=True)
    question = read_question(settings, console)
    scans = Scans.of(settings, question, checkpoints)
    predicted = scans.predict().as_json()["predicted_peak_bytes"]

    def listen(progress: influence.Progress) -> None:
        if progress.num_done >= _FIRST_STEPS:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        scans.find(Labels.of(question.graph, settings), None, listen)
    measured = scans.peaks.highest_bytes
    assert measured is not None, "nothing else profiles"
    return {
        "num_train_rows": len(scans.groups.first),
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured,
        "error_fraction": predicted / measured - 1,
    }


def _tracing() -> tuple[str, ...]:
    """Return what is traced."""
    return (
        *("--model-path", str(_FOLDER / "run" / "final_model.pt"), "--device", "cpu"),
        *("--budget", _BUDGET, "--max-train-triples", str(_NUM_TRAIN // 100)),
        *("--max-test-triples", str(_NUM_TEST), "--top-k", "10"),
    )


def _training() -> list[str]:
    """Return the command that trains on the graph, with the document's sizes."""
    files = [
        word
        for flag, name in (
            *(("train", "train"), ("valid", "valid"), ("test", "test")),
            *(("entity-to-id", "node_dict"), ("relation-to-id", "rel_dict")),
        )
        for word in (f"--{flag}", str(_FOLDER / f"{name}.txt"))
    ]
    sizes = ["--embedding-dim", "32", "--num-epochs", "1", "--batch-size", str(_BATCH_SIZE)]
    return ["train", "conve", *files, *sizes]


def _result_of(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *words, "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _kill_when(is_far: Callable[[], bool], *words: str) -> None:
    """Start a command, and kill it with a signal that nothing can catch, once it is far enough."""
    process = subprocess.Popen([sys.executable, "-m", "memfit", *words])
    while not is_far():
        if process.poll() is not None:
            msg = f"it ended with {process.returncode} before it could be killed"
            raise RuntimeError(msg)
        time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
