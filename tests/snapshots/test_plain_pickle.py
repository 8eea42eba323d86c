"""Pickles of plain data are read as Python reads them; whatever else they say is never carried out."""

from __future__ import annotations

import builtins
import os
import pickle
import pickletools
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.snapshots.recorded_programs import steady_training

from memfit.snapshots.plain_pickle import PlainPickleError, loads_plain

PLAIN = st.recursive(
    st.none()
    | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner)
    | st.tuples(inner, inner) | st.tuples(inner, inner, inner, inner),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_are_read_as_python_reads_them(value, protocol) -> None:
    data = pickle.dumps(value, protocol)

    assert loads_plain(data) == pickle.loads(data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_snapshot_is_read_in_every_protocol(protocol) -> None:
    content = steady_training(num_steps=1).snapshot()

    assert loads_plain(pickle.dumps(content, protocol)) == content


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_snapshot_needs_nothing_but_plain_data(protocol) -> None:
    data = pickle.dumps(steady_training(num_steps=1).snapshot(), protocol)
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}

    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ",
                        "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}  # fmt: skip


class Reduces:
    """Something that calls a function when an ordinary unpickler reads it."""

    def __init__(self, function, *args) -> None:
        self.found = function, args

    def __reduce__(self):
        return self.found


class SetsState:
    """Something whose ``__setstate__`` runs when an ordinary unpickler reads it."""

    def __setstate__(self, state) -> None:
        Path(state["path"]).mkdir()


def gadgets(path: Path) -> dict[str, bytes]:
    """Make pickles each of which makes a folder where it is read without care."""
    with_state = SetsState()
    with_state.path = str(path)
    line = f"__import__('os').mkdir({str(path)!r})"
    found = {}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        values = {
            "mkdir": Reduces(os.mkdir, str(path)),
            "system": Reduces(os.system, f"mkdir {path}"),
            "eval": Reduces(builtins.eval, line),  # noqa: S307 - never called
            "exec": Reduces(builtins.exec, line),
            "state": with_state,
        }
        for name, value in values.items():
            found[f"{name}-{protocol}"] = pickle.dumps({"segments": [value]}, protocol)
    found["inst"] = f"(S'{path}'\nios\nmkdir\n.".encode()
    found["obj"] = (
        b"(cos\nmkdir\nX" + len(str(path)).to_bytes(4, "little") + str(path).encode() + b"o."
    )
    return found


GADGETS = sorted(gadgets(Path("made")))


@pytest.mark.parametrize("name", GADGETS)
def test_nothing_that_a_pickle_says_is_run(name, tmp_path: Path) -> None:
    made = tmp_path / "made"
    data = gadgets(made)[name]

    with pytest.raises(PlainPickleError, match=r"no snapshot needs|which no snapshot"):
        loads_plain(data)
    assert not made.exists()
    pickle.loads(data)  # the pickle was able to: the refusal is what kept it from it
    assert made.exists()


def test_what_would_be_imported_is_named() -> None:
    with pytest.raises(PlainPickleError, match=r"import posix\.system"):
        loads_plain(pickle.dumps(Reduces(os.system, "true"), 0))


DEEP = 200_000
LAUGHS = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60))
HOSTILE = {
    "empty": b"",
    "nothing but a protocol": b"\x80\x04",
    "no pickle": b"\x00\x01\x02",
    "cut off in a text": b"\x80\x04\x8c\x10abc",
    "a text of 2**63 bytes": b"\x80\x04\x8d" + (2**63 - 1).to_bytes(8, "little") + b"x.",
    "bytes of 4 GiB": b"\x80\x04B\xff\xff\xff\xffx.",
    "a frame beyond the end": b"\x80\x04\x95" + b"\xff" * 8,
    "a memo that was never filled": b"\x80\x04h\x07.",
    "an integer of 200 bytes": b"\x80\x04\x8a\xc8" + b"\xff" * 200 + b".",
    "an integer of 2**31 bytes": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "a number that is none": b"Iabc\n.",
    "a key that is a tuple": b"\x80\x04})N\x73.",
    "a key that is a list": b"\x80\x04}]N\x73.",
    "keys without a value": b"\x80\x04}(\x8c\x01au.",
    "a dictionary filled as a list": b"\x80\x04}Na.",
    "a list filled as a dictionary": b"\x80\x04]\x8c\x01aNs.",
    "more taken than there is": b"\x80\x04\x86.",
    "a mark that is not there": b"\x80\x04u.",
    "no opcode": b"\x80\x04\xff.",
    "bytes that are no text": b"\x80\x04\x8c\x02\xff\xfe.",
    "deep lists": b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "deep tuples as a key": b"\x80\x04})" + b"\x85" * DEEP + b"Ns.",
    "a tuple of laughs as a key": LAUGHS.replace(b"\x80\x04", b"\x80\x04}", 1) + b"h\x3cNs.",
    "nothing but marks": b"\x80\x04" + b"(" * DEEP,
    "the end at once": b".",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_pickle_ends_with_one_clear_error(name) -> None:
    begin = time.process_time()

    with pytest.raises(PlainPickleError) as caught:
        loads_plain(HOSTILE[name])
    assert len(str(caught.value)) < 300
    assert time.process_time() - begin < 5


def test_a_large_index_of_the_memo_takes_no_memory() -> None:
    """Python's own unpickler would set aside 64 GiB for these nine bytes."""
    assert loads_plain(b"\x80\x04Nr\xff\xff\xff\xff.") is None


def test_laughs_are_shared_and_not_copied() -> None:
    value = loads_plain(LAUGHS + b"h\x3c.")

    assert value[0] is value[1]


def test_what_follows_the_end_is_ignored() -> None:
    assert loads_plain(pickle.dumps([1]) + b"\0\0") == [1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="memory is limited through the system")
def test_memory_stays_within_thirty_times_the_file() -> None:
    """The densest pickles of each kind, in a process that may not take more."""
    program = """
import resource
from memfit.snapshots.plain_pickle import PlainPickleError, loads_plain
size = 600_000
base = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for part in (b"]", b"}", b")", b"\\x8c\\x03abc", b"J\\0\\0\\0\\1", b"N\\x94", b"]\\x94", b")\\x85", b"("):
    data = b"\\x80\\x04" + part * (size // len(part)) + b"."
    resource.setrlimit(resource.RLIMIT_AS, (base + 32 * size, resource.RLIM_INFINITY))
    try:
        loads_plain(data)
    except PlainPickleError:
        pass
    print(part)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 9
