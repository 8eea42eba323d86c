"""Break things at random in small trainings, for as long as one lets it, and see what holds."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
from chaos_runs.stories import KINDS, draw


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--replay", type=int)
    args = parser.parse_args()
    from chaos_runs import one_run, warming
    warming.warm_up()
    seed = args.seed * 1_000_000
    done = 0
    counts = Counter(); bad = 0
    began = time.monotonic()
    while done < args.runs and time.monotonic() - began < args.seconds:
        story = draw(args.replay if args.replay is not None else seed)
        seed += 1
        if story.kind in ("command","budget"): continue
        if args.only and story.kind != args.only or args.ranks and story.num_ranks != args.ranks:
            if args.replay is None: continue
        from chaos_runs import configs
        o = configs.edited(story) if story.kind == 'config' else one_run.trained(story, keeps=Path("/tmp/me/h/keep") if args.replay is not None else None)
        if o.unusable:
            counts["unusable"] += 1
            print("unusable", story.seed, o.unusable[:300])
            if args.replay is not None: break
            continue
        done += 1
        counts[story.kind] += 1
        counts["struck"] += bool(o.struck)
        if o.violations or args.replay is not None:
            bad += 1
            if args.replay is not None: print(json.dumps(story.to_json()))
            print(o.struck, o.ended)
            for v in o.violations: print("   VIOLATION", story.seed, story.kind, v)
        if args.replay is not None: break
    print(done, bad, dict(counts), time.monotonic() - began)
    return int(bool(bad))

if __name__ == "__main__":
    sys.exit(main())
