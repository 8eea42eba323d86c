"""Give every reader of a user's files what no user means, and count what it makes of that.

Each input is a file that can be read, with bytes, words or lines exchanged, doubled or cut off. A
reader has to give a value or an error of memfit's in one line, within a second. What a run did is
found again by its seed: input N of a reader is the same whatever ran before it.

    python benchmarks/fuzz_readers.py --inputs 5000 --seed 1
    python benchmarks/fuzz_readers.py --reader plan --only 4711 --seed 1
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fuzz_marks
from fuzz_readers_list import READERS
from fuzzed_reader import Reader
from results_file import write_result

from memfit.errors import MemfitError
from memfit.units import MIB

HANG_SECONDS = 20.0
"""Of the processor; of waiting, ten times as long."""
HOSTILE = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 400, b"0x1f", b"1.5"),
    *(
        b"[]",
        b"{}",
        b"[" * 300,
        b"]",
        b'"',
        b"'",
        b"\\u0000",
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
    ),
    *(b"\x1b[2J", b"*a", b"&a ", b"!!python/name:os.system ", b"<<: ", b"? ", b"- ", b": ", b"\t"),
    *(b"\n", b"\r", b",", b"=", b"a.0-99999999999", b"exact", b"bf16", b"layers.0", b"2026-13-40"),
    *(b"\xe2\x80\xae", b"%s%n", b"../../etc/passwd", b"1_0", b"inf", b"nan", b"", b" "),
    *(b"!!python/object/apply:fuzz_marks.ran [] ", b"__import__('fuzz_marks').ran()"),
    *(b"cfuzz_marks\nran\n(tR.", b"\x80\x04cfuzz_marks\nran\n)R."),
)
GOOD, REFUSED, MANY_LINES, TRACEBACK, SLOW, LARGE, CODE, HANG = OUTCOMES = (
    *("read", "refused", "more than a line", "traceback", "slow", "large", "code run", "hang"),
)
BAD = (MANY_LINES, TRACEBACK, SLOW, LARGE, CODE, HANG)
MOST_BYTES = 200 * MIB
"""More than before may be resident while an input is read."""


class HangError(BaseException):
    """Say that a reader took far too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a reader made of an input."""

    kind: str
    told: str = ""
    """The error, or the last line of the traceback with its place."""
    processor_seconds: float = 0.0
    grown_bytes: int = 0
    """How far the resident memory rose above what it was before."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a reader made of its inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    """How often each outcome came."""
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The first input of each fault, by number, and what was told."""
    slowest_seconds: float = 0.0
    most_grown_bytes: int = 0

    def add(self, number: int, found: Outcome) -> None:
        """Count an input."""
        self.counts[found.kind] += 1
        self.slowest_seconds = max(self.slowest_seconds, found.processor_seconds)
        self.most_grown_bytes = max(self.most_grown_bytes, found.grown_bytes)
        if found.kind in BAD:
            self.faults.setdefault(found.told.partition(":")[0] + found.kind, (number, found.told))


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Change a file in one to four ways."""
    data = content
    for _ in range(chance.randint(1, 4)):
        begin = chance.randint(0, len(data))
        end = min(len(data), begin + chance.choice((0, 1, 2, 8, 64)))
        before, cut, after = data[:begin], data[begin:end], data[end:]
        words = data.split() or [b" "]
        data = chance.choice(
            (
                before + chance.choice(HOSTILE) + after,
                before + chance.randbytes(chance.randint(0, 4)) + after,
                before + cut * chance.choice((2, 3, 50)) + after,
                before + after,
                data.replace(chance.choice(words), chance.choice(HOSTILE), 1),
                data.replace(chance.choice(words), chance.choice(words), 1),
                before if chance.random() < 0.2 else data,
                data * 30 if chance.random() < 0.1 else data,
            )
        )
    return data


def outcome_of(reader: Reader, content: bytes, folder: Path) -> Outcome:
    """Have a reader read a content; what seems slow is read up to twice more.

    A virtual machine that is held up counts the wait as the process's own time, once in a while.
    """
    found = _once_read(reader, content, folder)
    for _ in range(2):
        if found.kind == SLOW:
            found = _once_read(reader, content, folder)
    return found


def _once_read(reader: Reader, content: bytes, folder: Path) -> Outcome:
    path = folder / reader.name
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, whole in reader.beside:
        (path.parent / name).write_bytes(whole)
    path.write_bytes(content)
    fuzz_marks.RUNS.clear()
    resident_bytes = _begin_peak()
    began_seconds = time.process_time()
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(path)
        found = Outcome(kind=GOOD)
    except MemfitError as error:
        is_line = "\n" not in str(error).strip()
        found = Outcome(kind=REFUSED if is_line else MANY_LINES, told=str(error))
    except HangError:
        found = Outcome(kind=HANG, told=_place())
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        found = Outcome(kind=TRACEBACK, told=f"{type(error).__name__}: {error} {_place()}")
    seconds = time.process_time() - began_seconds
    grown_bytes = _status_bytes("VmHWM") - resident_bytes
    kind = found.kind
    if fuzz_marks.RUNS:
        kind = CODE
    elif kind in {GOOD, REFUSED} and grown_bytes > MOST_BYTES:
        kind = LARGE
    elif kind in {GOOD, REFUSED} and seconds > reader.most_seconds:
        kind = SLOW
    return replace(found, kind=kind, processor_seconds=seconds, grown_bytes=grown_bytes)


def _begin_peak() -> int:
    """Forget the process's highest resident memory so far, and return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise HangError

    # Not the clock's time alone: on a busy machine everything takes long.
    clocks = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, end) for number in clocks.values()}
    signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * HANG_SECONDS)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _place() -> str:
    last = traceback.extract_tb(sys.exc_info()[2])[-3:]
    return " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(last))


