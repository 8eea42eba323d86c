"""The readers of a user's files, each with files that it reads."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fuzz_commands import COMMAND_READERS
from fuzz_data_readers import DATA_READERS
from fuzzed_reader import Reader, of
from rich.console import Console

import memfit
from memfit.cli.main import main
from memfit.configfile.document import read_document
from memfit.configfile.plan_settings import read_plan_settings
from memfit.devices.calibration import read_calibration
from memfit.devices.device_file import read_own_device
from memfit.journal.records import LeakEvent, RunFacts, StepRecord
from memfit.peak_changes.saved import read_prediction
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import run_html
from memfit.reports.run_text import run_summary
from memfit.snapshots.files import ReadLimits, load_content
from memfit.snapshots.reading import read_device
from memfit.strategies.plan import Plan
from memfit_workloads.checkpoint_files import read_checkpoint
from memfit_workloads.conve.data import GraphFiles, read_graph
from memfit_workloads.conve.tracin.labels import read_edge_map, read_node_names
from memfit_workloads.naics.config import read_yaml
from memfit_workloads.trident.deepspeed_file import read_deepspeed_file

PLAN = b"""memfit_plan: 1
device: cpu
ranks: null
numerics: exact
proof: null
reasons: [it fits, 'and more']
strategies:
- {name: micro-batching, micro_batch_size: 4}
- name: activation-checkpointing
  blocks: [layers.0-11, head]
  keep: []
- name: bf16
ladder:
- - {name: micro-batching, micro_batch_size: 2}
"""
CONFIG = b"""defaults: &d {lr: 0.1, steps: [1, 2, 3]}
training:
  per_device_train_batch_size: 8   # a comment
  gradient_accumulation_steps: 4
  bf16: false
  name: "a: b"
  text: |
    lines
  <<: *d
