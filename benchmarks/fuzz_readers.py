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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuzz_readers_list import READERS, Reader

from memfit.errors import MemfitError

HANG_SECONDS = 20.0
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
)
GOOD, REFUSED, MANY_LINES, TRACEBACK, SLOW, HANG = OUTCOMES = (
    *("read", "refused", "more than a line", "traceback", "slow", "hang"),
)
BAD = (MANY_LINES, TRACEBACK, SLOW, HANG)


class HangError(BaseException):
    """Say that a reader took far too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a reader made of an input."""

    kind: str
    told: str = ""
    """The error, or the last line of the traceback with its place."""


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
            )
        )
    return data


def outcome_of(reader: Reader, content: bytes, folder: Path) -> Outcome:
    """Have a reader read a content."""
    path = folder / reader.name
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, whole in reader.beside:
        (path.parent / name).write_bytes(whole)
    path.write_bytes(content)
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
    is_slow = time.process_time() - began_seconds > reader.most_seconds
    return Outcome(kind=SLOW, told=found.told) if is_slow and found.kind != HANG else found


@contextmanager
def _limited() -> Iterator[None]:
    def end(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
) -> tuple[Counter[str], dict[str, tuple[int, str]]]:
    """Give a reader its inputs; return how often each outcome came, and the first of each fault."""
    counts: Counter[str] = Counter()
    faults: dict[str, tuple[int, str]] = {}
    until_seconds = time.monotonic() + most_seconds
    with tempfile.TemporaryDirectory() as name:
        outcome_of(reader, reader.contents()[0], Path(name))  # what is imported is imported now
        for number, content in inputs_of(reader, seed, numbers):
            found = outcome_of(reader, content, Path(name))
            counts[found.kind] += 1
            if found.kind in BAD:
                faults.setdefault(found.told.partition(":")[0] + found.kind, (number, found.told))
            if time.monotonic() > until_seconds:
                break
    return counts, faults


def main() -> int:
    """Fuzz the readers, and print a row for each; the exit code is 1 if one gave way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each reader")
    parser.add_argument("--reader", help="this one alone")
    parser.add_argument("--only", type=int, help="this input alone, and print it")
    args = parser.parse_args()
    chosen = [each for each in READERS if args.reader in (None, each.title)]
    print(f"{'reader':<24}" + "".join(f"{kind:>18}" for kind in OUTCOMES))
    has_given_way = False
    for reader in chosen:
        numbers = range(args.inputs) if args.only is None else range(args.only, args.only + 1)
        if args.only is not None:
            print(next(inputs_of(reader, args.seed, numbers))[1])
        counts, faults = fuzzed(reader, args.seed, numbers, most_seconds=args.seconds)
        print(
            f"{reader.title:<24}" + "".join(f"{counts[kind]:>18,}" for kind in OUTCOMES), flush=True
        )
        for number, told in faults.values():
            print(f"    input {number}: {told[:300]!r}")
        has_given_way |= bool(faults)
    return int(has_given_way)


if __name__ == "__main__":
    sys.exit(main())
