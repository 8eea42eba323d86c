"""Start pairs of ranks that talk through gloo, under glibc's checks, and count how they end.

Once, a rank ended with SIGABRT and "unaligned tcache chunk detected": somebody had written over its
heap. Each pair here runs all-reduces, broadcasts of objects and a barrier, then ends its group, as
training does. Freed memory is filled with a pattern, so that a use after a free shows.

    python benchmarks/rerun_gloo.py --runs 20
    python benchmarks/rerun_gloo.py --runs 200 --save
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from results_file import write_result

NAME = "gloo"
CHECKS = {
    "plain": {},
    "perturbed": {"MALLOC_PERTURB_": "165"},
    "no thread cache": {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_PERTURB_": "90"},
    "checked heap": {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"},
    "one arena": {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "MALLOC_PERTURB_": "165"},
}
"""What is set of glibc's own, by name."""
RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    said = [None, None]
    dist.all_gather_object(said, {"rank": rank, "step": step, "text": "x" * (step * 97 % 1000)})
    held = [step if rank == 0 else None]
    dist.broadcast_object_list(held, src=0)
    assert held == [step] and said[1 - rank]["step"] == step
dist.barrier()
dist.destroy_process_group()
"""
MOST_SECONDS = 120


def ends_of(checks: dict[str, str]) -> list[tuple[int, str]]:
    """Run a pair, and return the exit code and the last line of each rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **checks}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-X", "faulthandler", "-c", RANK]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), str(Path(folder) / "store")],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        ends = []
        for rank in ranks:
            try:
                told = rank.communicate(timeout=MOST_SECONDS)[1]
            except subprocess.TimeoutExpired:
                rank.kill()
                told = rank.communicate()[1]
            ends.append((rank.returncode, told.strip()))
    return ends


def main() -> int:
    """Run the pairs in turn, and print how they ended; the exit code is 1 if one was killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep the counts as a result")
    args = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    has_failed = False
    for number in range(args.runs):
        name = [*CHECKS][number % len(CHECKS)]
        began_seconds = time.monotonic()
        for code, told in ends_of(CHECKS[name]):
            word = "done" if code == 0 else signal.Signals(-code).name if code < 0 else str(code)
            counts[name, word] += 1
            if code:
                has_failed = True
                print(
                    f"run {number}, {name}: {word} after {time.monotonic() - began_seconds:.0f} s"
                )
                print(told[-2000:])
    if args.save:
        rows = [{"checks": name, "end": word, "ranks": n} for (name, word), n in counts.items()]
        write_result(NAME, {"runs": args.runs, "rows": rows})
    for (name, word), count in sorted(counts.items()):
        print(f"{name:<20}{word:>10}{count:>6}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
