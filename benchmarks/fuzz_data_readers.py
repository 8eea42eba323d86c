"""The readers of data, of the systems that ship with memfit and of what scans keep."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from fuzzed_reader import Reader, of

from memfit.figures import Certainty, ConsideredPlan, Prediction, Term, Timeline
from memfit.influence.state import ScanState, opened_state
from memfit.integrations.deepspeed.config import adapted
from memfit.reports.training import (
    TRAINING_NAME,
    Training,
    read_metrics,
    read_training,
    write_training,
)
from memfit_workloads.conve.data import GraphFiles, read_graph
from memfit_workloads.conve.tracin.checkpoints import read_config as read_traced_config
from memfit_workloads.dreams.ms_data import columns_of, read_spectra
from memfit_workloads.dreams.spectra import BadRecords, OnBadRecord
from memfit_workloads.trident.frame_files import open_array
from memfit_workloads.trident.manifest import read_manifest
from memfit_workloads.wpo_sgm.cifar import read_batch
from memfit_workloads.wpo_sgm.data import read_samples

RECORD: dict[str, Any] = {
    "video": {"path": "a.mp4", "fps": 25, "ir_path": "b.npy"},
    "motion": {"kinematics": [[0.1 * n for n in range(9)] for _ in range(3)]},
    "object": {"class_id": 3, "conf": 0.5},
    "labels": {"event": 1, "severe": 0},
    "targets": {"boxes_path": "boxes.npy", "mask_path": "mask.npy"},
    "prompt": "a plume",
}
MGF = b"""# spectra
BEGIN IONS
TITLE=one
PEPMASS=301.14 1000
CHARGE=1+
RTINSECONDS=12.5
SMILES=CCO
50.1 10
77.25 100.5
120.0 3e2
END IONS