"""
CARDS = Path(memfit.__path__[0]) / "devices" / "data"
DEVICE = (CARDS / "rtx-3060-12gb.toml").read_bytes()
FACTS = RunFacts(
    title="train",
    command="python train.py",
    device="cpu",
    started_at="2026-01-01T00:00:00+00:00",
    process_id=3,
)
LEAK = LeakEvent(
    step=30,
    kind="list",
    holder="losses",
    chain=("train.py: losses", "[7]"),
    source_line="train.py:12",
    growth_bytes_per_step=4.0,
    total_growth_bytes=40,
    num_steps=10,
    place="host",
    sentence="losses grows.",
)
STEPS = [
    StepRecord(step=n, time_seconds=n * 0.5, step_seconds=0.4, host_bytes=n) for n in (1, 2, 3)
]
FAILED = {"event": "out-of-memory", "step": 2, "phase": "backward", "cause": "x", "plan": ["bf16"]}
ENDING = {
    "reason": "leak",
    "ended_by": "error",
    "exit_code": 1,
    "sentence": "It.",
    "remedy": "Stop.",
}
RUN = ("run.json", json.dumps(asdict(FACTS)).encode())
TIMELINE = (
    b'{"memfit_timeline": 1, "step": 1, "predicted": null, "measured": {"allocated_bytes": '
    b'[1, 5, 2], "by_category": {"x": [1, 5, 2]}, "phases": [[0, "forward"]], "places": null}}'
)
JOB = """
import torch, memfit
job = memfit.Job(
    model=lambda: torch.nn.Linear(8, 8),
    batch=lambda size: torch.randn(size, 8),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
"""


@cache
def _predictions() -> tuple[bytes, ...]:
    with TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        job, saved = Path(name) / "job.py", Path(name) / "p.json"
        job.write_text(JOB)
        main(["predict", f"{job}:job", "--device", "cpu", "--save", str(saved)])
        return (saved.read_bytes(),)


@cache
def _snapshots() -> tuple[bytes, ...]:
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    entry = {
        "action": "alloc",
        "addr": 512,
        "size": 512,
        "stream": 0,
        "frames": frames,
        "time_us": 1,
    }
    block = {"size": 512, "requested_size": 500, "address": 512, "state": "active_allocated"}
    segment = {
        "device": 0,
        "address": 512,
        "total_size": 2097152,
        "stream": 0,
        "segment_type": "small",
        "allocated_size": 512,
        "active_size": 512,
        "blocks": [{**block, "frames": frames}],
    }
    content = {
        "segments": [segment],
        "device_traces": [[entry, {**entry, "action": "oom", "device_free": 5}]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    }
    return json.dumps(content).encode(), pickle.dumps(content)


@cache
def _checkpoints() -> tuple[bytes, ...]:
    out = io.BytesIO()
    torch.save({"epoch": 1, "model": {"weight": torch.zeros(3)}}, out)
    return (out.getvalue(),)


def _lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _report(path: Path) -> None:
    report = read_report(path.parent)
    Console(file=io.StringIO()).print(run_summary(report, []))


def _page(path: Path) -> None:
    run_html(read_report(path.parent))


def _snapshot(path: Path) -> None:
    limits = ReadLimits(max_file_bytes=2**20)
    read_device(str(path), load_content(path, limits), None, limits)


def _graph(path: Path) -> None:
    read_graph(GraphFiles(train=path, valid=path, test=path))


def _journal(name: str, *contents: bytes, read: Callable[[Path], object] = _report) -> Reader:
    return Reader(
        title=f"{name}{' on a page' if read is _page else ''}",
        name=f"run/{name}",
        read=read,
        contents=of(*contents),
        beside=() if name == "run.json" else (RUN,),
        most_seconds=10.0 if read is _page else 1.0,
    )


READERS = (
    Reader(title="plan", name="plan.yaml", read=Plan.load, contents=of(PLAN)),
    Reader(title="plan settings", name="plan.yaml", read=read_plan_settings, contents=of(PLAN)),
    Reader(title="config YAML", name="c.yaml", read=read_document, contents=of(CONFIG)),
    Reader(
        title="config JSON",
        name="c.json",
        read=read_document,
        contents=of(b'{"train_batch_size": 8, "fp16": {"enabled": true}, "x": [1, 2.5, null]}\n'),
    ),
    Reader(
        title="config TOML",
        name="c.toml",
        read=read_document,
        contents=of(b'[train]\nbatch_size = 8\nx = {a = 1, b = [1, 2]}\ns = "t"\n'),
    ),
    Reader(
        title="config Python",
        name="c.py",
        read=read_document,
        contents=of(b"batch_size = 8\nargs = dict(lr=0.1, x=[1, 2])\nname = 'a'\n"),
    ),
    Reader(
        title="device file",
        name="card.toml",
        read=lambda path: read_own_device(str(path)),
        contents=of(DEVICE),
    ),
    Reader(
        title="calibration",
        name="cpu.toml",
        read=read_calibration,
        contents=of(b"[" + DEVICE.partition(b"\n[")[2]),
    ),
    _journal(*RUN),
    _journal("steps.jsonl", _lines(*map(asdict, STEPS))),
    _journal("events.jsonl", _lines({"event": "leak", **asdict(LEAK)}, FAILED)),
    _journal("reason.json", json.dumps({**ENDING, "leaks": [asdict(LEAK)]}).encode()),
    _journal("metrics.jsonl", _lines({"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4})),
    _journal("steps.jsonl", _lines(*map(asdict, STEPS)), read=_page),
    _journal("timeline.json", TIMELINE),
    Reader(title="saved prediction", name="p.json", read=read_prediction, contents=_predictions),
    Reader(title="snapshot", name="s.pickle", read=_snapshot, contents=_snapshots),
    Reader(
        title="checkpoint",
        name="c.pt",
        read=lambda path: read_checkpoint(path, "conve", ("epoch", "model")),
        contents=_checkpoints,
    ),
    Reader(
        title="triples", name="train.txt", read=_graph, contents=of(b"a\tr\tb\nb\tr\tc\nc\ts\ta\n")
    ),
    Reader(
        title="node names", name="n.txt", read=read_node_names, contents=of(b"a\tThe a\nb\tB\n")
    ),
    Reader(title="edge map", name="e.json", read=read_edge_map, contents=of(b'{"[1, 2]": "r"}')),
    Reader(title="NAICS config", name="n.yaml", read=read_yaml, contents=of(PLAN)),
    Reader(
        title="DeepSpeed file",
        name="d.json",
        read=read_deepspeed_file,
        contents=of(b'{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'),
    ),
    *DATA_READERS,
    *COMMAND_READERS,
)
