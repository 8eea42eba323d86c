"""Predicts one rank of an 8 B and a 70 B model on 8, 64 and 512 GPUs, without any of them.

Run: python benchmarks/bench_scale.py    (about three minutes; a fresh process for each row)

Llama 3's shapes in torchtitan's decoder, sharded by FSDP2 as torchtitan does it: parameters
gathered in bfloat16, gradients reduced in float32, AdamW fused, sequences of 8192. Every block of
the 70 B model is checkpointed, the 8 B one saves what torchtitan's list has. What the ranks send
each other is read off the recorded collectives: of a buffer of all ranks, each rank receives (or
sends) all but its own part.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

STARTED = time.perf_counter()

from accuracy.published.torchtitan import set_up  # noqa: E402 - imports are timed
from results_file import save_result  # noqa: E402

from memfit import Placement  # noqa: E402
from memfit.allocator.settings import AllocatorSettings  # noqa: E402
from memfit.devices.catalogue import load_device  # noqa: E402
from memfit.prediction.predict import evaluate_steps  # noqa: E402
from memfit.prediction.recording import record_steps  # noqa: E402
from memfit.trace.events import Trace  # noqa: E402
from memfit.virtual.process_group import one_rank_of  # noqa: E402

_DEVICE = "h100-80gb"
_LENGTH = 8192
_RANKS = (8, 64, 512)
_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "8 B": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256,
    },
    "70 B": {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28_672, "vocab": 128_256,
    },
})  # fmt: skip
_CHECKPOINTING = {"8 B": "selective, op policy", "70 B": "full"}


def main() -> None:
    """Predict all rows, or the one that is named."""
    if len(sys.argv) > 1:
        print(json.dumps(_row(sys.argv[1], int(sys.argv[2]))))
        return
    rows = [_in_process(model, num_ranks) for model in _MODELS for num_ranks in _RANKS]
    save_result("scale", {"device": _DEVICE, "num_tokens": _LENGTH, "rows": rows})


def _in_process(model: str, num_ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, model, str(num_ranks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _row(model: str, num_ranks: int) -> dict[str, Any]:
    """Predict the first of so many ranks."""
    fields = {
        "model": _MODELS[model],
        "source": "torchtitan",
        "parallelism": "FSDP2",
        "checkpointing": _CHECKPOINTING[model],
        "optimizer": "AdamW fused=True",
        "micro_batch": 1,
        "sequence": _LENGTH,
    }
    device = load_device(_DEVICE)
    imported, processor = time.perf_counter(), time.process_time()
    with one_rank_of(Placement(device=_DEVICE, num_ranks=num_ranks, devices_per_node=8)):
        recording = record_steps(partial(set_up, fields), device)
        settings = AllocatorSettings.parse("expandable_segments:True")
        found = evaluate_steps(recording, device, settings=settings)
    predicted = time.perf_counter()
    process = found.intervals["process"]
    return {
        "model": model,
        "num_ranks": num_ranks,
        "checkpointing": _CHECKPOINTING[model],
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "process_bytes": found.process_bytes,
        "process_low_bytes": process.low_bytes,
        "process_high_bytes": process.high_bytes,
        **_traffic(recording.steady, num_ranks),
        "import_seconds": round(imported - STARTED, 2),
        "predict_seconds": round(predicted - imported, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _traffic(step: Trace, num_ranks: int) -> dict[str, int]:
    """Return what a rank receives in all-gathers and sends in reduce-scatters, in one step."""
    sums = {"gathered_bytes": 0, "reduced_bytes": 0}
    for operation in step.operations:
        name = {
            "c10d._allgather_base_": "gathered_bytes",
            "c10d._reduce_scatter_base_": "reduced_bytes",
        }.get(operation.name)
        if name is not None:
            # The largest buffer of the call is that of all ranks.
            whole = max(step.allocations[index].num_bytes for index in operation.reads)
            sums[name] += whole * (num_ranks - 1) // num_ranks
    return sums


if __name__ == "__main__":
    main()