BEGIN IONS
PEPMASS=150.5
CHARGE=2+ and 3+
60 1
END IONS
"""
FACTS = {"model": "a", "num_rows": 3, "rate": 0.5}
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
        "reduce_bucket_size": 500000000,
        "overlap_comm": False,
    },
}


def _mzml() -> bytes:
    """Write a scan with one array that is compressed and one that is not."""
    arrays = {"MS:1000514": [50.1, 77.25, 120.0], "MS:1000515": [10.0, 100.0, 3.0]}
    written = ""
    for (kind, values), packing in zip(arrays.items(), ("MS:1000574", "MS:1000576"), strict=True):
        data = np.array(values, "<f8").tobytes()
        data = zlib.compress(data) if packing == "MS:1000574" else data
        names = "".join(f'<cvParam accession="{each}"/>' for each in (kind, packing, "MS:1000523"))
        text = base64.b64encode(data).decode()
        written += f"<binaryDataArray>{names}<binary>{text}</binary></binaryDataArray>"
    return (
        '<?xml version="1.0"?><mzML xmlns="http://psi.hupo.org/ms/mzml"><run><spectrumList>'
        '<spectrum id="scan=1"><cvParam accession="MS:1000511" value="2"/><scanList><scan>'
        '<cvParam accession="MS:1000016" value="1.5" unitAccession="UO:0000031"/></scan></scanList>'
        '<precursorList><precursor><selectedIon><cvParam accession="MS:1000744" value="301.14"/>'
        '<cvParam accession="MS:1000041" value="1"/></selectedIon></precursor></precursorList>'
        f"<binaryDataArrayList>{written}</binaryDataArrayList></spectrum></spectrumList></run></mzML>"
    ).encode()


@cache
def _states() -> tuple[bytes, ...]:
    with TemporaryDirectory() as name:
        arrays = {"sums": np.arange(6.0).reshape(2, 3), "ids": np.arange(3)}
        state = ScanState(facts=FACTS, num_done=4, checksums={"0": 7}, arrays=arrays)
        state.save(Path(name))
        (path,) = Path(name).iterdir()
        return (path.read_bytes(),)


def _saved(save: Callable[..., object], *arrays: object) -> bytes:
    out = io.BytesIO()
    save(out, *arrays)
    return out.getvalue()


@cache
def _trainings() -> tuple[bytes, ...]:
    prediction = Prediction(
        device="cpu",
        batch_size=4,
        peak_allocated_bytes=1000,
        peak_reserved_bytes=2000,
        process_bytes=3000,
        first_step_peak_bytes=900,
        step_seconds=0.1,
        by_category={"parameters": 400},
        by_module={"layers.0": 400},
        strategies=("micro-batching(2)",),
        numerics="exact",
        certainty=Certainty.EXACT,
        terms=[Term(name="parameters", num_bytes=400, certainty=Certainty.EXACT, source="")],
        timeline=Timeline(
            allocated_bytes=[1, 3, 2], by_category={"x": [1, 3, 2]}, phases=[(0, "forward")]
        ),
    )
    considered = ConsideredPlan(
        strategies=("bf16",),
        numerics="approximate",
        peak_bytes=900,
        step_seconds=0.2,
        fits=True,
        chosen=False,
        reason="slower",
    )
    training = Training(
        title="conve",
        command="memfit train conve",
        budget_bytes=5000,
        plain=prediction,
        planned=prediction,
        considered=[considered],
        results={"mrr": 0.5},
    )
    with TemporaryDirectory() as name:
        write_training(Path(name), training)
        return ((Path(name) / TRAINING_NAME).read_bytes(),)


def _spectra(path: Path) -> None:
    columns_of([*read_spectra(path, BadRecords(OnBadRecord.SKIP))])


def _refusing(path: Path) -> None:
    columns_of([*read_spectra(path, BadRecords())])


def _named_graph(path: Path) -> None:
    triples = path.with_name("train.txt")
    read_graph(GraphFiles(train=triples, valid=triples, test=triples, entity_to_id=path))


_TRIPLES = ("train.txt", b"a\tr\tb\n")
_ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
DATA_READERS = (
    Reader(
        title="trident manifest",
        name="clips.jsonl",
        read=lambda path: read_manifest(path, path.parent, 5),
        contents=of("".join(f"{json.dumps(RECORD)}\n" for _ in range(3)).encode()),
    ),
    Reader(title="MGF", name="s.mgf", read=_spectra, contents=of(MGF)),
    Reader(title="MGF, refusing", name="s.mgf", read=_refusing, contents=of(MGF)),
    Reader(title="mzML", name="s.mzML", read=_spectra, contents=lambda: (_mzml(),)),
    Reader(
        title="mzML, packed",
        name="s.mzML.gz",
        read=_spectra,
        contents=lambda: (gzip.compress(_mzml(), mtime=0),),
    ),
    Reader(
        title="influence state",
        name="progress.npz",
        read=lambda path: opened_state(path.parent, FACTS),
        contents=_states,
    ),
    Reader(
        title="traced model",
        name="config.json",
        read=lambda path: read_traced_config(path.parent),
        contents=of(b'{"data": {"dataset": "umls", "train": null}, "training": {"seed": 1}}'),
    ),
    Reader(
        title="entity ids",
        name="entity_to_id.txt",
        read=_named_graph,
        contents=of(b"a\t0\nb\t1\nc\t2\n"),
        beside=(_TRIPLES,),
    ),
    Reader(
        title="frames",
        name="f.npy",
        read=partial(open_array),
        contents=lambda: (_saved(np.save, _ARRAY),),
    ),
    Reader(
        title="frames, archived",
        name="f.npz",
        read=lambda path: (open_array(path, head_only=True), open_array(path)),
        contents=lambda: (_saved(np.savez, _ARRAY), _saved(np.savez_compressed, _ARRAY)),
    ),
    Reader(
        title="samples",
        name="x.npy",
        read=read_samples,
        contents=lambda: (_saved(np.save, np.arange(6.0).reshape(2, 3)),),
    ),
    Reader(
        title="CIFAR-10",
        name="data_batch_1",
        read=read_batch,
        contents=lambda: (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}, 2),),
    ),
    Reader(
        title="DeepSpeed config",
        name="ds.json",
        read=lambda path: adapted(path, batch_size=8, num_ranks=2),
        contents=of(json.dumps(DEEPSPEED).encode()),
    ),
    Reader(
        title="training.json",
        name="training.json",
        read=lambda path: read_training(path.parent),
        contents=_trainings,
    ),
    Reader(
        title="metrics alone",
        name="metrics.jsonl",
        read=lambda path: read_metrics(path.parent),
        contents=of(b'{"epoch": 1, "loss": 0.5}\n{"epoch": 2, "valid": {"mrr": 1}}\n'),
    ),
)