def inputs_of(reader: Reader, seed: int, numbers: range) -> Iterator[tuple[int, bytes]]:
    """Yield inputs by their number."""
    for number in numbers:
        chance = random.Random(f"{seed} {reader.title} {number}")
        yield number, mutated(chance.choice(reader.contents()), chance)


def fuzzed(
    reader: Reader, seed: int, numbers: range, *, most_seconds: float = float("inf")
) -> Tally:
    """Give a reader its inputs, and count what it makes of them."""
    tally = Tally()
    until_seconds = time.monotonic() + most_seconds
    with tempfile.TemporaryDirectory() as name, chdir(name):
        outcome_of(reader, reader.contents()[0], Path(name))  # what is imported is imported now
        for number, content in inputs_of(reader, seed, numbers):
            tally.add(number, outcome_of(reader, content, Path(name)))
            if time.monotonic() > until_seconds:
                break
    return tally


def main() -> int:
    """Fuzz the readers, and print a row for each; the exit code is 1 if one gave way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each reader")
    parser.add_argument("--reader", help="this one alone")
    parser.add_argument("--only", type=int, help="this input alone, and print it")
    parser.add_argument("--store", action="store_true", help="keep the counts in results")
    args = parser.parse_args()
    chosen = [each for each in READERS if args.reader in (None, each.title)]
    tallies: dict[str, Tally] = {}
    print(f"{'reader':<24}" + "".join(f"{kind:>18}" for kind in OUTCOMES))
    for reader in chosen:
        numbers = range(args.inputs) if args.only is None else range(args.only, args.only + 1)
        if args.only is not None:
            print(next(inputs_of(reader, args.seed, numbers))[1])
        tally = fuzzed(reader, args.seed, numbers, most_seconds=args.seconds)
        tallies[reader.title] = tally
        told_counts = "".join(f"{tally.counts[kind]:>18,}" for kind in OUTCOMES)
        print(f"{reader.title:<24}{told_counts}", flush=True)
        for number, told in tally.faults.values():
            print(f"    input {number}: {told[:300]!r}")
    figures = figures_of(tallies)
    print(f"{figures['num_inputs']:,} inputs for {figures['num_readers']} readers")
    if args.store:
        write_result("fuzz_readers", {"seed": args.seed, **figures})
    return int(any(tally.faults for tally in tallies.values()))


def figures_of(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """Add up what all readers made of their inputs."""
    total: Counter[str] = Counter()
    for tally in tallies.values():
        total.update(tally.counts)
    return {
        "num_readers": len(tallies),
        "num_inputs": total.total(),
        "outcomes": {kind: total[kind] for kind in OUTCOMES},
        "rows": [
            {
                "reader": title,
                "num_inputs": tally.counts.total(),
                "outcomes": {kind: tally.counts[kind] for kind in OUTCOMES},
                "slowest_processor_seconds": round(tally.slowest_seconds, 3),
                "most_grown_bytes": tally.most_grown_bytes,
            }
            for title, tally in tallies.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
